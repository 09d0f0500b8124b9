# SPDX-License-Identifier: Apache-2.0
"""What runs and is likely not meant is told: mistakes that passed in silence."""

import math
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import testing
from accelfn.testing import simulate
from tests.states import linear_state

INPUTS = torch.linspace(-1, 1, 24).reshape(12, 2)


def square(model, batch):
    return model(batch).square().mean()


def state_of(model=lambda: nn.Linear(2, 2), optimizer=torch.optim.SGD, **options):
    data = af.Data(INPUTS, batch_size=4)
    return af.TrainState.create(model=model, optimizer=optimizer, data=data, **options)


@contextmanager
def in_silence():
    """Fail where something is told in the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", af.Warning)
        yield


class Scaled(nn.Module):
    """A criterion with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs):
        return (self.scale * outputs).square().mean()


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_that_nobody_trains_are_told(size):
    """A criterion's own; each function of a loss is looked at once."""
    criterion = Scaled()

    def fn(world):
        setup = af.chain(af.shard_data(), af.wrap_ddp())
        state = state_of(world=world, setup=setup)
        batch = next(iter(af.batches(state)))
        af.value_and_grad(square)(state, batch)
        compute = af.value_and_grad(lambda model, batch: criterion(model(batch)))
        with pytest.warns(
            af.Warning, match=r"not those of the model .* shapes \[\(\)\]"
        ):
            compute(state, batch)
        with in_silence():
            compute(state, batch)
        criterion.requires_grad_(requires_grad=False)
        other = af.value_and_grad(lambda model, batch: 2 * criterion(model(batch)))
        with in_silence():
            other(state, batch)
        criterion.requires_grad_()

    simulate(size, fn)


def test_parameters_of_a_model_that_was_given_away_are_told():
    """Those that a caller has kept are not the ones that train."""
    model = nn.Linear(2, 2)
    kept = list(model.parameters())
    state = state_of(model=model)
    compute = af.value_and_grad(
        lambda model, batch: square(model, batch) + kept[0].square().sum()
    )
    with pytest.warns(af.Warning, match=r"take the parameters in the loss function"):
        compute(state, INPUTS)


def test_what_reads_a_frozen_model_is_not_told():
    """Nor a loss through inputs that have a gradient."""
    state, judge = state_of(), af.frozen(linear_state(2, 2))

    def loss(model, batch):
        inputs = batch.clone().requires_grad_()
        return judge(model(inputs)).square().mean()

    with in_silence():
        af.value_and_grad(loss)(state, INPUTS)


def put_data(module):
    module.weight.data = torch.zeros(2, 2)


def put_parameter(module):
    module.weight = nn.Parameter(torch.zeros(2, 2))


def put_dict(module):
    values = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    module.load_state_dict(values, assign=True)


@pytest.mark.parametrize("put", [put_data, put_parameter, put_dict])
def test_what_is_put_in_the_place_of_a_lent_tensor_is_refused(put):
    """The state keeps its own; what is written into that stays, and another kind is a look."""
    state = state_of()
    with (
        pytest.raises(
            af.StateError, match=r"in the place of weight.* state\.with_params"
        ),
        af.bind(state) as module,
    ):
        put(module)
    with af.bind(state) as module, torch.no_grad():
        module.weight.zero_()
    assert not state.params["weight"].any()
    with af.bind(state) as module:
        module.double()
        module.bias = None


def test_a_weight_with_a_gradient_is_refused():
    """A total is divided by a number."""
    state = state_of()

    def loss(model, batch):
        outputs = model(batch)
        return af.Loss(outputs.square().sum(), outputs.abs().sum())

    with pytest.raises(af.LossError, match=r"has a gradient, .* Detach it"):
        af.value_and_grad(loss)(state, INPUTS)


def test_a_schedule_below_zero_is_refused():
    """It would climb, where it goes on behind its end."""
    state = state_of(schedule=lambda update: 1 - update / 2)
    step = af.make_step(square)
    for batch in af.batches(state, epochs=1):
        state, _ = step(state, batch)
    with pytest.raises(
        af.ArgumentError, match=r"gave -0\.5 for update 3; .* 0 or more"
    ):
        step(state, INPUTS)


