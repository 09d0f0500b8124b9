# SPDX-License-Identifier: Apache-2.0
"""`simulate(also="processes")` and `run_processes`: what is compared, and what is refused first.

Here other simulated ranks stand for the processes; tests/ranks has real ones.
"""

import sys
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.errors import ArgumentError, LawError
from accelfn.testing import Raise, processes, run_processes, simulate

ARE_PROCESSES: list[bool] = []
"""Not empty while the ranks that run stand for processes."""
CALLS: list[int] = []


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(
        size: int, fn: Any, *args: Any, timeout: float, axes: Mapping[str, int] | None
    ) -> list[Any]:
        assert timeout > 0
        ARE_PROCESSES.append(True)
        try:
            return [*simulate(size, lambda world: fn(world, *args), axes=axes)]
        finally:
            ARE_PROCESSES.clear()

    CALLS.clear()
    monkeypatch.setattr(processes, "run_processes", ranks)


def planted(world: af.World, one: object, two: object) -> object:
    """Return another thing on rank 1 of what stands for processes."""
    CALLS.append(world.rank)
    return two if ARE_PROCESSES and world.rank == 1 else one


@pytest.mark.parametrize(
    ("one", "two", "told"),
    [
        ({(1, "a"): 1.0}, {(1, "a"): 2.0}, r"result\[\(1, 'a'\)\]: 1\.0 and 2\.0"),
        ({None: 1, b"a": 2}, {None: 1, b"a": 3}, r"result\[b'a'\]: 2 and 3"),
        ({(): 1}, {}, r"result: dict of 1 and dict of 0"),
        ({(1, 2), (3,)}, {(1, 2), (4,)}, r"result\[1\]\[0\]: 3 and 4"),
        (frozenset({2, 1}), {2, 1}, "frozenset of 2 and set of 2"),
        (torch.tensor([1j, 2j]), torch.tensor([1j, 3j]), r"at \[1\]: 2j and 3j"),
        (torch.tensor([True]), torch.tensor([False]), "True and False"),
        (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16(), r"\[0\]: 1 and 0"),
    ],
)
def test_a_difference_is_told_by_its_place(one, two, told):
    """Keys may be plain data and tuples of it, and every dtype has its own words."""
    with pytest.raises(LawError, match=f"(?s)Rank 1 of 2 .*{told}"):
        simulate(2, partial(planted, one=one, two=two), also="processes")
    simulate(2, partial(planted, one=one, two=one), also="processes")


@pytest.mark.parametrize("key", [1.5, (1, 2.5), (1, (2,)), frozenset({1})])
def test_a_key_that_may_not_be_found_again_is_refused(key):
    """Floats, and what holds other things than plain data, name no place."""
    with pytest.raises(ArgumentError, match="a key of result is a .*cannot compare it"):
        simulate(2, partial(planted, one={key: 1}, two={key: 1}), also="processes")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"faults": [Raise(1)]},
            r"faults=\[.*Raise.* cannot have planned faults",
        ),
        (
            {"device": "meta"},
            "device='meta'.*: real processes use Gloo and run on the CPU",
        ),
    ],
)
def test_what_processes_cannot_repeat_is_refused_at_once(options, told):
    """Before any rank has run, which may take long."""
    with pytest.raises(ArgumentError, match=told):
        simulate(2, partial(planted, one=1, two=1), also="processes", **options)
    with pytest.raises(ArgumentError, match='also="processes".*is a lambda'):
        simulate(2, partial(planted, one=1, two=lambda: 1), also="processes")
    assert CALLS == []


def nested() -> Any:
    """Return a function that only this one has."""

    def inside(world: af.World) -> int:
        return world.rank

    return inside


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda world: world.rank, "is a lambda, so another process"),
        (nested(), "nested.<locals>.inside is defined in a function, so"),
        (partial(planted, one=1, two=threading.Lock()), "pickle cannot send"),
    ],
    ids=["lambda", "inner", "lock"],
)
def test_what_cannot_be_sent_to_a_process_says_why(fn, told):
    """Functions are imported by name there, and a lock is of its process alone."""
    with pytest.raises(ArgumentError, match=told):
        run_processes(2, fn)


def test_what_a_script_defines_cannot_be_imported(monkeypatch):
    """A process would find another `__main__`, so the function is refused by its name."""
    monkeypatch.setattr(planted, "__module__", "__main__")
    monkeypatch.setitem(sys.modules["__main__"].__dict__, "planted", planted)
    with pytest.raises(ArgumentError, match="planted is defined in the running script"):
        run_processes(2, planted, 1, 2)


@pytest.mark.parametrize("size", [0, -1, True, 1.0, "2", None])
def test_a_number_of_processes_is_one_or_more(size):
    """Another is refused with what was given, and so is what is no function of a world."""
    with pytest.raises(ArgumentError, match=rf"run_processes\({size!r}, \.\.\.\): exp"):
        run_processes(size, planted)
    with pytest.raises(ArgumentError, match=r"run_processes\(1, 3\): expected a func"):
        run_processes(1, 3)


@pytest.mark.parametrize("size", [1, 3])
def test_a_world_of_one_process_is_a_world(size, monkeypatch):
    """Any number from one on is run, within the time that is given."""

    class Pool:
        def run(self, program: bytes, timeout: float) -> list[Any]:
            assert planted.__name__.encode() in program
            return [timeout] * size

    monkeypatch.setattr(processes, "_pool", {size: Pool()}.__getitem__)
    assert run_processes(size, planted, 1, 2, timeout=7.0) == [7.0] * size


def test_who_failed_first_is_told_first():
    """The whole trace of the first, a line of each that failed after it, by their times."""
    failed = {
        0: processes.Answer(failure="Traceback\nKeyError: 'after'\n", at=2.0),
        1: processes.Answer(failure="Traceback\nValueError: boom\n", at=1.0),
        2: processes.Answer(failure="The process was ended by SIGKILL.", at=3.0),
    }
    assert processes._report(failed, 4).splitlines() == [
        "Rank 1 of 4 failed first:",
        "Traceback",
        "ValueError: boom",
        "Rank 0 of 4 failed later: KeyError: 'after'",
        "Rank 2 of 4 failed later: The process was ended by SIGKILL.",
    ]
