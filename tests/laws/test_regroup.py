# SPDX-License-Identifier: Apache-2.0
"""Ranks that are left go on from the last average, and one that comes back comes in at one."""

import tempfile
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, reject
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import SimulationError
from accelfn.testing import Crash, simulate
from tests.internals import Words
from tests.laws.elastic import N, Training, as_saved, elastic, in_turns
from tests.strategies import differences, tensors

PLAIN = {
    "ddp": lambda _: af.wrap_ddp(),
    "local sgd": lambda every: af.local_sgd(sync_every=every),
    "diloco": lambda every: af.diloco(sync_every=every),
}
SETUPS = {
    **PLAIN,
    "local sgd, all": lambda every: af.local_sgd(sync_every=every, opt_state=True),
    "diloco in bits": lambda every: af.diloco(sync_every=every, bits=8),
    "diloco, later": lambda every: af.diloco(
        sync_every=every, fragments=min(every, 2), delay=every // 2
    ),
}
UPDATES = 12


@st.composite
def trainings(draw: st.DrawFn, setups: Mapping[str, Any], optimizer: str) -> Training:
    """Draw a training of several averages."""
    every = draw(st.integers(1, 4))
    return Training(
        setup=setups[draw(st.sampled_from(sorted(setups)))](every),
        every=every,
        updates=UPDATES,
        optimizer=optimizer,
        batch_size=draw(st.integers(3, 8)),
    )


@given(
    training=trainings(PLAIN, "sgd"),
    size=st.integers(2, 4),
    gone=st.integers(0, 3),
    step=st.integers(0, UPDATES - 1),
    schedule=st.lists(st.integers(0, 3), max_size=20),
)
@example(Training(setup=af.local_sgd(sync_every=4), every=4, updates=12), 3, 1, 6, [])
def test_the_rest_go_on_from_the_last_average(training, size, gone, step, schedule):
    """Ranks that are left train, numbered anew, what fewer do from a checkpoint saved there."""
    gone %= size
    numbered: dict[int, list[tuple[int, int]]] = {}

    def fn(world: af.World) -> Any:
        found = elastic(world, training)
        last = world.connection.successor or world
        numbered[world.rank] = [
            (last.rank, last.size),
            (last.local_rank, last.local_size),
        ]
        return found

    run = simulate(
        size, fn, faults=[Crash(gone, step=step)], elastic=1, schedule=schedule
    )
    average = step - step % training.every
    stages = [(0, size), (average, size - 1)]
    left = [each for rank, each in enumerate(run) if rank != gone]
    assert run[gone] is None
    assert list(dict(sorted(numbered.items())).values()) == [
        [(rank, size - 1)] * 2 for rank in range(size - 1)
    ]
    assert [told for _, told in left] == [stages] * len(left)
    with tempfile.TemporaryDirectory() as folder:
        expected = in_turns(training, stages, folder)
    for mine, (found, _) in zip(expected, left, strict=True):
        assert differences(mine, found) == []


@given(
    training=trainings(PLAIN, "sgd"),
    size=st.integers(2, 4),
    gone=st.integers(0, 3),
    step=st.integers(0, 5),
    later=st.integers(0, 3),
    begins=st.sampled_from([0, 50]),
)
@example(
    Training(setup=af.local_sgd(sync_every=2), every=2, updates=12), 3, 0, 3, 2, 50
)
@example(  # it comes back after the last update
    Training(setup=af.local_sgd(sync_every=4), every=4, updates=12), 2, 0, 5, 3, 0
)
def test_a_rank_that_comes_back_comes_in_at_an_average(
    training, size, gone, step, later, begins
):
    """It goes on with the others as from the checkpoint that these saved there."""
    gone %= size
    back = step + later

    def begun(state: af.TrainState) -> af.TrainState:
        # whatever it has, as of a checkpoint that it found
        is_new = state.world.size == 1
        return attrs.evolve(state, step=begins) if is_new else state

    run = simulate(
        size,
        lambda world: elastic(world, training, begun=begun),
        faults=[Crash(gone, step=step, returns=back)],
        elastic=1,
    )
    every, average = training.every, step - step % training.every
    told = [(0, size), (average, size - 1), (back - back % every + every, size)]
    together = training.setup == af.wrap_ddp()
    noticed = step if together else average + every - 1
    if back <= noticed:  # it was there before the others knew that it had gone
        told = [(0, size), (average, size)]
    assert [told_ for rank, (_, told_) in enumerate(run) if rank != gone] == [told] * (
        size - 1
    )
    assert run[gone][1] == told[-1:]
    with tempfile.TemporaryDirectory() as folder:
        expected = in_turns(training, told, folder)
    for mine, (found, _) in zip(expected, run, strict=True):
        assert differences(mine, found) == []


