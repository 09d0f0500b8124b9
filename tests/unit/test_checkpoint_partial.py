# SPDX-License-Identifier: Apache-2.0
"""Loading a part of a checkpoint, and parameters that are kept by their hash."""

import itertools
import shutil
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, CallError, CheckpointError, StateDonatedError
from accelfn.testing import simulate
from tests.golden.make import held
from tests.internals import read_manifest

FIELDS = (
    *("params", "buffers", "opt_state", "slots"),
    *("step", "num_skipped", "cursor", "seed"),
)
X = torch.linspace(-1, 1, 24).reshape(8, 3)
STEP = af.make_step(lambda model, batch: model(batch).square().mean())


def net(width=4, *, head=True, frozen=False, start=None):
    layers = [nn.Linear(3, width), nn.BatchNorm1d(width)]
    made = nn.Sequential(*layers, *([nn.Linear(width, 1)] if head else []))
    if start is not None:
        nn.init.constant_(made[0].weight, start)
    if frozen:
        made[0].requires_grad_(requires_grad=False)
    return made


def fresh(**options):
    """Return a state before its first update."""
    options = {
        "model": net,
        "optimizer": partial(torch.optim.Adam, lr=0.1),
        "setup": af.ema(0.9),
        "data": af.Data(X, global_batch_size=3),
        **options,
    }
    return af.TrainState.create(**options)


def made(**options):
    """Return a state two updates old, with an entry of the user's."""
    state = fresh(seed=3, **options)
    for _, batch in zip(range(2), af.batches(state), strict=False):
        state, _ = STEP(state, batch)
    return state.with_slot("mine", torch.arange(3))


@pytest.fixture
def saved(tmp_path):
    """Return the directory of a saved state."""
    af.save(made(), tmp_path / "saved")
    return tmp_path / "saved"


def same(state, other, *names):
    """Whether fields are the same, bitwise."""
    left, right = held(state), held(other)
    return all(left[name] == right[name] for name in names)


@pytest.mark.parametrize("count", range(len(FIELDS) + 1))
def test_any_fields(saved, count):
    """What is asked for is the checkpoint's, the rest the state's; averages begin with params."""
    state, whole = fresh().with_slot("mine", None), made()
    begun = state.with_params(whole.params)
    assert not same(begun, state, "slots")
    before = held(state)
    for only in itertools.combinations(FIELDS, count):
        loaded = af.load_part(state, saved, only=only)
        assert same(loaded.state, whole, *only)
        rest = set(FIELDS) - set(only)
        assert same(
            loaded.state, begun if "params" in only else state, *rest & {"slots"}
        )
        assert same(loaded.state, state, *rest - {"slots"})
        assert {name.partition(".")[0] for name in loaded.loaded} == set(only)
    assert before == held(state)


def test_a_slot_that_neither_has(saved):
    """A slot that is asked for and is nowhere is missing, not passed over."""
    ask = partial(af.load_part, fresh(), saved, only=("slots.emma",))
    with pytest.raises(CheckpointError, match=r"(?s)slots.*missing emma"):
        ask()
    assert ask(missing="init").missing == ("slots.emma",)


def test_a_head_that_is_new(tmp_path):
    """`missing="init"` leaves what the checkpoint lacks as it was, and names it."""
    af.save(made(model=partial(net, head=False)), tmp_path / "saved")
    state = fresh(seed=8)
    ask = partial(af.load_part, state, tmp_path / "saved", only=("params",))
    with pytest.raises(CheckpointError, match=r"(?s)params.*missing 2\.weight"):
        ask()
    with pytest.raises(CheckpointError, match=r"missing 2\.weight"):
        ask(extra="ignore")
    loaded = ask(missing="init")
    assert loaded.missing == ("params.2.weight", "params.2.bias")
    whole = made(model=partial(net, head=False))
    for name, param in loaded.state.params.items():
        expected = state.params if name.startswith("2.") else whole.params
        assert torch.equal(expected[name], param)
    assert str(loaded) == "loaded 4 of 6\nmissing 2: params.2.weight, params.2.bias"


def test_a_head_that_is_gone(saved):
    """`extra="ignore"` leaves out what the state has no place for, and names it."""
    state = fresh(model=partial(net, head=False))
    ask = partial(af.load_part, state, saved, only=("params", "slots.mine"))
    with pytest.raises(CheckpointError) as caught:
        ask()
    assert "unexpected 2.weight" in str(caught.value)
    assert "unexpected mine" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"unexpected 2\.weight"):
        ask(missing="init")
    loaded = ask(extra="ignore")
    assert loaded.unexpected == ("params.2.weight", "params.2.bias", "slots.mine")
    assert loaded.missing == ()
    assert "2.weight" not in loaded.state.params
    assert "unexpected 3: params.2.weight" in str(loaded)


