# SPDX-License-Identifier: Apache-2.0
"""Every collective of torch.distributed on a simulated group: what it computes, and its memory."""

# ruff: noqa: ARG001, ARG005

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
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


@pytest.mark.parametrize("sums", ["ranks", "ring", "tree"])
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_reductions(op, dtype, sums):
    """All ranks get the reduction, or the root alone, or each rank its part; in any order."""

    def fn(world, group):
        given, kind = (
            values(world.rank, (world.size, 3), dtype),
            getattr(dist.ReduceOp, op),
        )
        everywhere, at_root = given.clone(), given.clone()
        listed, single = given.new_empty(3), given.new_empty(1, 3)
        dist.all_reduce(everywhere, kind, group=group)
        dist.reduce(at_root, dst=0, op=kind, group=group)
        dist.reduce_scatter(listed, list(given), kind, group=group)
        reduce_scatter_single(single, given, kind, group=group)
        return everywhere, at_root if world.is_main else everywhere, listed, single[0]

    for size in SIZES:
        whole = reduced(op, [values(r, (size, 3), dtype) for r in range(size)])
        for rank, found in enumerate(on_ranks(size, fn, sums=sums)):
            assert all(map(same, (whole, whole, whole[rank], whole[rank]), found))


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


@pytest.mark.parametrize("sums", ["ranks", "ring", "tree"])
def test_a_sparse_tensor_is_added_from_the_first_rank_on(sums):
    """As DistributedDataParallel does for embeddings; it is not moved."""

    def fn(world):
        mine = drawn(world.rank, [6]).to_sparse()
        dist.all_reduce(mine, group=world.group)
        return mine.to_dense()

    expected = summed(3, [6], "ranks")[0]
    for found in simulate(3, fn, sums=sums):
        assert torch.equal(found, expected)
    with pytest.raises(af.errors.ArgumentError, match="broadcast .*sparse_coo"):
        on_ranks(2, lambda _, group: dist.broadcast(torch.eye(2).to_sparse(), 0, group))


# Moving


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, torch.int16])
def test_tensors_of_any_dtype_are_moved(dtype):
    """Also of those that cannot be added up."""

    def fn(world, group):
        mine = values(world.rank, dtype=dtype)
        dist.broadcast(mine, 1, group)
        return mine

    assert all(same(values(1, dtype=dtype), each) for each in on_ranks(2, fn))


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


def test_all_gather_coalesced():
    """Several tensors are gathered by one call, a list of them a rank."""

    def fn(world, group):
        given = [values(world.rank), values(world.rank, (3,))]
        got = [[torch.empty_like(each) for each in given] for _ in range(world.size)]
        with pytest.warns(FutureWarning, match="all_gather_coalesced"):
            dist.all_gather_coalesced(got, given, group=group)
        return got

    for got in on_ranks(3, fn):
        for rank, (matrix, vector) in enumerate(got):
            assert same(values(rank), matrix)
            assert same(values(rank, (3,)), vector)


# The order in which tensors are added up


ORDERS = ["ranks", "ring", "tree"]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def drawn(rank, shape, *, dtype=torch.float64):
    """Return a rank's numbers, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(
        dtype
    )


def summed(size, shape, sums, *, dtype=torch.float64):
    """Return what each rank gets of the sum of all."""

    def fn(world):
        mine = drawn(world.rank, shape, dtype=dtype)
        dist.all_reduce(mine, group=world.group)
        return mine

    return simulate(size, fn, sums=sums).results


def order_at(place, numel, size, sums):
    """Return in which order ranks are added where a number lies, as nested pairs."""
    ranks = list(range(size))
    if sums == "ring":
        longer, rest = -(-numel // size), numel % size or size
        edge = longer * rest
        piece = (
            place // longer
            if place < edge
            else rest + (place - edge) // max(1, longer - 1)
        )
        ranks = [(piece + 1 + k) % size for k in range(size)]
    if sums != "tree":
        return functools.reduce(lambda one, two: (one, two), ranks)
    while len(ranks) > 1:
        ranks = [
            tuple(ranks[i : i + 2]) if i + 1 < len(ranks) else ranks[i]
            for i in range(0, len(ranks), 2)
        ]
    return ranks[0]


def added(order, numbers):
    """Add numbers in an order."""
    if isinstance(order, int):
        return numbers[order]
    return operator.add(*(added(each, numbers) for each in order))


@given(size=st.integers(1, 5), shape=SHAPES, sums=st.sampled_from(ORDERS))
def test_each_number_is_added_in_its_order(size, shape, sums):
    """From the first rank on; from another rank on in each piece; or by pairs; on all alike."""
    parts = [drawn(rank, shape).flatten().tolist() for rank in range(size)]
    found = summed(size, shape, sums)
    numel = len(parts[0])
    expected = [
        added(order_at(i, numel, size, sums), [part[i] for part in parts])
        for i in range(numel)
    ]
    for each in found:
        assert each.flatten().tolist() == expected
        assert list(each.shape) == shape


def test_orders_differ_where_there_are_several_ranks():
    """What a law says under one order it may not say under another; of two ranks there is one."""
    two, four = (
        [summed(size, [9], sums)[0].tolist() for sums in ORDERS] for size in (2, 4)
    )
    assert two == [two[0]] * 3
    assert four[0] != four[1] != four[2] != four[0]


@pytest.mark.parametrize("sums", ORDERS)
def test_shares_and_means_are_in_that_order_too(sums):
    """A root's sum, the parts of a scattered one and a mean are those of an all-reduce."""
    size = 3
    whole = summed(size, [size * 2], sums)[0]

    def fn(world):
        mine = drawn(world.rank, [size * 2])
        mean, root = mine.clone(), mine.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=world.group)
        dist.reduce(root, dst=1, group=world.group)
        return mean, root

    for rank, (mean, root) in enumerate(simulate(size, fn, sums=sums)):
        assert torch.equal(mean, whole / size)
        assert torch.equal(root, whole) == (rank == 1)

    def scattered(world):
        parts = list(drawn(world.rank, [size * 2]).split(2))
        mine = torch.empty(2, dtype=torch.float64)
        dist.reduce_scatter(mine, parts, group=world.group)
        alone = parts[1].clone()
        dist.all_reduce(alone, group=world.group)
        return mine, alone

    ranks = simulate(size, scattered, sums=sums)
    assert torch.equal(ranks[1][0], ranks[1][1])


