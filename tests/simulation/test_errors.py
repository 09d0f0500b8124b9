# SPDX-License-Identifier: Apache-2.0
"""Wrong programs: every one ends, at once, with an error that says what each rank did."""

# not every program needs all that it is given
# ruff: noqa: ARG001, ARG005

import re
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accelfn as af
from accelfn.testing import Crash, simulate
from tests.internals import Turns

Mismatch = af.errors.CollectiveMismatchError
Deadlock = af.errors.DeadlockError
PeerFailed = af.errors.PeerFailedError


def told(size, fn, **options):
    """Return the error that each rank is told, and the one that simulate raises."""
    errors = [None] * size

    def rank(world):
        try:
            fn(world, world.group)
        except BaseException as error:
            errors[world.rank] = error
            raise

    with pytest.raises(BaseException) as raised:  # noqa: PT011 - it is returned
        simulate(size, rank, **options)
    return errors, raised.value


# Mismatches


def x(n=2, dtype=torch.float32):
    return torch.ones(n, dtype=dtype)


def y(r):
    """Return another dtype on each rank."""
    return x(1, torch.float64 if r else torch.float32)


MISMATCHES = {
    "kind": lambda r, g: (
        dist.broadcast(x(), 0, g) if r else dist.all_reduce(x(), group=g)
    ),
    "reduction": lambda r, g: dist.all_reduce(
        x(), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[r], group=g
    ),
    "root": lambda r, g: dist.broadcast(x(), r, g),
    "shape": lambda r, g: dist.all_reduce(x(2 + r), group=g),
    "dtype": lambda r, g: dist.all_reduce(y(r), group=g),
    "shape or layout": lambda r, g: dist.all_reduce(
        torch.eye(2).to_sparse() if r else torch.eye(2), group=g
    ),
    "shape of lists": lambda r, g: dist.all_gather([x(2 + r), x(2 + r)], x(2 + r), g),
    "shape scattered": lambda r, g: dist.scatter(
        x(2 + r), None if r else [x(2), x(2)], 0, g
    ),
    "shape of a message": lambda r, g: (
        dist.recv(x(3), 0, g) if r else dist.send(x(2), 1, g)
    ),
    "splits": lambda r, g: dist.all_to_all_single(
        x(3), x(3), [1, 2] if r else [2, 1], [1, 2], group=g
    ),
    "splits of dtypes": lambda r, g: dist.all_to_all([y(r)] * 2, [y(r)] * 2, g),
}


@pytest.mark.parametrize("schedule", [(), (1, 1), (0, 1, 1)])
@pytest.mark.parametrize("name", MISMATCHES)
def test_what_differs_is_named_on_all_ranks(name, schedule):
    """A table has a row a rank: its call, its shapes, and its line."""
    call = MISMATCHES[name]
    errors, raised = told(2, lambda w, g: call(w.rank, g), schedule=schedule)
    assert all(isinstance(error, Mismatch) for error in errors)
    assert any(raised is error for error in errors)
    for rank, error in enumerate(errors):
        assert f"Rank {rank} of 2: the ranks' calls do not match in " in str(error)
        assert name.split()[0] in str(error)
        for row in (0, 1):
            assert f"\n  rank {row}: #0 " in str(error)
        assert str(error).count("test_errors.py:") == 2
    assert len({str(error).partition(":")[2] for error in errors}) == 1


def test_a_mismatch_of_labels():
    """accelfn's own collectives say what they are for, and must agree on it."""
    labels = "columns", "rows"
    _, raised = told(2, lambda w, _: af.barrier(w, label=labels[w.rank]))
    assert isinstance(raised, Mismatch)
    for each in ("do not match in label", "'rows'", "'columns'"):
        assert each in str(raised)


def test_the_table_as_people_read_it():
    """One aligned line a rank, and what was completed before."""

    def fn(world, group):
        dist.broadcast(torch.ones(2), 0, group)
        if world.rank == 2:
            dist.broadcast(torch.ones(4), 1, group)
        else:
            dist.all_reduce(torch.ones(2, 3), group=group)

    _, raised = told(3, fn)
    lines = str(raised).splitlines()
    assert lines[0].endswith(
        "the ranks' calls do not match in kind, reduction, root, shape or dtype:"
    )
    line = fn.__code__.co_firstlineno
    assert lines[1:] == [
        f"  rank 0: #1 all_reduce  SUM (2, 3) float32   test_errors.py:{line + 5}",
        f"  rank 1: #1 all_reduce  SUM (2, 3) float32   test_errors.py:{line + 5}",
        f"  rank 2: #1 broadcast   root 1 (4,) float32  test_errors.py:{line + 3}",
        "Collectives completed before, the latest last:",
        f"  broadcast (2,) float32, 8 bytes (test_errors.py:{line + 1})",
    ]


