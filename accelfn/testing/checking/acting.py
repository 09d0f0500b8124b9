# SPDX-License-Identifier: Apache-2.0
"""When each method of a transform first does something: before that, no law has seen it."""

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, TypeAlias

import attrs

from accelfn.definition.facts import facts_of
from accelfn.definition.fields import has_field
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.state.views import eval_params
from accelfn.step.apply_grads import finalize
from accelfn.testing.checking.subject import Subject
from accelfn.testing.checking.watching import intercepted, subclassed
from accelfn.testing.comparing.differences import leaves
from accelfn.testing.comparing.entries import entries, first_difference, kept
from accelfn.testing.simulate import simulate
from accelfn.world import World

Acted: TypeAlias = dict[str, set[int]]
"""After which updates each method had done something, by how a message calls it."""

_ACTS = (
    *("grads", "hyper", "after_update"),
    *("reduce", "loss_scale", "observe", "eval_params"),
)
_WRAPS = ("data", "loss", "value_and_grad", "runner")
"""Methods that return another plan, or function, where they do something."""
_OVER_RANKS = ("data", "reduce", "runner")
"""Methods that may have nothing to do in a world of 1."""


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

        get = _observed_options(transform, _options(transform), found)
        seen = intercepted(transform, (*_ACTS, "finalize"), _observed(note))
        seen = intercepted(seen, _WRAPS, _observed_wrapper(note))
        return subclassed(seen, {"__getattribute__": get})

    def rank(world: World) -> None:
        # all that is called, not only the latest
        world.connection.activity.trail = deque()
        state = start(world, observed)
        update[world.rank] = 1
        for after, _ in subject.advance(state, 0, subject.updates):
            eval_params(after)
            finalize(after.copy())
            update[world.rank] += 1

    simulate(subject.size, rank)
    return found


def idle(transforms: Any, found: Mapping[str, set[int]], size: int) -> list[str]:
    """Return the methods that did nothing, of those that have something to do in time.

    `finalize` may owe nothing, and the models here may have nothing that `module` is about;
    `init`, `merge` and `engine` are no changes of something.
    """
    wanted = [
        method_name(each, field, skipped=field in _seeing_skips(each))
        for each in transforms
        for field in (*_ACTS, *_WRAPS)
        if has_field(each, field) and callable(getattr(each, field))
        if size > 1 or field not in _OVER_RANKS
    ]
    return [name for name in wanted if name not in found]


def unread(transforms: Any, found: Mapping[str, Any]) -> list[str]:
    """Return the options that have no effect: no method names them, and none was read."""
    options = [(each, option) for each in transforms for option in _options(each)]
    wanted = [f"{each!r}.{option}" for each, option in options]
    return [name for name in wanted if name not in found]


def _options(transform: Any) -> list[str]:
    """Return the options that no method names, which functions outside may read."""
    kind = type(transform)
    bodies = [each for cls in kind.__mro__ for each in vars(cls).values()]
    named = set[str]().union(*map(_names, bodies))
    options = [each.name for each in attrs.fields(kind) if each.eq and each.init]
    return [each for each in options if each != "name" and each not in named]


def _names(value: Any) -> set[str]:
    """Return the names and strings in a method or a property, and in functions inside it."""
    if isinstance(value, str):  # as in getattr(self, "scale")
        return {value}
    body = inspect.unwrap(getattr(value, "fget", getattr(value, "func", value)))
    code = getattr(getattr(body, "__func__", body), "__code__", body)
    if not isinstance(code, CodeType) or code.co_filename.startswith("<attrs"):
        return set()
    return set(code.co_names).union(*map(_names, code.co_consts))


def _observed_options(transform: Any, options: list[str], found: Acted) -> Any:
    """Return the access to attributes, which notes each option that is read."""

    def get(self: Any, name: str) -> Any:
        if name in options:
            frame = inspect.currentframe()
            caller = frame and frame.f_back and frame.f_back.f_code.co_name
            if caller not in ("_repr", "__eq__", "__hash__"):  # not a use
                found[f"{transform!r}.{name}"] = {0}
        return object.__getattribute__(self, name)

    return get


def _seeing_skips(transform: Any) -> Sequence[str]:
    """Return the methods that must do something after a skipped update."""
    return ["after_update"] if "sees_skips" in facts_of(transform) else []


def method_name(transform: Any, field: str, *, skipped: bool) -> str:
    """Return what a message calls a transform's method."""
    return f"{transform!r}.{field}{' of a skipped update' if skipped else ''}"


def _observed(note: Callable[[str, int], None]) -> Callable[..., Any]:
    """Return a call of a method that notes whether it did something, if it is from outside."""
    busy: set[int] = set()

    def call(field: str, method: Any, self: Any, value: Any, *given: Any) -> Any:
        slot, update = given
        world = update.world
        if world.rank in busy:  # one method of the transform's calls another
            return method(self, value, slot, update)
        busy.add(world.rank)
        # after a skip, without it, the slot of before the update would stay
        kept = update.state.slots.get(self.name) if update.skipped else slot
        # what ranks only count until they meet is not yet what the method is for
        counts = field == "after_update" and "apart" in facts_of(self)
        before = _named(field, value, kept, counts=counts)
        talked = len(world.connection.activity.trail)
        returned = method(self, value, slot, update)
        busy.discard(world.rank)
        if field == "hyper" and not returned[0]:  # it laid nothing over
            returned = value, returned[1]
        changed = first_difference(before, _named(field, *returned, counts=counts))
        changed = changed or (field == "eval_params" and returned[0] is not value)
        if len(world.connection.activity.trail) > talked or changed:
            note(method_name(self, field, skipped=update.skipped), world.rank)
        return returned

    return call


def _observed_wrapper(note: Callable[[str, int], None]) -> Callable[..., Any]:
    """Return a call of a method that notes whether it returned another thing."""

    def call(field: str, method: Any, self: Any, inner: Any, *given: Any) -> Any:
        returned = method(self, inner, *given)
        if returned is not inner and returned != inner:
            note(method_name(self, field, skipped=False), 0)
        return returned

    return call


def _named(field: str, value: Any, slot: Any, *, counts: bool) -> dict[str, Any]:
    """Return what a method can change of what it is given, copied; without what it counts."""
    found = {path: kept(leaf) for path, leaf in leaves("slot", slot)}
    if isinstance(value, TrainState):
        found = entries(value) | found
        value = None
    elif isinstance(value, Grads):
        skip = value.taken.skip
        value = {
            "tensors": value.tensors,
            "divisor": value.taken.divisor,
            "metrics": value.metrics,
            "skip": None if skip is None else skip.flag,
        }
    elif field == "hyper":
        value = {str(where): each for where, each in value.items()}
    found |= {path: kept(leaf) for path, leaf in leaves(field, value)}
    return {n: e for n, e in found.items() if not (counts and n.startswith("slot"))}
