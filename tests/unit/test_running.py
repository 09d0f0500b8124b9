# SPDX-License-Identifier: Apache-2.0
"""`af.run`: what is due when, what is kept of it, and what is refused."""

import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state


def loss_fn(model, batch):
    return model(batch).square().mean()


STEP = af.make_step(loss_fn)


def fresh(*setup, world=None):
    """Return a state with 12 samples, of which an update takes 4."""
    return linear_state(
        2,
        data=af.Data(torch.linspace(-1, 1, 24).reshape(12, 2), global_batch_size=4),
        setup=af.chain(*setup),
        world=world,
    )


def never(state, batch):
    """Be a step that is not taken."""
    raise AssertionError(state, batch)


def test_what_is_due_when():
    """Each period by itself, in the order given; numbers of an update are tracked at once."""
    done, tracked = [], []

    def say(what):
        def action(state, metrics):
            done.append((what, state.step))
            assert metrics["loss"]
            return {what: state.step}

        return action

    af.run(
        fresh(),
        STEP,
        until=af.epochs(2),
        actions={af.epochs(1): say("epoch"), 2: [say("two"), say("also")]},
        track=lambda numbers, update: tracked.append((update, dict(numbers))),
    )
    assert done == [
        *(("two", 2), ("also", 2), ("epoch", 3), ("two", 4), ("also", 4)),
        *(("epoch", 6), ("two", 6), ("also", 6)),
    ]
    assert tracked == [
        (2, {"two": 2, "also": 2}),
        (3, {"epoch": 3}),
        (4, {"two": 4, "also": 4}),
        (6, {"epoch": 6, "two": 6, "also": 6}),
    ]


def test_metrics_are_those_since():
    """An action gets the sum of what was seen since it was last called."""
    weights = []
    actions = {
        2: lambda _, metrics: weights.append(float(metrics.sums["loss"].weight)),
        af.epochs(2): lambda _, metrics: weights.append(
            -float(metrics.sums["loss"].weight)
        ),
    }
    af.run(fresh(), STEP, until=7, actions=actions)
    assert weights == [8.0, 8.0, 8.0, -24.0]


@pytest.mark.parametrize(
    ("until", "step"),
    [(4, 4), (af.epochs(2), 6), (lambda state: state.cursor.samples == 8, 2)],
)
def test_the_end(until, step):
    """A number of updates in all, of epochs, or what a function says; at the end it ends."""
    state = af.run(fresh(), STEP, until=until)
    assert step == state.step
    again = af.run(state, STEP, until=until)
    assert again is state


def test_an_update_that_was_skipped_is_not_done_twice(tmp_path):
    """Neither actions nor saves come again at a number at which they were done."""
    done = []

    def step(state, batch):
        broken = state.step == 2 and not done.count("broken")
        if broken:
            done.append("broken")
        return af.make_step(
            lambda model, rows: loss_fn(model, rows) / (0.0 if broken else 1.0)
        )(state, batch)

    with af.CheckpointStore(tmp_path, every=2, keep=None) as store:
        af.run(
            fresh(af.skip_nonfinite()),
            step,
            until=5,
            actions={2: lambda state, _: done.append(state.step)},
            store=store,
        )
        assert store.steps == (2, 4, 5)
    assert done == [2, "broken", 4]


def test_the_best_is_kept(tmp_path):
    """Numbers of an update are kept with its checkpoint, and choose the best."""
    losses = {2: 3.0, 4: 1.0, 6: 2.0}
    with af.CheckpointStore(tmp_path, every=2, keep=1, keep_best="held out") as store:
        af.run(
            fresh(),
            STEP,
            until=6,
            actions={2: lambda state, _: {"held out": losses[state.step]}},
            store=store,
        )
        assert store.best.name == "step-00000004"
        assert store.steps[-1] == 6


def test_nothing_is_trained_in_vain(tmp_path):
    """With a store that has the end already, nothing is read, trained or saved."""
    with af.CheckpointStore(tmp_path) as store:
        first = af.run(fresh(), STEP, until=3, store=store)
        assert store.steps == (3,)
        again = af.run(fresh(), never, until=3, store=store)
        assert store.steps == (3,)
    assert again.step == 3
    assert torch.equal(first.params["weight"], again.params["weight"])


def test_a_tracker_of_a_backend(tmp_path):
    """Any tracker of `af.track` takes the numbers."""
    world = af.World.single()
    with af.track.jsonl(tmp_path / "run.jsonl", world=world) as tracker:
        af.run(
            fresh(),
            STEP,
            until=4,
            actions={2: lambda state, metrics: metrics.all_reduce_mean(state.world)},
            track=tracker,
        )
    assert [*af.track.read(tmp_path / "run.jsonl").metrics["loss"]] == [2, 4]


