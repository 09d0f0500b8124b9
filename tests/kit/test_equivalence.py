# SPDX-License-Identifier: Apache-2.0
"""`assert_equivalent`: equal setups pass bit by bit, and a difference anywhere is placed."""

import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import LawError
from accelfn.testing import assert_equivalent

SGD = partial(torch.optim.SGD, lr=0.5)
DDP = af.chain(af.shard_data(), af.wrap_ddp())


def refused(one: object, two: object, **options: object) -> list[str]:
    """Return the lines of the refusal."""
    with pytest.raises(LawError) as caught:
        assert_equivalent(one, two, **options)
    return str(caught.value).splitlines()


def test_local_sgd_with_a_period_of_one_is_ddp_for_plain_sgd():
    """And for no optimizer that has memory: the refusal names it."""
    local = af.chain(af.shard_data(), af.local_sgd(sync_every=1))
    assert_equivalent(DDP, local, optimizer=SGD)
    lines = refused(DDP, local)
    assert lines[0] == (
        "The two setups train differently: in a world of size 2, on rank 0, after update 0"
        " (counted from 0), these values differ: opt_state (first setup and second setup):"
    )
    assert lines[1].startswith("  opt_state['head.weight']['momentum_buffer']: 6 of 6 ")
    assert lines[-1] == (
        "The first setup is af.chain(af.shard_data(), af.wrap_ddp()), the second setup is"
        " af.chain(af.shard_data(), af.local_sgd(sync_every=1))."
    )


@af.transform
class clamp:
    """A user's own `clip_grad_value`."""

    bound: float

    def grads(self, grads, slot, update):
        return grads.map(lambda g: g.clamp(-self.bound, self.bound)), slot


def test_a_transform_of_a_users_own_is_equivalent_to_the_built_in_one():
    """Their names and slots may differ; what they do may not."""
    assert_equivalent(clamp(0.25), af.clip_grad_value(0.25))
    lines = refused(clamp(0.25), af.clip_grad_value(0.125))
    assert " differ: opt_state, params (first setup and second setup):" in lines[0]


@af.transform
class average:
    """A user's own `ema`, which may be slower at the start."""

    decay: float
    late: bool = False

    def init(self, state):
        return {name: param.clone() for name, param in state.params.items()}

    def after_update(self, state, slot, update):
        decay = 1.0 if self.late and state.step == 1 else self.decay
        return state, {
            name: old * decay + (1 - decay) * state.params[name]
            for name, old in slot.items()
        }

    def eval_params(self, params, slot, update):
        return slot, slot


def test_what_is_evaluated_counts():
    """An average that training does not see is seen by evaluation."""
    assert_equivalent(average(0.5), af.ema(0.5))
    (head, *_) = refused(average(0.5, late=True), af.ema(0.5))
    assert ", these values differ: eval_params (" in head
    (head, *_) = refused(average(0.5), None)
    assert ", these values differ: eval_params (" in head


def test_slots_of_transforms_that_both_have_count():
    """Those of the same name, whatever their class."""

    @af.transform
    class Counts:
        by: int

        def init(self, state):
            return {"count": 0}

        def after_update(self, state, slot, update):
            return state, {"count": slot["count"] + self.by}

    assert_equivalent(Counts(1), Counts(1, name="other"))
    lines = refused(Counts(1), Counts(2))
    assert lines[1] == "  slots['counts']['count']: 1 and 2"


@af.transform
class disturb:
    """Add to one rank's parameters, in a world of one size, after one update."""

    size: int
    rank: int
    update: int

    def after_update(self, state, slot, update):
        world = state.world
        here = self.size, self.rank, self.update
        if (world.size, world.rank, state.step - 1) == here:
            state.params["head.bias"][1] += 2.0**-20
        return state, slot


@given(
    where=st.sampled_from([1, 2, 3, 4]).flatmap(
        lambda size: st.tuples(
            *(st.just(size), st.integers(0, size - 1), st.integers(0, 3)),
        )
    )
)
def test_a_difference_of_one_rank_after_one_update_is_placed(where):
    """The refusal names the world's size, the rank, the update and the quantity."""
    size, rank, update = where
    own = disturb(size, rank=rank, update=update)
    lines = refused(own, None, sizes=[size])
    assert (
        f"in a world of size {size}, on rank {rank}, after update {update} (counted from 0),"
        in lines[0]
    )
    assert re.match(
        r"  params\['head.bias'\]: 1 of 2 elements differs, at \[1\]", lines[1]
    )


def test_every_size_is_tried():
    """In the order given, by default 1, 2 and 4."""
    own = disturb(4, rank=2, update=3)
    assert "in a world of size 4, on rank 2, after update 3" in refused(own, None)[0]
    assert_equivalent(own, None, sizes=[1, 2, 3])


def test_what_is_owed_at_the_end_counts():
    """After `af.finalize` the states are compared once more."""

    @af.transform
    class Owes:
        def finalize(self, state, slot, update):
            state.params["head.bias"].zero_()
            return state, slot

    lines = refused(Owes(), None)
    assert "in a world of size 1, on rank 0, after af.finalize, these" in lines[0]
    assert lines[1].startswith("  params['head.bias']: ")
    late, later = (
        af.chain(af.shard_data(), af.local_sgd(sync_every=n)) for n in (4, 9)
    )
    assert_equivalent(late, later, optimizer=SGD, updates=3)


