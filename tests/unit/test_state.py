# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: what it lends and keeps, and how it says that it was given away."""

import math
import random
from contextlib import suppress
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.errors import (
    ArgumentError,
    CallError,
    LossError,
    StateDonatedError,
    StateError,
)
from accelfn.testing import simulate
from tests.internals import tree
from tests.states import STEP, bits, create, recorded_warnings, square

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def make(**options):
    """Return a state with buffers, optimizer state and a slot, one update old."""
    options = {
        "model": net,
        "optimizer": partial(torch.optim.Adam, lr=0.1),
        "data": af.Data(X, global_batch_size=4),
        "setup": af.ema(0.9),
        **options,
    }
    return STEP(create(**options), X)[0]


def bound(state, _):
    """Return a name of a module bound to the state."""
    with af.borrow_model(state) as model:
        return type(model).__name__


def is_bias(name, _):
    return name.endswith("bias")


# What a donated state refuses.

USES = {
    "step": lambda state, _: STEP(state, X),
    "step with donate=False": lambda state, _: STEP(state, X, donate=False),
    "value_and_grad": lambda state, _: af.value_and_grad(square)(state, X),
    "agree": lambda state, _: af.assert_replicas_agree(state),
    "save": lambda state, path: af.save(state, path / "saved"),
    "load": lambda state, path: af.load(state, path / "saved"),
    "evaluate": lambda state, _: af.evaluate(state, state.data, square),
    "predict": lambda state, _: list(af.predict(state, state.data, lambda m, b: m(b))),
    "params": lambda state, _: state.params,
    "buffers": lambda state, _: state.buffers,
    "opt_state": lambda state, _: state.opt_state,
    "slots": lambda state, _: state.slots,
    "copy": lambda state, _: state.copy(),
    "with_params": lambda state, _: state.with_params({}),
    "with_slot": lambda state, _: state.with_slot("mine", 1),
    "with_setup": lambda state, _: state.with_setup(af.identity()),
    "with_trainable": lambda state, _: state.with_trainable(is_bias),
    "setup(state)": lambda state, _: af.identity()(state),
    "bind": bound,
    "frozen": lambda state, _: af.snapshot_model(state),
    "eval_params": lambda state, _: af.eval_params(state),
    "finalize": lambda state, _: af.finalize(state),
    "build": lambda state, _: af.prepare_engine(state),
}


@pytest.mark.parametrize("use", USES)
def test_donated_state(use, tmp_path):
    """Each use of a donated state says at which update, and to copy it before."""
    state = make()
    STEP(state, X)
    with pytest.raises(
        af.errors.StateDonatedError, match=r"update 1\b.*copy\(\)"
    ) as caught:
        USES[use](state, tmp_path)
    assert isinstance(caught.value, RuntimeError)
    assert list(tmp_path.iterdir()) == []


def test_donated_state_and_its_gradients():
    """Gradients cannot be applied to a donated state; what is no tensor is still shown."""
    state = make()
    _, grads = af.value_and_grad(square)(state, X)
    STEP(state, X)
    with pytest.raises(af.errors.StateDonatedError):
        af.apply_grads(state, grads)
    with pytest.raises(af.errors.StateDonatedError):
        af.sync_grads(state, grads)
    state = make(setup=af.local_sgd(sync_every=2))
    af.finalize(state)
    with pytest.raises(af.errors.StateDonatedError, match="state = af.finalize"):
        STEP(state, X)
    state = make()
    STEP(state, X)
    assert "donated" in repr(state)
    assert (state.step, state.name, state.seed) == (1, "state", 0)


KIN = {
    "with_slot": lambda state: state.with_slot("mine", 1),
    "with_params": lambda state: state.with_params(dict(state.params)),
    "with_setup": lambda state: state.with_setup(af.identity()),
    "with_trainable": lambda state: state.with_trainable(is_bias),
    "setup(state)": af.clip_grad_norm(1.0),
    "build": af.prepare_engine,
    "evolve": lambda state: attrs.evolve(state, seed=3),
}