def test_a_renamed_parameter(saved):
    """A name that is missing is shown beside the nearest that is not expected."""

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            inner = net()
            self.add_module("0", inner[0])
            self.add_module("1", inner[1])
            self.add_module("2x", inner[2])

    with pytest.raises(
        CheckpointError, match=r"missing 2x\.weight \(similar: 2\.weight"
    ):
        af.load_part(fresh(model=Renamed), saved, only=("params",))


def test_cast(saved):
    """`cast=True` converts to the state's dtypes, and says what; without it, refused."""
    state = fresh(model=lambda: net().to(torch.bfloat16))
    ask = partial(af.load_part, state, saved, only=("params", "buffers"))
    with pytest.raises(CheckpointError, match=r"(?s)params.*bfloat16.*buffers"):
        ask()
    loaded, whole = ask(cast=True), made()
    for name, param in loaded.state.params.items():
        assert torch.equal(whole.params[name].to(torch.bfloat16), param)
    assert "params.0.weight" in loaded.cast
    assert "buffers.1.num_batches_tracked" not in loaded.cast
    assert "cast params.0.weight: saved as torch.float32, expected" in str(loaded)


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.float32, torch.int64),
        (torch.float64, torch.bool),
        (torch.bfloat16, torch.uint8),
        (torch.complex64, torch.float64),
        (torch.complex64, torch.int32),
    ],
)
def test_cast_to_a_kind_that_has_less(tmp_path, dtype, other):
    """`cast=True` makes no integers of floats and no real numbers of complex ones."""

    def having(dtype):
        made = net()
        made.register_buffer("table", torch.ones(2, dtype=dtype))
        return made

    af.save(fresh(model=partial(having, dtype)), tmp_path / "saved")
    state = fresh(model=partial(having, other))
    for only in ("buffers", FIELDS[:2]):
        with pytest.raises(CheckpointError, match=rf"table saved as {dtype}"):
            af.load_part(state, tmp_path / "saved", only=only, cast=True)