@af.transform
class mean_of_means:
    """The classic mistake: each part divided by its own weight."""

    def loss(self, loss_fn, slot, update):
        def alone(model, batch, *extras):
            loss = loss_fn(model, batch, *extras)
            return af.Loss(loss.total / loss.weight.clamp(min=1), 1)

        return alone, slot


def test_a_mean_of_means_is_no_mean():
    """It depends on how the update is split, over micro-batches and over ranks."""
    split = af.chain(af.accumulate(num_micro_batches=3), mean_of_means())
    (head, *_) = refused(split, mean_of_means(), sizes=[1])
    assert "after update 0 (counted from 0), these values differ: metrics, o" in head
    (head, *_) = refused(mean_of_means(), None)
    assert "in a world of size 2, on rank 0, after update 1" in head


def test_metrics_of_both_count():
    """Those that only one setup reports are left out."""

    @af.transform
    class Reports:
        value: float

        def grads(self, grads, slot, update):
            return grads.with_metrics(own=self.value), slot

    assert_equivalent(Reports(1.0), None)
    lines = refused(Reports(1.0), Reports(2.0))
    assert lines[1] == "  metrics['own']: 1.0 and 2.0, difference 1"


def perceptron(world: af.World, setup: af.chain) -> tuple[af.TrainState, object]:
    """Return a problem in float32 with a hidden layer, as a user may have."""
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(22, 3, generator=generator),
        torch.randn(22, 2, generator=generator),
    )
    state = af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
        data=af.Data(data, global_batch_size=8, shuffle=True),
        setup=setup,
        world=world,
    )
    return state, af.make_step(
        lambda net, batch: (net(batch[0]) - batch[1]).square().mean()
    )


def test_a_problem_of_a_users_own():
    """With a tolerance, as no data but dyadic ones is exact."""
    split = af.accumulate(num_micro_batches=3)
    assert_equivalent(split, None, make=perceptron, rtol=1e-5)
    refused(split, None, make=perceptron)
    told = refused(af.clip_grad_norm(0.5), None, make=perceptron, rtol=1e-5)
    assert not any("reduction" in line for line in told)  # the first loss is the same


LOSSES = {
    "mean": lambda errors: errors.square().mean(),
    "sum": lambda errors: errors.square().sum(),
    "weighted": lambda errors: af.Loss(errors.square().sum(), len(errors)),
}


@given(
    kind=st.sampled_from(sorted(LOSSES)),
    parts=st.integers(2, 4),
    size=st.sampled_from([1, 2, 3]),
    batch_size=st.integers(5, 9),
)
def test_a_loss_that_is_a_sum_is_seen(kind, parts, size, batch_size):
    """It depends on how samples are split, which a mean does not; the text says what to return."""

    def make(world, setup):
        rows = torch.linspace(-1, 1, 22 * 3, dtype=torch.float64).reshape(22, 3)
        state = af.TrainState.create(
            model=lambda: nn.Linear(3, 2, dtype=torch.float64),
            optimizer=partial(torch.optim.SGD, lr=0.01),
            data=af.Data((rows, rows[:, :2].sin()), global_batch_size=batch_size),
            setup=setup,
            world=world,
        )
        loss = LOSSES[kind]
        return state, af.make_step(lambda net, batch: loss(net(batch[0]) - batch[1]))

    split = af.accumulate(num_micro_batches=parts)
    options = {"make": make, "sizes": [size], "rtol": 1e-9}
    if kind == "sum":
        assert 'a loss with reduction="sum"' in refused(split, None, **options)[-1]
    else:
        assert_equivalent(split, None, **options)


def test_a_make_that_ignores_what_it_is_given_is_refused():
    """Nothing would be compared."""
    with pytest.raises(af.errors.ArgumentError, match="another world or setup"):
        assert_equivalent(
            *(af.ema(0.5), None), make=lambda world, _: perceptron(world, None)
        )
    with pytest.raises(af.errors.ArgumentError, match="another world or setup"):
        assert_equivalent(
            *(None, None), make=lambda _, setup: perceptron(af.World(), setup)
        )


@pytest.mark.parametrize("options", [{"updates": 0}, {"sizes": []}, {"sizes": [2, 0]}])
def test_counts_are_checked(options):
    """No updates or no worlds would compare nothing."""
    with pytest.raises(af.errors.ArgumentError, match="expected (numbers|a number) of"):
        assert_equivalent(None, None, **options)


def test_an_optimizer_belongs_to_the_problem():
    """A user's own problem has its own."""
    with pytest.raises(af.errors.ArgumentError, match="already has an"):
        assert_equivalent(None, None, make=perceptron, optimizer=SGD)


@pytest.mark.filterwarnings(
    "ignore::accelfn.errors.AccelfnWarning"
)  # whole batches are meant
def test_a_setup_that_shards_already_is_not_sharded_twice():
    """And one that says how gradients cross ranks is taken as it is."""
    assert_equivalent(af.shard_data(), None)
    assert_equivalent(DDP, None)
    # on the whole batch ranks never differ, so it does not matter when they are averaged
    assert_equivalent(af.local_sgd(sync_every=2), None)
    refused(af.chain(af.shard_data(), af.local_sgd(sync_every=2)), None)