@given(
    training=trainings(SETUPS, "momentum"),
    size=st.integers(2, 4),
    gone=st.integers(0, 3),
    step=st.integers(0, UPDATES - 1),
)
def test_what_is_each_rank_s_own_it_keeps(training, size, gone, step):
    """Those that are left have what they would have saved themselves and loaded."""
    gone %= size
    with tempfile.TemporaryDirectory() as folder:

        def fn(world: af.World) -> list[list[str]]:
            found: list[list[str]] = []
            elastic(
                world,
                training,
                rejoined=lambda kept, new: found.append(
                    as_saved(training, f"{folder}/saved", kept, new)
                ),
            )
            return found

        run = simulate(size, fn, faults=[Crash(gone, step=step)], elastic=1)
    assert [each for each in run if each is not None] == [[[]]] * (size - 1)


@given(
    training=trainings(PLAIN, "sgd"),
    size=st.integers(2, 4),
    faults=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.none() | st.integers(0, 2)),
        min_size=1,
        max_size=3,
        unique_by=lambda each: each[0],
    ),
)
@example(
    Training(setup=af.local_sgd(sync_every=4), every=4, updates=12), 3, [(1, 6, None)]
)
def test_each_epoch_is_covered_once(training, size, faults):
    """Whoever is gone and comes back: what counts in the parameters had each sample once."""
    planned = [
        Crash(rank, step=step, returns=None if later is None else step + later)
        for rank, step, later in faults
        if rank < size
    ][: size - 1]
    counted: dict[int, dict[int, list[int]]] = {}

    def fn(world: af.World) -> int:
        me = object()

        def seen(step: int, ids: list[int]) -> None:
            counted.setdefault(step, {})[id(me)] = ids
            kept.append(me)

        def forget(_old: af.TrainState, new: af.TrainState) -> None:
            for step in [each for each in counted if each >= new.step]:
                del counted[step]

        kept: list[object] = []
        elastic(world, training, seen=seen, rejoined=forget)
        return len(kept)

    try:
        simulate(size, fn, faults=planned, elastic=1)
    except SimulationError:  # one was not there to crash, or nobody to come back to
        reject()
    read = [
        sorted(i for ids in counted[step].values() for i in ids)
        for step in sorted(counted)
    ]
    assert len(read) == UPDATES
    per_epoch = -(-N // training.batch_size)
    for start in range(0, UPDATES - per_epoch + 1, per_epoch):
        epoch = sorted(i for ids in read[start : start + per_epoch] for i in ids)
        assert epoch == list(range(N))


@given(
    size=st.integers(2, 4),
    behind=st.sets(st.integers(0, 2), max_size=3),
    setup=st.sampled_from(sorted(PLAIN)),
)
def test_the_newest_state_is_what_all_go_on_from(size, behind, setup):
    """Where some had their average, and another was gone before the rest had it."""
    training = Training(setup=PLAIN[setup](2), every=2, updates=9)
    late = {rank for rank in behind if rank < size - 2}

    def fn(world: af.World) -> tuple[int, dict[str, torch.Tensor]]:
        state = training.train(training.state(world), 2)
        first = state.copy()
        state = training.train(state, 2)
        second = state.copy()
        with pytest.raises(af.errors.PeerFailedError):
            training.train(state, 2)
        state = af.regroup(first if world.rank in late else second)
        return state.step, tensors(state)

    last = size - 1
    run = simulate(size, fn, faults=[Crash(last, step=4)], elastic=1)
    assert [step for step, _ in run[:last]] == [4] * last
    for _, found in run[:last]:
        assert differences(run[0][1], found) == []


@given(size=st.integers(1, 4), updates=st.integers(0, 3))
def test_where_all_are_there_nothing_changes(size: int, updates: int) -> None:
    """The state comes back as it is, for the price of a broadcast."""
    training = Training(setup=af.wrap_ddp(), every=1, updates=9)

    def fn(world: af.World) -> bool:
        state = training.train(training.state(world), updates)
        pending = af.start_all_reduce(torch.ones(1), world)
        state = state.with_slot("mine", {"on its way": pending})
        return af.regroup(state) is state and pending.has_arrived

    run = simulate(size, fn, elastic=1)
    asked = [each for each in run.log if each.label == "regroup: ask who waits"]
    assert run.results == (True,) * size
    assert {each.kind for each in asked} <= {"broadcast"}
    assert sum(each.num_bytes for each in asked) <= 64


@given(
    acts=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["ask", "take", "lose"])),
        max_size=20,
    )
)
def test_who_has_asked_and_is_not_in_is_awaited(acts: list[tuple[int, str]]) -> None:
    """Neither one that was taken in nor one that is gone lets others stop for it again."""
    words, lives = Words.at(dist.HashStore()), [0, 0, 0]
    waiting, taken = set[str](), dict[str, int]()
    for number, (place, act) in enumerate(acts):
        name = f"{place}.{lives[place]}"
        if act == "ask" and name not in waiting:
            words.ask_in(name)
            waiting.add(name)
        elif act != "ask" and name in waiting:
            words.take_in(name, number if act == "take" else None)
            waiting.remove(name)
            taken |= {name: number} if act == "take" else {}
            lives[place] += 1
        assert words.num_waiting() == len(waiting)
        assert words.taken(name) == taken.get(name)
