# SPDX-License-Identifier: Apache-2.0
"""Optimizers as definitions: torch's own objects without the tensors they update.

A state's definition holds a *prototype*: the optimizer's class, options and parameter
groups, over meta parameters. `accelfn.engine.optimizer` makes copies over real ones.
"""

import copy
import inspect
import math
import weakref
import zlib
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.optim import ASGD, Optimizer

from accelfn.base.arguments import call_mismatch, signature
from accelfn.base.tree import is_shard
from accelfn.errors import ArgumentError, Error, ModelError, OptimizerError
from accelfn.model.model import Skeleton

# Several torch optimizers as one, each with parameters of its own.


NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
Predicate: TypeAlias = Callable[[str, nn.Parameter], object]
Part: TypeAlias = tuple[
    Predicate | EllipsisType, Callable[[NamedParameters], Optimizer]
]

_SCALING = ("grad_scale", "found_inf")
"""What a GradScaler hands to a fused optimizer, as attributes."""


class Partitioned(Optimizer):
    """An optimizer made of others: its groups, its state and its step are theirs, in order.

    The groups are the parts' own dictionaries, so what is set in one is set in the part.
    """

    parts: tuple[Optimizer, ...]

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        """Take optimizers that share no parameter."""
        super().__init__([{"params": []}], {})  # hooks; the groups are the parts'
        self.parts = tuple(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = cast("Any", PartStates(self.parts))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        handed = {name: vars(self)[name] for name in _SCALING if name in vars(self)}
        for part in self.parts:
            vars(part).update(handed)
            try:
                bare_step(part)()
            finally:
                for name in handed:
                    del vars(part)[name]
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether each part divides gradients in its own kernel, as torch's fused ones do."""
        return all(
            getattr(each, "_step_supports_amp_scaling", False) for each in self.parts
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse: torch would give the whole groups that are no part's."""
        msg = "A partitioned optimizer loads no state dict; load those of its `parts`."
        raise OptimizerError(msg)


class PartStates(MutableMapping[Any, dict[str, Any]]):
    """The state of several optimizers as one mapping.

    A parameter's entry is in the state of the part that has it. What a part keeps under
    another key `k` stands under `"i:k"`, i being its place.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        """Take the parts."""
        self._states = [cast("dict[Any, Any]", part.state) for part in parts]
        self._place = {
            id(param): i
            for i, part in enumerate(parts)
            for group in part.param_groups
            for param in group["params"]
        }

    def _at(self, key: Any) -> tuple[dict[Any, Any], Any]:
        if isinstance(key, torch.Tensor):
            return self._states[self._place[id(key)]], key
        place, _, own = str(key).partition(":")
        return self._states[int(place)], own

    def __getitem__(self, key: Any) -> dict[str, Any]:
        """Return an entry; one that is not there begins empty, as torch's do."""
        state, own = self._at(key)
        return state[own]

    def __setitem__(self, key: Any, entry: dict[str, Any]) -> None:
        """Set an entry of the part that it belongs to."""
        state, own = self._at(key)
        state[own] = entry

    def __delitem__(self, key: Any) -> None:
        """Drop an entry."""
        state, own = self._at(key)
        del state[own]

    def __contains__(self, key: object) -> bool:
        """Whether there is an entry."""
        state, own = self._at(key)
        return own in state

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the keys, part by part."""
        for i, state in enumerate(self._states):
            for key in state:
                yield key if isinstance(key, torch.Tensor) else f"{i}:{key}"

    def __len__(self) -> int:
        """Return how many entries there are."""
        return sum(map(len, self._states))

    def clear(self) -> None:
        """Drop all entries."""
        for state in self._states:
            state.clear()


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the torch optimizers that an optimizer is made of: itself, or its parts'."""
    if not isinstance(optimizer, Partitioned):
        return [optimizer]
    return [each for part in optimizer.parts for each in parts_of(part)]


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether a step runs torch's code alone, which draws nothing and keeps nothing elsewhere."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # pyright: ignore[reportPrivateUsage]
    # Adafactor and Muon name the package itself as their module
    module = f"{type(optimizer).__module__}."
    return module.startswith("torch.optim.") and not any(hooks)


def empty_state(optimizer: Optimizer, like: Optimizer) -> Any:
    """Return a mapping for the state of an optimizer that was made like another."""
    if isinstance(optimizer, Partitioned):
        return PartStates(optimizer.parts)
    kept = cast("Any", like.state)
    return type(kept)(kept.default_factory)


def bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the optimizer's step without the profiler's record around it.

    torch wraps every `step` in a named record, 10 µs that no training loop needs. Step
    hooks run in that wrapper, so an optimizer that has any keeps it.
    """
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", None)
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
    if bare is None or own or not getattr(step, "hooked", False):
        return optimizer.step
    return partial(bare, optimizer)


@attrs.frozen(init=False, repr=False)
class partition:
    """Give parameters to several optimizers, each its own: Muon to matrices, AdamW the rest.

    A factory of optimizers, for `TrainState.create(optimizer=...)`. Each parameter goes to
    the first part whose predicate is true of it. Parameter groups are numbered through the
    parts, in their order: schedules multiply the rates of all, and `hyper` and `state.lrs`
    go by that number.

    Acts on: nothing; it is part of the definition.

    Args:
        parts: pairs of a predicate, a function of `(name, parameter)`, and a factory of an
            optimizer, such as `partial(torch.optim.AdamW, lr=3e-4)`; `...` in place of the
            last predicate takes the rest.

    Law:
        Each parameter is updated as by its part's optimizer alone. One part that takes all is
        that optimizer, and two of one kind and options are one, bitwise.

    Cost: that of the parts; a microsecond for each.

    Raises:
        ArgumentError: no parts, one that is no such pair, or `...` before the last.
        OptimizerError: when the state is created: a parameter that no part takes, a part
            without parameters, or a factory whose optimizer has others than it was given.

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Example:
        >>> from functools import partial
        >>> def is_matrix(name, parameter):
        ...     return parameter.ndim == 2 and "embed" not in name
        >>> partition(
        ...     (is_matrix, partial(torch.optim.Muon, lr=0.02)),
        ...     (..., partial(torch.optim.AdamW, lr=3e-4)),
        ... )
        af.partition((is_matrix, Muon), (..., AdamW))
    """

    parts: tuple[Part, ...]

    def __init__(self, *parts: Part) -> None:
        """Take (predicate, factory) pairs; the first whose predicate is true has it."""
        for i, part in enumerate(parts):
            _check_part(i, part, is_last=i == len(parts) - 1)
        if not parts:
            msg = (
                "af.partition(): expected (predicate, factory) pairs, such as"
                " (lambda name, parameter: parameter.ndim == 2, partial(torch.optim.Muon,"
                " lr=0.02)), (..., partial(torch.optim.AdamW, lr=3e-4))."
            )
            raise ArgumentError(msg)
        self.__attrs_init__(parts=tuple(tuple(part) for part in parts))  # type: ignore[attr-defined]

    def __call__(self, named: NamedParameters) -> Partitioned:
        """Return the optimizers over these parameters, as one."""
        shares: list[NamedParameters] = [[] for _ in self.parts]
        homeless: list[str] = []
        for name, param in named:
            for (predicate, _), share in zip(self.parts, shares, strict=True):
                if predicate is ... or predicate(name, param):
                    share.append((name, param))
                    break
            else:
                homeless.append(name)
        if homeless:
            msg = (
                f"{self!r}: no part takes {len(homeless)} parameters:"
                f" {', '.join(homeless[:5])}. End with (..., factory), which takes the"
                " rest, or freeze them with requires_grad_(False)."
            )
            raise OptimizerError(msg)
        for i, share in enumerate(shares):
            if not share:
                msg = (
                    f"{self!r}: part {i} gets none of the {len(named)} trainable"
                    " parameters, such as"
                    f" {', '.join(name for name, _ in named[:3])}. Parts before it take"
                    " what it wants, or its predicate is never true. Drop it, or change it."
                )
                raise OptimizerError(msg)
        factories = (factory for _, factory in self.parts)
        made = zip(factories, shares, strict=True)
        return Partitioned(
            [_create_part(i, *each, self) for i, each in enumerate(made)]
        )

    def __repr__(self) -> str:
        """Show the parts by the names of their functions."""
        shown = (f"({_name(each)}, {_name(factory)})" for each, factory in self.parts)
        return f"af.partition({', '.join(shown)})"


def _check_part(i: int, part: Any, *, is_last: bool) -> None:
    pair = isinstance(part, (tuple, list)) and len(cast("Sequence[Any]", part)) == 2
    if not pair:
        msg = (
            f"af.partition: part {i} is {part!r}; expected a (predicate, factory) pair."
        )
        raise ArgumentError(msg)
    predicate, factory = cast("Sequence[Any]", part)
    if isinstance(factory, Optimizer) or not callable(factory):
        ready = isinstance(factory, Optimizer)
        given = f"a ready {type(factory).__name__}" if ready else repr(factory)
        msg = (
            f"af.partition: part {i} has {given}; expected a factory of an"
            " optimizer, such as functools.partial(torch.optim.AdamW, lr=3e-4)."
        )
        raise ArgumentError(msg)
    if predicate is ... and not is_last:
        msg = f"af.partition: part {i} is the rest, `...`, which goes last."
        raise ArgumentError(msg)
    if predicate is not ... and not callable(predicate):
        msg = (
            f"af.partition: part {i} has {predicate!r}; expected a function of (name,"
            " parameter), or `...` for the rest."
        )
        raise ArgumentError(msg)


def _create_part(
    i: int, factory: Any, share: NamedParameters, whole: partition
) -> Optimizer:
    """Return a part's optimizer, if it has just its share."""
    made = factory(share)
    if not isinstance(made, Optimizer):
        msg = (
            f"{whole!r}: the factory of part {i} gave {type(made).__name__}; expected a"
            " torch optimizer."
        )
        raise OptimizerError(msg)
    names = {id(param): name for name, param in share}
    owned = [param for group in made.param_groups for param in group["params"]]
    strangers = [tuple(p.shape) for p in owned if id(p) not in names]
    missing = names.keys() - {id(param) for param in owned}
    if strangers or missing:
        listed = sorted(names[each] for each in missing)
        msg = (
            f"{whole!r}: the {type(made).__name__} of part {i} lacks {listed[:5]} of the"
            f" parameters that the factory was given, and has {len(strangers)} others"
            f" (shapes {strangers[:5]}). Give it just those."
        )
        raise OptimizerError(msg)
    return made


def _name(value: Any) -> str:
    """Return what a function, a class or a partial is called."""
    if value is ...:
        return "..."
    while isinstance(value, partial):
        value = value.func
    return getattr(value, "__name__", None) or repr(value)


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
    error = call_mismatch(predicate, "", None)
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
    error = call_mismatch(factory, trainable)
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


# Where an optimizer reads what it keeps of a parameter: its counts on the host, all else
# there.
#
# torch's optimizers count the updates of each parameter in a tensor, out of which they work
# numbers. On a device each would be waited for; so it is on the host, unless a kernel reads
# it there.


def is_count(key: str, value: torch.Tensor) -> bool:
    """Whether an entry is a number, and not a value of a parameter that is a number too."""
    return key in {"step", "mu_product", "eta", "mu"} and not value.dim()


def place_opt_state(
    opt_state: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    module: nn.Module,
) -> dict[str, dict[str, Any]]:
    """Return what an optimizer keeps of parameters where it would have made it.

    Args:
        opt_state: by name of the parameter; what is of none stays where it is, as parts do.
        params: where they are.
        optimizer: of the definition.
        module: its parameters are those of the optimizer.
    """
    names = {id(meta): name for name, meta in module.named_parameters()}
    counted_there = {
        names[id(param)]
        for part in parts_of(optimizer)
        for group in part.param_groups
        if group.get("fused") or group.get("capturable") or isinstance(part, ASGD)
        for param in group["params"]
    }

    def put(name: str, key: str, value: Any) -> Any:
        if name not in params or not isinstance(value, torch.Tensor) or is_shard(value):
            return value
        on_host = is_count(key, value) and name not in counted_there
        return value.to("cpu" if on_host else params[name].device)

    return {
        name: {key: put(name, key, value) for key, value in entry.items()}
        for name, entry in opt_state.items()
    }


# The optimizers of the package lomo-optim, which update parameters from hooks of their own.
#
# Theirs run in the backward pass before gradients are divided or cross the ranks. Here the
# package's update of one parameter is called when its gradient is complete.


_OURS = {
    "clip_grad_norm": "af.clip_grad_norm, which sees all gradients",
    "loss_scale": "af.autocast('fp16')",
    "loss_scale_args": "af.autocast('fp16')",
}
_MOMENTS = {1: ("exp_avg_sq",), 2: ("exp_avg_sq_row", "exp_avg_sq_col")}


class _Model:
    """What the package takes for a model: the one parameter that is to be updated."""

    def __init__(self) -> None:
        self.named: NamedParameters = []

    def named_parameters(self) -> NamedParameters:
        """Return the parameter; none while the package would hang hooks on it."""
        return self.named

    def parameters(self) -> list[torch.Tensor]:
        """Return something to make a torch optimizer of."""
        return [torch.zeros(1)]


class PerParameter(Optimizer):
    """A torch optimizer whose step calls the package's update, parameter by parameter."""

    def __init__(
        self, named: NamedParameters, kind: type, options: dict[str, Any]
    ) -> None:
        """Take named parameters, a class of the package, and its options."""
        made = _made_lomo(kind, options)[0]
        hyper = {"lr": made.lr, "weight_decay": made.weight_decay}
        super().__init__([param for _, param in named], hyper)
        self.kind, self.options = kind, options
        self.adapts = hasattr(made, "exp_avg_sq")
        for name, param in named:
            if self.adapts and param.ndim not in _MOMENTS:
                msg = (
                    f"{kind.__name__} keeps moments of vectors and matrices, and {name!r} has"
                    f" the shape {tuple(param.shape)}. Give it those, and the rest to another"
                    " optimizer, with af.partition."
                )
                raise OptimizerError(msg)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient, and free that."""
        del closure
        if self not in _inner_of:
            _inner_of[self] = _made_lomo(self.kind, self.options)
        inner, model = _inner_of[self]
        for group in self.param_groups:
            inner.lr, inner.weight_decay = group["lr"], group["weight_decay"]
            inner.do_weight_decay = group["weight_decay"] > 0
            for param in group["params"]:
                if param.grad is not None:
                    model.named = [("", param)]
                    if self.adapts:
                        self._lend_moments(inner, param)
                    inner.grad_func(None)

    def _lend_moments(self, inner: Any, param: nn.Parameter) -> None:
        """Let the package use moments that are kept, and saved, here."""
        entry, names = self.state[param], _MOMENTS[param.ndim]
        if not entry:
            entry["step"] = torch.zeros(())
            for name, length in zip(names, param.shape, strict=True):
                entry[name] = torch.zeros(length, device=param.device)
        entry["step"] += 1
        inner.step_num = int(entry["step"])
        for name in names:
            getattr(inner, name)[""] = entry[name]


# not its attributes: a copy's would update the parameters of the first
_inner_of: "weakref.WeakKeyDictionary[PerParameter, tuple[Any, _Model]]"
_inner_of = weakref.WeakKeyDictionary()


def _made_lomo(kind: type, options: dict[str, Any]) -> tuple[Any, _Model]:
    model = _Model()
    made: Any = kind(model, **options)
    made.loss_scale = made.loss_scaler = None
    return made, model


def lomo(kind: type, **options: Any) -> Callable[[NamedParameters], Optimizer]:
    """Return a factory of an optimizer of the package lomo-optim, for `TrainState.create`.

    With `af.optimizer_in_backward()` each gradient is freed as soon as it is complete, as
    the package means it; without, it is an optimizer like any other. Schedules, ranks,
    checkpoints and `af.partition` work as with torch's own.

    Acts on: nothing; it is part of the definition.

    Args:
        kind: `lomo_optim.Lomo` or `lomo_optim.AdaLomo`.
        options: the package's own, but those that accelfn's transforms stand for.

    Law: an update is the package's; `Lomo` is plain SGD in float32.

    Cost: the package's update, a parameter at a time.

    Raises:
        OptimizerError: an option that a transform stands for; or, when the state is
            created, a parameter that `AdaLomo` keeps no moments of.

    References:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources"; Lv et al. 2023, "AdaLomo: Low-memory Optimization with Adaptive Learning
        Rate".
    """
    for name in options.keys() & _OURS.keys():
        msg = f"af.lomo({kind.__name__}, {name}=...): use {_OURS[name]}."
        raise OptimizerError(msg)
    return partial(PerParameter, kind=kind, options=options)