def test_columns_in_a_list_are_told():
    """Two samples of many rows are likely inputs and targets; few rows, or many, are samples."""
    with pytest.warns(
        af.Warning, match=r"2, tensors of 12 rows .*\(\(inputs, targets\)\)"
    ):
        af.Data([INPUTS, INPUTS], batch_size=1)
    many = [torch.arange(12.0) for _ in range(5)]
    with in_silence():
        for samples in ([INPUTS[:2]] * 2, list(INPUTS), [INPUTS, INPUTS[:6]], many):
            af.Data(samples, batch_size=1)


def test_directories_by_rank_are_refused_at_once(tmp_path):
    """By a store that writes behind the training's back, too, where ranks agree by files."""

    def fn(world):
        store = af.CheckpointStore(tmp_path / f"rank{world.rank}")
        store.save(state_of(world=world, setup=af.shard_data()))

    with pytest.raises(
        af.CheckpointWriteError, match=r"does not see .* Give all ranks one"
    ):
        simulate(2, fn)


def test_a_barrier_in_main_first_does_not_let_the_others_in():
    """The others wait for the end of the block, and another call is another."""

    def fn(world):
        with af.main_first(world):
            af.barrier(world)

    with pytest.raises(af.CollectiveMismatchError, match="main_first"):
        simulate(2, fn)


def test_an_optimizer_of_other_options_says_what_it_lacks(tmp_path):
    """As one with amsgrad, of a save without."""
    adam = partial(torch.optim.Adam, lr=0.1)
    state, _ = af.make_step(square)(state_of(optimizer=adam), INPUTS)
    af.save(state, tmp_path / "saved")
    other = af.load(state_of(optimizer=partial(adam, amsgrad=True)), tmp_path / "saved")
    with pytest.raises(
        af.OptimizerError, match=r"Adam lacks 'max_exp_avg_sq'.*load_part"
    ):
        af.make_step(square)(other, INPUTS)


@pytest.mark.parametrize("use", [lambda m: m[0], len, list])
def test_a_sequence_that_was_given_away_says_so(use):
    """Whatever way it is asked for its layers."""
    model = nn.Sequential(nn.Linear(2, 2))
    state_of(model=model)
    with pytest.raises(af.ModelError, match="was given to TrainState.create"):
        use(model)


@pytest.mark.parametrize("rate", [math.nan, math.inf, torch.tensor(math.nan)])
@pytest.mark.parametrize("first", [True, False])
def test_a_rate_that_is_no_number_is_refused(rate, first):
    """In any group, also of one part of several optimizers."""

    def groups(named):
        rates = (rate, 0.1) if first else (0.1, rate)
        pairs = zip(named, rates, strict=True)
        return torch.optim.Adam([{"params": [p], "lr": lr} for (_, p), lr in pairs])

    both = af.partition((lambda *_: True, groups))
    for optimizer in (groups, both):
        with pytest.raises(af.OptimizerError, match=r"lr=(nan|inf) in parameter group"):
            state_of(optimizer=optimizer)


@pytest.mark.parametrize("sizes", [2, [], [0], "12", [True]])
def test_numbers_of_ranks_are_asked_for(sizes):
    """Wherever a law is tried in worlds of several sizes."""

    def make(world):
        return linear_state(world=world), lambda state, _: (state, {})

    tried = (
        lambda: testing.check_resume(make, 1, sizes=sizes),
        lambda: testing.check_transform(af.ema(0.5), sizes=sizes),
        lambda: testing.check_step(make, states=lambda w: make(w)[0], sizes=sizes),
        lambda: testing.assert_equivalent(af.ema(0.5), af.ema(0.5), sizes=sizes),
    )
    for call in tried:
        with pytest.raises(af.ArgumentError, match="expected numbers of ranks"):
            call()
