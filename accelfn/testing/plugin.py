# SPDX-License-Identifier: Apache-2.0
"""The code of accelfn's pytest plugin that needs torch.

Every pytest run imports `pytest_accelfn`. Only for a test with the marker `simulated`,
`pytest_accelfn` imports this module.
"""

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from accelfn import World
from accelfn.testing.simulate import simulate
from accelfn.testing.simulation.calls import Entry

_NUM_SHOWN = 10
_REPEAT = "To repeat the run: "
"""A text in the note that `simulate` adds to an error."""


@contextmanager
def on_ranks(item: pytest.Function, options: Mapping[str, Any]) -> Generator[None]:
    """In a `with` block: run the item's test on every rank of a simulated world.

    The item's argument `world` is the size of the world. Under `@given`, each example is drawn
    before its world starts, and runs in a new world. Hypothesis's `assume` and `note` only work
    in the main thread of the test, so use them in strategies. The report of a failing test gets
    a section on how to repeat the test.
    """
    test: Any = item.obj
    is_hypothesis = getattr(test, "is_hypothesis_test", False)
    holder, name = (test.hypothesis, "inner_test") if is_hypothesis else (item, "obj")
    plain: Callable[..., Any] = getattr(holder, name)
    logs: list[list[Entry]] = []

    @functools.wraps(plain)
    def run_simulated(*args: Any, world: int, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        logs.clear()

        def rank(rank_world: World) -> Any:
            __tracebackhide__ = True
            group: Any = rank_world.group
            if rank_world.is_main:
                logs.append(group.log)
            return plain(*args, world=rank_world, **kwargs)

        rank.__qualname__ = plain.__qualname__
        run = simulate(world, rank, **options)
        return next((value for value in run if value is not None), None)

    setattr(holder, name, run_simulated)
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        report = _format_report(item, error, logs[0] if logs else [])
        item.add_report_section("call", "simulated world", report)
        raise
    finally:
        setattr(holder, name, plain)


def _format_report(
    item: pytest.Function, error: BaseException, log: Sequence[Entry]
) -> str:
    """Return a text with the command that repeats a failed test, and the last collectives."""
    lines = [f"To repeat the test: pytest {item.nodeid!r}"]
    lines += [note for note in getattr(error, "__notes__", []) if _REPEAT in note]
    if log:
        lines.append(f"The last of {len(log)} completed collectives:")
    return "\n".join([*lines, *(f"  {entry}" for entry in log[-_NUM_SHOWN:])])
