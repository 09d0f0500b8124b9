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
    raise AssertionError(state, batch)


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
    with af.CheckpointStore(tmp_path) as store:  # saved to at the end alone
        until = lambda state: state.cursor.samples == 8  # noqa: E731
        first = af.run(fresh(), STEP, until=until, store=store)
        assert af.run(first, never, until=until) is first
        assert store.steps == (first.step,) == (2,)
        again = af.run(fresh(), never, until=until, store=store)
        assert store.steps == (again.step,) == (2,)
        with pytest.raises(af.errors.ArgumentError, match="has no period"):
            store.due(again)
    assert torch.equal(first.params["weight"], again.params["weight"])


BAD = {
    "no end": {"until": 0},
    "a text": {"until": "3 epochs"},
    "true": {"until": True},
    "no mapping": {"actions": [print]},
    "no period": {"actions": {0: print}},
    "half a period": {"actions": {0.5: print}},
    "no action": {"actions": {1: "log"}},
    "no actions": {"actions": {1: [print, None]}},
    "no step": {"step": 5},
    "no state": {"state": 5},
    "no tracker": {"actions": {1: print}, "track": 5},
    "a file to track in": {"actions": {1: print}, "track": "run.jsonl"},
    "no store": {"store": 5},
    "a directory": {"store": "checkpoints"},
    **{
        f"returned {returned}": {"step": lambda *_, found=returned: found}
        for returned in (None, 5, (), ("state", af.Metrics({})), af.Metrics({}))
    },
}
ADVISED = [
    ({"state": STEP, "step": fresh()}, r"Write\s+af\.run\(state, step, until"),
    ({"actions": {1: lambda *_: "path"}, "step": STEP}, "returned 'path'"),
    ({"actions": {}, "track": print}, "would receive nothing"),
    ({"actions": {1: []}, "track": print}, "would receive nothing"),
    ({"track": "a.jsonl"}, r"af\.track\.jsonl\('a\.jsonl', world=state\.world\)"),
    ({"store": "there"}, r"af\.CheckpointStore\('there'\)"),
    ({"state": linear_state(2)}, "data=None"),
]


@pytest.mark.parametrize(
    ("options", "said"),
    [*((options, r"af\.run.*expected") for options in BAD.values()), *ADVISED],
    ids=[*BAD, *range(len(ADVISED))],
)
def test_what_has_no_meaning(options, said):
    """It is refused before anything is trained, but for what a step or an action returns."""
    kinds = af.errors.ArgumentError, af.errors.StateError
    with pytest.raises(kinds, match=said):
        af.run(**{"step": never, "state": fresh(), "until": 1, **options})


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "1"])
def test_epochs_that_are_none(count):
    """A number of epochs is a number."""
    with pytest.raises(af.errors.ArgumentError, match=r"epochs\(.*expected a number"):
        af.epochs(count)


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
