# SPDX-License-Identifier: Apache-2.0
"""What runs and is likely not meant is told: mistakes that passed in silence."""

import copy
import json
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import AccelfnWarning, CallError
from accelfn.testing import simulate
from tests.internals import ReadOnly
from tests.states import SGD, STEP, create, linear_state, recorded_warnings, square

INPUTS = torch.linspace(-1, 1, 24).reshape(12, 2)
in_silence = partial(warnings.catch_warnings, action="error")


def state_of(model=lambda: nn.Linear(2, 2), **options):
    return create(
        model=model, **{"data": af.Data(INPUTS, global_batch_size=4), **options}
    )


class Scaled(nn.Module):
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
        with pytest.warns(AccelfnWarning, match=r"shapes \[\(\)\] that do not belong"):
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
    with pytest.warns(AccelfnWarning, match=r"use model\.parameters\(\) of the loss"):
        compute(state, INPUTS)


def test_what_reads_a_frozen_model_is_not_told():
    """Nor a loss through inputs that have a gradient."""
    state, judge = state_of(), af.snapshot_model(linear_state(2, 2))

    def loss(model, batch):
        inputs = batch.clone().requires_grad_()
        return judge(model(inputs)).square().mean()

    with in_silence():
        af.value_and_grad(loss)(state, INPUTS)


class Noting(nn.Module):
    """Notes a number in each pass, which becomes another."""

    def __init__(self, first, become):
        super().__init__()
        self.linear, self.become = nn.Linear(2, 2), become
        self.noted = copy.deepcopy(first)

    def forward(self, inputs):
        self.noted = self.become(self.noted)
        return self.linear(inputs)


NOTES = {  # what there is at first, what it becomes, and whether that counts
    "of passes": (0, lambda was: was + 1, True),
    "down": (100.0, lambda was: was - 0.1, True),
    "a decay": (1.0, lambda was: was * 0.9, True),
    "what was not there": (None, lambda was: (was or 0) + 4, True),
    "a length": (0, lambda _: 4, False),
    "a length that varies": (0, lambda was: (7 * was + 4) % 5, False),
    "nothing": (3, lambda was: was, False),
    "that it began": (0, lambda _: 1, False),
    "a flag": (False, lambda was: not was, False),
    "no number": (math.nan, lambda was: was + 1, False),
    "a number that goes": (3, lambda _: None, False),
    "a history": ([], lambda was: [*was, 1], True),
    "a number in a dict": ({"n": 1}, lambda was: {"n": 2 * was["n"]}, True),
    "what a dict has": (
        {"n": 1, "last": None},
        lambda was: {**was, "last": "x"},
        False,
    ),
    "a list of the last pass": ([], lambda _: [1, 2], False),
    "a tensor": (torch.tensor(0), lambda was: was + 1, True),
    "a mean in a tensor": (torch.ones(2), lambda was: was * 0.9 + torch.rand(2), False),
    "a mean in place": (torch.zeros(2), lambda was: was.mul_(0.9).add_(1), True),
    "a complex mean": (torch.zeros(3) * 1j, lambda was: was.mul_(0.9).add_(1), True),
    "a tensor of the last pass": (None, lambda _: torch.zeros(2).add_(1), False),
    "a tensor of two truths": (
        torch.zeros((), dtype=torch.bool),
        torch.logical_not,
        False,
    ),
}


def told_in_training(state):
    with recorded_warnings() as told:
        for batch in af.batches(state, until_epoch=4):
            state, _ = STEP(state, batch)
    return [str(each.message) for each in told]


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_number_that_a_module_counts_on_is_told(name, num_micro_batches):
    """It is in no checkpoint; once, with its place, and not what a pass notes of its batch."""
    first, become, counts = NOTES[name]
    state = state_of(
        model=lambda: nn.Sequential(nn.Linear(2, 2), Noting(first, become)),
        setup=af.accumulate(num_micro_batches=num_micro_batches),
    )
    told = told_in_training(state)
    assert len(told) == counts
    assert all(each.startswith("While the loss function ran, 1.noted") for each in told)


class Counting(torch.optim.SGD):
    def __init__(self, params, first, become):
        super().__init__(params, lr=0.1)
        self.noted, self.become = copy.deepcopy(first), become

    def step(self, closure=None):
        self.noted = self.become(self.noted)
        return super().step(closure)


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("parts", [False, True])
def test_a_number_that_an_optimizer_counts_on_is_told(name, parts):
    """It is in no checkpoint, as what a group or an entry of its state holds is."""
    first, become, counts = NOTES[name]
    make = partial(Counting, first=first, become=become)
    if parts:
        make = af.combine_optimizers((lambda name, _: name == "bias", make), (..., SGD))
    told = told_in_training(state_of(optimizer=make))
    assert len(told) == counts
    assert all(
        each.startswith("While the optimizer stepped, Counting.noted") for each in told
    )


