# SPDX-License-Identifier: Apache-2.0
"""Every collective of torch.distributed on a simulated group, against its definition."""

# not every program needs all that it is given
# ruff: noqa: ARG001

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _coalescing_manager,
    reduce_scatter_single,
)

import accelfn as af
from accelfn.testing import simulate

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
OPERATIONS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
REDUCTIONS = [
    (op, dtype)
    for op in OPERATIONS
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX)
    if (dtype not in COMPLEX or op in ("SUM", "AVG"))
    and (op != "AVG" or dtype not in INTEGERS)
    and (dtype not in FLOATS or not op.startswith("B"))
]
SIZES = (1, 2, 4)


def values(rank, shape=(2, 3), dtype=torch.float64):
    """Return small integers that differ from rank to rank."""
    number = torch.Size(shape).numel()
    return ((torch.arange(number) * 7 + rank * 3 + 1) % 5).reshape(shape).to(dtype)


def reduced(op, parts):
    """Return the parts reduced in their order."""
    total = functools.reduce(OPERATIONS[op], parts)
    return total / len(parts) if op == "AVG" else total


def same(expected, actual):
    """Compare bitwise, with dtypes."""
    return expected.dtype == actual.dtype and torch.equal(expected, actual)


def on_ranks(size, fn, **options):
    """Return what `fn(world, group)` returns on every rank."""
    return simulate(size, lambda world: fn(world, world.group), **options).results


# Reductions


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_all_reduce(op, dtype):
    """All ranks get the reduction, in place."""

    def fn(world, group):
        mine = values(world.rank, dtype=dtype)
        dist.all_reduce(mine, getattr(dist.ReduceOp, op), group=group)
        return mine

    for size in SIZES:
        expected = reduced(op, [values(r, dtype=dtype) for r in range(size)])
        assert all(same(expected, got) for got in on_ranks(size, fn))


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_reduce(op, dtype):
    """The root gets the reduction; the others keep what they had."""

    def fn(world, group, to):
        mine = values(world.rank, dtype=dtype)
        dist.reduce(mine, op=getattr(dist.ReduceOp, op), group=group, **to)
        return mine

    for root in range(4):
        for to in ({"dst": root}, {"group_dst": root}):
            got = on_ranks(4, functools.partial(fn, to=to))
            all_given = [values(r, dtype=dtype) for r in range(4)]
            for rank in range(4):
                wanted = reduced(op, all_given) if rank == root else all_given[rank]
                assert same(wanted, got[rank])


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_reduce_scatter(op, dtype):
    """Each rank gets the reduction of its own part, out of a list or of one tensor."""

    def fn(world, group):
        given = values(world.rank, (world.size, 3), dtype)
        kind = getattr(dist.ReduceOp, op)
        listed, single = given.new_empty(3), given.new_empty(1, 3)
        dist.reduce_scatter(listed, list(given.clone()), kind, group=group)
        reduce_scatter_single(single, given, kind, group=group)
        return listed, single

    for size in SIZES:
        parts = [values(r, (size, 3), dtype) for r in range(size)]
        for rank, (listed, single) in enumerate(on_ranks(size, fn)):
            wanted = reduced(op, [part[rank] for part in parts])
            assert same(wanted, listed)
            assert same(wanted, single[0])


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (dist.ReduceOp.AVG, torch.int64),
        (dist.ReduceOp.BAND, torch.float32),
        (dist.ReduceOp.MAX, torch.complex64),
        (dist.ReduceOp.SUM, torch.int16),
        (dist.ReduceOp.SUM, torch.float8_e4m3fn),
        pytest.param(
            dist._make_nccl_premul_sum(2.0), torch.float32, id="premultiplied"
        ),
    ],
    ids=str,
)
def test_reductions_that_gloo_lacks_are_refused(op, dtype):
    """What has no meaning, or none on Gloo, is an error that names it."""

    def fn(world, group):
        dist.reduce(torch.ones(2).to(dtype), 0, op=op, group=group)

    with pytest.raises(af.errors.ArgumentError, match=r" \w+ in reduce .*\(2,\)"):
        on_ranks(2, fn)


def test_sparse_all_reduce():
    """Sparse tensors are added up, as DistributedDataParallel does for embeddings."""

    def fn(world, group):
        mine = torch.sparse_coo_tensor(
            [[world.rank]], [1.0 + world.rank], (3,), check_invariants=True
        )
        dist.all_reduce(mine, group=group)
        return mine.to_dense()

    for got in on_ranks(3, fn):
        assert got.tolist() == [1, 2, 3]
    with pytest.raises(af.errors.ArgumentError, match="broadcast .*sparse_coo"):
        on_ranks(2, lambda _, group: dist.broadcast(torch.eye(2).to_sparse(), 0, group))


