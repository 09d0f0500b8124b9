# SPDX-License-Identifier: Apache-2.0
"""`simulate(also="processes")` and `run_processes`: what is compared, and what is refused first.

Here other simulated ranks stand for the processes; tests/ranks has real ones.
"""

import dataclasses
import enum
import math
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import attrs
import numpy as np
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


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    one: object
    two: object


@attrs.frozen
class Record:
    _field: object


@dataclasses.dataclass
class Data:
    field: object


def nan(payload: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | payload))[0]


PAIRS: dict[str, tuple[object, object, str]] = {
    "int": (1, 2, "result: 1 and 2"),
    "bool and int": (1, True, "result: 1 and True"),
    "int and float": (1, 1.0, "result: 1 and 1.0"),
    "zero": (0.0, -0.0, "result: 0.0 and -0.0"),
    "NaN": (nan(0), nan(1), "result: nan of bits"),
    "complex": (1j, 2j, "result: 1j and 2j"),
    "str": ("a", "b", "result: 'a' and 'b'"),
    "bytes": (b"a", b"b", "result: b'a' and b'b'"),
    "None": (None, 0, "result: None and 0"),
    "dtype": (torch.int8, torch.uint8, "result: torch.int8 and torch.uint8"),
    "enum": (Colour.RED, Colour.BLUE, "result: Colour 1 and Colour 2"),
    "list": ([1, 2], [1, 3], r"result\[1\]: 2 and 3"),
    "longer": ([1], [1, 3], r"result\[1\]: only in the world of processes"),
    "tuple": ([1], (1,), "result: list of 1 and tuple of 1"),
    "named": (Pair(1, 2), Pair(1, 3), r"result\.two: 2 and 3"),
    "set": ({1, 2}, {1, 3}, r"result\[1\]: 2 and 3"),
    "dict": ({"a": {0: 1}}, {"a": {0: 2}}, r"result\['a'\]\[0\]: 1 and 2"),
    "key": ({"a": 1}, {"b": 1}, r"result\['a'\]: only in the simulated world"),
    "kind": ({}, OrderedDict(), "result: dict of 0 and OrderedDict of 0"),
    "record": (Record([1]), Record([2]), r"result\._field\[0\]: 1 and 2"),
    "dataclass": (Data(1), Data(2), r"result\.field: 1 and 2"),
    "metrics": (
        af.Metrics({"loss": (2.0, 2)}),
        af.Metrics({"loss": (1.0, 1)}),
        r"result\.sums\['loss'\]\.amount: 2\.0 and 1\.0",
    ),
    "tensor": (
        torch.zeros(2, 3),
        torch.eye(2, 3),
        r"result: 2 of 6 elements differ, the first at \[0, 0\]: 0\.0 and 1\.0",
    ),
    "tensor's NaN": (
        torch.tensor([1.0, nan(0)], dtype=torch.float64),
        torch.tensor([1.0, nan(1)], dtype=torch.float64),
        r"at \[1\]: nan of bits 0x7ff8000000000000 and nan of bits 0x7ff8000000000001",
    ),
    "tensor's dtype": (torch.zeros(2), torch.zeros(2).int(), "float32 .* and .* int32"),
    "tensor's shape": (torch.zeros(2), torch.zeros(2, 1), r"\(2,\) .* and \(2, 1\)"),
    "array": (np.arange(3), np.arange(3) % 2, r"\[\.\.\.\]: .* at \[2\]: 2 and 0"),
    "scalar": (np.float32(1), np.float64(1), "numpy float32 and numpy float64"),
    "array and tensor": (np.zeros(2), torch.zeros(2).double(), "result: .*numpy"),
    "key of keys": (
        {(1, "a"): 1.0},
        {(1, "a"): 2.0},
        r"result\[\(1, 'a'\)\]: 1\.0 and 2\.0",
    ),
    "key of bytes": (
        {None: 1, b"a": 2},
        {None: 1, b"a": 3},
        r"result\[b'a'\]: 2 and 3",
    ),
    "emptier": ({(): 1}, {}, r"result: dict of 1 and dict of 0"),
    "set of tuples": ({(1, 2), (3,)}, {(1, 2), (4,)}, r"result\[1\]\[0\]: 3 and 4"),
    "frozenset": (frozenset({2, 1}), {2, 1}, "frozenset of 2 and set of 2"),
    "tensor of complex": (
        torch.tensor([1j, 2j]),
        torch.tensor([1j, 3j]),
        r"at \[1\]: 2j and 3j",
    ),
    "tensor of bool": (torch.tensor([True]), torch.tensor([False]), "True and False"),
    "tensor of bfloat16": (
        torch.ones(2).bfloat16(),
        torch.zeros(2).bfloat16(),
        r"\[0\]: 1 and 0",
    ),
}
"""By name: what the simulated ranks return, what rank 1 of processes does, what is told."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_difference_is_told_by_its_place(name):
    """By rank, place and both values; and the run that shows it."""
    one, two, told = PAIRS[name]
    with pytest.raises(LawError, match=f"(?s)^Rank 1 of 2 .*{told}") as raised:
        simulate(2, partial(planted, one=one, two=two), also="processes")
    assert "accelfn.testing.simulate(2, " in str(raised.value)
    simulate(2, partial(planted, one=one, two=one), also="processes")


INCOMPARABLE: dict[str, object] = {
    "function": planted,
    "object": object(),
    "module": torch.nn.Linear(1, 1),
    "generator": torch.default_generator,
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "objects": np.array([object()]),
    "texts": np.array(["a"]),
    "key": {object(): 1},
    "range": range(3),
    "subclass": torch.nn.Buffer(torch.ones(1)).as_subclass(
        type("T", (torch.Tensor,), {})
    ),
}


def incomparable(_: af.World, name: str) -> object:
    return {"inside": [Record(INCOMPARABLE[name])]}


@pytest.mark.parametrize("name", INCOMPARABLE)
def test_what_cannot_be_compared_is_refused(name):
    """It never passes for equal."""
    with pytest.raises(ArgumentError, match=r"\['inside'\]\[0\]\._field.*cannot comp"):
        simulate(2, partial(incomparable, name=name), also="processes")


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


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf, None, True])
def test_a_timeout_is_a_number_of_seconds(timeout):
    """It is positive and finite."""
    with pytest.raises(ArgumentError, match="timeout"):
        run_processes(2, planted, 1, 2, timeout=timeout)


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
