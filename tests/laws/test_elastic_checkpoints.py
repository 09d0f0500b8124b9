# SPDX-License-Identifier: Apache-2.0
"""Ranks that come and go save their checkpoints, and go on from one where parts are lost."""

import tempfile
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import Crash, simulate
from tests.laws.elastic import Training, elastic, in_turns
from tests.strategies import differences, tensors

SETUPS = {
    "ddp": lambda _: af.wrap_ddp(),
    "local sgd": lambda every: af.local_sgd(sync_every=every),
    "diloco": lambda every: af.diloco(sync_every=every),
    "fsdp": lambda _: af.wrap_fsdp(),
}
UPDATES = 14


@given(
    setup=st.sampled_from(sorted(SETUPS)),
    every=st.integers(1, 4),
    size=st.integers(2, 4),
    gone=st.integers(0, 3),
    step=st.integers(1, 7),
    later=st.none() | st.integers(0, 2),
    async_=st.booleans(),
)
@settings(max_examples=25)
@example(setup="fsdp", every=2, size=3, gone=1, step=5, later=2, async_=False)
@example(setup="fsdp", every=2, size=3, gone=0, step=5, later=None, async_=True)
@example(setup="local sgd", every=2, size=3, gone=0, step=5, later=2, async_=False)
@example(setup="local sgd", every=2, size=2, gone=1, step=5, later=None, async_=True)
def test_whoever_is_there_saves_and_goes_on(
    setup, every, size, gone, step, later, async_
):
    """What they train is what as many do from their checkpoints; the last is what they end with.

    It is so whether rank 0 is lost, whose the directory is, or takes it from another as it
    comes back; and whether a save was under way. Of a split model that lost a rank they go on
    from the last that is whole.
    """
    gone, is_split = gone % size, setup == "fsdp"
    training = Training(setup=SETUPS[setup](every), every=every, updates=UPDATES)
    back = None if later is None else step + later
    with tempfile.TemporaryDirectory() as folder:
        saved = f"{folder}/saved"

        def fn(world: af.World) -> Any:
            store = af.CheckpointStore(saved, keep=None, async_=async_)
            if is_split:  # with nothing saved there would be nothing to go on with
                store.save(training.state(world)) if world.size > 1 else None
            found = elastic(world, training, averaged=store.save, restore=store.restore)
            store.close()
            return found, store.steps

        run = simulate(
            size, fn, faults=[Crash(gone, step=step, returns=back)], elastic=1
        )
        there = [each for each in run if each is not None]
        (trained, told), steps = max(there, key=lambda each: len(each[0][1]))
        expected = in_turns(training, told, f"{folder}/turns")
        for mine, ((found, _), _) in zip(expected, there, strict=True):
            assert differences(mine, found) == []
        lone = af.load(training.state(None), f"{saved}/step-{UPDATES:08}")
    assert steps[-1] == UPDATES
    assert async_ or set(steps) >= set(range(every, UPDATES, every))
    assert told[0] == (0, size)
    assert all(at in (0, *steps) or setup != "fsdp" for at, _ in told)
    if setup == "ddp":
        assert differences(tensors(lone), trained) == []


def test_with_nothing_to_go_on_with_what_is_lost_is_lost():
    """A store without a checkpoint gives back the state that it was given: no number is in it."""
    training = Training(setup=af.wrap_fsdp(), every=2, updates=6)
    with tempfile.TemporaryDirectory() as folder:

        def fn(world: af.World) -> None:
            elastic(world, training, restore=af.CheckpointStore(folder).restore)

        with pytest.raises(af.errors.StateError, match="did not load a checkpoint"):
            simulate(3, fn, faults=[Crash(1, step=3)], elastic=1)


@pytest.mark.parametrize(
    ("restore", "said"),
    [
        (lambda: None, "too many positional arguments"),
        ("checkpoints", "restore=str.: cannot call restore.state.: it is not callable"),
        (lambda state: state.step, "returned int; expected the loaded state"),
    ],
)
def test_what_restores_is_a_function_of_a_state(restore, said):
    """Told where it is given, or where what it gives is no state."""
    training = Training(setup=af.wrap_fsdp(), every=2, updates=6)
    with pytest.raises(af.errors.ArgumentError, match=said):
        simulate(
            3,
            lambda world: elastic(world, training, restore=restore),
            faults=[Crash(1, step=3)],
            elastic=1,
        )
