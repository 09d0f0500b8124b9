# SPDX-License-Identifier: Apache-2.0
"""Optimizers as definitions: torch's own objects without the tensors they update.

A state's definition holds a *prototype*: the optimizer's class, options and parameter
groups, over meta parameters. `accelfn.engine.optimizer.live_optimizer` makes copies over real ones.
"""

import copy
import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.base.arguments import why_not
from accelfn.base.signatures import signature
from accelfn.errors import ArgumentError, Error, ModelError, OptimizerError
from accelfn.structure.partition import (
    NamedParameters,
    Partitioned,
    bare_step,
    empty_state,
    is_torchs,
    parts_of,
)
from accelfn.structure.skeleton import Skeleton

OptimizerSource: TypeAlias = Optimizer | Callable[[NamedParameters], Optimizer]
Hyper: TypeAlias = Mapping[str | tuple[int | str, str], Any]

Assignments: TypeAlias = dict[tuple[int, str], Any]
"""Values of hyperparameters by group index and name."""

STRUCTURE = frozenset({"params", "param_names", "name"})
"""What a parameter group has that is no hyperparameter."""

_CALLED = (
    "The factory that TrainState.create(optimizer=...) was given is called with a list of"
    " (name, parameter): functools.partial(torch.optim.AdamW, lr=3e-4) is one, and so is"
    " lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)."
)

_KERNELS = frozenset({"fused", "foreach", "capturable"})
"""Options of a group that choose a kernel, which may not take meta tensors."""

OTHERS = "<optimizer>"
"""Where state of no parameter stands in `opt_state`; like group keys, no parameter's name."""


def prototype_of(
    source: OptimizerSource, module: nn.Module, skeleton: Skeleton
) -> tuple[Optimizer, dict[str, dict[str, Any]]]:
    """Return the prototype of an optimizer, and the state it already holds, by name.

    Raises:
        OptimizerError: parameters that are not the model's, none at all, one the model
            trains that is missing, or an optimizer whose step needs a closure.
    """
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not isinstance(source, Optimizer) and not callable(source):
        several = isinstance(source, (list, tuple, dict))
        shown = type(cast("object", source)).__name__ if several else repr(source)
        hint = (
            " Several optimizers are one: af.partition((predicate, factory), ...)."
            if several
            else ""
        )
        msg = (
            f"optimizer={shown}: expected a torch optimizer, or a factory such as"
            f" functools.partial(torch.optim.AdamW, lr=3e-4).{hint}"
        )
        raise OptimizerError(msg)
    if isinstance(source, Optimizer):
        _refuse_scheduler(source)
        optimizer = source
    else:
        _check_takes(source, trainable)
        try:
            optimizer = source(trainable)
        except Exception as error:
            if not isinstance(error, Error):  # which says what to write
                error.add_note(_CALLED)
            raise
    if not isinstance(optimizer, Optimizer):
        msg = (
            f"optimizer={source!r} gave {type(optimizer).__name__}; expected a torch"
            " optimizer, or a factory such as functools.partial(torch.optim.AdamW,"
            " lr=3e-4)."
        )
        raise OptimizerError(msg)
    for part in parts_of(optimizer):
        _refuse_inner(part)
        _refuse_wrappers(part)
        _refuse_closure(part)
        _check_rates(part)
    names = {id(param): name for name, param in module.named_parameters()}
    _check_owned(optimizer, names, trainable, given_ready=optimizer is source)
    held = named_state(optimizer, names)
    metas = dict(skeleton.module.named_parameters())
    memo = {id(p): metas[n] for n, p in module.named_parameters()}
    return rebuilt(optimizer, memo), held


