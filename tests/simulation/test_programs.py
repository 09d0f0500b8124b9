# SPDX-License-Identifier: Apache-2.0
"""Drawn programs: one answer under every schedule, and an end under every fault."""

import functools
import threading

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import event, example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import Corrupt, Crash, Leave, Raise, Stall, Terminate, simulate

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "ring",
    "barrier",
)


@attrs.frozen
class Collective:
    """One call of a drawn program: which, on how much, from whom, and when it is awaited."""

    kind: str
    length: int = 1
    root: int = 0
    is_async: bool = False


def collectives(size):
    return st.builds(
        Collective,
        kind=st.sampled_from(COLLECTIVES),
        length=st.integers(0, 3),
        root=st.integers(0, size - 1),
        is_async=st.booleans(),
    )


@st.composite
def programs(draw):
    """Draw a size, at most six collectives, and two schedules."""
    size = draw(st.integers(1, 4))
    schedule = st.lists(st.integers(0, size - 1), max_size=30)
    program = draw(st.lists(collectives(size), min_size=1, max_size=6))
    return size, program, draw(schedule), draw(schedule)


FAULTS = (Raise, Leave, Crash, Stall, Corrupt, Terminate)


@st.composite
def faulty_programs(draw):
    """Draw a program and one fault in it."""
    size, program, schedule, _ = draw(programs())
    kind = draw(st.sampled_from(FAULTS))
    rank, at = draw(st.integers(0, size - 1)), draw(st.integers(0, len(program) - 1))
    return size, program, schedule, kind(rank, at)


def splits_of(call, size):
    """Return how many rows each rank is given: one more than the rank before."""
    return [call.length + rank for rank in range(size)]


def start(call, x, world):
    """Call a collective without waiting; return its works and what they fill."""
    n, group, kind = world.size, world.group, call.kind
    mine, is_root = x.clone(), world.rank == call.root
    many = [x + i for i in range(n)]
    got = [torch.zeros_like(x) for _ in range(n)]
    if kind == "ring":
        right, left = (world.rank + 1) % n, (world.rank - 1) % n
        receiving = dist.irecv(got[0], left, group)
        return [dist.isend(mine, right, group), receiving], got[:1]
    splits = splits_of(call, n)
    rows, of_each = (
        torch.arange(sum(splits)) + 10.0 * world.rank,
        [splits[world.rank]] * n,
    )
    taken, whole = torch.empty(sum(of_each)), torch.cat(got)
    collective = functools.partial(getattr(dist, kind), group=group, async_op=True)
    given, filled = {
        "all_reduce": ((mine,), [mine]),
        "broadcast": ((mine, call.root), [mine]),
        "reduce": ((mine, call.root), [mine]),
        "all_gather": ((got, mine), got),
        "all_gather_single": ((whole, mine), [whole]),
        "gather": ((mine, got if is_root else None, call.root), got),
        "scatter": ((mine, many if is_root else None, call.root), [mine]),
        "reduce_scatter": ((mine, many), [mine]),
        "reduce_scatter_single": ((mine, torch.cat(many)), [mine]),
        "all_to_all": ((got, many), got),
        "all_to_all_single": ((taken, rows, of_each, splits), [taken]),
        "barrier": ((), []),
    }[kind]
    return [collective(*given)], filled


def run(program, world):
    """Run a program; its asynchronous calls are awaited in reverse, at the end."""
    results, later = [], []
    for number, call in enumerate(program):
        x = torch.arange(call.length) + 10.0 * world.rank + 100 * number
        works, filled = start(call, x, world)
        results.append(filled)
        if call.is_async:
            later = [*works, *later]
            continue
        for work in works:
            work.wait()
    for work in later:
        work.wait()
    return [[each.tolist() for each in filled] for filled in results]


