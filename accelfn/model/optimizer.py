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
"""Attributes that a GradScaler sets on a fused optimizer."""


class Partitioned(Optimizer):
    """Several optimizers as one optimizer, with their groups, state and steps in order.

    The groups are the parts' own dictionaries, so a change of a group changes the part.
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
        scaling = {name: vars(self)[name] for name in _SCALING if name in vars(self)}
        for part in self.parts:
            vars(part).update(scaling)
            try:
                bare_step(part)()
            finally:
                for name in scaling:
                    del vars(part)[name]
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether each part divides gradients in its own kernel, as torch's fused ones do."""
        return all(
            getattr(part, "_step_supports_amp_scaling", False) for part in self.parts
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise an error: torch would replace the groups, and the parts would keep theirs."""
        msg = "A partitioned optimizer loads no state dict; load those of its `parts`."
        raise OptimizerError(msg)


class PartStates(MutableMapping[Any, dict[str, Any]]):
    """The state of several optimizers as one mapping.

    A parameter's entry is in the state of its part. Another key `k` of part `i` is `"i:k"`.
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
        place, _, inner_key = str(key).partition(":")
        return self._states[int(place)], inner_key

    def __getitem__(self, key: Any) -> dict[str, Any]:
        """Return an entry; a missing entry begins empty, as in torch."""
        state, inner_key = self._at(key)
        return state[inner_key]

    def __setitem__(self, key: Any, entry: dict[str, Any]) -> None:
        """Set an entry in the state of its part."""
        state, inner_key = self._at(key)
        state[inner_key] = entry

    def __delitem__(self, key: Any) -> None:
        """Drop an entry."""
        state, inner_key = self._at(key)
        del state[inner_key]

    def __contains__(self, key: object) -> bool:
        """Whether there is an entry."""
        state, inner_key = self._at(key)
        return inner_key in state

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
    """Return the torch optimizers inside of an optimizer: itself, or its parts."""
    if not isinstance(optimizer, Partitioned):
        return [optimizer]
    return [inner for part in optimizer.parts for inner in parts_of(part)]


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether a step runs only torch's code, without random draws or state elsewhere."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # pyright: ignore[reportPrivateUsage]
    # Adafactor and Muon name the package itself as their module
    module = f"{type(optimizer).__module__}."
    return module.startswith("torch.optim.") and not any(hooks)


def empty_state(optimizer: Optimizer, like: Optimizer) -> Any:
    """Return an empty mapping for an optimizer's state, of the same kind as another's."""
    if isinstance(optimizer, Partitioned):
        return PartStates(optimizer.parts)
    state = cast("Any", like.state)
    return type(state)(state.default_factory)


def bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the optimizer's step without the profiler's record around it.

    torch wraps every `step` in a named record, 10 µs that no training loop needs. Step
    hooks run in that wrapper, so an optimizer that has any keeps it.
    """
    step = type(optimizer).step
    inner = getattr(step, "__wrapped__", None)
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
    if inner is None or hooks or not getattr(step, "hooked", False):
        return optimizer.step
    return partial(inner, optimizer)


@attrs.frozen(init=False, repr=False)
class combine_optimizers:
    """Use several optimizers, such as Muon for matrices and AdamW for the rest.

    Pass it to `TrainState.create(optimizer=...)`. Each parameter goes to the first part with a
    predicate that is true. Parameter groups are numbered through the parts, in their order:
    schedules multiply all rates, and `hyper` and `state.lrs` use this number.

    Acts on: nothing; it is part of the definition.

    Args:
        parts: pairs of a predicate, a function of `(name, parameter)`, and a factory of an
            optimizer, such as `partial(torch.optim.AdamW, lr=3e-4)`; `...` instead of the
            last predicate takes the rest.

    Law:
        Each parameter is updated as by its part's optimizer alone. One part for all
        parameters equals that optimizer, and two parts of one kind and options equal one
        optimizer, bitwise.

    Cost: the cost of the parts, and a microsecond for each.

    Raises:
        ArgumentError: there are no parts, a part is not such a pair, or `...` is not last.
        OptimizerError: when the state is created: no part takes a parameter, a part has no
            parameters, or a factory's optimizer has other parameters.

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Example:
        >>> from functools import partial
        >>> def is_matrix(name, parameter):
        ...     return parameter.ndim == 2 and "embed" not in name
        >>> combine_optimizers(
        ...     (is_matrix, partial(torch.optim.Muon, lr=0.02)),
        ...     (..., partial(torch.optim.AdamW, lr=3e-4)),
        ... )
        af.combine_optimizers((is_matrix, Muon), (..., AdamW))
    """

    parts: tuple[Part, ...]

    def __init__(self, *parts: Part) -> None:
        """Take pairs of a predicate and a factory."""
        for i, part in enumerate(parts):
            _check_part(i, part, is_last=i == len(parts) - 1)
        if not parts:
            msg = (
                "af.combine_optimizers(): expected (predicate, factory) pairs, such as"
                " (..., partial(torch.optim.AdamW, lr=3e-4))."
            )
            raise ArgumentError(msg)
        self.__attrs_init__(parts=tuple(tuple(part) for part in parts))  # type: ignore[attr-defined]

    def __call__(self, named: NamedParameters) -> Partitioned:
        """Return one optimizer of all parts over these parameters."""
        shares: list[NamedParameters] = [[] for _ in self.parts]
        rest: list[str] = []
        for name, param in named:
            for (predicate, _), share in zip(self.parts, shares, strict=True):
                if predicate is ... or predicate(name, param):
                    share.append((name, param))
                    break
            else:
                rest.append(name)
        if rest:
            msg = (
                f"{self!r}: no part takes {len(rest)} parameters: {', '.join(rest[:5])}. End"
                " with (..., factory), or freeze them with requires_grad_(False)."
            )
            raise OptimizerError(msg)
        optimizers: list[Optimizer] = []
        for i, ((_, factory), share) in enumerate(zip(self.parts, shares, strict=True)):
            if not share:
                some = ", ".join(name for name, _ in named[:3])
                msg = (
                    f"{self!r}: part {i} gets none of the {len(named)} trainable parameters,"
                    f" such as {some}. Earlier parts take them, or its predicate is never true."
                )
                raise OptimizerError(msg)
            optimizers.append(_create_part(i, factory, share, self))
        return Partitioned(optimizers)

    def __repr__(self) -> str:
        """Show the parts by the names of their functions."""
        parts = (f"({_name(rule)}, {_name(factory)})" for rule, factory in self.parts)
        return f"af.combine_optimizers({', '.join(parts)})"


def _check_part(i: int, part: Any, *, is_last: bool) -> None:
    is_ready = isinstance(part, (tuple, list)) and len(cast("Sequence[Any]", part)) == 2
    predicate, factory = cast("Sequence[Any]", part) if is_ready else (None, None)
    problem = ""
    if not is_ready:
        problem = f"is {part!r}; expected a (predicate, factory) pair"
    elif isinstance(factory, Optimizer):
        problem = f"has a ready {type(factory).__name__}; expected {_FACTORY}"
    elif not callable(factory):
        problem = f"has {factory!r}; expected {_FACTORY}"
    elif predicate is ... and not is_last:
        problem = "is the rest, `...`, which goes last"
    elif predicate is not ... and not callable(predicate):
        problem = (
            f"has {predicate!r}; expected a function of (name, parameter), or `...`"
        )
    if problem:
        msg = f"af.combine_optimizers: part {i} {problem}."
        raise ArgumentError(msg)


def _create_part(
    i: int, factory: Any, share: NamedParameters, owner: combine_optimizers
) -> Optimizer:
    """Return a part's optimizer over exactly its share."""
    optimizer = factory(share)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        msg = f"{owner!r}: the factory of part {i} gave {kind}; expected a torch optimizer."
        raise OptimizerError(msg)
    names = {id(param): name for name, param in share}
    params = _all_params(optimizer)
    shapes = [tuple(p.shape) for p in params if id(p) not in names]
    missing = names.keys() - {id(param) for param in params}
    if shapes or missing:
        absent = sorted(names[key] for key in missing)
        msg = (
            f"{owner!r}: the {kind} of part {i} lacks {absent[:5]} of the parameters that the"
            f" factory was given, and has {len(shapes)} others (shapes {shapes[:5]})."
        )
        raise OptimizerError(msg)
    return optimizer


def _all_params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _name(value: Any) -> str:
    """Return the name of a function, a class or a partial."""
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
"""Keys of a parameter group that are not hyperparameters."""

_FACTORY = "a factory such as functools.partial(torch.optim.AdamW, lr=3e-4)"
_CALLED = (
    "TrainState.create(optimizer=...) calls the factory with a list of (name, parameter):"
    " functools.partial(torch.optim.AdamW, lr=3e-4) is one, and so is"
    " lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)."
)

_KERNELS = frozenset({"fused", "foreach", "capturable"})
"""Options of a group that choose a kernel, which may not take meta tensors."""

OTHERS = "<optimizer>"
"""The key in `opt_state` of state without a parameter."""


def prototype_of(
    source: OptimizerSource, module: nn.Module, skeleton: Skeleton
) -> tuple[Optimizer, dict[str, dict[str, Any]]]:
    """Return the prototype of an optimizer, and the state that it already has, by name.

    Raises:
        OptimizerError: the source gives no optimizer, or an optimizer that cannot be used.
    """
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if isinstance(source, Optimizer):
        _refuse_scheduler(source)
        optimizer = source
    else:
        _check_factory(source, trainable)
        try:
            optimizer = source(trainable)
        except Exception as error:
            if not isinstance(error, Error):  # accelfn's errors have the code to write
                error.add_note(_CALLED)
            raise
    if not isinstance(optimizer, Optimizer):
        msg = (
            f"optimizer={source!r} gave {type(optimizer).__name__}; expected a torch"
            f" optimizer, or {_FACTORY}."
        )
        raise OptimizerError(msg)
    for part in parts_of(optimizer):
        _refuse_inner(part)
        _refuse_wrappers(part)
        _refuse_closure(part)
        _check_rates(part)
    names = {id(param): name for name, param in module.named_parameters()}
    _check_owned(optimizer, names, trainable, given_ready=optimizer is source)
    state = named_state(optimizer, names)
    metas = dict(skeleton.module.named_parameters())
    memo = {id(p): metas[n] for n, p in module.named_parameters()}
    return rebuilt(optimizer, memo), state


def named_state(
    optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state by parameter name; the entries are the optimizer's own.

    State under other keys (MADGRAD's count) is under `OTHERS`.
    """
    named: dict[str, dict[str, Any]] = {}
    for key, entry in cast("dict[Any, Any]", optimizer.state).items():
        if isinstance(key, torch.Tensor):
            named[names[id(key)]] = entry
        else:
            named.setdefault(OTHERS, {})[str(key)] = entry
    return named


def owned_names(optimizer: Optimizer, skeleton: Skeleton) -> list[str]:
    """Return the names of the parameters that an optimizer has."""
    ids = set(map(id, _all_params(optimizer)))
    metas = skeleton.module.named_parameters()
    return [name for name, meta in metas if id(meta) in ids]


def trained_names(
    predicate: Callable[[str, torch.Tensor], object],
    params: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    skeleton: Skeleton,
) -> set[str]:
    """Return the names of the parameters for which a predicate is true.

    Raises:
        OptimizerError: the optimizer lacks such a parameter.
        ModelError: there is no such parameter.
    """
    error = (
        call_mismatch(predicate, "", None) if callable(predicate) else "not callable"
    )
    if error is not None:
        msg = (
            f"with_trainable({predicate!r}): expected a function, called as"
            f" predicate(name, parameter): {error}."
        )
        raise ArgumentError(msg)
    chosen = {name for name, param in params.items() if predicate(name, param)}
    if not chosen:
        msg = (
            f"with_trainable({predicate!r}): it is true of none of the {len(params)}"
            f" parameters ({', '.join(list(params)[:3])}, ...)."
        )
        raise ModelError(msg)
    names = owned_names(optimizer, skeleton)
    lacking = [name for name in params if name in chosen and name not in names]
    if lacking:
        msg = (
            f"with_trainable({predicate!r}): {type(optimizer).__name__} lacks"
            f" {len(lacking)} parameters, which were frozen when the state was created:"
            f" {', '.join(lacking[:5])}. Create it with them trained, then freeze them."
        )
        raise OptimizerError(msg)
    return chosen


def group_key(index: int) -> str:
    """Return the key in `opt_state` for the changing numbers of a parameter group."""
    return f"<group {index}>"


def rebuilt(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return the optimizer over other parameters, without its per-parameter state.

    Not by deepcopy of the object: Optimizer.__getstate__ leaves subclass attributes out.
    An LRScheduler patches `step` on the instance; a copy starts unpatched.
    """
    if isinstance(optimizer, Partitioned):
        # first the parts, so that the whole's copy has their groups
        memo |= {id(part): rebuilt(part, memo) for part in optimizer.parts}
    new = object.__new__(type(optimizer))
    attributes = {
        k: v for k, v in vars(optimizer).items() if k not in {"state", "step"}
    }
    new.__dict__.update(copy.deepcopy(attributes, memo))
    new.state = empty_state(new, optimizer)
    return new


def scratch_of(prototype: Optimizer) -> Any:
    """Return an optimizer of the same groups, for a scheduler to set their options.

    Its parameters have no values, and reading its state raises an error. Options that are
    tensors are on the CPU, so reading one waits for no device.
    """
    memo = _meta_params(prototype)
    for param in memo.values():
        param.grad = torch.empty_like(param)
    optimizer = rebuilt(prototype, cast("Any", memo))
    for group in optimizer.param_groups:
        for key in group.keys() - STRUCTURE:
            if isinstance(group[key], torch.Tensor):
                group[key] = group[key].detach().cpu()
    optimizer.state = cast("Any", _UnreadableState())
    return optimizer


def _meta_params(optimizer: Optimizer) -> dict[int, nn.Parameter]:
    """Create parameters without values in place of an optimizer's, by their ids."""
    return {
        id(param): nn.Parameter(
            torch.empty_like(param, device="meta"), param.requires_grad
        )
        for param in _all_params(optimizer)
    }


def entries_of(prototype: Optimizer, skeleton: Skeleton) -> dict[str, dict[str, Any]]:
    """Return the state that torch's optimizers have for each parameter, without values.

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
        groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for i, group in enumerate(part.param_groups):
            for param in group["params"]:
                groups.setdefault((i, param.shape, param.dtype), []).append(param)
            group["params"] = [some[0] for key, some in groups.items() if key[0] == i]
            group.update(dict.fromkeys(_KERNELS & group.keys(), False))
        # torch makes entries before any kernel, and some kernels reject meta tensors
        with suppress(NotImplementedError, RuntimeError), torch.no_grad():
            bare_step(part)()
        for some in groups.values():
            entry = part.state.get(some[0], {})
            entries |= {names[id(param)]: entry for param in some}
    return entries


class _UnreadableState:
    """The state of an optimizer for a scheduler, which cannot read it."""

    def __getitem__(self, key: object) -> Any:
        """Raise an error."""
        msg = "it reads the state of the optimizer, which a schedule does not have"
        raise ArgumentError(msg)


def kind_of(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """Return an optimizer's class, or the classes of its parts with hashes of their parameters.

    Args:
        optimizer: the optimizer of a state.
        names: names of its parameters, by their ids.
    """
    if isinstance(optimizer, Partitioned):
        parts = [
            f"{kind_of(part, names)}{_share(part, names)}" for part in optimizer.parts
        ]
        return f"partition({', '.join(parts)})"
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _share(part: Optimizer, names: Mapping[int, str]) -> str:
    members = [names[id(param)] for param in _all_params(part)]
    checksum = zlib.crc32("\n".join(sorted(members)).encode())
    return f" of {len(members)} parameters ({checksum:08x})"


def _check_factory(factory: Any, trainable: object) -> None:
    """Raise unless a factory takes a list of named parameters."""
    if isinstance(factory, (list, tuple, dict)):
        kind = type(cast("object", factory)).__name__
        msg = (
            f"optimizer={kind}: expected a torch optimizer, or {_FACTORY}. Several optimizers"
            " are one: af.combine_optimizers((predicate, factory), ...)."
        )
        raise OptimizerError(msg)
    if not callable(factory):
        msg = f"optimizer={factory!r}: expected a torch optimizer, or {_FACTORY}."
        raise OptimizerError(msg)
    error = call_mismatch(factory, trainable)
    if error is not None:
        msg = (
            f"optimizer={factory!r}: expected a factory that takes a list of (name,"
            f" parameter): {error}. Write {_FACTORY}."
        )
        raise OptimizerError(msg) from error


def _refuse_scheduler(optimizer: Optimizer) -> None:
    """Raise if an optimizer has a torch scheduler, which would not set the rate of a copy."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        msg = (
            f"The {type(optimizer).__name__} has a torch scheduler. Give TrainState.create"
            " schedule=af.schedules.from_torch(...), and an optimizer without one."
        )
        raise OptimizerError(msg)


def _refuse_inner(optimizer: Optimizer) -> None:
    """Raise for an optimizer around another: no copy or checkpoint would have its state."""
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            msg = (
                f"{type(optimizer).__name__} keeps another optimizer, {name}, so no copy or"
                " checkpoint would have the state of that one. Give an optimizer that is not"
                " wrapped; for several optimizers, use af.combine_optimizers."
            )
            raise OptimizerError(msg)


def _refuse_wrappers(optimizer: Optimizer) -> None:
    """Raise for torchao's optimizers of 8 and 4 bits before they train for long."""
    kind = type(optimizer)
    makes = getattr(kind, "_subclass_zeros", None)
    # the method of torchao's base class is abstract
    if makes is not None and not makes.__qualname__.startswith("_AdamBase."):
        raise OptimizerError(wrapper_error(kind.__name__))


def wrapper_error(kind: str) -> str:
    """Return the error of an optimizer with a state of wrapper tensors."""
    return (
        f"{kind} keeps its state in a tensor class that no checkpoint can hold. Use"
        " torch.optim.AdamW, or bitsandbytes.optim.AdamW8bit for 8 bits."
    )


def _check_rates(optimizer: Optimizer) -> None:
    """Raise for an infinite learning rate or NaN, which torch accepts."""
    for i, group in enumerate(optimizer.param_groups):
        rate: Any = group.get("lr")
        is_here = isinstance(rate, float) or (
            isinstance(rate, torch.Tensor) and rate.is_cpu
        )
        if is_here and not math.isfinite(rate):
            msg = (
                f"{type(optimizer).__name__}: lr={float(rate)} in parameter group {i}; give a"
                " finite rate."
            )
            raise OptimizerError(msg)


def _refuse_closure(optimizer: Optimizer) -> None:
    """Raise for an optimizer that calls the loss in its step, by its signature or a trial.

    The trial is a step without gradients, on a copy over meta parameters.
    """
    msg = (
        f"{type(optimizer).__name__} calls the loss from inside its step (a required closure),"
        " but gradients are taken before it. Use an optimizer that takes gradients."
    )
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(msg)
    if type(optimizer).__module__.startswith("torch."):
        return
    trial = rebuilt(optimizer, cast("Any", _meta_params(optimizer)))
    trial._optimizer_step_pre_hooks.clear()  # pyright: ignore[reportPrivateUsage]
    trial._optimizer_step_post_hooks.clear()  # pyright: ignore[reportPrivateUsage]
    try:
        bare_step(trial)()
    except Exception as error:
        text = str(error)
        if "closure" in text or "'NoneType' object is not callable" in text:
            raise OptimizerError(msg) from error


def _check_owned(
    optimizer: Optimizer,
    names: Mapping[int, str],
    trainable: Iterable[tuple[str, nn.Parameter]],
    *,
    given_ready: bool,
) -> None:
    params = _all_params(optimizer)
    shapes = [tuple(param.shape) for param in params if id(param) not in names]
    if shapes:
        why = " Pass the model instance with these parameters, or an optimizer factory."
        msg = (
            f"{type(optimizer).__name__} holds {len(shapes)} parameters that are not the"
            f" model's (shapes {shapes[:5]}).{why if given_ready else ''}"
        )
        raise OptimizerError(msg)
    ids = set(map(id, params))
    missing = [name for name, param in trainable if id(param) not in ids]
    if missing:
        msg = (
            f"{type(optimizer).__name__} lacks {len(missing)} trainable parameters:"
            f" {', '.join(missing[:5])}. Give it all of them, or freeze these with"
            " requires_grad_(False)."
        )
        raise OptimizerError(msg)


# The device of an optimizer's state: counts on the host, all else with the parameter.
#
# torch's optimizers count the updates of each parameter in a tensor, and compute numbers from
# it. Each would wait for a device. So the count is on the host, unless a kernel reads it.


def is_count(key: str, value: torch.Tensor) -> bool:
    """Whether an entry is a number, and not a value of a parameter that is a number too."""
    return key in {"step", "mu_product", "eta", "mu"} and not value.dim()


def place_opt_state(
    opt_state: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    module: nn.Module,
) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state on the devices where the optimizer would have created it.

    Args:
        opt_state: the state by parameter name; other entries and shards stay where they are.
        params: the parameters, on their devices.
        optimizer: the prototype of the definition.
        module: the module with the prototype's parameters.
    """
    names = {id(meta): name for name, meta in module.named_parameters()}
    counted_there = {
        names[id(param)]
        for part in parts_of(optimizer)
        for group in part.param_groups
        if group.get("fused") or group.get("capturable") or isinstance(part, ASGD)
        for param in group["params"]
    }

    def put_value(name: str, key: str, value: Any) -> Any:
        if name not in params or not isinstance(value, torch.Tensor) or is_shard(value):
            return value
        on_host = is_count(key, value) and name not in counted_there
        return value.to("cpu" if on_host else params[name].device)

    return {
        name: {key: put_value(name, key, value) for key, value in entry.items()}
        for name, entry in opt_state.items()
    }


# The optimizers of the package lomo-optim, which update parameters from their own hooks.
#
# These hooks run in the backward pass before gradients are divided or cross the ranks. accelfn
# calls the package's update of one parameter when its gradient is complete.


_OURS = {
    "clip_grad_norm": "af.clip_grad_norm, which sees all gradients",
    "loss_scale": "af.autocast('fp16')",
    "loss_scale_args": "af.autocast('fp16')",
}
_MOMENTS = {1: ("exp_avg_sq",), 2: ("exp_avg_sq_row", "exp_avg_sq_col")}


class _Model:
    """A stand-in for the package's model, with the one parameter to update."""

    def __init__(self) -> None:
        self.named: NamedParameters = []

    def named_parameters(self) -> NamedParameters:
        """Return the parameter, or none while the package adds hooks."""
        return self.named

    def parameters(self) -> list[torch.Tensor]:
        """Return a tensor for the constructor of a torch optimizer."""
        return [torch.zeros(1)]


class PerParameter(Optimizer):
    """A torch optimizer that calls the package's update, parameter by parameter."""

    def __init__(
        self, named: NamedParameters, kind: type, options: dict[str, Any]
    ) -> None:
        """Take named parameters, a class of the package, and its options."""
        optimizer = _made_lomo(kind, options)[0]
        hyper = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
        super().__init__([param for _, param in named], hyper)
        self.kind, self.options = kind, options
        self.adapts = hasattr(optimizer, "exp_avg_sq")
        for name, param in named:
            if self.adapts and param.ndim not in _MOMENTS:
                msg = (
                    f"{kind.__name__} keeps moments of vectors and matrices, but {name!r} has"
                    f" the shape {tuple(param.shape)}. Use af.combine_optimizers for the rest."
                )
                raise OptimizerError(msg)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient, and free the gradients."""
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
        """Let the package use the moments in this optimizer's state."""
        entry, names = self.state[param], _MOMENTS[param.ndim]
        if not entry:
            entry["step"] = torch.zeros(())
            for name, length in zip(names, param.shape, strict=True):
                entry[name] = torch.zeros(length, device=param.device)
        entry["step"] += 1
        inner.step_num = int(entry["step"])
        for name in names:
            getattr(inner, name)[""] = entry[name]


# not attributes, because a copy would update the parameters of the original
_inner_of: "weakref.WeakKeyDictionary[PerParameter, tuple[Any, _Model]]"
_inner_of = weakref.WeakKeyDictionary()


def _made_lomo(kind: type, options: dict[str, Any]) -> tuple[Any, _Model]:
    model = _Model()
    optimizer: Any = kind(model, **options)
    optimizer.loss_scale = optimizer.loss_scaler = None
    return optimizer, model


def lomo(kind: type, **options: Any) -> Callable[[NamedParameters], Optimizer]:
    """Return a factory of an optimizer of the package lomo-optim, for `TrainState.create`.

    With `af.optimizer_in_backward()` each gradient is freed as soon as it is complete, as the
    package intends; without it, this is an optimizer like any other. Schedules, ranks,
    checkpoints and `af.combine_optimizers` work as with torch's optimizers.

    Acts on: nothing; it is part of the definition.

    Args:
        kind: `lomo_optim.Lomo` or `lomo_optim.AdaLomo`.
        options: the package's options, without those that a transform replaces.

    Law: an update equals the package's; `Lomo` is plain SGD in float32.

    Cost: the package's update, one parameter at a time.

    Raises:
        OptimizerError: a transform replaces the option; or, when the state is created,
            `AdaLomo` has no moments for a parameter.

    References:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources"; Lv et al. 2023, "AdaLomo: Low-memory Optimization with Adaptive Learning
        Rate".
    """
    for name in options.keys() & _OURS.keys():
        msg = f"af.lomo({kind.__name__}, {name}=...): use {_OURS[name]}."
        raise OptimizerError(msg)
    return partial(PerParameter, kind=kind, options=options)
