# SPDX-License-Identifier: Apache-2.0
"""What a reduction of tensors of one dtype sends, so that it means the same everywhere.

Gloo does not know every dtype, adds up 8-bit integers in 8 bits, and lets NaN win or vanish as
ranks happen to come.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
import torch.distributed as dist

from accelfn.base.arguments import is_number
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


def check_weight(op: str, weight: object, bucket_cap_mb: object) -> None:
    """Raise unless a reduction can be by weight, and this is one.

    Raises:
        ArgumentError: it is no mean; or the weight is no number, or less than 0; or the size
            of buffers is none.
    """
    if weight is None and bucket_cap_mb is None:
        return
    if op != "mean" or weight is None:
        given = "weight" if weight is not None else "bucket_cap_mb"
        msg = (
            f"af.reduce({op!r}, {given}=...): only a mean by weight has it; give"
            ' "mean" and weight=.'
        )
        raise ArgumentError(msg)
    if isinstance(weight, torch.Tensor):
        good = weight.numel() == 1 and weight.dtype in _REAL
    else:
        good = is_number(weight) and 0 <= weight < math.inf
    if not good:
        msg = f"af.reduce(weight={weight!r}): expected one number, 0 or more."
        raise ArgumentError(msg)
    if bucket_cap_mb is not None and not (
        is_number(bucket_cap_mb) and 0 < bucket_cap_mb < math.inf
    ):
        msg = f"af.reduce(bucket_cap_mb={bucket_cap_mb!r}): expected a positive number of MiB."
        raise ArgumentError(msg)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose mean can be taken in its dtype."""
    given = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach() if given else tensor.to(torch.float64)


def in_default_floats(given: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return a mean as one of a tensor of such a dtype is given: of integers as a float."""
    kept = given.is_floating_point() or given.is_complex()
    return mean if kept else mean.to(torch.get_default_dtype())


def reduced(
    same: Sequence[torch.Tensor], world: World, op: str, label: str
) -> Sequence[torch.Tensor]:
    """Return tensors of one dtype combined over all ranks: parts of one vector."""
    return started(same, world, op, label)()


def started(
    same: Sequence[torch.Tensor], world: World, op: str, label: str
) -> Callable[[], Sequence[torch.Tensor]]:
    """Begin to combine tensors of one dtype; return what waits for them."""
    dtype = same[0].dtype
    ordered = op in ("min", "max") and dtype.is_floating_point
    flat = pack(same)
    if ordered:
        flat = _integers(flat, op)
    elif op == "mean":
        flat = flat.to(_summed(dtype))
    elif dtype in _WIDER:
        flat = flat.to(_WIDER[dtype])
    wait = _begun(flat, world, op, label) if world.size > 1 else None
    wanted = dtype
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        wanted = torch.get_default_dtype()
    elif op == "sum" and dtype is torch.bool:
        wanted = flat.dtype
    metas = [torch.empty_like(each, device="meta") for each in same]

    def finished() -> Sequence[torch.Tensor]:
        if wait is not None:
            wait()
        found = _floats(flat, dtype) if ordered else flat
        found = found / world.size if op == "mean" else found
        return cut(found.to(wanted), metas)

    return finished


def _begun(
    flat: torch.Tensor, world: World, op: str, label: str
) -> Callable[[], object]:
    """Begin to reduce a vector in place; return what waits for it."""
    numbers = torch.view_as_real(flat) if flat.dtype.is_complex else flat
    with naming(label, world):
        work = dist.all_reduce(numbers, op=_OPS[op], group=world.group, async_op=True)

    def wait() -> None:
        with naming(label, world, begins=False):
            cast("dist.Work", work).wait()

    return wait


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