@pytest.mark.parametrize("kin", KIN)
@pytest.mark.parametrize("first", [0, 1])
def test_records_that_share_tensors_go_together(kin, first):
    """A step on one record donates all that share its tensors, whichever it is."""
    state = make()
    records = [state, KIN[kin](state)]
    STEP(records[first], X)
    for record in records:
        with pytest.raises(af.errors.StateDonatedError, match="update 1"):
            _ = record.params


# An update that was interrupted.


def test_gradients_that_were_begun_with_are_given_away():
    """They may be divided already where a transform's `grads` raises, so nobody has them."""
    raised = []

    @af.transform
    class BreaksOnce:
        def grads(self, grads, slot, update):
            if not raised:
                raised.append(ZeroDivisionError())
                raise raised[0]
            return grads, slot

    state = make().with_setup(BreaksOnce())
    _, grads = af.value_and_grad(square)(state, X)
    with pytest.raises(ZeroDivisionError):
        af.apply_grads(state, grads)
    with pytest.raises(af.errors.GradsError, match="passed to"):
        af.apply_grads(state, grads)
    assert len(state.params) > 0  # which nothing has changed


def test_a_transform_is_told_which_state_is_before():
    """`update.state` has no tensors behind an update; the first argument has them."""

    @af.transform
    class ReadsBefore:
        def after_update(self, state, slot, update):
            assert update.state.step + 1 == state.step
            assert len(state.params) == len(update.state.params)
            return state, slot

    with pytest.raises(af.errors.StateDonatedError) as caught:
        STEP(make().with_setup(ReadsBefore()), X)
    (note,) = caught.value.__notes__
    assert "use the state that is the first argument. update.state is" in note


@pytest.mark.parametrize(
    ("options", "device", "is_kept"),
    [
        ({}, "cpu", True),
        ({}, "meta", False),
        ({"foreach": False}, "meta", True),
        ({"foreach": True}, "cpu", False),
        ({"fused": True}, "cpu", False),
    ],
)
def test_kernels_on_lists_of_tensors_may_have_changed_the_state(
    options, device, is_kept
):
    """What they write torch does not count; off the CPU they are torch's default."""

    def fn(world):
        state = create(
            model=lambda: nn.Embedding(4, 2, sparse=True),
            optimizer=partial(torch.optim.Adam, lr=0.1, **options),
            world=world,
        )
        step = af.make_step(lambda model, rows: af.Loss(model(rows).sum(), 1))
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            step(state, torch.zeros(3, dtype=torch.long, device=world.device))
        return not state.lease.is_over

    assert list(simulate(1, fn, device=device)) == [is_kept]


class Refuses(torch.optim.SGD):
    """An optimizer that raises at once, of which only its author knows that."""

    def step(self, closure=None):
        raise ZeroDivisionError


def test_optimizer_that_nobody_knows_may_have_changed_the_state():
    """Who is not torch's may have written where torch does not count; the text says so."""
    state = create(model=net, optimizer=partial(Refuses, lr=0.1))
    with pytest.raises(ZeroDivisionError):
        STEP(state, X)
    with pytest.raises(af.errors.StateDonatedError, match="may be partly updated"):
        _ = state.params


# Creating.


# Changing a record.


def test_with_slot_is_kept_by_a_step():
    """The user's own entry stays through steps and setups, and is apart from transforms' slots."""
    state, _ = STEP(make().with_slot("mine", {"best": 0.5}), X)
    assert state.slots["mine"] == {"best": 0.5}
    assert state.with_setup(af.ema(0.5)).slots["mine"] == {"best": 0.5}
    with pytest.raises(
        af.errors.StateError, match=r"with_slot\('ema', .*belongs to the transform"
    ):
        make().with_slot("ema", 3)
    state = make(setup=None).with_slot("ema", 3)
    with pytest.raises(af.errors.Error, match="ema"):
        af.ema(0.9)(state)
    state = make().with_slot("mine", 1)
    kept = state.with_setup(af.chain(af.clip_grad_norm(1.0), af.ema(0.5)))
    assert bits(state.slots) == bits(kept.slots)
    assert list(state.with_setup(af.chain()).slots) == ["mine"]
    assert list(state.slots) == ["ema", "mine"]


