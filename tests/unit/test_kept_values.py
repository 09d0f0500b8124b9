# SPDX-License-Identifier: Apache-2.0
"""What a user keeps of a state, or reads beside it, is what it says, or an error."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.errors import DataError, LossError, StateDonatedError, StateError
from accelfn.testing import simulate
from tests.internals import tree

INPUTS = torch.linspace(-1, 1, 48).reshape(12, 4)
DATA = af.Data(INPUTS, global_batch_size=4)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Blocks(nn.Module):
    """Units, and what is of none of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.head = nn.Linear(4, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def square(model, batch):
    return model(batch).square().mean()


def state_of(world=None, **options):
    options = {"model": Blocks, "optimizer": SGD, "data": DATA, **options}
    return af.TrainState.create(world=world, **options)


def trained(state, updates):
    """Return the state after some updates."""
    step = af.make_step(square)
    for batch in af.batches(state, until_epoch=updates):
        state, _ = step(state, batch)
        if state.step == updates:
            break
    return state


# What is kept of a state that is trained on.

READS = {
    "an entry": lambda shown: shown[next(iter(shown))],
    "entries": lambda shown: list(shown.values()),
    "items": lambda shown: dict(shown.items()),
    "a dict": dict,
    "a copy": lambda shown: shown.copy(),
    "names": list,
    "more": lambda shown: shown | {},
}


@pytest.mark.parametrize("field", ["params", "buffers", "opt_state", "slots"])
@pytest.mark.parametrize("read", READS)
def test_values_that_were_trained_on_are_not_read(field, read):
    """Their tensors have the newest numbers: who goes back to the best gets the last."""
    state = trained(state_of(setup=af.ema(0.5)), 1)
    shown = getattr(state, field)
    READS[read](shown)
    after, _ = af.make_step(square)(state, INPUTS[:4])
    with pytest.raises(StateDonatedError, match="was passed to the step of update 1"):
        READS[read](shown)
    READS[read](getattr(after, field))


ENTRIES = {  # an entry of a state, and whether it follows the training
    "parameters": (lambda state: {"best": dict(state.params)}, True),
    "a buffer": (lambda state: [state.buffers["blocks.1.running_mean"]], True),
    "momentum": (lambda state: dict(state.opt_state), True),
    "a row": (lambda state: (1, state.params["head.weight"][1]), True),
    "copies": (lambda state: tree.clone(dict(state.params)), False),
    "one's own": (lambda _: {"mine": torch.ones(4), "none": torch.ones(0)}, False),
    "sparse": (lambda _: torch.eye(2).to_sparse(), False),
    "no tensors": (lambda _: {"best": 0.5}, False),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_follows_the_training_is_told(name):
    """It is one tensor with the state's, which may be meant; copies keep what they are."""
    make, follows = ENTRIES[name]
    state = trained(state_of(), 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", af.errors.AccelfnWarning)
        state = state.with_slot("mine", make(state))
    assert len(told) == follows
    tensors = tree.tensor_leaves(state.slots["mine"])
    before = [each.to_dense().clone() for each in tensors]
    trained(state, 2)
    after = [each.to_dense() for each in tensors]
    assert all(map(torch.equal, before, after)) == (not follows)


@af.transform
class InPlace:
    """Halves what is evaluated."""

    copies: bool = False

    def eval_params(self, params, slot, update):
        if self.copies:
            params = {name: each.clone() for name, each in params.items()}
        params["head.bias"].mul_(0.5)
        return params, slot


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_evaluated_is_not_written_into(size):
    """It is the state's own, and each evaluation would train it."""

    def fn(world, copies):
        setup = [af.shard_data(), af.wrap_ddp(), InPlace(copies=copies)]
        return af.evaluate(state_of(world, setup=af.chain(*setup)), DATA, square)

    with pytest.raises(
        StateError, match=r"eval_params of InPlace\(\) changed .*head\.bias"
    ):
        simulate(size, partial(fn, copies=False))
    assert simulate(size, partial(fn, copies=True)).results[0]["square"] > 0


# What is computed beside the model's forward pass.


def penalty(model):
    return sum(each.square().sum() for each in model.parameters())


def beside(model, batch):
    return square(model, batch) + penalty(model)


def in_aux(model, batch):
    return af.Loss(square(model, batch) * 4, 4, size=penalty(model))


def as_weight(model, batch):
    return af.Loss(square(model, batch) * 4, 4, size=(1.0, penalty(model)))


def in_dict(model, batch):
    return {"loss": square(model, batch), "size": penalty(model)}


@pytest.mark.parametrize("fn", [beside, in_aux, as_weight, in_dict])
@pytest.mark.parametrize("act", ["step", "evaluate"])
def test_what_split_parameters_say_is_not_taken_for_the_whole(fn, act):
    """A number of a part counts as one of all: the loss was that over the number of ranks."""
    if fn is in_dict and act == "step":
        fn = beside

    def acts(world, wrap):
        state = state_of(world, setup=af.chain(af.shard_data(), wrap))
        if act == "step":
            return af.make_step(fn)(state, next(iter(af.batches(state))))
        return af.evaluate(state, DATA, fn)

    with pytest.raises(
        LossError, match=r"returned a DTensor\. .* outside of the model's"
    ):
        simulate(2, partial(acts, wrap=af.wrap_fsdp()))
    simulate(2, partial(acts, wrap=af.wrap_ddp()))


def two_layers():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def scaled_signs(grad):
    return grad.sign() * grad.abs().mean()


def centred(grad):
    return grad - grad.mean(0, keepdim=True)


@af.transform
class Changed:
    """Changes each gradient by a function, as a map or by name."""

    fn: object
    maps: bool

    def grads(self, grads, slot, update):
        if self.maps:
            changed = grads.map(self.fn)
        else:
            made = {name: self.fn(each) for name, each in grads.tensors.items()}
            changed = grads.with_tensors(made)
        assert lying(changed) == lying(grads)
        return changed, slot


def lying(grads):
    """Return how gradients lie on the ranks, by name."""
    return {
        name: getattr(each, "placements", None) for name, each in grads.tensors.items()
    }


@given(
    fn=st.sampled_from([scaled_signs, centred]),
    maps=st.booleans(),
    size=st.integers(2, 3),
    clips=st.booleans(),
)
def test_gradients_that_a_transform_made_lie_as_they_did(fn, maps, size, clips):
    """Operators leave a DTensor as it is cheapest for them; the parameter's is split."""
    clip = [af.clip_grad_norm(0.1)] if clips else []

    def updated(world, wrap):
        changed = [Changed(fn=fn, maps=maps), *clip]
        setup = af.chain(af.shard_data(), wrap, *changed)
        state = state_of(world, model=two_layers, setup=setup)
        state, _ = af.make_step(square)(state, next(iter(af.batches(state))))
        return af.full_params(state)

    one = simulate(1, partial(updated, wrap=af.wrap_ddp())).results[0]
    for found in simulate(size, partial(updated, wrap=af.wrap_fsdp())).results:
        for name, expected in one.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


# Batches and orders.


@given(columns=st.integers(1, 3), batch_size=st.integers(1, 5))
def test_lockstep_takes_a_loaders_batch_as_it_is(columns, batch_size):
    """Of samples that are tuples a DataLoader makes a list, which is no micro-batches."""
    loader = DataLoader(TensorDataset(*[INPUTS] * columns), batch_size=batch_size)
    with af.World.single() as world:
        locked = [each.value for each in af.join_uneven(loader, world)]
    expected = list(loader)
    assert [len(each) for each in locked] == [columns] * len(expected)
    for one, two in zip(locked, expected, strict=True):
        assert isinstance(one, list)
        assert all(map(torch.equal, one, two))
    with af.World.single() as world:  # of others a list is what it was
        (batch,) = af.join_uneven([[INPUTS[:2], INPUTS[2:]]], world)
    assert len(batch.micro_batches) == 2


GENERATORS = {
    "numpy": np.random.permutation,
    "torch": lambda n: torch.randperm(n).tolist(),
    "Python": lambda n: random.sample(range(n), n),
}


@given(
    draws=st.sampled_from([*GENERATORS]), cut=st.integers(0, 5), seed=st.integers(0, 9)
)
def test_an_order_that_draws_is_the_same_when_it_is_asked_again(draws, cut, seed):
    """It draws by the seed and the epoch; a run that goes on sees each sample once an epoch."""
    data = af.Data(
        INPUTS, global_batch_size=4, order=lambda _seed, _epoch, n: GENERATORS[draws](n)
    )
    before = torch.get_rng_state()

    def read(cursor, count):
        state = state_of(data=data, seed=seed)
        found = []
        for number, batch in enumerate(af.batches(state, until_epoch=2)):
            if number >= cursor + count:
                break
            if number >= cursor:
                found += batch.indices.tolist()
        return found

    whole = read(0, 6)
    assert read(0, cut) + read(cut, 6) == whole
    assert sorted(whole[:12]) == sorted(whole[12:]) == list(range(12))
    assert whole[:12] != whole[12:]
    assert torch.equal(torch.get_rng_state(), before)


def test_an_order_of_a_generator_that_goes_on_is_refused():
    """It is another each time, and a resumed run has samples twice."""
    generator = np.random.default_rng(0)
    data = af.Data(
        INPUTS, global_batch_size=4, order=lambda *_: generator.permutation(12)
    )
    with pytest.raises(DataError, match="different orders when it was called twice"):
        next(iter(af.batches(state_of(data=data))))


IMAGE = torch.ones(3, 4)
LISTS = {  # a batch, and whether it is likely one of samples
    "images": ([IMAGE] * 12, True),
    "as many features as rows": ([IMAGE] * 3, False),
    "inputs, targets, a mask and weights": ([IMAGE] * 4, False),
    "a tuple": ((IMAGE,) * 12, False),
    "a tensor": (IMAGE, False),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_samples_is_told(name):
    """Of images the first dim is the channels: 12 of 3 would count for 3 samples."""
    batch, is_told = LISTS[name]
    state = af.TrainState.create(model=nn.Linear(4, 1), optimizer=SGD)
    step = af.make_step(lambda model, batch: model(batch[0]).mean())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", af.errors.AccelfnWarning)
        step(state, batch)
    expected = (
        ["This batch is a list of 12 tensors with 3 rows each"] if is_told else []
    )
    assert [str(each.message).partition(",")[0] for each in told] == expected


# What has no effect.


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.CrossEntropyLoss()])
def test_a_loss_of_torchs_is_no_loss_of_a_model(loss):
    """Be it a class, which nobody called."""
    with pytest.raises(af.errors.ArgumentError, match="a loss function of torch"):
        af.make_step(loss)


FALSE = torch.ones(()) < 0


@pytest.mark.parametrize(
    ("weight", "aux"),
    [
        (FALSE, {}),
        (np.int64(3), {}),
        (2, {"size": (1.0, 2.0, 3.0)}),
        (2, {"size": (1.0,)}),
        (2, {"size": FALSE}),
    ],
)
def test_totals_and_weights_are_numbers(weight, aux):
    """A truth counts for nothing that was meant, and a total has one weight."""
    with pytest.raises(LossError, match=r"af\.Loss\((weight|size)=.*expected"):
        af.Loss(torch.ones((), requires_grad=True), weight, **aux)
