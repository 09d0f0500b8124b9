# SPDX-License-Identifier: Apache-2.0
"""Programs that give one thing in a simulated world and another on processes, or refuse to."""

import dataclasses
import enum
import multiprocessing
import os
import random
import struct
from collections import OrderedDict
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
import torch.distributed as dist

import accelfn as af
from tests.strategies import Run


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
    """Return one of the many floats that are not a number."""
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | payload))[0]


def on_process(world: af.World) -> bool:
    """Whether this is rank 1 of a world of processes, where a difference is planted."""
    return multiprocessing.parent_process() is not None and world.rank == 1


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
    "array": (
        np.arange(3),
        np.arange(3) % 2,
        r"result\[\.\.\.\]: .* at \[2\]: 2 and 0",
    ),
    "scalar": (np.float32(1), np.float64(1), "numpy float32 and numpy float64"),
    "array and tensor": (np.zeros(2), torch.zeros(2).double(), "result: .*numpy"),
}
"""By name: what the simulated ranks return, what rank 1 of processes does, what is said."""


def planted(world: af.World, name: str) -> object:
    """Return something else on a process than in a simulated world."""
    one, two, _ = PAIRS[name]
    return two if on_process(world) else one


def equal(world: af.World, name: str) -> object:
    """Return the same in both worlds, made anew in each."""
    del world
    return PAIRS[name][1]


INCOMPARABLE: dict[str, object] = {
    "function": equal,
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


def incomparable(world: af.World, name: str) -> object:
    """Return what cannot be compared, deep inside."""
    return {"rank": world.rank, "inside": [Record(INCOMPARABLE[name])]}


def draws(world: af.World) -> dict[str, Any]:
    """Return draws from every generator of a process."""
    return {
        "torch": torch.randn(3) + world.rank,
        "numpy": np.random.rand(2),  # noqa: NPY002 - the one that ranks share
        "python": random.random(),  # noqa: S311
    }


def modes(world: af.World) -> dict[str, Any]:
    """Return what the caller's modes do to a product."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ torch.ones(2, 2)
    return {"product": product, "grad": product.requires_grad, "rank": world.rank}


def fails_on_processes(world: af.World) -> None:
    """Raise where a simulated rank does not."""
    if on_process(world):
        raise KeyError("only here")


def variable(world: af.World) -> tuple[int, str | None]:
    """Return what the environment says of the rank, as no program should ask it."""
    return world.rank, os.environ.get("RANK")


def strided(world: af.World) -> torch.Tensor:
    """Reduce a tensor with gaps, which Gloo does wrong without a word."""
    x = torch.arange(6, dtype=torch.float64)[::2]
    dist.all_reduce(x, group=world.group)
    return x


def state(world: af.World, run: Run) -> af.TrainState:
    """Return the state after training."""
    trained, _ = run.train(run.state(world))
    return trained


def moved_state(world: af.World, run: Run) -> af.TrainState:
    """Return a state of which one bit is another on a process."""
    trained = state(world, run)
    params = {name: param.clone() for name, param in trained.params.items()}
    if on_process(world):
        params["head.bias"].view(torch.int64)[1] += 1
    return trained.with_params(params)
