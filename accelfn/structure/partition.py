# SPDX-License-Identifier: Apache-2.0
"""Several torch optimizers as one, each with parameters of its own."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.base.calling import called
from accelfn.errors import ArgumentError, OptimizerError

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


@called
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
        return Partitioned([_made(i, *each, self) for i, each in enumerate(made)])

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


def _made(i: int, factory: Any, share: NamedParameters, whole: partition) -> Optimizer:
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
