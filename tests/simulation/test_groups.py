# SPDX-License-Identifier: Apache-2.0
"""Groups of some ranks: what errors and the log say of them, and what torch builds on them."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import accelfn as af
from accelfn.testing import Raise, simulate

BOX = {"dp_shard": 2, "tp": 2}


def test_the_log_names_a_call_s_group():
    """And who took part in it."""
    run = simulate(4, lambda w: af.all_reduce(torch.ones(3), w.along("tp")), axes=BOX)
    assert [(entry.group, entry.ranks) for entry in run.log] == [
        ("tp", (0, 1)),
        ("tp", (2, 3)),
    ]
    assert "SUM (3,) float32 among ranks 0, 1 (tp), 12 bytes" in str(run.log[0])


def test_a_mismatch_shows_the_group():
    """Only its ranks are in the table, by their numbers in the world."""

    def fn(world):
        size = 2 if world.rank == 3 else 3
        af.all_reduce(torch.ones(size), world.along("tp"))

    with pytest.raises(af.errors.CollectiveMismatchError) as caught:
        simulate(4, fn, axes=BOX)
    text = str(caught.value)
    assert "rank 2: #0 all_reduce  SUM (3,) float32 among tp of ranks 2, 3" in text
    assert "rank 3: #0 all_reduce  SUM (2,) float32 among tp of ranks 2, 3" in text
    assert "rank 0" not in text.partition("Collectives completed before")[0]


def test_a_dead_lock_shows_the_groups():
    """Of ranks that wait for one another along different axes."""

    def fn(world):
        af.barrier(world.along("tp" if world.rank in (0, 3) else "dp_shard"))

    with pytest.raises(af.errors.DeadlockError) as caught:
        simulate(4, fn, axes=BOX)
    text = str(caught.value)
    assert "rank 0: in #0 all_reduce  SUM (1,) float32 among tp of ranks 0, 1" in text
    assert (
        "rank 1: in #0 all_reduce  SUM (1,) float32 among dp_shard of ranks 1, 3"
        in text
    )


def test_a_failure_reaches_ranks_of_other_groups():
    """They wait along another axis, and are told of the rank of the world that failed."""

    def fn(world):
        try:
            af.barrier(world.along("tp"))
            af.barrier(world.along("dp_shard"))
        except af.errors.PeerFailedError as error:
            told.append((world.rank, str(error)))
            raise

    told = []
    with pytest.raises(ZeroDivisionError):
        simulate(4, fn, axes=BOX, faults=[Raise(1, at=1, error=ZeroDivisionError)])
    assert {rank for rank, _ in told} == {0, 2, 3}
    assert all("rank 1 raised ZeroDivisionError" in text for _, text in told)


def test_messages_of_one_pair_of_ranks_meet_in_their_groups():
    """In whichever order they are sent and received."""

    def fn(world):
        groups = world.along("tp").group, world.group
        if world.rank == 2:
            for i, group in enumerate(groups):
                dist.isend(torch.tensor([float(i)]), 3, group=group)
        got = torch.empty(1), torch.empty(1)
        if world.rank == 3:
            for i in (1, 0):
                dist.recv(got[i], 2, group=groups[i])
            return [each.item() for each in got]
        return None

    assert simulate(4, fn, axes=BOX)[3] == [0.0, 1.0]


def test_a_call_along_an_axis_says_what_it_is_for():
    """As one of all ranks does."""
    whole, part = (
        simulate(4, lambda w, of=of: af.barrier(of(w)), axes=BOX).log[0].label
        for of in (lambda w: w, lambda w: w.along("tp"))
    )
    assert whole
    assert part == whole


def test_an_operator_meets_its_own_rank_s_mesh():
    """What torch has worked out for another rank's DTensor is not taken for this one's."""

    def fn(world):
        rows = distribute_tensor(torch.arange(6.0), world.mesh, [Shard(0)])
        other = (rows * 2 + rows).full_tensor()
        assert rows.to_local().tolist() == [3.0 * world.rank + i for i in range(3)]
        return other.tolist()

    for _ in range(3):
        assert simulate(2, fn, axes={"tp": 2}).results == ([0, 3, 6, 9, 12, 15],) * 2


def test_nothing_is_left_of_meshes():
    """Two hundred runs leave no group in the process's list, and no mesh alive."""
    left = []

    def fn(world):
        left.append(weakref.ref(world.mesh))
        rows = distribute_tensor(torch.arange(4.0), world.mesh, [Shard(0)])
        name = world.group.group_name
        left.append(weakref.ref(world.group))
        rows.full_tensor()
        return name

    names = {name for _ in range(200) for name in simulate(2, fn, axes={"tp": 2})}
    gc.collect()
    assert len(names) == 400
    assert not any(each() for each in left)
    for name in names:
        with pytest.raises(RuntimeError):
            torch._C._distributed_c10d._resolve_process_group(name)


def test_torch_s_meshes_know_nothing_of_threads_afterwards():
    """What meshes ask in a simulated rank, they ask of the process again."""
    from torch.distributed import device_mesh

    before = device_mesh.get_backend, device_mesh.threading
    simulate(2, lambda world: world.mesh, axes={"tp": 2})
    assert (device_mesh.get_backend, device_mesh.threading) == before
