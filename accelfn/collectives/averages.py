# SPDX-License-Identifier: Apache-2.0
"""The mean over ranks by weight, in place, in buffers of a bounded size."""

from collections.abc import Iterator, Sequence

import torch

from accelfn.base.arguments import Number
from accelfn.base.shards import local
from accelfn.base.valueless import is_positive
from accelfn.collectives.packed import pack, sum_, unpack_
from accelfn.world import World

_MIB = 1 << 20


def average_(
    tensors: Sequence[torch.Tensor],
    weight: Number,
    world: World,
    *,
    label: str,
    bucket_cap_mb: float | None = None,
) -> None:
    """Set floating-point tensors to their mean over ranks by weight, in place.

    The weight travels at the end of each buffer; if it is 0 on all ranks, they are asked again
    for the plain mean. Integer tensors are left alone. Of a DTensor it is the rank's part.

    Args:
        tensors: of the same shapes and dtypes on all ranks.
        weight: of this rank, 0 or more.
        world: whose ranks have them.
        label: what the ranks are doing.
        bucket_cap_mb: the size of a buffer in MiB; None is one buffer a dtype.
    """
    parts = map(local, tensors)
    moving = [t for t in parts if t.is_floating_point() or t.is_complex()]
    if world.size == 1:
        return
    for kind in dict.fromkeys((each.dtype, each.device) for each in moving):
        same = [each for each in moving if (each.dtype, each.device) == kind]
        for bucket in _buckets(same, bucket_cap_mb):
            _average_bucket_(bucket, weight, world, label)


def _average_bucket_(
    same: Sequence[torch.Tensor], weight: Number, world: World, label: str
) -> None:
    dtype = same[0].dtype
    # below float32 a weight could not be counted: average in float32
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    seen = torch.zeros(1, dtype=wide, device=world.device) + weight
    seen = seen.to(same[0].device)  # parts may lie on the host
    flat = pack([*same, seen.to(dtype)]).to(wide)
    flat[-1:] = 1
    flat.mul_(seen)
    sum_(flat, world, label=label)
    if _may_be_zero(weight) and not is_positive(flat[-1].real):
        _average_bucket_(same, 1, world, label)
        return
    flat.div_(flat[-1].clone())
    unpack_(flat[:-1], same)


def _may_be_zero(weight: Number) -> bool:
    """Whether the sum of all ranks' weights must be looked at; a device is waited for."""
    return isinstance(weight, torch.Tensor) or weight == 0


def _buckets(
    tensors: Sequence[torch.Tensor], bucket_cap_mb: float | None
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield tensors of one dtype, in order, as many at once as a buffer holds.

    A larger one comes in pieces, if its elements lie one after the other.
    """
    if bucket_cap_mb is None:
        yield tensors
        return
    most = max(1, int(bucket_cap_mb * _MIB) // tensors[0].element_size())
    bucket: list[torch.Tensor] = []
    room = most
    for tensor in tensors:
        whole = tensor.numel() <= most or not tensor.is_contiguous()
        for piece in [tensor] if whole else tensor.view(-1).split(most):
            if bucket and piece.numel() > room:
                yield bucket
                bucket, room = [], most
            bucket.append(piece)
            room -= piece.numel()
    if bucket:
        yield bucket