BAD = {
    "no end": {"until": 0},
    "a text": {"until": "3 epochs"},
    "true": {"until": True},
    "no mapping": {"until": 1, "actions": [print]},
    "no period": {"until": 1, "actions": {0: print}},
    "half a period": {"until": 1, "actions": {0.5: print}},
    "no action": {"until": 1, "actions": {1: "log"}},
    "no actions": {"until": 1, "actions": {1: [print, None]}},
    "no step": {"until": 1, "step": 5},
    "no state": {"until": 1, "state": 5},
    "no tracker": {"until": 1, "actions": {1: print}, "track": 5},
    "a file to track in": {"until": 1, "actions": {1: print}, "track": "run.jsonl"},
    "no store": {"until": 1, "store": 5},
    "a directory": {"until": 1, "store": "checkpoints"},
    "a path": {"until": 1, "actions": {1: lambda *_: "path"}},
}


def test_the_order_of_before_says_the_new_one():
    """The state comes first, as in every other call."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"Write\s+af\.run\(state, step, until"
    ):
        af.run(STEP, fresh(), until=1)


@pytest.mark.parametrize("case", BAD)
def test_what_has_no_meaning(case):
    """It is refused before anything is trained, but for what an action returns."""
    state = fresh()
    with pytest.raises(
        af.errors.ArgumentError, match=r"af\.run.*expected|returned 'path'"
    ):
        af.run(**{"step": STEP, "state": state, **BAD[case]})
    if case != "a path":
        assert state.params["weight"] is not None


@pytest.mark.parametrize("actions", [{}, {1: []}])
def test_a_tracker_with_nothing_to_track(actions):
    """Where no action could return numbers, a tracker is refused and not forgotten."""
    told = []
    with pytest.raises(af.errors.ArgumentError, match="would receive nothing"):
        af.run(
            fresh(),
            never,
            until=1,
            actions=actions,
            track=lambda *each: told.append(each),
        )
    assert not told


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ({"track": "a.jsonl"}, r"af\.track\.jsonl\('a\.jsonl', world=state\.world\)"),
        ({"store": "there"}, r"af\.CheckpointStore\('there'\)"),
    ],
)
def test_a_path_says_what_to_make_of_it(argument, advice):
    """A path in place of a tracker or a store is in the call to write instead."""
    with pytest.raises(af.errors.ArgumentError, match=advice):
        af.run(fresh(), never, until=1, **argument)


@pytest.mark.parametrize(
    "returned", [None, 5, (), ("state", af.Metrics({})), af.Metrics({})]
)
def test_a_step_that_is_none(returned):
    """What a step returns is looked at before anything is done with it."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"af\.run: step returned.*expected"
    ):
        af.run(fresh(), lambda *_: returned, until=1)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "1"])
def test_epochs_that_are_none(count):
    """A number of epochs is a number."""
    with pytest.raises(af.errors.ArgumentError, match=r"epochs\(.*expected a number"):
        af.epochs(count)


def test_without_data():
    """There is nothing to run over."""
    state = linear_state(2)
    with pytest.raises(af.errors.StateError, match="data=None"):
        af.run(state, STEP, until=1)


COLLIDING = {
    "one period": lambda one, two: {2: [one, two]},
    "two periods": lambda one, two: {2: one, af.epochs(1): two},
    "one action": lambda one, _: {2: one, af.epochs(1): one},
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", COLLIDING)
def test_two_numbers_of_one_name(case, size):
    """Neither is lost in silence: both actions are named when first both are due."""

    def one(*_):
        return {"loss": 1.0, "mine": 2.0}

    def two(*_):
        return {"loss": 3.0}

    def train(world):
        tracked = []
        with pytest.raises(
            af.errors.ArgumentError, match="(?s)one.*'loss'.*update"
        ) as told:
            af.run(
                fresh(af.shard_data(), af.wrap_ddp(), world=world),
                STEP,
                until=af.epochs(2),
                actions=COLLIDING[case](one, two),
                track=lambda _, update: tracked.append(update),
            )
        return tracked, str(told.value)

    (tracked, said), *others = simulate(size, train).results
    assert tracked == {"one period": []}.get(case, [2, 3, 4])
    assert "two" in said or case == "one action"
    assert all((tracked, said) == each for each in others)


def test_metrics_of_one_rank_are_no_numbers():
    """In a world of several an action's own sums are refused; alone they are means."""

    def train(world):
        af.run(
            fresh(af.shard_data(), af.wrap_ddp(), world=world),
            STEP,
            until=2,
            actions={1: lambda _, metrics: metrics},
        )

    simulate(1, train)
    with pytest.raises(
        af.errors.ArgumentError, match=r"lambda.*all_reduce_mean\(state\.world"
    ):
        simulate(2, train)


def test_a_store_may_be_saved_to_at_the_end_alone(tmp_path):
    """One without `every=` is not asked on the way; a loop that asks it is told."""
    with af.CheckpointStore(tmp_path / "run") as store:
        state = af.run(fresh(), STEP, until=3, store=store)
        assert store.steps == (3,)
        with pytest.raises(af.errors.ArgumentError, match="has no period"):
            store.due(state)