def named_state(
    optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state by parameter name; the entries are its own.

    What some optimizers keep under other keys (MADGRAD's count) stands under `OTHERS`.
    """
    named: dict[str, dict[str, Any]] = {}
    for key, entry in cast("dict[Any, Any]", optimizer.state).items():
        if isinstance(key, torch.Tensor):
            named[names[id(key)]] = entry
        else:
            named.setdefault(OTHERS, {})[str(key)] = entry
    return named


def owned_names(optimizer: Optimizer, skeleton: Skeleton) -> list[str]:
    """Return the parameters that an optimizer has: those that are, or may be, trained."""
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    metas = skeleton.module.named_parameters()
    return [name for name, meta in metas if id(meta) in owned]


def trained_names(
    predicate: Callable[[str, torch.Tensor], object],
    params: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    skeleton: Skeleton,
) -> set[str]:
    """Return the names of the parameters of which a predicate is true.

    Raises:
        OptimizerError: the optimizer lacks one of them.
        ModelError: there are none.
    """
    if not callable(predicate):
        msg = (
            f"with_trainable({predicate!r}): expected a function of (name, parameter) that"
            " says whether it is trained."
        )
        raise ArgumentError(msg)
    error = why_not(predicate, "", None)
    if error is not None:
        msg = f"with_trainable({predicate!r}): it is called as predicate(name, parameter): {error}."
        raise ArgumentError(msg)
    wanted = {name for name, param in params.items() if predicate(name, param)}
    if not wanted:
        msg = (
            f"with_trainable({predicate!r}): it is true of none of the {len(params)}"
            f" parameters ({', '.join(list(params)[:3])}, ...), so nothing would be trained."
        )
        raise ModelError(msg)
    owned = owned_names(optimizer, skeleton)
    lacking = [name for name in params if name in wanted and name not in owned]
    if lacking:
        msg = (
            f"with_trainable({predicate!r}): {type(optimizer).__name__} lacks"
            f" {len(lacking)} parameters that would be trained: {', '.join(lacking[:5])}."
            " They were frozen when the state was created. Create it with them trained,"
            " then freeze them with with_trainable."
        )
        raise OptimizerError(msg)
    return wanted


def group_key(index: int) -> str:
    """Return where what changes in a parameter group stands in `opt_state`."""
    return f"<group {index}>"


def rebuilt(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return the optimizer over other parameters, without its per-parameter state.

    Not by deepcopy of the object: Optimizer.__getstate__ leaves subclass attributes out.
    An LRScheduler patches `step` on the instance; a copy starts unpatched.
    """
    if isinstance(optimizer, Partitioned):
        # first the parts, so that the whole's copy has their groups
        memo |= {id(part): rebuilt(part, memo) for part in optimizer.parts}
    made = object.__new__(type(optimizer))
    attributes = {
        k: v for k, v in vars(optimizer).items() if k not in {"state", "step"}
    }
    made.__dict__.update(copy.deepcopy(attributes, memo))
    made.state = empty_state(made, optimizer)
    return made


def scratch_of(prototype: Optimizer) -> Any:
    """Return an optimizer of the same groups, for a scheduler to set their options.

    Its parameters have no values, and its state is not there to be read. Options that are
    tensors are on the CPU, where reading one waits for no device.
    """
    memo: dict[int, Any] = {}
    for param in (
        param for group in prototype.param_groups for param in group["params"]
    ):
        memo[id(param)] = nn.Parameter(
            torch.empty_like(param, device="meta"), param.requires_grad
        )
        memo[id(param)].grad = torch.empty_like(memo[id(param)])
    made = rebuilt(prototype, memo)
    for group in made.param_groups:
        for key in group.keys() - STRUCTURE:
            if isinstance(group[key], torch.Tensor):
                group[key] = group[key].detach().cpu()
    made.state = cast("Any", _Unread())
    return made


def entries_of(prototype: Optimizer, skeleton: Skeleton) -> dict[str, dict[str, Any]]:
    """Return what torch's optimizers keep of each parameter, as tensors without values.

    Entries of other optimizers are missing, because their steps may do anything.

    Cost: a step of one parameter of each shape in each group.
    """
    memo: dict[int, Any] = {}
    names: dict[int, str] = {}
    for name, meta in skeleton.module.named_parameters():
        memo[id(meta)] = param = nn.Parameter(torch.empty_like(meta, device="meta"))
        param.grad = torch.empty_like(param)
        names[id(param)] = name
    entries: dict[str, dict[str, Any]] = {}
    for part in filter(is_torchs, parts_of(rebuilt(prototype, memo))):
        alike: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for i, group in enumerate(part.param_groups):
            for param in group["params"]:
                alike.setdefault((i, param.shape, param.dtype), []).append(param)
            group["params"] = [some[0] for key, some in alike.items() if key[0] == i]
            group.update(dict.fromkeys(_KERNELS & group.keys(), False))
        # entries come before any kernel, and some kernels know no tensors without values
        with suppress(NotImplementedError, RuntimeError), torch.no_grad():
            bare_step(part)()
        for some in alike.values():
            entry = part.state.get(some[0], {})
            entries |= {names[id(param)]: entry for param in some}
    return entries


class _Unread:
    """The state of an optimizer that a scheduler cannot read: it would be another's."""

    def __getitem__(self, key: object) -> Any:
        """Refuse."""
        msg = "it reads the state of the optimizer, which a schedule does not have"
        raise ArgumentError(msg)


def kind_of(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """Return an optimizer's class; of several, each with what tells its parameters.

    Args:
        optimizer: of a state.
        names: of its parameters, by their ids.
    """
    if isinstance(optimizer, Partitioned):
        parts = [
            f"{kind_of(each, names)}{_share(each, names)}" for each in optimizer.parts
        ]
        return f"partition({', '.join(parts)})"
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _share(part: Optimizer, names: Mapping[int, str]) -> str:
    owned = [
        names[id(param)] for group in part.param_groups for param in group["params"]
    ]
    listed = zlib.crc32("\n".join(sorted(owned)).encode())
    return f" of {len(owned)} parameters ({listed:08x})"


def _check_takes(factory: Any, trainable: object) -> None:
    """Refuse a factory that does not take what it is called with."""
    error = why_not(factory, trainable)
    if error is not None:
        msg = (
            f"optimizer={factory!r}: expected a factory that takes a list of (name,"
            " parameter), such as functools.partial(torch.optim.AdamW, lr=3e-4); this one:"
            f" {error}."
        )
        raise OptimizerError(msg) from error


def _refuse_scheduler(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose rate torch's scheduler sets, which a copy would not see."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        msg = (
            f"The {type(optimizer).__name__} has a torch scheduler, which would set the"
            " rate of an optimizer that trains no more. Give TrainState.create"
            " schedule=af.schedules.from_torch(...), and an optimizer without one."
        )
        raise OptimizerError(msg)


def _refuse_inner(optimizer: Optimizer) -> None:
    """Refuse an optimizer around another, whose state would be in no copy nor checkpoint."""
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            msg = (
                f"{type(optimizer).__name__} keeps another optimizer, {name}, whose state is"
                " not in its own: no copy or checkpoint of the training would have it. Give"
                " one that is not wrapped; for several side by side, use af.partition."
            )
            raise OptimizerError(msg)


def _refuse_wrappers(optimizer: Optimizer) -> None:
    """Refuse torchao's optimizers of 8 and 4 bits before they train for long."""
    kind = type(optimizer)
    makes = getattr(kind, "_subclass_zeros", None)
    # the base class of torchao's optimizers only says that others make such tensors
    if makes is not None and not makes.__qualname__.startswith("_AdamBase."):
        raise OptimizerError(wrapper_error(kind.__name__))


def wrapper_error(kind: str) -> str:
    """Return the error of an optimizer with a state of wrapper tensors."""
    return (
        f"{kind} keeps its state in a tensor class whose values no checkpoint can hold. Use one"
        " with plain tensors: torch.optim.AdamW, or bitsandbytes.optim.AdamW8bit for 8 bits."
    )


def _check_rates(optimizer: Optimizer) -> None:
    """Refuse a rate after which a parameter would be no number; torch takes it for above 0."""
    for i, group in enumerate(optimizer.param_groups):
        rate: Any = group.get("lr")
        is_here = isinstance(rate, float) or (
            isinstance(rate, torch.Tensor) and rate.is_cpu
        )
        if is_here and not math.isfinite(rate):
            msg = (
                f"{type(optimizer).__name__}: lr={float(rate)} in parameter group {i}. Parameters"
                " would be no numbers after the first update; give a finite rate."
            )
            raise OptimizerError(msg)


def _refuse_closure(optimizer: Optimizer) -> None:
    """Refuse an optimizer that calls the loss itself: by its signature, or when tried.

    It is tried without gradients, on a copy over what stands for the parameters.
    """
    kind = type(optimizer).__name__
    msg = (
        f"{kind} calls the loss from inside its step (a required closure), but gradients"
        " are taken before it. Use an optimizer that takes gradients."
    )
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(msg)
    if type(optimizer).__module__.startswith("torch."):
        return
    memo: dict[int, Any] = {
        id(param): nn.Parameter(
            torch.empty_like(param, device="meta"), param.requires_grad
        )
        for group in optimizer.param_groups
        for param in group["params"]
    }
    trial = rebuilt(optimizer, memo)
    trial._optimizer_step_pre_hooks.clear()  # pyright: ignore[reportPrivateUsage]
    trial._optimizer_step_post_hooks.clear()  # pyright: ignore[reportPrivateUsage]
    try:
        bare_step(trial)()
    except Exception as error:
        told = str(error)
        if "closure" in told or "'NoneType' object is not callable" in told:
            raise OptimizerError(msg) from error


def _check_owned(
    optimizer: Optimizer,
    names: Mapping[int, str],
    trainable: Iterable[tuple[str, nn.Parameter]],
    *,
    given_ready: bool,
) -> None:
    owned = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [tuple(param.shape) for param in owned if id(param) not in names]
    if strangers:
        why = (
            " A ready optimizer goes with the very model instance whose parameters it"
            " was given, on the device of its world; with a model factory, give an optimizer"
            " factory."
            if given_ready
            else ""
        )
        msg = (
            f"{type(optimizer).__name__} holds {len(strangers)} parameters that are not"
            f" the model's (shapes {strangers[:5]}).{why}"
        )
        raise OptimizerError(msg)
    have = {id(param) for param in owned}
    missing = [name for name, param in trainable if id(param) not in have]
    if missing:
        msg = (
            f"{type(optimizer).__name__} lacks {len(missing)} trainable parameters:"
            f" {', '.join(missing[:5])}. Give it all of them, or freeze these with"
            " requires_grad_(False)."
        )
        raise OptimizerError(msg)
