# SPDX-License-Identifier: Apache-2.0
"""What counts as out of memory, what is kept of a try that failed, and what is refused."""

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.testing import simulate


def find(fn, start=8, world=None):
    return af.find_batch_size(fn, start, world or af.World.single())


@pytest.mark.parametrize(
    "error",
    [
        None,
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you"),
    ],
)
def test_out_of_memory_is_noticed(error):
    """What torch and Python raise for want of memory halves the batch size."""
    tried = []

    def fn(batch_size, _world):
        tried.append(batch_size)
        if batch_size > 5:
            if error is None:  # ask the CPU's allocator for more than there is
                torch.empty(2**46, dtype=torch.uint8)
            raise error
        return batch_size

    assert find(fn, 23) == 5
    assert tried == [23, 11, 5]


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("bad"), KeyboardInterrupt()]
)
def test_other_errors_pass_at_once(error):
    """They are the caller's, and nothing is tried again."""
    fn = mock.Mock(side_effect=error)
    with pytest.raises(type(error)) as raised:
        find(fn)
    assert raised.value is error
    fn.assert_called_once()


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

        return find(fn, 8, world)

    assert [len(found) for found in simulate(size, search)] == [2] * size


def test_the_last_error_is_shown():
    """Where not even 1 fits, the message names it, and the error is the cause."""
    words = r"size of 1 \(the search started at 4"
    with pytest.raises(af.errors.OutOfMemoryError, match=words) as it:
        find(mock.Mock(side_effect=MemoryError("boom")), 4)
    assert str(it.value.__cause__) == "boom"


def first(size, _world):
    return size


@pytest.mark.parametrize(
    ("fn", "start", "words"),
    [
        *((first, start, "start=") for start in (0, -2, 2.5, True, "8")),
        (8, 8, "expected a function"),
    ],
)
def test_arguments_that_are_none(fn, start, words):
    """A start that can be no batch size, and what cannot be called, are refused."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        find(fn, start)


def test_ranks_start_alike():
    """Different starts on different ranks would never agree."""
    words = r"equal on all ranks, got \[4, 5\]"
    with pytest.raises(af.errors.ArgumentError, match=words):
        simulate(2, lambda world: find(first, 4 + world.rank, world))


def test_the_outer_world_is_refused_meanwhile():
    """A rank in it could wait for ever for one that ran out of memory; after it, it works."""

    words = "the world that af.find_batch_size passes to your function"

    def search(world):
        with pytest.raises(af.errors.WorldError, match=words):
            find(lambda *_: af.barrier(world), 4, world)
        return find(first, 4, world)

    assert simulate(2, search).results == (4, 4)


def test_a_search_in_a_search_is_refused():
    """The inner one would need a world that the outer one may have given up."""
    with pytest.raises(af.errors.WorldError, match="of another search"):
        simulate(2, lambda w: find(lambda size, inner: find(first, size, inner), 4, w))


def test_a_rank_that_fails_is_no_rank_without_memory():
    """The error of one rank ends all, as anywhere."""

    def fn(_, world):
        if world.rank == 1:
            raise ValueError("a bug")
        af.barrier(world)

    with pytest.raises(ValueError, match="a bug"):
        simulate(2, lambda world: find(fn, 4, world))


def test_a_lost_connection_is_no_lack_of_memory():
    """A rank that loses its peers while none is out of memory says so, on all ranks."""

    def search(world):
        def fn(*_):
            if world.rank == 1:
                raise af.errors.PeerFailedError("gone")

        with pytest.raises(af.errors.PeerFailedError, match="no rank ran out of mem"):
            find(fn, 4, world)

    simulate(2, search)


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
            find(lambda *_: pytest.fail("it was tried"), 4, world)
    finally:
        dist.destroy_process_group()