def test_a_mismatch_that_nobody_waits_for():
    """Asynchronous calls of different shapes are an error, also if never waited for."""

    def fn(world):
        dist.all_reduce(x(2 + world.rank), group=world.group, async_op=True)

    with pytest.raises(Mismatch, match="do not match in shape"):
        simulate(2, fn)


def test_a_call_that_others_never_join():
    """An asynchronous call of one rank is an error at the end, if not before."""

    def fn(world):
        dist.barrier(group=world.group)
        if world.rank:
            dist.all_reduce(x(), group=world.group, async_op=True)

    with pytest.raises(Mismatch, match="never|neither joined") as raised:
        simulate(2, fn)
    assert "\n  rank 1: #1 all_reduce" in str(raised.value)
    assert "rank 0: #" not in str(raised.value)
    assert "barrier" in str(raised.value)
    assert raised.value.__notes__[0].startswith("In a simulated world. To repeat")

    def forgotten(world):
        if world.rank:
            dist.isend(x(), 0, world.group)

    with pytest.raises(Mismatch, match=r"rank 1: #0 send +to rank 0 \(2,\) float32"):
        simulate(2, forgotten)


# What one rank alone does wrong


def gather(out, g):
    return dist.all_gather_single(out, x(), g)


def swap(*splits):
    return lambda g: dist.all_to_all_single(x(3), x(3), *splits, group=g)


ALONE = {
    r"Expected 2 tensors, one per rank, got 3\.": lambda g: dist.all_gather(
        [x(), x(), x()], x(), g
    ),
    r"The tensor for rank 1 is \(3,\) float32; expected \(2,\) float32\.": lambda g: (
        dist.all_gather([x(), x(3)], x(), g)
    ),
    r"contiguous float32 with 4 elements \(2 ranks, 2 each\), got \(3,\)": lambda g: (
        gather(x(3), g)
    ),
    r"got \(2, 2\) float32 with strides \(1, 2\)": lambda g: gather(
        torch.ones(2, 2).T, g
    ),
    r"got \(4,\) float64": lambda g: gather(x(4, torch.float64), g),
    r"3 rows do not divide evenly among 2 ranks\.": swap(),
    r"to sum exactly to 3 ": swap([1, 1], [1, 2]),
    r"Expected 2 tensors, one per rank, got 1\.": swap([3], [1, 2]),
    r"broadcast: root is 7, but there are only 2 ranks\.": lambda g: dist.broadcast(
        x(), group_src=7, group=g
    ),
    r"send: peer is 2, but there are only 2 ranks\.": lambda g: dist.send(
        x(), group_dst=2, group=g
    ),
}


@pytest.mark.parametrize("message", ALONE)
def test_arguments_that_no_rank_could_give(message):
    """They are refused in the rank that gives them, before anything is sent."""

    def fn(world, group):
        if world.rank == 1:
            ALONE[message](group)
        dist.barrier(group=group)

    errors, raised = told(2, fn)
    assert raised is errors[1]
    assert isinstance(raised, (af.errors.ArgumentError, RuntimeError))
    assert re.search(message, str(raised))
    assert isinstance(errors[0], PeerFailed)


# Dead-locks


DEADLOCKS = {
    "both send": lambda r, g: (dist.send(x(), 1 - r, g), dist.recv(x(), 1 - r, g)),
    "both receive": lambda r, g: (dist.recv(x(), 1 - r, g), dist.send(x(), 1 - r, g)),
    "none sends": lambda r, g: r or dist.recv(x(), 1, g),
    "none receives": lambda r, g: r or dist.send(x(), 1, g),
    "from any rank": lambda r, g: r or dist.recv(x(), group=g),
    "another tag": lambda r, g: (
        dist.recv(x(), 0, g, tag=2) if r else dist.send(x(), 1, g, tag=1)
    ),
    "to itself": lambda r, g: dist.irecv(x(), r, g).wait(),
    "one in a barrier": lambda r, g: (
        dist.recv(x(), 0, g) if r else dist.barrier(group=g)
    ),
    "one has returned": lambda r, g: r or dist.barrier(group=g),
    "waits for what is not joined": lambda r, g: (
        r or dist.all_reduce(x(), group=g, async_op=True).wait()
    ),
    "asks on and on": lambda r, g: r or _ask(dist.irecv(x(), 1, g)),
    "all ask on and on": lambda r, g: _ask(dist.irecv(x(), 1 - r, g)),
}


