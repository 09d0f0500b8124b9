# SPDX-License-Identifier: Apache-2.0
"""A state's optimizer: a torch optimizer without the parameters that it updates.

A state's definition has a *prototype*: the user's optimizer with its options and parameter
groups, but with parameters on the meta device. `accelfn.engine.optimizer` makes copies of it
with the real parameters.
"""

import copy
import inspect
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.optim import ASGD, Optimizer

from accelfn.base.arguments import call_mismatch, list_names, signature
from accelfn.base.tree import is_shard
from accelfn.errors import ArgumentError, Error, ModelError, OptimizerError
from accelfn.model.model import Skeleton, parameter_like

# Several torch optimizers as one, such as Muon for matrices and AdamW for the rest.


NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
Predicate: TypeAlias = Callable[[str, nn.Parameter], object]
Part: TypeAlias = tuple[
    Predicate | EllipsisType, Callable[[NamedParameters], Optimizer]
]

_SCALING = ("grad_scale", "found_inf")
"""Attributes that torch's GradScaler sets on a fused optimizer."""


class Partitioned(Optimizer):
    """One optimizer made of several, with the groups and the state of all of them.

    A step runs the steps of the inner optimizers (`parts`) in order. The groups are the dicts of
    the inner optimizers, so a change of a group changes an inner optimizer.
    """

    parts: tuple[Optimizer, ...]

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        """Initialize with optimizers that do not share parameters."""
        # for torch's hooks; the groups follow below
        super().__init__([{"params": []}], {})
        self.parts = tuple(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = cast("Any", PartStates(self.parts))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the step of each inner optimizer."""
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
        """Whether each inner optimizer divides gradients in its kernel, as fused ones do."""
        name = "_step_supports_amp_scaling"
        return all(getattr(part, name, False) for part in self.parts)

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise an error, because torch would replace the groups only here, not in `parts`."""
        msg = "af.combine_optimizers: load a state dict into each of the optimizer's `parts`."
        raise OptimizerError(msg)


class PartStates(MutableMapping[Any, dict[str, Any]]):
    """The state of several optimizers as one mapping.

    The entry of a parameter is in the state of the optimizer that has it. Any other key `k` in
    the state of optimizer number `i` is `"i:k"` here.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        """Initialize with the optimizers."""
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
        """Return an entry; create an empty one if it is missing, as torch does."""
        state, inner_key = self._at(key)
        return state[inner_key]

    def __setitem__(self, key: Any, entry: dict[str, Any]) -> None:
        """Set an entry in the state of the optimizer that has its parameter."""
        state, inner_key = self._at(key)
        state[inner_key] = entry

    def __delitem__(self, key: Any) -> None:
        """Remove an entry."""
        state, inner_key = self._at(key)
        del state[inner_key]

    def __contains__(self, key: object) -> bool:
        """Return whether there is an entry for a key."""
        state, inner_key = self._at(key)
        return inner_key in state

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys of all optimizers in order."""
        for i, state in enumerate(self._states):
            for key in state:
                yield key if isinstance(key, torch.Tensor) else f"{i}:{key}"

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self._states))

    def clear(self) -> None:
        """Remove all entries."""
        for state in self._states:
            state.clear()


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the inner optimizers of a combination, or a list with only this optimizer."""
    if not isinstance(optimizer, Partitioned):
        return [optimizer]
    return [inner for part in optimizer.parts for inner in parts_of(part)]


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step runs only code of torch.

    Then the step uses no random numbers, and has no state outside of the optimizer.
    """
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # pyright: ignore[reportPrivateUsage]
    # the `__module__` of Adafactor and Muon is "torch.optim", so add a dot before comparing
    module = f"{type(optimizer).__module__}."
    return module.startswith("torch.optim.") and not any(hooks)


def empty_state(optimizer: Optimizer, like: Optimizer) -> Any:
    """Return an empty mapping for an optimizer's state, of the type of `like.state`."""
    if isinstance(optimizer, Partitioned):
        return PartStates(optimizer.parts)
    state = cast("Any", like.state)
    return type(state)(state.default_factory)


def bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return an optimizer's step function without torch's profiling, which takes 10 µs.

    torch wraps each `step` in a profiler record. The wrapper also runs step hooks, so it is kept
    if the optimizer has hooks.
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

    Pass the result to `TrainState.create(optimizer=...)`. Each parameter goes to the first pair
    with a predicate that is true for it. Schedules multiply the learning rates of all
    optimizers. The parameter groups of all optimizers are numbered in order, and a transform's
    `hyper` and `state.lrs` use these numbers.

    Acts on: nothing; it is part of the definition.

    Args:
        parts: pairs of a predicate and a factory. The predicate is a function of
            `(name, parameter)`. The factory creates an optimizer, such as
            `partial(torch.optim.AdamW, lr=3e-4)`. In the last pair, `...` can replace the
            predicate, for all remaining parameters.

    Law:
        Each parameter is updated as by its own optimizer without the other optimizers. A
        combination of one optimizer is bitwise equal to that optimizer, and so is a combination
        of two optimizers with the same class and options.

    Cost: the cost of the optimizers, and a microsecond for each.

    Raises:
        ArgumentError: no pair was passed, an argument is not such a pair, or `...` is not last.
        OptimizerError: when the state is created, if a parameter belongs to no optimizer, an
            optimizer gets no parameters, or a factory returns an optimizer of other parameters.

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
        """Initialize with pairs of a predicate and a factory."""
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
        """Create the optimizers for these parameters, and return them as one optimizer."""
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
                f"{self!r}: parameters belong to no pair: {list_names(rest)}. Add"
                " (..., factory) as the last pair, or freeze them with requires_grad_(False)."
            )
            raise OptimizerError(msg)
        optimizers: list[Optimizer] = []
        for i, ((_, factory), share) in enumerate(zip(self.parts, shares, strict=True)):
            if not share:
                some = ", ".join(name for name, _ in named[:3])
                msg = (
                    f"{self!r}: pair {i} gets none of the {len(named)} trainable parameters (such"
                    f" as {some}). Its predicate is never true, or earlier pairs get them."
                )
                raise OptimizerError(msg)
            optimizers.append(_create_part(i, factory, share, self))
        return Partitioned(optimizers)

    def __repr__(self) -> str:
        """Return the pairs as text, with the names of their functions."""
        parts = (f"({_name(rule)}, {_name(factory)})" for rule, factory in self.parts)
        return f"af.combine_optimizers({', '.join(parts)})"


def _check_part(i: int, part: Any, *, is_last: bool) -> None:
    is_ready = isinstance(part, (tuple, list)) and len(cast("Sequence[Any]", part)) == 2
    predicate, factory = cast("Sequence[Any]", part) if is_ready else (None, None)
    problem = ""
    if not is_ready:
        problem = f"is {part!r}; expected a (predicate, factory) pair"
    elif isinstance(factory, Optimizer):
        problem = f"has an optimizer, {type(factory).__name__}; expected {_FACTORY}"
    elif not callable(factory):
        problem = f"has {factory!r}; expected {_FACTORY}"
    elif predicate is ... and not is_last:
        problem = "has the predicate `...`, which only the last pair can have"
    elif predicate is not ... and not callable(predicate):
        problem = (
            f"has {predicate!r}; expected a function of (name, parameter), or `...`"
        )
    if problem:
        msg = f"af.combine_optimizers: pair {i} {problem}."
        raise ArgumentError(msg)


