# SPDX-License-Identifier: Apache-2.0
"""Loading a part of a checkpoint, and parameters that are kept by their hash."""

import itertools
import shutil
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import (
    ArgumentError,
    CallError,
    CheckpointCorruptError,
    CheckpointError,
    StateDonatedError,
)
from accelfn.testing import simulate
from tests import checkpoints
from tests.checkpoints import FILE, STEP, X, damage, fresh, net, refused
from tests.internals import read_manifest
from tests.states import FIELDS, values


def made(**options):
    """Return a state two updates old, with an entry of the user's."""
    return checkpoints.made(seed=3, **options).with_slot("mine", torch.arange(3))


@pytest.fixture
def saved(tmp_path):
    """Return the directory of a saved state."""
    af.save(made(), tmp_path / "saved")
    return tmp_path / "saved"


def same(state, other, *names):
    """Whether fields are the same, bitwise."""
    left, right = values(state), values(other)
    return all(left[name] == right[name] for name in names)


HEADLESS = partial(net, head=False)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_fields(saved, count):
    """What is asked for is the checkpoint's, the rest the state's; averages begin with params."""
    state, whole = fresh().with_slot("mine", None), made()
    begun = state.with_params(whole.params)
    assert not same(begun, state, "slots")
    before = values(state)
    for only in itertools.combinations(FIELDS, count):
        loaded = af.load_part(state, saved, only=only)
        assert same(loaded.state, whole, *only)
        rest = {*FIELDS} - {*only}
        own = begun if "params" in only else state
        assert same(loaded.state, own, *rest & {"slots"})
        assert same(loaded.state, state, *rest - {"slots"})
        assert {name.partition(".")[0] for name in loaded.loaded} == {*only}
    assert before == values(state)


def test_a_head_that_is_new(tmp_path):
    """`missing="init"` leaves what the checkpoint lacks as it was, and names it."""
    whole, state = made(model=HEADLESS), fresh(seed=8)
    af.save(whole, tmp_path / "saved")
    ask = partial(af.load_part, state, tmp_path / "saved", only=("params",))
    for options in ({}, {"extra": "ignore"}):
        with refused(r"(?s)params.*missing 2\.weight"):
            ask(**options)
    loaded = ask(missing="init")
    for name, param in loaded.state.params.items():
        expected = state.params if name.startswith("2.") else whole.params
        assert torch.equal(expected[name], param)
    assert str(loaded) == "loaded 4 of 6\nmissing 2: params.2.weight, params.2.bias"
    with refused(r"(?s)slots.*missing emma"):
        af.load_part(state, tmp_path / "saved", only=("slots.emma",))


def test_a_head_that_is_gone_or_renamed(saved):
    """`extra="ignore"` leaves out what the state has no place for, and names it.

    A name that is missing is shown beside the nearest that is not expected.
    """
    state = fresh(model=HEADLESS)
    ask = partial(af.load_part, state, saved, only=("params", "slots.mine"))
    with refused(r"(?s)unexpected 2\.weight.*unexpected mine"):
        ask()
    with refused(r"unexpected 2\.weight"):
        ask(missing="init")
    loaded = ask(extra="ignore")
    assert loaded.unexpected == ("params.2.weight", "params.2.bias", "slots.mine")
    assert "2.weight" not in loaded.state.params
    assert "unexpected 3: params.2.weight" in str(loaded)

    def renamed():
        model = HEADLESS()
        model.add_module("2x", net()[2])
        return model

    with refused(r"missing 2x\.weight \(similar: 2\.weight"):
        af.load_part(fresh(model=renamed), saved, only=("params",))