# Moving


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, torch.int16])
def test_broadcast(dtype):
    """All ranks get the root's tensor, named by its rank in the world or in the group."""

    def fn(world, group, of):
        mine = values(world.rank, dtype=dtype)
        dist.broadcast(mine, group=group, **of)
        return mine

    for root in range(3):
        for of in ({"src": root}, {"group_src": root}):
            got = on_ranks(3, functools.partial(fn, of=of))
            assert all(same(values(root, dtype=dtype), each) for each in got)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, torch.int16])
def test_all_gather(dtype):
    """All ranks get every rank's tensor: in a list, stacked, or concatenated."""

    def fn(world, group):
        mine = values(world.rank, (2, 2), dtype)
        listed = [torch.empty_like(mine) for _ in range(world.size)]
        stacked = mine.new_empty(world.size, 2, 2)
        joined = mine.new_empty(world.size * 2, 2)
        dist.all_gather(listed, mine, group=group)
        dist.all_gather_single(stacked, mine, group=group)
        dist.all_gather_single(joined, mine, group=group)
        return listed, stacked, joined

    for size in SIZES:
        parts = [values(r, (2, 2), dtype) for r in range(size)]
        for listed, stacked, joined in on_ranks(size, fn):
            assert all(map(same, parts, listed))
            assert same(torch.stack(parts), stacked)
            assert same(torch.cat(parts), joined)


def test_gather_and_scatter():
    """The root gets one tensor a rank; it gives one to each."""

    def fn(world, group, root, name):
        mine = values(world.rank)
        is_root = world.rank == root
        gathered = [torch.empty_like(mine) for _ in range(world.size)]
        dist.gather(
            mine, gathered if is_root else None, group=group, **{f"{name}dst": root}
        )
        got = torch.empty_like(mine)
        dist.scatter(
            got, gathered if is_root else None, group=group, **{f"{name}src": root}
        )
        return gathered if is_root else None, got

    for root in range(3):
        for name in ("", "group_"):
            results = on_ranks(3, functools.partial(fn, root=root, name=name))
            for rank, (gathered, got) in enumerate(results):
                assert (gathered is None) is (rank != root)
                assert same(values(rank), got)
            assert all(map(same, map(values, range(3)), results[root][0]))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, torch.int16])
def test_all_to_all(dtype):
    """Rank i gives its j-th part to rank j: listed, in even rows, in split rows."""

    def fn(world, group):
        n = world.size
        given = (torch.arange(n) + world.rank * n).to(dtype)
        listed = [torch.empty(1, dtype=dtype) for _ in range(n)]
        dist.all_to_all(listed, list(given.split(1)), group=group)
        even = torch.empty_like(given)
        dist.all_to_all_single(even, given, group=group)
        # to rank r goes r + 1 times the own rank
        splits = [r + 1 for r in range(n)]
        rows = torch.full((sum(splits), 2), world.rank).to(dtype)
        got = torch.empty(n * (world.rank + 1), 2, dtype=dtype)
        dist.all_to_all_single(got, rows, [world.rank + 1] * n, splits, group=group)
        return torch.cat(listed), even, got

    for size in SIZES:
        for rank, (listed, even, got) in enumerate(on_ranks(size, fn)):
            wanted = (torch.arange(size) * size + rank).to(dtype)
            assert same(wanted, listed)
            assert same(wanted, even)
            times = torch.arange(size).repeat_interleave(rank + 1).to(dtype)
            assert same(times[:, None].expand(-1, 2), got)