PARAMS = {
    "missing": lambda p: {n: t for n, t in p.items() if n != "0.bias"},
    "unknown": lambda p: {**p, "extra": X},
    "shape": lambda p: {**p, "0.bias": torch.zeros(7)},
    "dtype": lambda p: {**p, "0.bias": p["0.bias"].double()},
    "meta": lambda p: {**p, "0.bias": p["0.bias"].to("meta")},
    "number": lambda p: {**p, "0.bias": 3.0},
}


@pytest.mark.parametrize("case", PARAMS)
def test_with_params_of_another_model(case):
    """Parameters that are not the model's are refused, the first that differs named."""
    state = make()
    wrong = PARAMS[case](dict(state.params))
    with pytest.raises(af.errors.StateError, match=r"with_params.*(0\.bias|extra)"):
        state.with_params(wrong)


class Box:
    def __init__(self):
        self.seen = [[0]]

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def test_a_copy_keeps_what_is_one_tensor():
    """A slot that is a parameter follows it after a copy, too."""
    state = make()
    name = next(iter(state.params))
    mine = {"same": state.params[name], "objects": [Box()]}
    with pytest.warns(af.errors.AccelfnWarning, match="will also change this entry"):
        state = state.with_slot("mine", mine)
    copied = state.copy()
    assert copied.slots["mine"]["same"] is copied.params[name]
    assert copied.params[name] is not state.params[name]
    one, two = (each.slots["mine"]["objects"][0] for each in (state, copied))
    assert one is not two
    two.seen[0].append(1)
    assert one.seen == [[0]]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_after_the_block_it_is_empty(error):
    """The module holds nothing, and says what to write; hooks and modes reach no step."""
    state, witness = make(setup=None), make(setup=None)
    before = bits(state.params), bits(state.buffers)
    with suppress(ZeroDivisionError), af.borrow_model(state) as model:
        model.eval().requires_grad_(requires_grad=False)
        model[0].register_forward_hook(lambda *_: torch.zeros(8, 4))
        if error:
            raise error
    left = [*model.parameters(), *model.buffers()]
    assert {(0, 0)} == {(t.numel(), t.untyped_storage().nbytes()) for t in left}
    for called in (model, *model):
        words = r"comes from af\.borrow_model.*has ended"
        with pytest.raises(StateError, match=words):
            called(X)
    assert before == (bits(state.params), bits(state.buffers))
    assert bits(STEP(witness, X)[0].params) == bits(STEP(state, X)[0].params)


class Shared(nn.Linear):
    """A layer with a parameter and a buffer of two names."""

    def __init__(self):
        super().__init__(2, 2)
        self.table = self.twin = nn.Parameter(torch.ones(2))
        self.register_buffer("buffer", torch.ones(2))
        self.register_buffer("alias", self.buffer)


VALUES = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
PUTS = {
    "weight": lambda m: setattr(m.weight, "data", torch.zeros(2, 2)),
    "bias": lambda m: setattr(m, "bias", nn.Parameter(torch.zeros(2))),
    "weight, bias": lambda m: m.load_state_dict(VALUES, strict=False, assign=True),
    "table": lambda m: setattr(m, "table", nn.Parameter(torch.zeros(2))),
    "twin": lambda m: setattr(m, "twin", nn.Parameter(torch.zeros(2))),
    "buffer": lambda m: setattr(m, "buffer", torch.zeros(2)),
    "alias": lambda m: setattr(m, "alias", torch.zeros(2)),
}


@pytest.mark.parametrize("names", PUTS)
def test_what_is_put_in_the_place_of_a_lent_tensor_is_refused(names):
    """Under any name: the state keeps its own. What is written into that stays."""
    state = create(model=Shared)
    words = rf"replaced the tensors {names}, but the state keeps.* state\.with_params"
    with pytest.raises(StateError, match=words), af.borrow_model(state) as module:
        PUTS[names](module)
    with af.borrow_model(state) as module, torch.no_grad():
        module.weight.zero_()
    assert not state.params["weight"].any()
    with af.borrow_model(state) as module:  # another kind is a look
        module.double()
        module.bias = None