def _ask(work):
    while not work.is_completed():
        pass


@pytest.mark.parametrize("schedule", [(), (1, 1, 0, 1)])
@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlocks(name, schedule):
    """All that wait are told, with a row a rank that says where each stands."""
    call = DEADLOCKS[name]
    errors, raised = told(2, lambda w, g: call(w.rank, g), schedule=schedule)
    assert isinstance(raised, Deadlock)
    assert isinstance(errors[0], Deadlock)
    assert errors[1] is None or isinstance(errors[1], Deadlock)
    assert "\n  rank 0: in #" in str(errors[0])
    row = "\n  rank 1: returned" if errors[1] is None else "\n  rank 1: in #"
    assert row in str(errors[0])


# Ranks that raise


class PlannedError(Exception):
    """What a rank raises in these tests."""


class StubbornError(PlannedError):
    """Takes no note, and has no text."""

    def add_note(self, note):
        raise RuntimeError(note)

    def __repr__(self):
        raise RuntimeError

    __str__ = __repr__


@pytest.mark.parametrize("schedule", [(), (1,), (2, 1, 1)])
@pytest.mark.parametrize(
    "kind", [PlannedError, ValueError, KeyboardInterrupt, SystemExit, StubbornError]
)
def test_the_error_of_a_rank_ends_all_and_is_raised(kind, schedule):
    """It is the same object; the others are told which rank raised what, and where."""
    planned = kind() if kind is StubbornError else kind("boom")

    def fn(world, group):
        dist.all_reduce(x(), group=group)
        if world.rank == 1:
            raise planned
        dist.all_reduce(x(), group=group)

    errors, raised = told(3, fn, schedule=schedule)
    assert raised is planned
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerFailed)
        shown = "StubbornError" if kind is StubbornError else f"{kind.__name__}('boom')"
        assert f"Rank {rank} of 3: rank 1 raised {shown} after #0 all_reduce" in str(
            errors[rank]
        )
    if kind is not StubbornError:
        (note,) = raised.__notes__
        assert note.startswith("In rank 1 of a simulated world. To repeat the run: ")


def test_the_note_repeats_the_run():
    """Schedule, faults, sums and seed are in it; the same error object gets it once."""
    planned = PlannedError("boom")

    def fn(world):
        if world.rank:
            raise planned
        dist.barrier(group=world.group)

    for _ in range(2):
        with pytest.raises(PlannedError):
            simulate(2, fn, schedule=[1, 0], sums="ring", seed=7)
    name = fn.__qualname__
    (note,) = planned.__notes__
    assert note == (
        "In rank 1 of a simulated world. To repeat the run:"
        f" accelfn.testing.simulate(2, {name}, schedule=[1, 0], sums='ring', seed=7)"
    )


def test_the_first_of_several_errors_is_raised():
    """Which is first is the schedule's to say."""

    def fn(world):
        raise PlannedError(world.rank)

    for first in range(3):
        with pytest.raises(PlannedError) as raised:
            simulate(3, fn, schedule=[first])
        assert raised.value.args == (first,)


def test_an_error_is_shown_though_its_rank_cleans_up_collectively():
    """A barrier in a `finally` mismatches; the cause is the context of what is raised."""

    def fn(world):
        try:
            if world.rank == 1:
                raise PlannedError
            dist.all_reduce(x(), group=world.group)
        finally:
            dist.barrier(group=world.group)

    for schedule in ((), (1,)):
        with pytest.raises(Mismatch) as raised:
            simulate(2, fn, schedule=schedule)
        context = raised.value.__context__
        while isinstance(context, Mismatch):
            context = context.__context__
        assert isinstance(context, PlannedError)