def test_opt_state_of_another_optimizer(saved):
    """It is refused, unless it is not asked for."""
    state = fresh(optimizer=partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(CheckpointError, match=r"Adam.*SGD"):
        af.load_part(state, saved, only=("params", "opt_state"))
    assert same(af.load_part(state, saved, only=("params",)).state, made(), "params")


def test_a_position_in_other_data(saved):
    """It is refused, unless it is allowed or not asked for."""
    state = fresh(data=af.Data(X, global_batch_size=4))
    with pytest.raises(CheckpointError, match="other data"):
        af.load_part(state, saved, only=("cursor",))
    loaded = af.load_part(state, saved, only=("cursor",), allow=("batch_size",))
    assert same(loaded.state, made(), "cursor")
    assert af.load_part(state, saved, only=("step",)).state.step == 2


REFUSED = {
    "an unknown field": ({"only": ("weights",)}, "expected names out of"),
    "a word of none": ({"only": "weights"}, "expected names out of"),
    "a part of params": ({"only": ("params.0.weight",)}, "expected names out of"),
    "a slot without a name": ({"only": ("slots.",)}, "expected names out of"),
    "missing": ({"only": ("params",), "missing": "ignore"}, '"error" or "init"'),
    "extra": ({"only": ("params",), "extra": "init"}, '"error" or "ignore"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_words(saved, case):
    """An option that is none of its words is refused with those that are."""
    options, words = REFUSED[case]
    with pytest.raises(ArgumentError, match=words):
        af.load_part(fresh(), saved, **options)


@pytest.mark.parametrize(
    "options", [{"only": ("params",)}, {"missing": "init"}, {"cast": True}]
)
def test_a_partial_load_as_it_was_written_before(saved, options):
    """`load` returns a state, whatever it is given; it says what loads a part."""
    with pytest.raises(CallError, match=r"write\s+af\.load_part\(state, directory"):
        af.load(fresh(), saved, **options)


def test_a_donated_state(saved):
    """A state that was given to a step cannot say what to load into."""
    state = fresh()
    STEP(state, X)
    with pytest.raises(StateDonatedError):
        af.load_part(state, saved, only=("params",))


# Frozen parameters that are kept by their hash.

FROZEN = partial(net, frozen=True, start=0.5)


def test_frozen_parameters_by_hash(tmp_path):
    """They are not written; a state that has the same is loaded as if they were."""
    state = made(model=FROZEN)
    for frozen in ("write", "hash"):
        af.save(state, tmp_path / frozen, frozen=frozen)
    names = read_manifest(tmp_path / "hash").files["rank-00000.safetensors"].tensors
    assert "params.2.weight" in names
    assert not {"params.0.weight", "params.0.bias"} & names.keys()
    other = fresh(seed=3, model=FROZEN)
    whole, kept = (af.load(other, tmp_path / frozen) for frozen in ("write", "hash"))
    assert same(whole, kept, *FIELDS)
    part = af.load_part(other.with_slot("mine", 0), tmp_path / "hash", only=FIELDS)
    assert same(whole, part.state, *FIELDS)
    before = held(other)
    STEP(kept, X)
    assert before == held(other)


def test_frozen_parameters_that_are_others(tmp_path):
    """A state with other frozen values, or without them, is refused by name."""
    af.save(made(model=FROZEN), tmp_path / "saved", frozen="hash")
    other = fresh(seed=3, model=partial(net, frozen=True, start=0.25))
    only = partial(af.load_part, only=("params",))
    for load in (af.load, only, partial(only, missing="init")):
        with pytest.raises(CheckpointError, match=r"other values: 0\.weight\."):
            load(other, tmp_path / "saved")
    renamed = fresh(model=lambda: nn.Sequential(nn.Identity(), *net()))
    with pytest.raises(CheckpointError, match=r"Missing: 0\.bias, 0\.weight"):
        af.load(renamed, tmp_path / "saved")
    assert af.load_part(other, tmp_path / "saved", only=("step",)).state.step == 2


def test_nothing_is_frozen(tmp_path):
    """Where all is trained, `frozen="hash"` writes the same files."""
    for frozen in ("write", "hash"):
        af.save(made(), tmp_path / frozen, frozen=frozen)
    for path in (tmp_path / "write").iterdir():
        assert path.read_bytes() == (tmp_path / "hash" / path.name).read_bytes()


def test_another_word_for_frozen(tmp_path):
    """It is refused before anything is written, by a store when it is made."""
    with pytest.raises(ArgumentError, match='"write" or "hash"'):
        af.save(made(), tmp_path / "saved", frozen="skip")
    with pytest.raises(ArgumentError, match='"write" or "hash"'):
        af.CheckpointStore(tmp_path / "runs", frozen="skip")
    assert list(tmp_path.iterdir()) == []


def test_what_was_trained_is_written(tmp_path):
    """What `with_trainable` froze in mid-run has been trained: no hash is enough for it."""
    state = made().with_trainable(lambda name, _: name.startswith("2."))
    af.save(state, tmp_path / "saved", frozen="hash")
    assert not read_manifest(tmp_path / "saved").kept
    loaded = af.load(fresh(), tmp_path / "saved", allow="trainable")
    assert same(state, loaded, "params")


def test_what_was_kept_by_hash_is_its_own(tmp_path):
    """A loaded state has memory of its own for a parameter that the given one had."""
    af.save(made(model=FROZEN), tmp_path / "saved", frozen="hash")
    other = fresh(seed=3, model=FROZEN)
    loaded = af.load(other, tmp_path / "saved")
    loaded.params["0.weight"].data.add_(1)
    assert torch.equal(other.params["0.weight"], torch.full((4, 3), 0.5))


def test_what_is_not_finite_is_cast(tmp_path):
    """Infinity and NaN have their like in every float; a finite number that has not is told."""

    def having(values, dtype):
        made = net()
        made.register_buffer("table", torch.tensor(values, dtype=dtype))
        return made

    def loaded(values):
        af.save(fresh(model=partial(having, values, torch.float32)), tmp_path / "saved")
        state = fresh(model=partial(having, [0.0] * len(values), torch.float16))
        return af.load_part(state, tmp_path / "saved", only="buffers", cast=True).state

    found = loaded([torch.inf, torch.nan, 1.5]).buffers["table"]
    assert torch.equal(found[::2], torch.tensor([torch.inf, 1.5]).half())
    assert found[1].isnan()
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(
        CheckpointError,
        match="table was saved as .* values too large for torch.float16",
    ):
        loaded([1e10, 1.5])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_models_of_several_ranks_are_no_parts_of_one(tmp_path, size):
    """What ranks trained apart is not put together of rows of each, on however many ranks."""
    step = af.make_step(lambda model, x: (model(x) - 1).square().mean())

    def make(world, way):
        return af.TrainState.create(
            model=lambda: torch.nn.Linear(4, 4, bias=False),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=af.Data(torch.linspace(-1, 1, 64).reshape(16, 4), global_batch_size=4),
            setup=af.chain(af.shard_data(), way),
            world=world,
        )

    def save(world):
        state = make(world, af.local_sgd(sync_every=8))
        state, _ = step(state, next(iter(af.batches(state))))
        af.save(state, tmp_path / "apart")

    def load(world):
        state = make(world, af.wrap_fsdp())
        said = (
            r"on 2 ranks that had different .*params.*Load it on 2 ranks with its setup"
        )
        with pytest.raises(CheckpointError, match=said):
            af.load_part(state, tmp_path / "apart", ["params"], extra="ignore")

    simulate(2, save)
    simulate(size, load)
