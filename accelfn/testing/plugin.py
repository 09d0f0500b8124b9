# SPDX-License-Identifier: Apache-2.0
"""What accelfn's pytest plugin does once a test asks for it.

Pytest finds the plugin in `pytest_accelfn`, which is imported in every run and imports this
when a test has its marker.
"""

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from pytest_accelfn import register_profiles

from accelfn.testing.simulate import simulate
from accelfn.testing.simulation.entries import Entry
from accelfn.world import World

__all__ = ["on_ranks", "register_profiles"]

_NUM_SHOWN = 10
_REPEAT = "To repeat the run: "
"""Is in the note that `simulate` adds to an error."""


@contextmanager
def on_ranks(item: pytest.Function, options: Mapping[str, Any]) -> Generator[None]:
    """Let every rank of a simulated world run the item's test, as long as this lasts.

    The item's argument `world` is the size. Under `@given` each example has a world of its
    own, and is drawn before it starts; so hypothesis's `assume` and `note`, which belong to
    the test's thread, are for strategies. A failing test gets a section on how to repeat it.
    """
    test: Any = item.obj
    drawn = getattr(test, "is_hypothesis_test", False)
    holder, name = (test.hypothesis, "inner_test") if drawn else (item, "obj")
    plain: Callable[..., Any] = getattr(holder, name)
    last: list[Entry] = []
    setattr(holder, name, _on_every_rank(plain, options, last))
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        item.add_report_section("call", "simulated world", _told(item, error, last))
        raise
    finally:
        setattr(holder, name, plain)


def _on_every_rank(
    test: Callable[..., Any], options: Mapping[str, Any], last: list[Entry]
) -> Callable[..., Any]:
    """Return the test as a function of the world's size; `last` is the last one's log."""

    @functools.wraps(test)
    def simulated(*args: Any, world: int, **kwargs: Any) -> Any:
        __tracebackhide__ = True

        def rank(own: World) -> Any:
            __tracebackhide__ = True
            logs[own.rank] = _log_of(own)
            return test(*args, world=own, **kwargs)

        rank.__qualname__ = test.__qualname__
        logs: dict[int, list[Entry]] = {}
        try:
            run = simulate(world, rank, **options)
        finally:
            last[:] = logs.get(0, [])
        return next((each for each in run if each is not None), None)

    return simulated


def _told(item: pytest.Function, error: BaseException, log: Sequence[Entry]) -> str:
    """Return how to repeat a failed test, and the collectives that were carried out."""
    shown = log[-_NUM_SHOWN:]
    lines = [f"To repeat the test: pytest {item.nodeid!r}"]
    lines += [note for note in getattr(error, "__notes__", []) if _REPEAT in note]
    lines.append(f"Of {len(log)} collectives that were carried out, the last:")
    lines += [f"  {entry}" for entry in shown]
    return "\n".join(lines if shown else lines[:-1])


def _log_of(world: World) -> list[Entry]:
    group: Any = world.group
    return group.log
