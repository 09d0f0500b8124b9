# SPDX-License-Identifier: Apache-2.0
"""What each collective computes: from what all ranks give to what each gets.

Pure functions. Sums are taken in the order of the ranks, and are the same on all of them.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from accelfn.testing.calls import Call

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Results: TypeAlias = list[Tensors]
"""By rank, what is written to the tensors that the rank wants filled."""

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def is_reduction(name: str) -> bool:
    """Say whether a reduction of this name can be computed."""
    return name in _REDUCTIONS


def reduced(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts reduced from first to last."""
    total = parts[0]
    for part in parts[1:]:
        total = _REDUCTIONS[op](total, part)
    return total / len(parts) if op == "AVG" else total


def results(calls: Sequence[Call]) -> Results:
    """Return what each rank gets, from the calls of all ranks in their order."""
    return _OPERATIONS[calls[0].kind](calls)


def _all_reduce(calls: Sequence[Call]) -> Results:
    total = reduced(str(calls[0].op), [call.sends[0] for call in calls])
    return [(total,)] * len(calls)


def _reduce(calls: Sequence[Call]) -> Results:
    total = reduced(str(calls[0].op), [call.sends[0] for call in calls])
    return [(total,) if call.fills else () for call in calls]


def _broadcast(calls: Sequence[Call]) -> Results:
    root = calls[0].root or 0
    return [calls[root].sends] * len(calls)


def _gather(calls: Sequence[Call]) -> Results:
    """Of all ranks, for those that want it: all_gather and gather."""
    gathered = tuple(call.sends[0] for call in calls)
    return [gathered if call.fills else () for call in calls]


def _scatter(calls: Sequence[Call]) -> Results:
    root = calls[0].root or 0
    return [(part,) for part in calls[root].sends]


def _reduce_scatter(calls: Sequence[Call]) -> Results:
    op = str(calls[0].op)
    return [(reduced(op, [c.sends[r] for c in calls]),) for r in range(len(calls))]


def _all_to_all(calls: Sequence[Call]) -> Results:
    return [tuple(call.sends[r] for call in calls) for r in range(len(calls))]


def _barrier(calls: Sequence[Call]) -> Results:
    return [()] * len(calls)


_OPERATIONS: dict[str, Callable[[Sequence[Call]], Results]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _gather,
    "all_gather_into_tensor": _gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "barrier": _barrier,
}