# Copies at the call, results at the wait, no sharing


ASYNC = {
    "all_reduce": lambda x, out, group: dist.all_reduce(x, group=group, async_op=True),
    "broadcast": lambda x, out, group: dist.broadcast(x, 0, group, async_op=True),
    "all_gather": lambda x, out, group: dist.all_gather(
        out, x, group=group, async_op=True
    ),
    "reduce_scatter": lambda x, out, group: dist.reduce_scatter(
        out[0], [x, x.clone()], group=group, async_op=True
    ),
    "all_to_all": lambda x, out, group: dist.all_to_all(
        out, [x, x.clone()], group=group, async_op=True
    ),
    "recv": lambda x, out, group: (
        dist.isend(x, 1 - group.rank(), group)
        and dist.irecv(out[0], 1 - group.rank(), group)
    ),
}
IN_PLACE = ("all_reduce", "broadcast")


@pytest.mark.parametrize("kind", ASYNC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_result_is_nan_until_it_is_waited_for(kind, dtype):
    """Also when all ranks have called long ago."""

    def fn(world):
        x = torch.ones(3).to(dtype)
        out = [torch.zeros(3, dtype=dtype) for _ in range(2)]
        work = ASYNC[kind](x, out, world.group)
        dist.barrier(group=world.group)
        got = x if kind in IN_PLACE else out[0]
        before = got.isnan().all().item()
        work.wait()
        return before, got.isnan().any().item()

    assert simulate(2, fn).results == ((True, False), (True, False))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("number", [0, 1])
def test_an_integer_result_is_far_off_until_it_is_waited_for(dtype, number):
    """Where there is no NaN, the extreme integer, and booleans flipped."""

    def fn(world):
        x = torch.full((3,), number).to(dtype)
        work = dist.all_reduce(x, dist.ReduceOp.MAX, group=world.group, async_op=True)
        before = x.clone()
        work.wait()
        return before, x

    for before, after in simulate(2, fn):
        assert not (before == after).any()
        assert after.tolist() == [number] * 3


def test_inputs_are_copied_when_they_are_posted():
    """Changing a tensor after the call does not change what others get."""

    def fn(world):
        x = torch.full((2,), 1.0 + world.rank)
        out = [torch.zeros(2) for _ in range(2)]
        work = dist.all_gather(out, x, group=world.group, async_op=True)
        x.fill_(9.0)
        work.wait()
        sending = dist.isend(x, 1 - world.rank, world.group)
        x.fill_(7.0)
        got = torch.zeros(2)
        dist.recv(got, 1 - world.rank, world.group)
        sending.wait()
        return [each.tolist() for each in (*out, got)]

    for schedule in ((), (1,), (1, 0, 1)):
        run = simulate(2, fn, schedule=schedule)
        assert run.results == ([[1, 1], [2, 2], [9, 9]],) * 2


@pytest.mark.parametrize("kind", ASYNC)
def test_results_share_no_memory(kind):
    """Neither those of ranks with one another nor with what was given."""

    def fn(world):
        x = torch.ones(3)
        out = [torch.zeros(3) for _ in range(2)]
        ASYNC[kind](x, out, world.group).wait()
        return (x, *out)

    tensors = [each for result in simulate(2, fn) for each in result]
    before = [each.clone() for each in tensors]
    for i, each in enumerate(tensors):
        each.add_(100 + i)
    for i, (old, new) in enumerate(zip(before, tensors, strict=True)):
        assert torch.equal(old + (100 + i), new)


def test_layouts():
    """Strided, transposed and sliced tensors are read and written in place."""

    def fn(world):
        whole = torch.arange(24.0).reshape(4, 6) * (world.rank + 1)
        views = [whole[:, ::2], whole.T[1], whole[1:3, 1:5:2].T]
        for view in views:
            dist.all_reduce(view, group=world.group)
            dist.broadcast(view, 1, world.group)
        gathered = torch.empty(2, 3, 4).permute(0, 2, 1)
        dist.all_gather(list(gathered), whole[:, :3], group=world.group)
        return whole, gathered.clone()

    first, second = simulate(2, fn)
    mine = [torch.arange(24.0).reshape(4, 6) * (r + 1) for r in range(2)]
    for select in (lambda w: w[:, ::2], lambda w: w.T[1], lambda w: w[1:3, 1:5:2].T):
        total = select(mine[0]) + select(mine[1])
        for whole in mine:
            select(whole).copy_(total)
    for wanted, (whole, gathered) in zip(mine, (first, second), strict=True):
        assert torch.equal(wanted, whole)
        assert torch.equal(torch.stack([w[:, :3] for w in mine]), gathered)


def test_a_tensor_that_overlaps_itself_cannot_be_filled():
    """It has no place for a result; this is an error and not a wrong number."""

    def fn(world):
        dist.all_reduce(torch.ones(1).expand(3), group=world.group)

    with pytest.raises(RuntimeError, match="memory location"):
        simulate(2, fn)


def test_parameters_and_inference_tensors_can_be_reduced():
    """Autograd does not see a collective, in whatever mode it is waited for."""

    def fn(world):
        parameter = torch.nn.Parameter(torch.ones(2))
        dist.all_reduce(parameter, group=world.group)
        with torch.inference_mode():
            made = torch.ones(2)
            work = dist.all_reduce(made, group=world.group, async_op=True)
            dist.all_reduce(parameter, group=world.group)
        work.wait()
        return parameter.tolist(), made.tolist(), parameter.requires_grad

    assert simulate(2, fn).results == (([4.0, 4.0], [2.0, 2.0], True),) * 2


def test_nothing_is_kept_of_what_was_reduced():
    """The caller's tensors and the copies of them go when the caller lets go of them."""
    import weakref

    def fn(world):
        x = torch.ones(10)
        dist.all_reduce(x, group=world.group)
        kept = weakref.ref(x)
        del x
        dist.barrier(group=world.group)
        return kept() is None

    assert simulate(2, fn).results == (True, True)


@pytest.mark.parametrize("how", ["result", "synchronize", "wait"])
def test_whatever_waits_for_a_work_writes_it(how):
    """Its result, its wait and its synchronize let the others run, and then it is there."""

    def fn(world):
        x = torch.full((2,), 1.0 + world.rank)
        work = dist.all_reduce(x, group=world.group, async_op=True)
        assert x.isnan().all()
        getattr(work, how)()
        return x.tolist(), work.result()[0] is x

    for schedule in ((), (1,)):
        run = simulate(2, fn, schedule=schedule)
        assert run.results == (([3.0, 3.0], True),) * 2


def test_asking_for_completion():
    """is_completed lets the others run; when it says so, the result is there."""

    def fn(world):
        x = torch.ones(2)
        if world.rank:
            dist.barrier(group=world.group)
            dist.all_reduce(x, group=world.group)
            return x.tolist()
        entering = dist.barrier(group=world.group, async_op=True)
        work = dist.all_reduce(x, group=world.group, async_op=True)
        while not work.is_completed():
            pass
        entering.wait()
        return x.tolist()

    for schedule in ((), (1, 1, 1), (0, 1, 0, 1)):
        assert simulate(2, fn, schedule=schedule).results == ([2.0, 2.0],) * 2


def test_asking_says_no_where_the_others_wait_for_the_one_who_asks():
    """That is no dead-lock: the one who asks may still do what they wait for."""

    def fn(world):
        got = torch.empty(1)
        if world.rank:
            dist.recv(got, 0, world.group)
            dist.send(got, 0, world.group)
            return None
        work = dist.irecv(got, 1, world.group)
        asked = [work.is_completed(), work.is_completed()]
        dist.send(torch.ones(1), 1, world.group)
        work.wait()
        return [*asked, got.item(), work.is_completed()]

    for schedule in ((), (1,), (1, 1, 0, 1)):
        assert simulate(2, fn, schedule=schedule)[0] == [False, False, 1.0, True]