def test_columns_in_a_list_are_told():
    """Two samples of many rows are likely inputs and targets; few rows, or many, are samples."""
    with pytest.warns(
        AccelfnWarning, match=r"2: tensors of 12 rows .*\(\(inputs, targets\)\)"
    ):
        af.Data([INPUTS, INPUTS], global_batch_size=1)
    many = [torch.arange(12.0) for _ in range(5)]
    with in_silence():
        for samples in ([INPUTS[:2]] * 2, list(INPUTS), [INPUTS, INPUTS[:6]], many):
            af.Data(samples, global_batch_size=1)


@pytest.mark.parametrize("kept", ["nothing", "a copy", "the loaded state", "its use"])
def test_a_loaded_state_that_nobody_keeps_is_told(kept, tmp_path):
    """A step on the state that was given to `load` says so, unless the loaded one is kept."""
    state = state_of(data=None)
    saved, _ = STEP(state_of(data=None), INPUTS)
    af.save(saved, tmp_path / "saved")
    loaded = af.load(state, tmp_path / "saved")
    assert loaded.step == 1
    if kept == "its use":
        state = loaded
    elif kept == "a copy":
        state = state.copy()
        del loaded
    elif kept == "nothing":
        del loaded
        words = r"at update 0\. Write state = af\.load\(state, directory\)"
        with pytest.warns(AccelfnWarning, match=words):
            state, _ = STEP(state, INPUTS)
    with in_silence():
        STEP(state, INPUTS)


def thinned(kept, samples):
    return torch.stack([each for each in samples if kept(float(each[0]))])


def packed(samples):
    return torch.stack(samples).flatten()[: len(samples) // 3 * 6].reshape(-1, 6)


COLLATES = {
    "the first": (partial(thinned, lambda x: x != 1), 2),
    "a later one": (partial(thinned, lambda x: x != 7), 2),
    "several": (partial(thinned, lambda x: x not in {7, 8}), 2),
    "none": (partial(thinned, lambda _: True), 0),
    "torch's": (None, 0),
    "rows of several": (packed, 0),
    "rows of another axis": (lambda samples: torch.stack(samples, 1), 0),
    "no rows": (lambda samples: [float(sum(map(torch.sum, samples)))], 0),
}
"""Of twelve samples, of which the first is 0; and how many are told, of training and not."""


@pytest.mark.parametrize("name", COLLATES)
def test_samples_that_a_collate_leaves_out_are_told(name):
    """Once a state and an evaluation; a loss that says what it is of is right."""
    collate, expected = COLLATES[name]
    inputs = torch.arange(12.0)[:, None].expand(12, 2).clone()
    data = af.Data(inputs, global_batch_size=6, collate=collate)

    def plain(model, batch):
        return model(sum(map(torch.as_tensor, batch)).mean().expand(1, 2)).mean()

    def exact(model, batch):
        return af.Loss(plain(model, batch) * len(batch), len(batch))

    def told(loss_fn, setup):
        still = partial(torch.optim.SGD, lr=0.0)
        state = state_of(optimizer=still, data=data, setup=setup)
        step = af.make_step(loss_fn)
        with recorded_warnings() as said:
            for batch in af.batches(state, until_epoch=2):
                state, _ = step(state, batch)
            af.evaluate(state, data, loss_fn)
        found = [str(each.message) for each in said]
        assert all("collate returned" in each for each in found)
        return len(found)

    parts = af.accumulate(num_micro_batches=2)
    assert expected == told(plain, parts)
    assert told(exact, parts) == 0
    # an update of one mean counts beside no other; an evaluation is of several
    assert bool(expected) == told(plain, af.chain())


NAMES = st.text("ab", max_size=1)
DICTS = st.dictionaries(NAMES, st.integers(), max_size=3)


@given(shown=DICTS, other=DICTS, name=NAMES)
def test_what_is_shown_reads_as_a_dict(shown, other, name):
    """Whatever is read of it is the dict's, also of what the dict gets later."""
    view = ReadOnly(shown, "it")
    reads = (
        *(list, dict, len, repr, dict.copy, bool),
        *(lambda m: list(reversed(m)), lambda m: {**m}, lambda m: m.get(name, 7)),
        *(lambda m: list(m.keys()), lambda m: list(m.values())),
        *(lambda m: list(m.items()), lambda m: name in m, lambda m: m | other),
        *(lambda m: other | m, lambda m: m == other, lambda m: other == m),
        *(lambda m: m.keys() & other.keys(), lambda m: m != shown),
        *(copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))),  # noqa: S301
    )
    for _ in range(2):
        for read in reads:
            found = view.copy() if read is dict.copy else read(view)
            assert read(shown) == found
        for one in shown:
            assert shown[one] is view[one]
        # torch reads a dict that was pickled without trusting the file
        pickled = pickle.loads(pickle.dumps(view))  # noqa: S301
        apart = (view.copy(), copy.copy(view), view | {}, {} | view, pickled)
        assert all(isinstance(each, dict) and each is not shown for each in apart)
        with pytest.raises(KeyError):
            view["c"]
        shown |= other