@pytest.mark.parametrize("where", ["forward", "backward hook", "communication hook"])
def test_errors_inside_ddp(where):
    """Through torch's C++ they come as they were raised, and all ranks end."""
    planned = PlannedError("boom")

    def fail(*_, bucket=None):
        raise planned

    def fn(world, group):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=1e-5)
        if world.rank == 1 and where == "forward":
            net[1].register_forward_hook(fail)
        if world.rank == 1 and where == "backward hook":
            net[0].weight.register_hook(fail)
        if where == "communication hook":
            model.register_comm_hook(world, fail if world.rank else _reduce)
        model(torch.ones(1, 2)).sum().backward()

    def _reduce(world, bucket):
        work = dist.all_reduce(bucket.buffer(), group=world.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    errors, raised = told(2, fn)
    assert isinstance(errors[0], PeerFailed)
    assert raised is planned


def test_errors_of_a_world_reach_through_ddp():
    """A mismatch found in a backward pass is told on all ranks by its own class."""

    def fn(world, group):
        net = nn.Linear(2, 2)
        model = DistributedDataParallel(net, process_group=group)
        loss = model(torch.ones(1, 2)).sum()
        if world.rank:
            dist.barrier(group=group)
        else:
            loss.backward()

    errors, _ = told(2, fn)
    assert all(isinstance(error, Mismatch) for error in errors)
    assert "test_errors.py:" in str(errors[0])


def test_errors_of_a_nested_world():
    """They pass through the outer one, with a note of each."""

    def inner(world):
        if world.rank == 1:
            raise PlannedError("boom")
        dist.barrier(group=world.group)

    def outer(world, group):
        if world.rank == 0:
            simulate(2, inner)
        dist.barrier(group=group)

    errors, raised = told(2, outer)
    assert raised is errors[0]
    assert isinstance(raised, PlannedError)
    assert [note.partition(":")[0] for note in raised.__notes__] == [
        "In rank 1 of a simulated world. To repeat the run",
        "In rank 0 of a simulated world. To repeat the run",
    ]
    assert isinstance(errors[1], PeerFailed)


def test_the_error_of_a_rank_is_raised_whatever_others_do_with_theirs():
    """Also where another handles an error of its own as it is told."""

    def handling(world):
        try:
            {}[world.rank]
        except KeyError:
            dist.all_reduce(x(), group=world.group)

    def fn(world):
        handling(world) if world.rank else dist.all_reduce(x())

    for schedule in ((), (1,)):
        with pytest.raises(af.errors.DefaultGroupError):
            simulate(2, fn, schedule=schedule)
        with pytest.raises(af.errors.RankCrashedError):
            simulate(2, handling, schedule=schedule, faults=[Crash(0)])


def test_ranks_may_handle_what_they_are_told():
    """A run in which all errors are caught returns what the ranks return."""

    def fn(world):
        for error in (Mismatch, Mismatch):
            with pytest.raises(error):
                dist.all_reduce(x(2 + world.rank), group=world.group)
        return world.rank

    assert simulate(2, fn).results == (0, 1)


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_rank_that_swallows_errors_for_ever_is_unwound(everywhere):
    """`while True: try ... except Exception` ends after a hundred times."""
    counts = [0, 0]

    def fn(world):
        if world.rank and not everywhere:
            raise PlannedError("boom")
        while True:
            try:
                counts[world.rank] += 1
                dist.all_reduce(x(2 + world.rank), group=world.group)
            except Exception:  # noqa: BLE001, S112 - what this is about
                continue

    if everywhere:
        with pytest.raises(af.errors.RankCrashedError, match="kept calling") as e:
            simulate(2, fn)
        assert isinstance(e.value.__cause__, Mismatch)
        assert max(counts) < 150
    else:
        with pytest.raises(PlannedError):
            simulate(2, fn)


# What a simulated world has not


def test_calls_on_the_default_group_are_refused():
    """Also what goes there unsaid; the error says what to pass instead."""
    calls = [
        lambda w: dist.all_reduce(x()),
        lambda w: dist.all_reduce(x(), group=dist.group.WORLD),
        lambda w: dist.broadcast(x(), 0),
        lambda w: dist.all_gather([x(), x()], x()),
        lambda w: dist.all_gather_object([None, None], 1),
        lambda w: dist.broadcast_object_list([None], 0),
        lambda w: dist.reduce(x(), 0),
        lambda w: dist.barrier(),
        lambda w: dist.send(x(), 1 - w.rank),
        lambda w: dist.recv(x(), 1 - w.rank),
        lambda w: dist.recv(x()),
        lambda w: DistributedDataParallel(nn.Linear(1, 1)),
    ]
    for call in calls:
        with pytest.raises(af.errors.DefaultGroupError, match="group=world.group"):
            simulate(2, call)


def test_the_default_group_tells_the_truth():
    """Code that asks whether it is distributed, and which rank it is, is told."""

    def fn(world):
        group = world.group
        assert dist.is_initialized()
        assert dist.get_backend() == dist.get_backend(group) == "simulated"
        assert dist.get_process_group_ranks(group) == [0, 1, 2]
        assert dist.get_process_group_ranks(None) == [0, 1, 2]
        assert dist.get_group_rank(group, 1) == dist.get_global_rank(group, 1) == 1
        assert dist.get_world_size() == dist.get_world_size(group) == 3
        return dist.get_rank(), dist.get_rank(group)

    assert simulate(3, fn).results == ((0, 0), (1, 1), (2, 2))
    assert not dist.is_initialized()


def _mesh_of_two_dims(world):
    from torch.distributed.device_mesh import init_device_mesh

    init_device_mesh("cpu", (2, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: dist.new_group([0]), r"world.along\(name\)"),
        (lambda w: dist.new_subgroups(1), r"simulate\(size, fn, axes="),
        (_mesh_of_two_dims, "As a DeviceMesh, use world.mesh"),
        (lambda w: dist.destroy_process_group(), "the group ends with the world"),
        (
            lambda w: dist.destroy_process_group(w.group),
            "the group ends with the world",
        ),
    ],
)
def test_what_a_simulated_world_has_not_is_refused(call, message):
    """With what to do instead; nobody hangs, and nobody is silently alone."""
    with pytest.raises(af.errors.SimulationError, match=message):
        simulate(2, call)


