# SPDX-License-Identifier: Apache-2.0
"""What a collective does to memory: copies at the call, results at the wait, no sharing."""

# not every program needs all that it is given
# ruff: noqa: ARG005

import pytest
import torch
import torch.distributed as dist

from accelfn.testing import simulate

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


def test_a_future_holds_the_result():
    """get_future, which communication hooks use, is done when it is had."""

    def fn(world):
        x = torch.ones(2)
        work = dist.all_reduce(x, group=world.group, async_op=True)
        then = work.get_future().then(lambda done: done.value()[0] / 2)
        return then.wait().tolist(), work.result()[0] is x

    assert simulate(2, fn).results == (([1.0, 1.0], True),) * 2


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