def test_messages():
    """A message is received by whom it is sent to: blocking, not, from any, by tag."""

    def fn(world, group):
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        mine, got = torch.tensor([world.rank]), torch.empty(4, dtype=torch.int64)
        work = dist.isend(mine, right, group=group)
        dist.recv(got[0:1], left, group=group)
        work.wait()
        works = [
            dist.isend(mine, group_dst=right, group=group, tag=1),
            dist.isend(mine + 10, right, group=group, tag=2),
            dist.irecv(got[2:3], group_src=left, group=group, tag=2),
            dist.irecv(got[1:2], left, group=group, tag=1),
        ]
        for work in works:
            work.wait()
        operations = [
            dist.P2POp(dist.irecv, got[3:4], left, group),
            dist.P2POp(dist.isend, mine + 20, right, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return got.tolist()

    assert on_ranks(3, fn) == ([2, 2, 12, 22], [0, 0, 10, 20], [1, 1, 11, 21])


def test_messages_from_any_rank_name_their_sender():
    """What is received from any rank comes with who sent it."""

    def fn(world, group):
        if world.rank:
            dist.send(torch.tensor([world.rank]), 0, group=group)
            return None
        got = torch.empty(1, dtype=torch.int64)
        return [(dist.recv(got, group=group), got.item()) for _ in range(2)]

    for schedule in ((), (1, 1, 1), (2,)):
        received, *_ = on_ranks(3, fn, schedule=schedule)
        assert sorted(received) == [(1, 1), (2, 2)]


def test_messages_of_one_sender_keep_their_order():
    """Equal messages between two ranks are received as they were sent."""

    def fn(world, group):
        got = torch.empty(3, 1)
        if world.rank:
            works = [dist.isend(torch.tensor([x]), 0, group) for x in (1.0, 2.0, 3.0)]
        else:
            works = [dist.irecv(each, 1, group) for each in got]
        for work in reversed(works):
            work.wait()
        return got.flatten().tolist()

    assert on_ranks(2, fn, schedule=[1])[0] == [1, 2, 3]
    assert on_ranks(2, fn)[0] == [1, 2, 3]


def test_objects():
    """Python objects travel like tensors do."""

    def fn(world, group):
        mine = {"rank": world.rank, "text": "x" * world.rank}
        n, last = world.size, world.size - 1
        everyones, gathered, scattered = [None] * n, [None] * n, [None]
        dist.all_gather_object(everyones, mine, group=group)
        dist.gather_object(
            mine, gathered if world.rank == last else None, dst=last, group=group
        )
        dist.scatter_object_list(
            scattered, everyones if world.rank == last else None, src=last, group=group
        )
        shared = [mine, world.rank]
        dist.broadcast_object_list(shared, src=last, group=group)
        passed = [None, None]
        if world.rank == 0 and n > 1:
            dist.send_object_list([mine, 5], last, group=group)
        if world.rank == last and n > 1:
            dist.recv_object_list(passed, 0, group=group)
        return everyones, gathered, scattered, shared, passed

    for size in SIZES:
        all_given = [{"rank": r, "text": "x" * r} for r in range(size)]
        for rank, (all_, gathered, scattered, shared, passed) in enumerate(
            on_ranks(size, fn)
        ):
            is_last = rank == size - 1
            assert all_given == all_
            assert (all_given if is_last else [None] * size) == gathered
            assert [all_given[rank]] == scattered
            assert [all_given[-1], size - 1] == shared
            if is_last and size > 1:
                assert [all_given[0], 5] == passed


def test_coalesced():
    """Several collectives under one wait are the same as each alone."""

    def fn(world, group):
        tensors = [values(world.rank), values(world.rank, (3,)) + 1]
        together = [each.clone() for each in tensors]
        with pytest.warns(FutureWarning, match="all_reduce_coalesced"):
            dist.all_reduce_coalesced(together, group=group)
        managed = [each.clone() for each in tensors]
        gathered = [each.new_empty(world.size, *each.shape) for each in tensors]
        parts = [values(world.rank, (world.size, 2)), values(3, (world.size, 1))]
        scattered = [torch.empty_like(each[0]) for each in parts]
        with _coalescing_manager(group):
            for each in managed:
                dist.all_reduce(each, group=group)
        with _coalescing_manager(group, async_ops=True) as works:
            for got, each in zip(gathered, tensors, strict=True):
                dist.all_gather_single(got, each, group=group)
        works.wait()
        with _coalescing_manager(group):
            for got, each in zip(scattered, parts, strict=True):
                reduce_scatter_single(got, each, group=group)
        return together, managed, gathered, scattered

    for rank, (together, managed, gathered, scattered) in enumerate(on_ranks(2, fn)):
        tensors = [[values(r), values(r, (3,)) + 1] for r in range(2)]
        sums = [operator.add(*each) for each in zip(*tensors, strict=True)]
        assert all(map(same, sums, together))
        assert all(map(same, sums, managed))
        stacked = [torch.stack(each) for each in zip(*tensors, strict=True)]
        assert all(map(same, stacked, gathered))
        assert same(values(0, (2, 2))[rank] + values(1, (2, 2))[rank], scattered[0])
        assert same(2 * values(3, (2, 1))[rank], scattered[1])


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
def test_differentiable_collectives():
    """Those of torch.distributed.nn let gradients through."""
    from torch.distributed.nn import functional as collectives

    def fn(world, group):
        x = torch.full((2,), 1.0 + world.rank, requires_grad=True)
        total = collectives.all_reduce(x * x, group=group)
        gathered = collectives.all_gather(x * 1, group=group)
        (total.sum() + gathered[0].sum()).backward()
        return total.detach(), x.grad

    for rank, (total, grad) in enumerate(on_ranks(2, fn)):
        assert total.tolist() == [5.0, 5.0]
        # the sum of both ranks' losses, in which this rank's x is
        wanted = 2 * 2.0 * (1 + rank) + (2.0 if rank == 0 else 0.0)
        assert grad.tolist() == [wanted] * 2


def test_barrier_lets_nobody_pass_before_all_are_there():
    """What was done before a barrier is seen after it by all."""
    arrived = []

    def fn(world, group):
        arrived.append(world.rank)
        dist.barrier(group=group)
        return len(arrived)

    for schedule in ((), (1, 0, 2, 1)):
        arrived.clear()
        assert on_ranks(3, fn, schedule=schedule) == (3, 3, 3)


# accelfn's own