def meaning(program, size):
    """Return what a program's ranks get, by the definitions of collectives."""
    results = [[] for _ in range(size)]
    for number, call in enumerate(program):
        xs = [
            torch.arange(call.length) + 10.0 * rank + 100 * number
            for rank in range(size)
        ]
        zeros, root = [torch.zeros(call.length)] * size, call.root
        total = functools.reduce(torch.add, xs)
        splits = splits_of(call, size)
        rows = torch.arange(sum(splits)).split(splits)
        for rank in range(size):
            got = {
                "all_reduce": [total],
                "broadcast": [xs[root]],
                "reduce": [total if rank == root else xs[rank]],
                "all_gather": xs,
                "all_gather_single": [torch.cat(xs)],
                "gather": xs if rank == root else zeros,
                "scatter": [xs[root] + rank],
                "reduce_scatter": [total + size * rank],
                "reduce_scatter_single": [total + size * rank],
                "all_to_all": [x + rank for x in xs],
                "all_to_all_single": [
                    torch.cat([rows[rank] + 10.0 * peer for peer in range(size)])
                ],
                "ring": [xs[(rank - 1) % size]],
                "barrier": [],
            }[call.kind]
            results[rank].append([each.tolist() for each in got])
    return tuple(results)


@given(programs())
def test_any_schedule_gives_the_meaning_of_the_program(drawn):
    """The same results and the same log; only messages may come in another order."""
    size, program, one, other = drawn
    fn = functools.partial(run, program)
    first = simulate(size, fn, schedule=one)
    second = simulate(size, fn, schedule=other)
    assert meaning(program, size) == first.results == second.results
    assert sorted(map(str, first.log)) == sorted(map(str, second.log))
    collective = [entry for entry in first.log if entry.kind != "send"]
    assert collective == [entry for entry in second.log if entry.kind != "send"]
    event(f"{size} ranks, {len(program)} collectives")


@given(programs())
def test_the_same_arguments_give_the_same_run(drawn):
    """Also the same log, in the same order, with messages."""
    size, program, schedule, _ = drawn
    fn = functools.partial(run, program)
    first, second = (simulate(size, fn, schedule=schedule) for _ in range(2))
    assert first == second


@given(faulty_programs())
@example((2, [Collective("ring")], [], Leave(1)))
@example((3, [Collective("gather", root=1)], [1], Stall(0)))
@example((1, [Collective("barrier")], [], Terminate(0)))
def test_any_fault_ends_with_a_report(drawn):
    """It is raised or named by rank; a run that ends well had little to lose."""
    size, program, schedule, fault = drawn
    threads = threading.active_count()
    fn, error = functools.partial(run, program), None
    try:
        ended = simulate(size, fn, schedule=schedule, faults=[fault])
    except (af.errors.Error, RuntimeError) as raised:
        error = raised
    assert threads == threading.active_count()
    event(type(error).__name__ if error else f"{type(fault).__name__} harmless")
    if error is None:
        assert not isinstance(fault, (Raise, Crash, Terminate))
        if isinstance(fault, Corrupt) and not ended.missed:
            assert ended.results != meaning(program, size)
        return
    text = str(error)
    assert not isinstance(fault, Corrupt)
    assert f"rank {fault.rank}" in text.lower() or f"{fault!r}" in text
    assert "To repeat the run" in error.__notes__[-1]
    if isinstance(fault, Raise):
        assert f"planned fault: {fault!r}" in text
    if isinstance(fault, (Crash, Terminate)):
        assert isinstance(error, af.errors.RankCrashedError)


@given(programs(), st.data())
def test_a_rank_that_skips_a_call_is_found_out(drawn, data):
    """By a mismatch or a dead-lock, also where nobody waited, unless it is alone."""
    size, program, schedule, _ = drawn
    skipped = data.draw(st.integers(0, len(program) - 1))
    lazy = data.draw(st.integers(0, size - 1))

    def fn(world):
        calls = list(program)
        if world.rank == lazy:
            del calls[skipped]
        return run(calls, world)

    if size == 1:
        simulate(size, fn, schedule=schedule)
        return
    with pytest.raises(
        (af.errors.SimulationError, af.errors.CollectiveMismatchError)
    ) as raised:
        simulate(size, fn, schedule=schedule)
    event(type(raised.value).__name__)
    assert "test_programs.py:" in str(raised.value)