# Outside of a rank's thread


def test_a_group_does_not_outlive_its_world():
    """A group that was taken out of its world says that the world has ended."""
    (group,) = simulate(1, lambda world: world.group)
    with pytest.raises(
        af.errors.SimulationError, match="its simulated world had ended"
    ):
        dist.all_reduce(x(), group=group)
    (work,) = simulate(1, lambda w: dist.all_reduce(x(), group=w.group, async_op=True))
    with pytest.raises(
        af.errors.SimulationError, match="its simulated world had ended"
    ):
        work.wait()
    (world,) = simulate(1, lambda world: world)
    with pytest.raises(af.errors.WorldError, match="closed"):
        _ = world.group


def test_a_nested_rank_is_none_of_the_outer_world():
    """It has a thread, and a world, of its own."""

    def outer(world):
        return simulate(2, lambda _: dist.all_reduce(x(), group=world.group))

    with pytest.raises(ValueError, match="is not initialized") as raised:
        simulate(2, outer)  # torch's report of the error finds no such group
    assert isinstance(raised.value.__context__, af.errors.SimulationError)


def test_a_rank_is_one_thread():
    """A thread that a rank starts cannot call collectives: two would run at once."""
    caught = []

    def fn(world):
        def call():
            try:
                dist.all_reduce(x(), group=world.group)
            except af.errors.SimulationError as error:
                caught.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        dist.barrier(group=world.group)

    simulate(2, fn)
    assert len(caught) == 2
    assert all("in another thread" in text for text in caught)


def test_a_rank_has_no_use_of_another_ones_group():
    """A call, or the wait for one, is refused by name, and no rank waits for ever."""
    groups, works = {}, {}

    def call(world):
        groups[world.rank] = world.group
        dist.barrier(group=world.group)
        groups[0].allreduce(x())

    def wait(world):
        works[world.rank] = dist.all_reduce(x(), group=world.group, async_op=True)
        dist.barrier(group=world.group)
        works[0].wait()

    for fn in (call, wait):
        with pytest.raises(af.errors.SimulationError, match="simulated rank 1. Call"):
            simulate(2, fn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, r"simulate\(0, ...\): expected a number of ranks"),
        ({"size": True}, "expected a number of ranks"),
        ({"size": 2.0}, "expected a number of ranks"),
        ({"fn": 3}, "expected a function that takes a World"),
        ({"schedule": [-1]}, "expected integers, 0 or more"),
        ({"schedule": ["a"]}, "expected integers, 0 or more"),
        ({"faults": ["boom"]}, "expected faults, such as Raise"),
        ({"seed": "a"}, "expected an integer"),
        ({"sums": "star"}, "sums='star'.: expected one of 'ranks', 'ring', 'tree'"),
        ({"also": "threads"}, 'expected "processes" or None'),
    ],
)
def test_arguments_of_simulate(arguments, message):
    """What no run could be is refused before it begins."""
    given = {"size": 1, "fn": lambda world: None, **arguments}
    size, fn = given.pop("size"), given.pop("fn")
    with pytest.raises(af.errors.ArgumentError, match=message):
        simulate(size, fn, **given)


def test_what_ends_the_first_rank_is_what_is_raised():
    """Where giving a rank its turn fails, for each of them, the first is told."""
    came = []

    def enter(rank):
        came.append(rank)
        raise ValueError(rank)

    turns = Turns(3, [], on_stuck=lambda: None, on_leave=lambda _: None, on_enter=enter)
    with pytest.raises(ValueError, match=r"^\d$") as raised:
        turns.run(lambda _: None)
    assert (raised.value.args, sorted(came)) == ((came[0],), [0, 1, 2])