@pytest.mark.parametrize(
    "call",
    [
        lambda state, **given: af.borrow_model(state, **given).__enter__(),
        af.snapshot_model,
        af.full_params,
        lambda state, **given: af.export_model(state, "nowhere", **given),
    ],
    ids=["bind", "frozen", "full_params", "export_model"],
)
def test_where_parameters_are_taken_is_one_word(call):
    """Another word, and the one of before, are refused with what to write."""
    with pytest.raises(ArgumentError, match=r'expected "train" or "eval"'):
        call(make(setup=None), at="raw")
    with pytest.raises(CallError, match='at="train" instead of raw=True'):
        call(make(setup=None), raw=True)


def test_a_module_that_judges_in_a_loss_stays_until_the_backward_pass():
    """One that was lent for less is refused; a frozen one judges."""
    state, other = make(setup=None), make(setup=None, seed=1)

    def judged(model, batch):
        with af.borrow_model(other) as judge:
            return (model(batch) * judge(batch)).mean()

    with pytest.raises(
        LossError, match=r"ended before the backward.*af\.snapshot_model"
    ):
        af.make_step(judged)(state, X)
    _, metrics = af.make_step(
        lambda model, batch: (model(batch) * af.snapshot_model(other)(batch)).mean()
    )(state, X)
    assert math.isfinite(metrics["loss"])


def test_params_go_into_torch_func():
    """`torch.func.grad` and `tree_map` take the mapping, and give the gradients of a step."""
    inputs, module = torch.eye(2), nn.Linear(2, 2)
    state = af.TrainState.create(
        model=lambda: nn.Linear(2, 2), optimizer=partial(torch.optim.SGD, lr=0.1)
    )

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).square().mean()

    found = torch.func.grad(loss)(state.params, inputs)
    _, grads = af.value_and_grad(square)(state, inputs)
    assert found.keys() == grads.tensors.keys()
    for name, tensor in grads.tensors.items():
        torch.testing.assert_close(found[name], tensor)
    doubled = tree_map(lambda p: 2 * p, state.params)
    assert type(doubled) is dict
    assert all(torch.equal(doubled[n], 2 * p) for n, p in state.params.items())
    af.apply_grads(state, grads)


INPUTS = torch.linspace(-1, 1, 48).reshape(12, 4)
DATA = af.Data(INPUTS, global_batch_size=4)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.head = nn.Linear(4, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def trained(state, updates):
    for batch in af.batches(state, until_epoch=updates):
        state, _ = STEP(state, batch)
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
    after, _ = STEP(state, INPUTS[:4])
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
    with recorded_warnings() as told:
        state = state.with_slot("mine", make(state))
    assert len(told) == follows
    tensors = tree.tensor_leaves(state.slots["mine"])
    before = [each.to_dense().clone() for each in tensors]
    trained(state, 2)
    after = [each.to_dense() for each in tensors]
    assert all(map(torch.equal, before, after)) == (not follows)


@af.transform
class InPlace:
    copies: bool = False

    def eval_params(self, params, slot, update):
        if self.copies:
            params = {name: each.clone() for name, each in params.items()}
        params["head.bias"].mul_(0.5)
        return params, slot


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
state_of = partial(create, model=Blocks, optimizer=MOMENTUM, data=DATA)


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_evaluated_is_not_written_into(size):
    """It is the state's own, and each evaluation would train it."""

    def fn(world, copies):
        setup = [af.shard_data(), af.wrap_ddp(), InPlace(copies=copies)]
        return af.evaluate(state_of(world=world, setup=af.chain(*setup)), DATA, square)

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
        state = state_of(world=world, setup=af.chain(af.shard_data(), wrap))
        if act == "step":
            return af.make_step(fn)(state, next(iter(af.batches(state))))
        return af.evaluate(state, DATA, fn)

    with pytest.raises(
        LossError, match=r"returned a DTensor\. .* outside of the model's"
    ):
        simulate(2, partial(acts, wrap=af.wrap_fsdp()))
    simulate(2, partial(acts, wrap=af.wrap_ddp()))


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
        state = state_of(
            world=world,
            model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)),
            setup=setup,
        )
        state, _ = STEP(state, next(iter(af.batches(state))))
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
    state = create(model=nn.Linear(4, 1))
    step = af.make_step(lambda model, batch: model(batch[0]).mean())
    with recorded_warnings() as told:
        step(state, batch)
    expected = (
        ["This batch is a list of 12 tensors with 3 rows each"] if is_told else []
    )
    assert [str(each.message).partition(",")[0] for each in told] == expected
