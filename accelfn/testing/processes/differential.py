# SPDX-License-Identifier: Apache-2.0
"""The differential test: what a simulated world gives, real processes must give, bit by bit."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, cast

import attrs
import numpy as np
import torch

from accelfn.base.pending import Pending
from accelfn.errors import ArgumentError, LawError
from accelfn.state.metrics import Metrics
from accelfn.state.state import TrainState
from accelfn.testing.comparing.differences import (
    Comparison,
    Difference,
    described,
    listed,
)
from accelfn.testing.comparing.states import SAVED
from accelfn.testing.processes.rank import packed
from accelfn.testing.processes.run import RankError, run_processes
from accelfn.testing.simulation.ambient import seed_rank
from accelfn.testing.simulation.plan import Plan, Run
from accelfn.world import World

_SECONDS = 600.0
_BITWISE = Comparison(
    bitwise=True, sides=("the simulated world", "the world of processes")
)
_NUMBERS = (bool, int, float, complex)
_PLAIN = frozenset({*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device})
_KEYS = frozenset({bool, int, str, bytes, type(None)})


def check_comparable(plan: Plan) -> None:
    """Refuse, before anything runs, a run that real processes cannot repeat.

    A schedule is not refused: results must not depend on it, so processes may have theirs.

    Raises:
        ArgumentError: faults or a device are planned, or the function cannot be sent to a
            process.
    """
    if plan.faults:
        msg = (
            f'simulate(also="processes", faults={list(plan.faults)}): faults happen in a'
            " simulated world only. Leave out one of the two."
        )
        raise ArgumentError(msg)
    if plan.device.type != "cpu":
        msg = (
            f'simulate(also="processes", device={str(plan.device)!r}): processes are joined'
            " by Gloo, on the CPU. Leave out one of the two."
        )
        raise ArgumentError(msg)
    try:
        packed(plan.fn)
    except ArgumentError as error:
        msg = f'simulate(also="processes"): {error}'
        raise ArgumentError(msg) from error


def compare_with_processes(plan: Plan, run: Run[Any]) -> None:
    """Run the same on real processes joined by Gloo, and compare each rank's result.

    Compared are trees of dicts, lists, tuples, sets, attrs records and dataclasses: their
    types, their keys, and what they hold: tensors and numpy arrays by dtype, shape and the
    bits of each element, numbers by type and bits, and text. Of a `TrainState` it is what
    is saved. Other types are refused. Not compared are the order of keys, memory layouts,
    `requires_grad`, and which entries share memory.

    Raises:
        LawError: a result differs, or processes fail where simulated ranks did not.
        ArgumentError: a result holds what cannot be compared.
    """
    check_comparable(plan)
    simulated = [_leaves_by_path(result) for result in run]
    try:
        real = run_processes(
            plan.size,
            _run_on_rank,
            plan.fn,
            plan.seed,
            timeout=_SECONDS,
            axes=plan.axes or None,
        )
    except RankError as error:
        msg = (
            "The program ran in a simulated world, but not on processes joined by Gloo."
            f" {error}\nThe run: {plan}"
        )
        raise LawError(msg) from error
    for rank, (ours, theirs) in enumerate(zip(simulated, real, strict=True)):
        found = list(_differences(ours, theirs))
        if found:
            msg = (
                f"Rank {rank} of {plan.size} returns one thing in a simulated world and"
                " another on processes joined by Gloo (simulated, on processes):"
                f"{listed(found)}\nThe run: {plan}"
            )
            raise LawError(msg)


def _run_on_rank(world: World, fn: Callable[[World], Any], seed: int) -> dict[str, Any]:
    """Run a program as a simulated rank runs it, and return its result's leaves."""
    seed_rank(seed, world.rank, world.device)
    return _leaves_by_path(fn(world))


def _differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[Difference]:
    for path in {**ours, **theirs}:
        if path in ours and path in theirs:
            yield from _BITWISE.differences(path, ours[path], theirs[path])
        else:
            side = _BITWISE.sides[path not in ours]
            yield Difference(path, f"only in {side}")


@attrs.frozen(repr=False)
class _Kind:
    """What stands at a path and has no value of its own: a container, a member of an enum."""

    name: str

    def __repr__(self) -> str:
        return self.name


def _leaves_by_path(result: Any) -> dict[str, Any]:
    return dict(_leaves("result", result))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a tree holds with its place: tensors, plain data, and kinds of containers."""
    kind = type(value)
    if kind in _PLAIN:
        yield path, value
    elif kind in (torch.Tensor, torch.nn.Parameter):
        yield path, _values(path, value)
    elif isinstance(value, (np.ndarray, np.generic)):
        yield path, _Kind(f"numpy {kind.__name__}")
        yield f"{path}[...]", _array(path, value)
    elif isinstance(value, Enum):
        yield path, _Kind(f"{kind.__name__} {value.value!r}")
    else:
        entries = _entries(path, value)
        yield path, _Kind(f"{kind.__name__} of {len(entries)}")
        for place, inside in entries.items():
            yield from _leaves(f"{path}{place}", inside)


def _entries(path: str, tree: Any) -> dict[str, Any]:
    """Return what a container or record holds, by how code would reach it."""
    if isinstance(tree, TrainState):
        return {f".{name}": getattr(tree, name) for name in SAVED}
    if isinstance(tree, (Metrics, Pending)):
        known = isinstance(tree, Metrics)
        return {".sums": tree.sums} if known else {".wait()": tree.wait()}
    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree).items()
        return {f"[{_key(path, key)!r}]": value for key, value in items}
    if isinstance(tree, (list, tuple)):
        values = cast("list[Any]", tree)
        fields: Any = getattr(tree, "_fields", None)  # the mark of a namedtuple
        names = [f".{field}" for field in fields or ()]
        return {(names or _places(values))[i]: each for i, each in enumerate(values)}
    if isinstance(tree, (set, frozenset)):
        members = sorted(
            cast("set[Any]", tree), key=lambda each: repr(_key(path, each))
        )
        return dict(zip(_places(members), members, strict=True))
    if attrs.has(type(tree)):
        named = [field.name for field in attrs.fields(type(tree))]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        named = [field.name for field in dataclasses.fields(tree)]
    else:
        raise _incomparable(path, tree)
    return {f".{name}": getattr(tree, name) for name in named}


def _places(values: Any) -> list[str]:
    return [f"[{i}]" for i in range(len(values))]


def _key(path: str, key: Any) -> Any:
    if type(key) in _KEYS or (
        type(key) is tuple and all(type(k) in _KEYS for k in key)
    ):
        return key
    place = f"A key of {path}"
    raise _incomparable(place, key)


def _values(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements alone, in memory of their own."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    if not plain or tensor.is_quantized or tensor.is_meta:
        raise _incomparable(path, tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    return tensor.clone(memory_format=torch.contiguous_format)


def _array(path: str, array: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise _incomparable(path, array) from None


def _incomparable(path: str, value: Any) -> ArgumentError:
    msg = (
        f"{path} is a {type(value).__qualname__} ({described(value)}), which cannot be compared"
        " with that of another process. Return dense tensors, arrays and plain data, in"
        " containers or records, or a TrainState."
    )
    return ArgumentError(msg)