def test_what_is_not_asked_for_may_differ(saved):
    """Other data or another optimizer is refused where its position or its state is asked for."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    state = fresh(optimizer=sgd, data=af.Data(X, global_batch_size=4))
    for only, words in (("opt_state", "Adam.*SGD"), ("cursor", "other data")):
        with refused(words):
            af.load_part(state, saved, only=("params", only))
    found = af.load_part(state, saved, only=("params", "step")).state
    assert same(found, made(), "params", "step")


ONLY = "expected names out of"
REFUSED = {
    "an unknown field": ({"only": ("weights",)}, ONLY),
    "a word of none": ({"only": "weights"}, ONLY),
    "a part of params": ({"only": ("params.0.weight",)}, ONLY),
    "a slot without a name": ({"only": ("slots.",)}, ONLY),
    "missing": ({"only": ("params",), "missing": "ignore"}, '"error" or "init"'),
    "extra": ({"only": ("params",), "extra": "init"}, '"error" or "ignore"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_words(saved, case):
    """An option that is none of its words is refused with those that are."""
    options, words = REFUSED[case]
    with refused(words, ArgumentError):
        af.load_part(fresh(), saved, **options)


@pytest.mark.parametrize("options", [{"only": ("params",)}, {"cast": True}])
def test_a_partial_load_as_it_was_written_before(saved, options):
    """`load` returns a state, whatever it is given; it says what loads a part."""
    with refused(r"write\s+af\.load_part\(state, directory", CallError):
        af.load(fresh(), saved, **options)


def test_a_donated_state(saved):
    """A state that was given to a step cannot say what to load into."""
    state = fresh()
    STEP(state, X)
    with pytest.raises(StateDonatedError):
        af.load_part(state, saved, only=("params",))


@pytest.mark.parametrize("size", [1, 2])
def test_whoever_reads_notices_a_change(size, tmp_path):
    """A bit of a trained value flipped: whichever call reads it refuses, on each rank."""
    saved = tmp_path / "step-00000002"
    af.save(made(), saved)
    damage(
        saved / FILE, read_manifest(saved).files[FILE].tensors["params.0.bias"].begin
    )

    def read(world):
        state = fresh(world=world)
        for call in (
            partial(af.load, state, saved),
            partial(af.load_part, state, saved, "params"),
            partial(af.CheckpointStore(tmp_path).restore, state),
        ):
            with pytest.raises(CheckpointCorruptError, match=FILE):
                call()

    simulate(size, read)


# Frozen parameters that are kept by their hash.


def frozen(start=0.5):
    """Return a model whose first layer is not trained."""
    model = net()
    nn.init.constant_(model[0].weight, start)
    model[0].requires_grad_(requires_grad=False)
    return model


def test_frozen_parameters_by_hash(tmp_path):
    """They are not written; a state that has the same is loaded as if they were, in its memory."""
    state = made(model=frozen)
    for how in ("write", "hash"):
        af.save(state, tmp_path / how, frozen=how)
    names = read_manifest(tmp_path / "hash").files[FILE].tensors
    assert "params.2.weight" in names
    assert not {"params.0.weight", "params.0.bias"} & names.keys()
    other = fresh(seed=3, model=frozen)
    whole, kept = (af.load(other, tmp_path / how) for how in ("write", "hash"))
    assert same(whole, kept, *FIELDS)
    part = af.load_part(other.with_slot("mine", 0), tmp_path / "hash", only=FIELDS)
    assert same(whole, part.state, *FIELDS)
    before = values(other)
    kept.params["0.weight"].data.add_(1)
    STEP(kept, X)
    assert before == values(other)


def test_frozen_parameters_that_are_others(tmp_path):
    """A state with other frozen values, or without them, is refused by name."""
    af.save(made(model=frozen), tmp_path / "saved", frozen="hash")
    other = fresh(seed=3, model=partial(frozen, 0.25))
    only = partial(af.load_part, only=("params",))
    for load in (af.load, only, partial(only, missing="init")):
        with refused(r"other values: 0\.weight\."):
            load(other, tmp_path / "saved")
    renamed = fresh(model=lambda: nn.Sequential(nn.Identity(), *net()))
    with refused(r"Missing: 0\.bias, 0\.weight"):
        af.load(renamed, tmp_path / "saved")
    assert af.load_part(other, tmp_path / "saved", only=("step",)).state.step == 2


def test_nothing_is_frozen(tmp_path):
    """Where all is trained, `frozen="hash"` writes the same files; another word is refused."""
    for how in ("write", "hash"):
        af.save(made(), tmp_path / how, frozen=how)
    for path in (tmp_path / "write").iterdir():
        assert path.read_bytes() == (tmp_path / "hash" / path.name).read_bytes()
    for call in (partial(af.save, made()), af.CheckpointStore):
        with refused('"write" or "hash"', ArgumentError):
            call(tmp_path / "other", frozen="skip")
    assert not (tmp_path / "other").exists()


def test_what_was_trained_is_written(tmp_path):
    """What `with_trainable` froze in mid-run has been trained: no hash is enough for it."""
    state = made().with_trainable(lambda name, _: name.startswith("2."))
    af.save(state, tmp_path / "saved", frozen="hash")
    assert not read_manifest(tmp_path / "saved").kept
    loaded = af.load(fresh(), tmp_path / "saved", allow="trainable")
    assert same(state, loaded, "params")


def test_what_is_not_finite_is_cast(tmp_path):
    """Infinity and NaN have their like in every float; a finite number that has not is told."""

    def having(values, dtype):
        model = net()
        model.register_buffer("table", torch.tensor(values, dtype=dtype))
        return model

    def loaded(values):
        af.save(fresh(model=partial(having, values, torch.float32)), tmp_path / "saved")
        state = fresh(model=partial(having, [0.0] * len(values), torch.float16))
        return af.load_part(state, tmp_path / "saved", only="buffers", cast=True).state

    found = loaded([torch.inf, torch.nan, 1.5]).buffers["table"]
    assert torch.equal(found[::2], torch.tensor([torch.inf, 1.5]).half())
    assert found[1].isnan()
    shutil.rmtree(tmp_path / "saved")
    with refused("table was saved as .* values too large for torch.float16"):
        loaded([1e10, 1.5])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_models_of_several_ranks_are_no_parts_of_one(tmp_path, size):
    """What ranks trained apart is not put together of rows of each, on however many ranks."""
    state = partial(fresh, model=partial(nn.Linear, 3, 3, bias=False))
    said = "on 2 ranks that had different .*params.*Load it on 2 ranks with its setup"

    def save(world):
        apart = state(setup=af.local_sgd(sync_every=8), world=world)
        af.save(STEP(apart, X + world.rank)[0], tmp_path / "apart")

    def load(world):
        split = state(setup=af.wrap_fsdp(), world=world)
        with pytest.raises(CheckpointError, match=said):
            af.load_part(split, tmp_path / "apart", ["params"], extra="ignore")

    simulate(2, save)
    simulate(size, load)
