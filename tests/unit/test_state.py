# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: a record that is given away, and says so wherever it is used after."""

from functools import partial

import attrs
import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.states import bits, values

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def loss(model, batch):
    return model(batch).square().mean()


STEP = af.make_step(loss)


def make(**options):
    """Return a state with buffers, optimizer state and a slot, one update old."""
    options = {
        "model": net,
        "optimizer": partial(torch.optim.Adam, lr=0.1),
        "data": af.Data(X, global_batch_size=4),
        "setup": af.ema(0.9),
        **options,
    }
    return STEP(af.TrainState.create(**options), X)[0]


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
    "value_and_grad": lambda state, _: af.value_and_grad(loss)(state, X),
    "save": lambda state, path: af.save(state, path / "saved"),
    "load": lambda state, path: af.load(state, path / "saved"),
    "evaluate": lambda state, _: af.evaluate(state, state.data, loss),
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
    """Gradients cannot be applied to, nor synchronised for, a donated state."""
    state = make()
    _, grads = af.value_and_grad(loss)(state, X)
    STEP(state, X)
    with pytest.raises(af.errors.StateDonatedError):
        af.apply_grads(state, grads)
    with pytest.raises(af.errors.StateDonatedError):
        af.sync_grads(state, grads)
    state = make(setup=af.local_sgd(sync_every=2))
    af.finalize(state)
    with pytest.raises(af.errors.StateDonatedError, match="state = af.finalize"):
        STEP(state, X)


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


def test_seen_though_donated():
    """What a donated state was is still shown, and what is no tensor still read."""
    state = make()
    STEP(state, X)
    assert "donated" in repr(state)
    assert (state.step, state.name, state.seed) == (1, "state", 0)


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
    _, grads = af.value_and_grad(loss)(state, X)
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


def test_optimizer_that_refuses_gradients_leaves_the_state():
    """One of torch's that raises before it changed anything costs no state."""
    sparse = partial(torch.optim.SparseAdam, lr=0.1)
    state = af.TrainState.create(model=net, optimizer=sparse)
    before = values(state)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            STEP(state, X)
        assert before == values(state)


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
        state = af.TrainState.create(
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
    state = af.TrainState.create(model=net, optimizer=partial(Refuses, lr=0.1))
    with pytest.raises(ZeroDivisionError):
        STEP(state, X)
    with pytest.raises(af.errors.StateDonatedError, match="may be partly updated"):
        _ = state.params


# Creating.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": "0"}, "seed='0'.*integer"),
        ({"seed": 1.0}, r"seed=1\.0.*integer"),
        ({"seed": True}, "seed=True.*integer"),
        ({"seed": None}, "seed=None.*integer"),
        ({"schedule": "cosine"}, r"schedule='cosine'.*af\.schedules"),
        ({"data": [X]}, r"data=list.*af\.Data"),
        ({"data": X}, r"data=Tensor.*af\.Data"),
        ({"world": 2}, "world=2"),
    ],
)
def test_bad_arguments(options, words):
    """An argument that can have no meaning is refused by name and value."""
    with pytest.raises(af.errors.ArgumentError, match=words):
        make(**options)


def test_seeds_of_any_size():
    """A seed is any integer; others draw other parameters."""
    drawn = [values(make(seed=seed))["params"] for seed in (-1, 0, 2**40, 2**100)]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


# Changing a record.


def test_with_slot_is_kept_by_a_step():
    """The user's own entry goes with the state, and into another setup."""
    state, _ = STEP(make().with_slot("mine", {"best": 0.5}), X)
    assert state.slots["mine"] == {"best": 0.5}
    assert state.with_setup(af.ema(0.5)).slots["mine"] == {"best": 0.5}


def test_with_slot_of_a_transform():
    """A transform's own slot cannot be set; the name is said."""
    with pytest.raises(
        af.errors.StateError, match=r"with_slot\('ema', .*belongs to the transform"
    ):
        make().with_slot("ema", 3)


@pytest.mark.parametrize("name", [3, None])
def test_with_slot_of_no_name(name):
    """A slot's name is a word."""
    with pytest.raises(af.errors.Error, match="with_slot"):
        make().with_slot(name, 1)


def test_transform_does_not_take_over_a_users_slot():
    """A transform named like an entry of the user's is refused, not handed that entry."""
    state = make(setup=None).with_slot("ema", 3)
    with pytest.raises(af.errors.Error, match="ema"):
        af.ema(0.9)(state)


def test_with_setup_keeps_slots_of_one_name():
    """Slots of transforms that stay are kept, of others dropped; the user's stay."""
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
    """An object of the user's, in a slot."""

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