WRITES = {
    "[]": lambda m: m.__setitem__("weight", 1),
    "del": lambda m: m.__delitem__("weight"),
    "update": lambda m: m.update(weight=1),
    "setdefault": lambda m: m.setdefault("weight", 1),
    "pop": lambda m: m.pop("weight", None),
    "popitem": lambda m: m.popitem(),
    "clear": lambda m: m.clear(),
    "|=": lambda m: m.__ior__({"weight": 1}),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_a_state_holds_is_not_replaced(write):
    """Who writes into what a state shows is told what to write, and nothing changes."""
    state = state_of()
    for name, said in {
        "params": r"state\.with_params\(",
        "buffers": r"\.copy_\(value\)",
        "opt_state": r"\.copy_\(value\)",
        "slots": r"state\.with_slot\(",
    }.items():
        shown = getattr(state, name)
        before = dict(shown)
        with pytest.raises(CallError, match=rf"state\.{name} is read-only.*{said}"):
            WRITES[write](shown)
        assert before.keys() == shown.keys()
        assert all(value is shown[key] for key, value in before.items())
    with pytest.raises(CallError, match=r'metrics\.with_values\(\{"lr": \.\.\.'):
        af.Metrics({"loss": (1.0, 1)})["lr"] = 0.1


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        ({"loss": 1.0}, {"loss": 2.0}),
        ({"loss": 1.0}, None),
        ({"loss": 1.0}, {"loss": 1.0}, {"loss": math.nan}),
        ({"loss": 1.0}, {"loss": 1}),
        ({"loss": math.nan}, {"loss": math.nan}),
        (None, None),
    ],
)
def test_metrics_of_one_rank_are_told(given, async_, tmp_path):
    """Those of rank 0 are kept, and another's are named, where ranks give a store others."""
    alike = len({str({k: float(v) for k, v in (m or {}).items()}) for m in given}) == 1

    def train(world):
        store = af.CheckpointStore(tmp_path, async_=async_)
        store.save(state_of(world=world), metrics=given[world.rank])
        store.wait()

    with recorded_warnings() as told:
        simulate(len(given), train)
    assert len(told) == (not alike)
    last = f"rank {len(given) - 1}"
    assert all(last in str(each.message) for each in told)
    ((_, kept),) = [
        (path, json.loads((path / "manifest.json").read_text())["metrics"])
        for path in tmp_path.glob("step-*")
    ]
    assert kept.keys() == (given[0] or {}).keys()


class PreTrainedModel(nn.Linear):
    """A model that computes its loss as those of Transformers do."""

    def forward(self, inputs, labels):
        return nn.functional.cross_entropy(super().forward(inputs), labels)


@pytest.mark.parametrize(
    ("ignored", "parts", "weighed", "told"),
    [
        (True, 2, False, True),
        (True, 1, False, False),
        (False, 2, False, False),
        (True, 2, True, False),
    ],
)
def test_a_mean_over_labels_that_a_model_took_is_told(ignored, parts, weighed, told):
    """Where labels are left out of it, and other micro-batches or ranks have others."""
    labels = torch.arange(12) % 2
    labels[3:5] = -100 if ignored else 0

    def loss(model, batch):
        kept = (batch["labels"] != -100).sum()
        mean = model(**batch)
        return af.Loss(mean * kept, kept) if weighed else mean

    state = create(
        model=lambda: PreTrainedModel(2, 2),
        data=af.Data({"inputs": INPUTS, "labels": labels}, global_batch_size=6),
        setup=af.accumulate(num_micro_batches=parts),
    )
    step = af.make_step(loss)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)
    assert any("-100" in str(each.message) for each in caught) == told


