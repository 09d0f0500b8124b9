# SPDX-License-Identifier: Apache-2.0
"""What each collective computes: from what all ranks give to what each gets.

Pure functions. What is reduced is the same on all ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TypeAlias

import torch
from torch import _C
from torch.utils._python_dispatch import _disable_current_modes

from accelfn.testing.simulation.calls import Call
from accelfn.testing.simulation.sums import Sums, reduced

# torch has no public names for the modes that it dispatches through
# pyright: reportPrivateUsage=false

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Results: TypeAlias = list[Tensors]
"""By rank, what is written to the tensors that the rank wants filled."""

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMPLEX = {torch.complex64, torch.complex128}
_INTEGERS = {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
_ALL = _FLOATS | _COMPLEX | _INTEGERS  # what Gloo reduces
_DTYPES = {
    "SUM": _ALL,
    "AVG": _FLOATS | _COMPLEX,
    "PRODUCT": _ALL,
    "MIN": _FLOATS | _INTEGERS,
    "MAX": _FLOATS | _INTEGERS,
    "BAND": _INTEGERS,
    "BOR": _INTEGERS,
    "BXOR": _INTEGERS,
}


def can_carry_out(kind: str, op: str | None, tensor: torch.Tensor) -> bool:
    """Say whether a tensor can be sent and reduced so: as strictly as Gloo does."""
    if tensor.layout is not torch.strided and (kind, op) != ("all_reduce", "SUM"):
        return False
    return op is None or tensor.dtype in _DTYPES.get(op, ())


def results(calls: Sequence[Call], sums: Sums) -> Results:
    """Return what each rank gets, from the calls of all ranks in their order."""
    with _no_modes():
        return _OPERATIONS[calls[0].kind](calls, sums)


def _no_modes() -> AbstractContextManager[object]:
    """Leave the modes of whichever rank came last: the results are all ranks'."""
    no_functions = _C.DisableTorchFunction()
    if not torch.is_inference_mode_enabled() and not _C._len_torch_dispatch_stack():
        return no_functions
    stack = ExitStack()
    stack.enter_context(no_functions)
    stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(_disable_current_modes())
    return stack


def _all_reduce(calls: Sequence[Call], sums: Sums) -> Results:
    total = reduced(str(calls[0].op), [call.sends[0] for call in calls], sums)
    return [(total,)] * len(calls)


def _reduce(calls: Sequence[Call], sums: Sums) -> Results:
    total = reduced(str(calls[0].op), [call.sends[0] for call in calls], sums)
    return [(total,) if call.fills else () for call in calls]


def _broadcast(calls: Sequence[Call], _sums: Sums) -> Results:
    return [_of_root(calls).sends] * len(calls)


def _gather(calls: Sequence[Call], _sums: Sums) -> Results:
    """Of all ranks, for those that want it: all_gather and gather."""
    gathered = tuple(call.sends[0] for call in calls)
    return [gathered if call.fills else () for call in calls]


def _scatter(calls: Sequence[Call], _sums: Sums) -> Results:
    return [(part,) for part in _of_root(calls).sends]


def _of_root(calls: Sequence[Call]) -> Call:
    return next(call for call in calls if call.rank == call.root)


def _reduce_scatter(calls: Sequence[Call], sums: Sums) -> Results:
    op = str(calls[0].op)
    shares = ([call.sends[rank] for call in calls] for rank in range(len(calls)))
    return [(reduced(op, share, sums),) for share in shares]


def _all_to_all(calls: Sequence[Call], _sums: Sums) -> Results:
    return [tuple(call.sends[r] for call in calls) for r in range(len(calls))]


def _barrier(calls: Sequence[Call], _sums: Sums) -> Results:
    return [()] * len(calls)


def _message(calls: Sequence[Call], _sums: Sums) -> Results:
    """From a send to its recv."""
    return [calls[0].sends if call.fills else () for call in calls]


_OPERATIONS: dict[str, Callable[[Sequence[Call], Sums], Results]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _gather,
    "all_gather_single": _gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "barrier": _barrier,
    "send": _message,
}
