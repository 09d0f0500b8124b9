# SPDX-License-Identifier: Apache-2.0
"""When each method of a transform first does something: before that, no law has seen it."""

from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeAlias

from accelfn.definition.fields import has_field
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.step.apply_grads import finalize
from accelfn.testing.checking.subject import Subject
from accelfn.testing.checking.watching import subclassed
from accelfn.testing.comparing.differences import leaves
from accelfn.testing.comparing.entries import entries, first_difference, kept
from accelfn.testing.simulate import simulate
from accelfn.world import World

Acted: TypeAlias = dict[str, set[int]]
"""After which updates each method had done something, by how a message calls it."""

LATER = ("grads", "hyper", "after_update", "after_skip")
"""Methods that may have nothing to do for many updates; others have, or are for the end."""


def acted(subject: Subject, start: Callable[[World, Any], Any]) -> Acted:
    """Return which methods did something in which of a subject's updates, on any rank.

    What counts is that it changed a bit of what it was given, or that ranks communicated.

    Args:
        subject: what is trained.
        start: gives the state before the first update, of a world, in a setup in which
            each transform is what a function makes of it.
    """
    found: Acted = {}
    update = [0] * subject.size

    def observed(transform: Any) -> Any:
        def note(name: str, rank: int) -> None:
            found.setdefault(name, set()).add(update[rank])

        busy: set[int] = set()
        methods = {
            field: _observed(field, getattr(type(transform), field), note, busy)
            for field in (*LATER, "finalize")
            if has_field(transform, field)
        }
        return subclassed(transform, methods)

    def rank(world: World) -> None:
        world.connection.trail = deque()  # all that is called, not only the latest
        state = start(world, observed)
        update[world.rank] = 1
        for after, _ in subject.advance(state, 0, subject.updates):
            finalize(after.copy())
            update[world.rank] += 1

    simulate(subject.size, rank)
    return found


def idle(transforms: Any, found: Mapping[str, set[int]]) -> list[str]:
    """Return the methods that did nothing, of those that have something to do in time."""
    return [
        name
        for each in transforms
        for field in LATER
        if has_field(each, field) and (name := method_name(each, field)) not in found
    ]


def method_name(transform: Any, field: str) -> str:
    """Return what a message calls a transform's method."""
    return f"{transform!r}.{field}"


def _observed(
    field: str,
    method: Callable[..., Any],
    note: Callable[[str, int], None],
    busy: set[int],
) -> Callable[..., Any]:
    """Return the method, which notes each call from outside that did something."""

    @wraps(method)
    def call(self: Any, *given: Any) -> Any:
        (world,) = [each.world for each in given if isinstance(each, TrainState)]
        if world.rank in busy:  # one method of the transform's calls another
            return method(self, *given)
        busy.add(world.rank)
        before, talked = _given_to(self, field, given), len(world.connection.trail)
        returned = method(self, *given)
        busy.discard(world.rank)
        after = _returned_by(field, returned)
        if len(world.connection.trail) > talked or first_difference(before, after):
            note(method_name(self, field), world.rank)
        return returned

    return call


def _given_to(self: Any, field: str, given: tuple[Any, ...]) -> dict[str, Any]:
    """Return what a method can change of what it is given, copied, by name."""
    if field == "hyper":
        return {}
    if field == "after_skip":  # without it, the slot of before the update would stay
        return _named("slot", given[2].slots.get(self.name))
    value, slot, *_ = given
    return _of_value(value) | _named("slot", slot)


def _returned_by(field: str, returned: Any) -> dict[str, Any]:
    """Return what came of it."""
    if field == "hyper":
        return dict(returned)
    if field == "after_skip":
        return _named("slot", returned)
    value, slot = returned
    return _of_value(value) | _named("slot", slot)


def _of_value(value: TrainState | Grads) -> dict[str, Any]:
    if isinstance(value, TrainState):
        return entries(value)
    parts = {
        "tensors": value.tensors,
        "divisor": value.divisor,
        "metrics": value.metrics,
        "skip": None if value.skip is None else value.skip.flag,
    }
    return _named("grads", parts)


def _named(name: str, value: Any) -> dict[str, Any]:
    return {path: kept(leaf) for path, leaf in leaves(name, value)}
