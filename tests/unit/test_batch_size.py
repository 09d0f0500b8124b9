# SPDX-License-Identifier: Apache-2.0
"""What counts as out of memory, what is kept of a try that failed, and what is refused."""

import weakref

import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.testing import simulate


def out_of_memory() -> None:
    """Ask the CPU's allocator for more than there is."""
    torch.empty(2**46, dtype=torch.uint8)


def raises(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "run_out",
    [
        out_of_memory,
        lambda: raises(MemoryError()),
        lambda: raises(torch.OutOfMemoryError("CUDA out of memory. Tried to")),
        lambda: raises(RuntimeError("CUDA error: out of memory")),
        lambda: raises(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
        lambda: raises(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when")),
        lambda: raises(RuntimeError("DefaultCPUAllocator: not enough memory: you")),
    ],
)
def test_out_of_memory_is_noticed(run_out):
    """What torch and Python raise for want of memory halves the batch size."""
    tried = []

    def fn(batch_size, _world):
        tried.append(batch_size)
        if batch_size > 5:
            run_out()
        return batch_size

    assert af.find_batch_size(fn, 23, af.World.single()) == 5
    assert tried == [23, 11, 5]


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("bad"), KeyboardInterrupt()]
)
def test_other_errors_pass_at_once(error):
    """They are the caller's, and nothing is tried again."""
    tried = []

    def fn(batch_size, _world):
        tried.append(batch_size)
        raise error

    with pytest.raises(type(error)) as raised:
        af.find_batch_size(fn, 8, af.World.single())
    assert raised.value is error
    assert tried == [8]


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_of_a_try_is_kept(size):
    """When the next begins, the tensors of the last are gone, though somebody keeps the errors."""

    def search(world):
        made, kept = [], []

        def fails_first():
            tensor = torch.ones(1)
            made.append(weakref.ref(tensor))
            raise ValueError

        def fn(batch_size, _inner):
            assert [each() for each in made] == [None] * len(made)
            tensor = torch.ones(batch_size)
            cycle = [tensor]
            cycle.append(cycle)
            made.append(weakref.ref(tensor))
            if batch_size > 2 and world.is_main:
                try:
                    fails_first()
                except ValueError:  # the first is behind the second, shown or not
                    kept.append(MemoryError())
                    raise kept[-1] from None
            return tensor

        return af.find_batch_size(fn, 8, world)

    assert [len(found) for found in simulate(size, search)] == [2] * size


def test_the_last_error_is_shown():
    """Where not even 1 fits, the message names it, and the error is the cause."""
    with pytest.raises(
        af.errors.OutOfMemoryError, match=r"size of 1 \(the search started at 4"
    ) as it:
        af.find_batch_size(
            lambda _, __: raises(MemoryError("boom")), 4, af.World.single()
        )
    assert str(it.value.__cause__) == "boom"


@pytest.mark.parametrize("start", [0, -2, 2.5, True, "8"])
def test_a_start_is_a_positive_integer(start):
    """Anything else can be no batch size."""
    with pytest.raises(af.errors.ArgumentError, match="start="):
        af.find_batch_size(lambda size, _: size, start, af.World.single())


def test_a_function_is_called():
    """Something that cannot be called is refused."""
    with pytest.raises(af.errors.ArgumentError, match="expected a function"):
        af.find_batch_size(8, 8, af.World.single())


def test_ranks_start_alike():
    """Different starts on different ranks would never agree."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"equal on all ranks, got \[4, 5\]"
    ):
        simulate(2, lambda w: af.find_batch_size(lambda b, _: b, 4 + w.rank, w))


def test_the_outer_world_is_refused_meanwhile():
    """A rank in it could wait for ever for one that ran out of memory; after it, it works."""

    def search(world):
        with pytest.raises(
            af.errors.WorldError,
            match="the world that af.find_batch_size passes to your function",
        ):
            af.find_batch_size(lambda *_: af.barrier(world), 4, world)
        return af.find_batch_size(lambda size, _: size, 4, world)

    assert simulate(2, search).results == (4, 4)


def test_a_search_in_a_search_is_refused():
    """The inner one would need a world that the outer one may have given up."""

    def search(world):
        return af.find_batch_size(
            lambda size, inner: af.find_batch_size(lambda s, _: s, size, inner),
            4,
            world=world,
        )

    with pytest.raises(af.errors.WorldError, match="of another search"):
        simulate(2, search)


def test_a_rank_that_fails_is_no_rank_without_memory():
    """The error of one rank ends all, as anywhere."""

    def fn(_, world):
        if world.rank == 1:
            raise ValueError("a bug")
        af.barrier(world)

    with pytest.raises(ValueError, match="a bug"):
        simulate(2, lambda world: af.find_batch_size(fn, 4, world))


def test_a_lost_connection_is_no_lack_of_memory():
    """A rank that loses its peers while none is out of memory says so, on all ranks."""

    def search(world):
        def fn(*_):
            if world.rank == 1:
                raise af.errors.PeerFailedError("gone")

        with pytest.raises(
            af.errors.PeerFailedError, match="no rank ran out of memory"
        ):
            af.find_batch_size(fn, 4, world)
        return True

    assert simulate(2, search).results == (True, True)


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_ranks_that_cannot_leave_are_refused(monkeypatch, backend):
    """Joined by anything but Gloo, ranks are told before a try, and before they meet."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = af.World(rank=0, size=2, group=dist.group.WORLD)
        # of the class: put back on the record, the method and the group would be garbage
        monkeypatch.setattr(type(world.connection), "backend", lambda *_: backend)
        said = rf"2 ranks are connected by {backend}.*backend='gloo'.*in one process"
        with pytest.raises(af.errors.WorldError, match=said):
            af.find_batch_size(lambda *_: pytest.fail("it was tried"), 4, world)
    finally:
        dist.destroy_process_group()