def entropy(scores, labels, reduction="mean"):
    """Return the cross entropy; a row of labels is the target and the ignored class."""
    return nn.functional.cross_entropy(
        scores, labels[:, 0], reduction=reduction, ignore_index=int(labels[0, 1])
    )


def num_kept(labels):
    return (labels[:, 0] != labels[:, 1]).sum()


LOSSES = {
    "mean": entropy,
    "sum": lambda x, y: entropy(x, y, "sum"),
    "squares": lambda x, y: nn.functional.mse_loss(
        x[:, 0], y[:, 0].double(), reduction="sum"
    ),
    "mean / 1": lambda x, y: af.Loss(entropy(x, y), 1),
    "mean / n": lambda x, y: af.Loss(entropy(x, y), len(y)),
    "sum / n": lambda x, y: af.Loss(entropy(x, y, "sum"), len(y)),
    "sum / kept": lambda x, y: af.Loss(entropy(x, y, "sum"), num_kept(y)),
}


@pytest.mark.parametrize("ignored", [None, -100, 0])
@pytest.mark.parametrize("name", LOSSES)
def test_warn_of_a_reduction_if_gradients_depend_on_micro_batches(name, ignored):
    """A loss that passes without a warning has the gradients of the whole batch in any parts."""
    if name in ("squares", "mean / 1"):
        ignored = None
    labels = torch.stack([torch.arange(12) % 2, torch.full((12,), -100)], 1)
    if ignored is not None:
        labels[2:4, 0], labels[:, 1] = ignored, ignored

    def loss(model, batch):
        inputs, targets = batch
        return LOSSES[name](model(inputs), targets)

    def gradients(num_micro_batches):
        state = create(
            model=lambda: nn.Linear(2, 2).double(),
            data=af.Data((INPUTS.double(), labels), global_batch_size=12),
            setup=af.accumulate(num_micro_batches=num_micro_batches),
        )
        _, grads = af.value_and_grad(loss)(state, next(iter(af.batches(state))))
        return torch.cat([grad.flatten() for grad in grads.tensors.values()])

    with warnings.catch_warnings(record=True, action="always") as caught:
        one, four = gradients(1), gradients(4)
    differ = not torch.allclose(one, four, rtol=1e-12)
    # 1/n of a mean is divided twice: wrong even if all parts are equal
    assert bool(caught) == (differ or name == "mean / n"), [
        str(w.message) for w in caught
    ]


@pytest.mark.parametrize(
    ("dtype", "factor", "told"),
    [
        (torch.float16, None, "float16"),
        (torch.bfloat16, None, None),
        (
            torch.float32,
            lambda epoch: 0.1**epoch,
            "the number of the update, not of the epoch",
        ),
        (torch.float32, lambda update: 0.97**update, None),
        (torch.float32, lambda update: max(0.0, 1 - update / 20), None),
    ],
)
def test_values_that_vanish_are_told(dtype, factor, told):
    """Parameters in float16, and a schedule of epochs."""
    state = state_of(lambda: nn.Linear(2, 2).to(dtype), schedule=factor)
    with warnings.catch_warnings(record=True, action="always") as caught:
        af.make_step(lambda model, x: square(model, x.to(dtype)))(state, INPUTS)
    assert [told in str(each.message) for each in caught] == [True] * (told is not None)


def test_a_loss_that_keeps_a_graph_says_detach():
    """A moving average over updates, with the graphs of earlier updates."""
    kept = [torch.zeros(2)]

    def loss(model, batch):
        outputs = model(batch)
        kept[0] = 0.9 * kept[0] + 0.1 * outputs.mean(0)
        return (outputs - kept[0]).square().mean()

    state, _ = af.make_step(loss)(state_of(), INPUTS)
    with pytest.raises(RuntimeError) as caught:
        af.make_step(loss)(state, INPUTS)
    assert "detach()" in caught.value.__notes__[0]


def test_a_loss_on_meta_has_no_values_to_warn_of():
    """Neither its weight nor its targets, where only calls are looked at."""

    def loss(model, batch):
        return af.Loss(
            nn.functional.cross_entropy(model(batch[0]), batch[1]), batch[1].sum()
        )

    def train(world):
        rows, labels = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
        batch = rows.to(world.device), labels.to(world.device)
        af.make_step(loss)(state_of(data=None, world=world), batch)

    simulate(1, train, device="meta")
