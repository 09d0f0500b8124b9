# SPDX-License-Identifier: Apache-2.0
"""What a reduction of tensors of one dtype sends, so that it means the same everywhere.

Gloo does not know every dtype, adds up 8-bit integers in 8 bits, and lets NaN win or vanish as
ranks happen to come.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from accelfn.collectives.naming import naming
from accelfn.collectives.packed import cut, pack
from accelfn.errors import ArgumentError
from accelfn.world import World

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_WIDER = {
    torch.bool: torch.int64,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""What Gloo reduces in place of a dtype; sums and products wrap around as its own would."""
_REAL = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
        *_WIDER,
    }
)
_COMPLEX = frozenset({torch.complex64, torch.complex128})


def check_reducible(dtypes: Collection[torch.dtype], op: object) -> None:
    """Raise unless ranks can combine tensors of these dtypes in that way.

    Raises:
        ArgumentError: they cannot, or there is no such way.
    """
    if not isinstance(op, str) or op not in _OPS:
        msg = f"af.reduce(op={op!r}): expected one of {', '.join(map(repr, _OPS))}."
        raise ArgumentError(msg)
    for dtype in dtypes:
        if dtype in _COMPLEX and op not in ("sum", "mean"):
            msg = f"af.reduce(op={op!r}): {dtype} has no order, and no product across ranks."
            raise ArgumentError(msg)
        if dtype not in _REAL | _COMPLEX:
            msg = (
                f"af.reduce: ranks cannot reduce {dtype}; convert it to another dtype."
            )
            raise ArgumentError(msg)


def reduced(
    same: Sequence[torch.Tensor], world: World, op: str, label: str
) -> Sequence[torch.Tensor]:
    """Return tensors of one dtype combined over all ranks: parts of one vector."""
    dtype = same[0].dtype
    ordered = op in ("min", "max") and dtype.is_floating_point
    flat = pack(same)
    if ordered:
        flat = _integers(flat, op)
    elif op == "mean":
        flat = flat.to(_summed(dtype))
    elif dtype in _WIDER:
        flat = flat.to(_WIDER[dtype])
    if world.size > 1:
        numbers = torch.view_as_real(flat) if dtype.is_complex else flat
        with naming(label, world):
            dist.all_reduce(numbers, op=_OPS[op], group=world.group)
    if ordered:
        flat = _floats(flat, dtype)
    elif op == "mean":
        given = dtype.is_floating_point or dtype.is_complex
        flat = (flat / world.size).to(dtype if given else torch.get_default_dtype())
    elif flat.dtype is not dtype and (dtype is not torch.bool or op != "sum"):
        flat = flat.to(dtype)
    return cut(flat, same)


def _summed(dtype: torch.dtype) -> torch.dtype:
    """Return in what numbers are added up for their mean."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.float64


_ORDERED = {
    torch.float64: (torch.float64, torch.int64),
    torch.float32: (torch.float32, torch.int32),
    torch.float16: (torch.float32, torch.int32),
    torch.bfloat16: (torch.float32, torch.int32),
}


def _integers(floats: torch.Tensor, op: str) -> torch.Tensor:
    """Return integers in the order of floats; NaN is beyond all that it is compared with."""
    wide, integer = _ORDERED[floats.dtype]
    limits = torch.iinfo(integer)
    bits = floats.to(wide).view(integer)
    ordered = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    nan = limits.max if op == "max" else limits.min
    return ordered.masked_fill_(floats.isnan(), nan)


def _floats(ordered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the floats that integers stand for."""
    wide, integer = _ORDERED[dtype]
    limits = torch.iinfo(integer)
    bits = ordered ^ ((ordered >> (limits.bits - 1)) & limits.max)
    return bits.view(wide).to(dtype)