def _create_part(
    i: int, factory: Any, share: NamedParameters, owner: combine_optimizers
) -> Optimizer:
    """Create the optimizer of one pair, and check that it has exactly the pair's parameters."""
    optimizer = factory(share)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        msg = f"{owner!r}: the factory of pair {i} returned {kind}; expected a torch optimizer."
        raise OptimizerError(msg)
    names = {id(param): name for name, param in share}
    params = _all_params(optimizer)
    shapes = [tuple(p.shape) for p in params if id(p) not in names]
    missing = names.keys() - {id(param) for param in params}
    if shapes or missing:
        absent = sorted(names[key] for key in missing)
        lacks = f" It lacks {', '.join(absent[:5])}." if absent else ""
        more = f" It has {len(shapes)} others (shapes {shapes[:5]})." if shapes else ""
        msg = (
            f"{owner!r}: the factory of pair {i} returned {kind} with other parameters than it"
            f" got.{lacks}{more} Pass all parameters that the factory gets to the optimizer."
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
"""Values of hyperparameters, by the index of the parameter group and the name."""

STRUCTURE = frozenset({"params", "param_names", "name"})
"""The keys of a parameter group that are not hyperparameters."""

_FACTORY = "a factory such as functools.partial(torch.optim.AdamW, lr=3e-4)"
_CALLED = (
    "TrainState.create(optimizer=...) calls the factory with a list of (name, parameter) pairs."
    " Write functools.partial(torch.optim.AdamW, lr=3e-4), or"
    " lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)."
)

_KERNELS = frozenset({"fused", "foreach", "capturable"})
"""Options of a group that choose a kernel; some kernels do not support meta tensors."""

OTHERS = "<optimizer>"
"""The key in `opt_state` for the state of an optimizer that belongs to no parameter."""


def prototype_of(
    source: OptimizerSource, module: nn.Module, skeleton: Skeleton
) -> tuple[Optimizer, dict[str, dict[str, Any]]]:
    """Return the prototype of an optimizer, and its initial state by parameter name.

    Args:
        source: the optimizer, or a factory that is called with the trainable parameters.
        module: the model.
        skeleton: the skeleton of the model.

    Raises:
        OptimizerError: the source does not return an optimizer, or accelfn cannot use it.
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
            if not isinstance(error, Error):  # these errors already say what to write
                error.add_note(_CALLED)
            raise
    if not isinstance(optimizer, Optimizer):
        msg = (
            f"optimizer={source!r} returned {type(optimizer).__name__}; expected a torch"
            f" optimizer, or {_FACTORY}."
        )
        raise OptimizerError(msg)
    for part in parts_of(optimizer):
        _refuse_inner(part)
        _refuse_wrappers(part)
        _refuse_closure(part)
        _check_rates(part)
    names = {id(param): name for name, param in module.named_parameters()}
    _check_owned(optimizer, names, trainable)
    state = named_state(optimizer, names)
    metas = dict(skeleton.module.named_parameters())
    memo = {id(p): metas[n] for n, p in module.named_parameters()}
    return rebuilt(optimizer, memo), state


def named_state(
    optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state by parameter name, without copying the entries.

    State that belongs to no parameter, such as MADGRAD's count, has the key `OTHERS`.
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
    """Return the names of the parameters for which a predicate of `with_trainable` is true.

    Raises:
        ArgumentError: the predicate is not a function of (name, parameter).
        OptimizerError: the optimizer does not have one of these parameters.
        ModelError: the predicate is true for no parameter.
    """
    is_function = callable(predicate)
    error = call_mismatch(predicate, "", None) if is_function else "not callable"
    if error is not None:
        msg = (
            f"state.with_trainable({predicate!r}): expected a function of (name, parameter):"
            f" {error}."
        )
        raise ArgumentError(msg)
    chosen = {name for name, param in params.items() if predicate(name, param)}
    if not chosen:
        msg = (
            f"state.with_trainable({predicate!r}): the function returned True for none of the"
            f" parameters ({', '.join(list(params)[:3])}, ...), so nothing would be trained."
        )
        raise ModelError(msg)
    names = owned_names(optimizer, skeleton)
    lacking = [name for name in params if name in chosen and name not in names]
    if lacking:
        msg = (
            f"state.with_trainable({predicate!r}): parameters were frozen when the state was"
            f" created, so {type(optimizer).__name__} does not have them: {list_names(lacking)}."
            " Create the state with them trainable, then freeze them with state.with_trainable."
        )
        raise OptimizerError(msg)
    return chosen


def group_key(index: int) -> str:
    """Return the key in `opt_state` for the changing numbers of a parameter group."""
    return f"<group {index}>"


def rebuilt(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy of an optimizer with other parameters and an empty state.

    A deepcopy of the object would lose attributes of subclasses, because
    `Optimizer.__getstate__` leaves them out. The attribute `step` is not copied, because it
    exists only if an LRScheduler has replaced the method `step`.

    Args:
        optimizer: the optimizer.
        memo: the new parameters, by the `id` of the old ones, as for `copy.deepcopy`.
    """
    if isinstance(optimizer, Partitioned):
        # copy the inner optimizers first, so that the combination's copy has their groups
        memo |= {id(part): rebuilt(part, memo) for part in optimizer.parts}
    new = object.__new__(type(optimizer))
    attributes = {
        k: v for k, v in vars(optimizer).items() if k not in {"state", "step"}
    }
    new.__dict__.update(copy.deepcopy(attributes, memo))
    new.state = empty_state(new, optimizer)
    return new


def scratch_of(prototype: Optimizer) -> Any:
    """Return a copy of an optimizer for a torch scheduler, which sets options of its groups.

    The copy's parameters have no values, and reading its state raises an error. Options that
    are tensors are on the CPU, so that reading them does not wait for a GPU.
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
    """Return, by the `id` of each parameter of an optimizer, a parameter on the meta device."""
    return {
        id(param): parameter_like(param, torch.empty_like(param, device="meta"))
        for param in _all_params(optimizer)
    }


def entries_of(prototype: Optimizer, skeleton: Skeleton) -> dict[str, dict[str, Any]]:
    """Return the state that an optimizer will have for each parameter, without values.

    Only entries of torch's own optimizers are returned, because a trial step of another
    optimizer could have side effects.

    Cost: a trial step with one parameter of each shape in each group, on the meta device.
    """
    memo: dict[int, Any] = {}
    names: dict[int, str] = {}
    for name, meta in skeleton.module.named_parameters():
        memo[id(meta)] = param = parameter_like(meta, torch.empty_like(meta))
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
        # some kernels do not support meta tensors, but torch creates the state before it runs them
        with suppress(NotImplementedError, RuntimeError), torch.no_grad():
            bare_step(part)()
        for some in groups.values():
            entry = part.state.get(some[0], {})
            entries |= {names[id(param)]: entry for param in some}
    return entries


class _UnreadableState:
    """The state of the optimizer that a torch scheduler gets: reading it raises an error."""

    def __getitem__(self, key: object) -> Any:
        """Raise `ArgumentError`, because a schedule cannot read the optimizer's state."""
        msg = "it reads the optimizer's state, which is not available to a schedule"
        raise ArgumentError(msg)


def kind_of(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """Return the name of an optimizer's class.

    For a combination, return the name of each inner class with a hash of its parameters' names.

    Args:
        optimizer: the optimizer of a state.
        names: the names of its parameters, by their `id`.
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
    """Raise `OptimizerError` unless a factory can be called with a list of named parameters."""
    if not callable(factory):
        is_several = isinstance(factory, (list, tuple, dict))
        text = type(factory).__name__ if is_several else repr(factory)
        msg = (
            f"optimizer={text}: expected a torch optimizer, or {_FACTORY}. For several"
            " optimizers, write af.combine_optimizers((predicate, factory), ...)."
        )
        raise OptimizerError(msg)
    error = call_mismatch(factory, trainable)
    if error is not None:
        msg = (
            f"optimizer={factory!r}: expected a factory that accepts a list of (name,"
            f" parameter): {error}. Pass {_FACTORY}."
        )
        raise OptimizerError(msg) from error


def _refuse_scheduler(optimizer: Optimizer) -> None:
    """Raise `OptimizerError` if a torch scheduler is attached to an optimizer.

    The scheduler would not set the learning rate of the state's copy.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        msg = (
            f"optimizer={type(optimizer).__name__}: a torch scheduler is attached to this"
            " optimizer. Pass an optimizer without a scheduler, and"
            " schedule=af.schedules.from_torch(...), to TrainState.create."
        )
        raise OptimizerError(msg)


def _refuse_inner(optimizer: Optimizer) -> None:
    """Raise `OptimizerError` if an optimizer has another optimizer as an attribute.

    Copies and checkpoints would not have the state of the inner optimizer.
    """
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            msg = (
                f"optimizer={type(optimizer).__name__}: its attribute {name} is another"
                " optimizer, and copies and checkpoints would not have the state of that one."
                " Pass the inner optimizer. For several optimizers, use af.combine_optimizers."
            )
            raise OptimizerError(msg)


def _refuse_wrappers(optimizer: Optimizer) -> None:
    """Raise `OptimizerError` for torchao's optimizers with 8 and 4 bits.

    Without this check, the error would appear only at the first save.
    """
    kind = type(optimizer)
    makes = getattr(kind, "_subclass_zeros", None)
    # the method of torchao's base class is abstract
    if makes is not None and not makes.__qualname__.startswith("_AdamBase."):
        raise OptimizerError(wrapper_error(kind.__name__))


def wrapper_error(kind: str) -> str:
    """Return the error message for an optimizer with a special tensor class in its state."""
    return (
        f"{kind} keeps its state in a tensor class that cannot be saved in a checkpoint. Use"
        " torch.optim.AdamW, or bitsandbytes.optim.AdamW8bit for 8 bits."
    )


def _check_rates(optimizer: Optimizer) -> None:
    """Raise `OptimizerError` for a learning rate that is infinite or NaN; torch accepts it."""
    for i, group in enumerate(optimizer.param_groups):
        rate: Any = group.get("lr")
        on_device = isinstance(rate, torch.Tensor) and not rate.is_cpu
        is_here = isinstance(rate, (float, torch.Tensor)) and not on_device
        if is_here and not math.isfinite(rate):
            msg = (
                f"{type(optimizer).__name__}: lr={float(rate)} in parameter group {i}. Pass a"
                " finite learning rate."
            )
            raise OptimizerError(msg)


def _refuse_closure(optimizer: Optimizer) -> None:
    """Raise `OptimizerError` for an optimizer with a step that calls the loss (a closure).

    The signature of the step shows this, or a trial step of a copy on the meta device, without
    gradients and without a closure.
    """
    msg = (
        f"{type(optimizer).__name__} requires a closure that calls the loss inside step(), but"
        " accelfn computes gradients before step(). Use an optimizer that needs no closure."
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
    optimizer: Optimizer, names: Mapping[int, str], trainable: NamedParameters
) -> None:
    params = _all_params(optimizer)
    shapes = [tuple(param.shape) for param in params if id(param) not in names]
    if shapes:
        kind = type(optimizer).__name__
        msg = (
            f"TrainState.create(optimizer={kind}): the optimizer has parameters of another model,"
            f" of the shapes {shapes[:5]}. Pass the optimizer's model, or write"
            f" functools.partial({kind}, lr=...)."
        )
        raise OptimizerError(msg)
    ids = set(map(id, params))
    missing = [name for name, param in trainable if id(param) not in ids]
    if missing:
        msg = (
            f"{type(optimizer).__name__} lacks trainable parameters: {list_names(missing)}. Create"
            " it with all of them, or freeze the missing ones with requires_grad_(False)."
        )
        raise OptimizerError(msg)


# The device of an optimizer's state: counts are on the CPU, other entries on the parameter's
# device.
#
# torch's optimizers count the updates of each parameter in a tensor, and read it to compute
# other numbers. If the count were on a GPU, each read would wait for the GPU. So the count is
# on the CPU, unless a GPU kernel reads it.


def is_count(key: str, value: torch.Tensor) -> bool:
    """Return whether an entry of the state is a scalar, such as a count of updates.

    Counts are on the CPU. Other entries, such as moments, are on the parameter's device.
    """
    return key in {"step", "mu_product", "eta", "mu"} and not value.dim()


def place_opt_state(
    opt_state: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    module: nn.Module,
) -> dict[str, dict[str, Any]]:
    """Move an optimizer's state to the devices where the optimizer would have created it.

    Args:
        opt_state: the state by parameter name. DTensors, and entries that belong to no
            parameter, are not moved.
        params: the parameters by name.
        optimizer: the prototype in the definition.
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


# The optimizers of the package lomo-optim, which update parameters in hooks of backward.
#
# These hooks would run before gradients are divided and reduced over ranks. So accelfn calls
# the package's function for one parameter when the gradient of that parameter is complete.


_OURS = {
    "clip_grad_norm": "af.clip_grad_norm(...)",
    "loss_scale": "af.autocast('fp16')",
    "loss_scale_args": "af.autocast('fp16')",
}
_MOMENTS = {1: ("exp_avg_sq",), 2: ("exp_avg_sq_row", "exp_avg_sq_col")}


class _Model:
    """An object that lomo-optim uses as the model; it has only the parameter to update."""

    def __init__(self) -> None:
        self.named: NamedParameters = []

    def named_parameters(self) -> NamedParameters:
        """Return the parameter to update; an empty list while the package adds hooks."""
        return self.named

    def parameters(self) -> list[torch.Tensor]:
        """Return any tensor, because torch's constructor needs one."""
        return [torch.zeros(1)]


class PerParameter(Optimizer):
    """A torch optimizer that calls lomo-optim's update function for each parameter."""

    def __init__(
        self, named: NamedParameters, kind: type, options: dict[str, Any]
    ) -> None:
        """Initialize with named parameters, a class of the package, and its options."""
        optimizer = _made_lomo(kind, options)[0]
        hyper = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
        super().__init__([param for _, param in named], hyper)
        self.kind, self.options = kind, options
        self.adapts = hasattr(optimizer, "exp_avg_sq")
        for name, param in named:
            if self.adapts and param.ndim not in _MOMENTS:
                msg = (
                    f"{kind.__name__} supports only vectors and matrices, but {name!r} has the"
                    f" shape {tuple(param.shape)}. Add an optimizer for it: af.combine_optimizers."
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
        """Let lomo-optim's update of a parameter use the moments in this optimizer's state."""
        entry, names = self.state[param], _MOMENTS[param.ndim]
        if not entry:
            entry["step"] = torch.zeros(())
            for name, length in zip(names, param.shape, strict=True):
                entry[name] = torch.zeros(length, device=param.device)
        entry["step"] += 1
        inner.step_num = int(entry["step"])
        for name in names:
            getattr(inner, name)[""] = entry[name]


# not an attribute: a copy of the optimizer would then update the original's parameters
_inner_of = weakref.WeakKeyDictionary[PerParameter, tuple[Any, _Model]]()


def _made_lomo(kind: type, options: dict[str, Any]) -> tuple[Any, _Model]:
    model = _Model()
    optimizer: Any = kind(model, **options)
    optimizer.loss_scale = optimizer.loss_scaler = None
    return optimizer, model


def lomo(kind: type, **options: Any) -> Callable[[NamedParameters], Optimizer]:
    """Use an optimizer of the package lomo-optim: pass the result to `TrainState.create`.

    With `af.optimizer_in_backward()`, the memory of each gradient is freed as soon as the
    gradient was applied, as the package intends. Without it, the optimizer works like any other.
    Schedules, several ranks, checkpoints and `af.combine_optimizers` work as with torch's
    optimizers.

    Acts on: nothing; it is part of the definition.

    Args:
        kind: `lomo_optim.Lomo` or `lomo_optim.AdaLomo`.
        options: the options of that class, except those that a transform replaces.

    Law: an update is that of the package. `Lomo` is plain SGD in float32.

    Cost: the update of the package, one parameter at a time.

    Raises:
        OptimizerError: a transform replaces the option. Or, when the state is created,
            `AdaLomo` does not support the shape of a parameter.

    References:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources"; Lv et al. 2023, "AdaLomo: Low-memory Optimization with Adaptive Learning
        Rate".
    """
    for name in options.keys() & _OURS.keys():
        msg = f"af.lomo({kind.__name__}, {name}=...): add {_OURS[name]} to the setup instead."
        raise OptimizerError(msg)
    return partial(PerParameter, kind=kind, options=options)
