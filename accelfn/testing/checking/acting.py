# SPDX-License-Identifier: Apache-2.0
"""When each method of a transform first does something: before that, no law has seen it."""

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from types import CodeType
from typing import Any, TypeAlias

import attrs

from accelfn.definition.facts import facts_of
from accelfn.definition.fields import has_field
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.state.views import eval_params
from accelfn.step.apply_grads import finalize
from accelfn.testing.checking.subject import Subject
from accelfn.testing.checking.watching import subclassed
from accelfn.testing.comparing.differences import leaves
from accelfn.testing.comparing.entries import entries, first_difference, kept
from accelfn.testing.simulate import simulate
from accelfn.world import World

Acted: TypeAlias = dict[str, set[int]]
"""After which updates each method had done something, by how a message calls it."""

LATER = ("grads", "hyper", "after_update")
"""Methods that may have nothing to do for many updates; others have at once."""
_AT_ONCE = ("reduce", "loss_scale", "observe", "eval_params")
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

        busy: set[int] = set()
        kind = type(transform)
        methods = {
            field: _observed(field, getattr(kind, field), note, busy)
            for field in (*LATER, *_AT_ONCE, "finalize")
            if has_field(transform, field) and callable(getattr(kind, field))
        }
        methods |= {
            field: _observed_wrapper(field, getattr(kind, field), note)
            for field in _WRAPS
            if has_field(transform, field)
        }
        if options := _options(transform):
            methods["__getattribute__"] = _observed_options(transform, options, found)
        return subclassed(transform, methods)

    def rank(world: World) -> None:
        world.connection.activity.trail = (
            deque()
        )  # all that is called, not only the latest
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
    fields = (*LATER, *_AT_ONCE, *_WRAPS)
    wanted = [
        method_name(each, field, skipped=skipped)
        for each in transforms
        for field in fields
        for skipped in _calls(each, field)
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


def _calls(transform: Any, field: str) -> tuple[bool, ...]:
    """Return after which updates a method must do something: skipped ones, or others."""
    sees = field == "after_update" and "sees_skips" in facts_of(transform)
    return (True,) if sees else (False,)


def method_name(transform: Any, field: str, *, skipped: bool) -> str:
    """Return what a message calls a transform's method."""
    return f"{transform!r}.{field}{' of a skipped update' if skipped else ''}"


def _observed(
    field: str,
    method: Callable[..., Any],
    note: Callable[[str, int], None],
    busy: set[int],
) -> Callable[..., Any]:
    """Return the method, which notes each call from outside that did something."""

    @wraps(method)
    def call(self: Any, value: Any, slot: Any, update: Update) -> Any:
        world = update.world
        if world.rank in busy:  # one method of the transform's calls another
            return method(self, value, slot, update)
        busy.add(world.rank)
        # after a skip, without it, the slot of before the update would stay
        kept = update.state.slots.get(self.name) if update.skipped else slot
        before, talked = (
            _named(field, value, kept),
            len(world.connection.activity.trail),
        )
        returned = method(self, value, slot, update)
        busy.discard(world.rank)
        if field == "hyper" and not returned[0]:  # it laid nothing over
            returned = value, returned[1]
        changed = first_difference(before, _named(field, *returned))
        if changed and field == "after_update" and "apart" in facts_of(self):
            # what ranks only count until they meet is not yet what the method is for
            changed = any(
                not each.startswith("slot")
                for each in _differing(before, field, *returned)
            )
        changed = changed or (field == "eval_params" and returned[0] is not value)
        if len(world.connection.activity.trail) > talked or changed:
            note(method_name(self, field, skipped=update.skipped), world.rank)
        return returned

    return call


def _differing(
    before: Mapping[str, Any], field: str, value: Any, slot: Any
) -> list[str]:
    """Return the paths at which something was changed."""
    after = _named(field, value, slot)
    return [
        path
        for path in {**before, **after}
        if path not in before
        or path not in after
        or first_difference({path: before[path]}, {path: after[path]})
    ]


def _observed_wrapper(
    field: str, method: Callable[..., Any], note: Callable[[str, int], None]
) -> Callable[..., Any]:
    """Return the method, which notes each call that returned another thing."""

    @wraps(method)
    def call(self: Any, inner: Any, *given: Any) -> Any:
        returned = method(self, inner, *given)
        if returned is not inner and returned != inner:
            note(method_name(self, field, skipped=False), 0)
        return returned

    return call


def _named(field: str, value: Any, slot: Any) -> dict[str, Any]:
    """Return what a method can change of what it is given, copied, by name."""
    own = {path: kept(leaf) for path, leaf in leaves("slot", slot)}
    if isinstance(value, TrainState):
        return entries(value) | own
    if isinstance(value, Grads):
        skip = value.taken.skip
        value = {
            "tensors": value.tensors,
            "divisor": value.taken.divisor,
            "metrics": value.metrics,
            "skip": None if skip is None else skip.flag,
        }
    elif field == "hyper":
        value = {str(where): each for where, each in value.items()}
    return {path: kept(leaf) for path, leaf in leaves(field, value)} | own
