# SPDX-License-Identifier: Apache-2.0
"""Wrong programs, for the table of what Gloo and a simulated world say of them."""

import math
import multiprocessing
import os
import time
from typing import Any

import attrs
import torch
import torch.distributed as dist

import accelfn as af
from tests.internals import sum_

LATE_SECONDS = 0.3
"""How much later one rank is where the other must be seen not to wait for it."""


def is_simulated() -> bool:
    return multiprocessing.parent_process() is None


def numbers(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def skips(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    if world.rank == 0:
        dist.all_reduce(x, group=world.group)
    return x.tolist()


def skips_one_of_two(world: af.World) -> list[list[float]]:
    x, y = numbers(world.rank + 1), numbers(10 * (world.rank + 1))
    if world.rank == 0:
        dist.all_reduce(x, group=world.group)
    dist.all_reduce(y, group=world.group)
    return [x.tolist(), y.tolist()]


def swaps(world: af.World) -> list[list[float]]:
    x, y = numbers(world.rank + 1), numbers(10 * (world.rank + 1))
    for each in (x, y) if world.rank == 0 else (y, x):
        dist.all_reduce(each, group=world.group)
    return [x.tolist(), y.tolist()]


def swaps_labelled(world: af.World) -> list[list[float]]:
    x, y = numbers(world.rank + 1), numbers(10 * (world.rank + 1))
    calls = [(x, "losses"), (y, "counts")]
    for each, label in calls if world.rank == 0 else reversed(calls):
        sum_(each, world, label=label)
    return [x.tolist(), y.tolist()]


def skips_in_its_row(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    if world.rank != 3:
        dist.all_reduce(x, group=world.along("dp_shard").group)
    return x.tolist()


def takes_the_other_axis(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    axis = "dp_replicate" if world.rank == 3 else "dp_shard"
    dist.all_reduce(x, group=world.along(axis).group)
    return x.tolist()


def takes_axes_in_another_order(world: af.World) -> list[float]:
    x, axes = numbers(world.rank + 1), ["dp_shard", "dp_replicate"]
    for axis in axes if world.rank != 3 else reversed(axes):
        dist.all_reduce(x, group=world.along(axis).group)
    return x.tolist()


@attrs.frozen
class Meet:
    """Each rank calls a collective of its own name."""

    names: tuple[str, ...]

    def __call__(self, world: af.World) -> list[float]:
        x, group = numbers(world.rank + 1), world.group
        match self.names[world.rank]:
            case "all_reduce":
                dist.all_reduce(x, group=group)
            case "broadcast":
                dist.broadcast(x, src=0, group=group)
            case "all_gather":
                dist.all_gather([torch.zeros_like(x) for _ in range(2)], x, group=group)
            case "barrier":
                dist.barrier(group=group)
        return x.tolist()


@attrs.frozen
class Differ:
    """All ranks call one collective on tensors of lengths and dtypes of their own."""

    name: str
    lengths: tuple[int, int] = (2, 2)
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float64, torch.float64)

    def __call__(self, world: af.World) -> Any:
        length, dtype = self.lengths[world.rank], self.dtypes[world.rank]
        x = torch.full((length,), world.rank + 1, dtype=dtype)
        group, is_root = world.group, world.rank == 0
        each = [torch.zeros_like(x) for _ in range(2)]
        match self.name:
            case "all_reduce":
                dist.all_reduce(x, group=group)
            case "broadcast":
                dist.broadcast(x, src=0, group=group)
            case "reduce":
                dist.reduce(x, dst=0, group=group)
            case "gather":
                dist.gather(x, each if is_root else None, dst=0, group=group)
                return [part.tolist() for part in each] if is_root else None
            case "all_gather":
                dist.all_gather(each, x, group=group)
                return [part.tolist() for part in each]
            case "scatter":
                dist.scatter(x, [x, x + 1] if is_root else None, src=0, group=group)
            case "reduce_scatter":
                dist.reduce_scatter(each[0], [x, x], group=group)
                return each[0].tolist()
            case "send":
                (dist.send if is_root else dist.recv)(x, 1 - world.rank, group=group)
        return x.tolist()


def different_reductions(world: af.World) -> list[float]:
    x = numbers(world.rank + 2, 5)
    op = dist.ReduceOp.SUM if world.rank == 0 else dist.ReduceOp.MAX
    dist.all_reduce(x, op=op, group=world.group)
    return x.tolist()


def own_root(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    dist.broadcast(x, src=world.rank, group=world.group)
    return x.tolist()


def last_names_another_root(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    dist.broadcast(x, src=world.rank // 2, group=world.group)
    return x.tolist()


def reduces_to_itself(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    dist.reduce(x, dst=world.rank, group=world.group)
    return x.tolist()


def transposed(*, on: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return a 3 by 2 tensor, stored by columns on some ranks."""
    x = torch.arange(6, dtype=torch.float64).view(3, 2)
    return x.t().contiguous().t() if rank in on else x


def reduces_one_transposed(world: af.World) -> list[list[float]]:
    x = transposed(on=(0,), rank=world.rank)
    dist.all_reduce(x, group=world.group)
    return x.tolist()


def reduces_all_transposed(world: af.World) -> list[list[float]]:
    x = transposed(on=(0, 1), rank=world.rank)
    dist.all_reduce(x, group=world.group)
    return x.tolist()


def broadcasts_transposed(world: af.World) -> list[list[float]]:
    x = transposed(on=(0,), rank=world.rank)
    dist.broadcast(x, src=0, group=world.group)
    return x.tolist()


def sends_transposed(world: af.World) -> list[list[float]]:
    x = transposed(on=(0,), rank=world.rank)
    (dist.recv if world.rank else dist.send)(x, 1 - world.rank, group=world.group)
    return x.tolist()


def reduces_with_gaps(world: af.World) -> list[float]:
    x = torch.arange(6, dtype=torch.float64)[::2]
    dist.all_reduce(x, group=world.group)
    return x.tolist()


def reduces_expanded(world: af.World) -> list[float]:
    x = numbers(1).expand(3)
    dist.all_reduce(x, group=world.group)
    return x.tolist()


def raises(world: af.World) -> list[float]:
    x = numbers(1)
    if world.rank == 1:
        raise KeyError("boom")
    dist.all_reduce(x, group=world.group)
    return x.tolist()


def ends(world: af.World) -> list[float]:
    """End rank 1; in a simulated world a planned fault does so instead."""
    x = numbers(1)
    if world.rank == 1 and not is_simulated():
        os._exit(7)
    dist.all_reduce(x, group=world.group)
    return x.tolist()


def reads_before_waiting(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    if world.rank == 1 and not is_simulated():
        time.sleep(LATE_SECONDS)
    work = dist.all_reduce(x, group=world.group, async_op=True)
    read = x.tolist() if world.rank == 0 else None
    work.wait()
    return read or x.tolist()


def never_waits(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    dist.all_reduce(x, group=world.group, async_op=True)
    if not is_simulated():
        time.sleep(LATE_SECONDS)
    return x.tolist()


@attrs.frozen
class Split:
    """Each rank's splits of what it gives in an all_to_all_single; it takes [2, 2]."""

    splits: tuple[tuple[int, int], tuple[int, int]]

    def __call__(self, world: af.World) -> list[float]:
        x, got = torch.arange(4.0), torch.zeros(4)
        splits = list(self.splits[world.rank])
        dist.all_to_all_single(got, x, [2, 2], splits, group=world.group)
        return got.tolist()


def uneven_all_to_all(world: af.World) -> list[list[float]]:
    given = [numbers(1), numbers(2, 3)] if world.rank == 0 else [numbers(4), numbers(5)]
    got = [numbers(0), numbers(0)]
    dist.all_to_all(got, given, group=world.group)
    return [each.tolist() for each in got]


def both_receive(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    dist.recv(x, 1 - world.rank, group=world.group)
    return x.tolist()


def both_send_first(world: af.World) -> list[float]:
    x, got = numbers(world.rank + 1), numbers(0)
    dist.send(x, 1 - world.rank, group=world.group)
    dist.recv(got, 1 - world.rank, group=world.group)
    return got.tolist()


def sends_to_nobody(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    if world.rank == 0:
        dist.send(x, 1, group=world.group)
    return x.tolist()


def different_tags(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    (dist.recv if world.rank else dist.send)(
        x, 1 - world.rank, group=world.group, tag=world.rank
    )
    return x.tolist()


@attrs.frozen
class Reduce:
    """All ranks reduce the same in the same way, which may mean nothing."""

    op: str
    values: tuple[float, ...]
    dtype: torch.dtype

    def __call__(self, world: af.World) -> list[float]:
        x = torch.tensor([self.values[world.rank]], dtype=self.dtype)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, self.op), group=world.group)
        return x.tolist()


def least(world: af.World) -> list[float]:
    """Reduce a number and NaN by accelfn's own call."""
    return af.all_reduce(numbers((1.0, math.nan)[world.rank]), world, "min").tolist()


def gathers_into_too_few(world: af.World) -> list[float]:
    got = [numbers(0)]
    dist.all_gather(got, numbers(world.rank + 1), group=world.group)
    return got[0].tolist()


def gathers_into_another_dtype(world: af.World) -> list[float]:
    got = [numbers(0, dtype=torch.float32) for _ in range(2)]
    dist.all_gather(got, numbers(world.rank + 1), group=world.group)
    return got[0].tolist()


def calls_the_default_group(world: af.World) -> list[float]:
    x = numbers(world.rank + 1)
    dist.all_reduce(x)
    return x.tolist()
