# SPDX-License-Identifier: Apache-2.0
"""What a loss gets and may return: batches of any kind, `Loss` and `Metrics`."""

import math
from functools import partial
from typing import NamedTuple

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import BatchError, GradsError, LossError, NonFiniteLossError
from accelfn.testing import assert_states_equal, simulate
from tests.states import STEP, bits, linear_state

X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(0, 1, 8)
make = partial(linear_state, 3)


def stepped(loss, batch=X, **options):
    """Return a state and metrics after a step of a loss."""
    return af.make_step(loss)(make(**options), batch)


# What a loss gets.


@attrs.frozen
class Record:
    rows: torch.Tensor
    label: str


class Named(NamedTuple):
    rows: torch.Tensor
    label: str


VALUES = {  # with the number of rows, which is the weight of a mean
    "tensor": (X, 8),
    "tuple": ((X, Y), 8),
    "namedtuple": (Named(X, "x"), 8),
    "dict": ({"x": X, "y": Y, "note": "text", "none": None}, 8),
    "nested": ({"a": [X, (Y, {"b": 3})]}, 8),
    "list": (["a", None, X], 8),
    "record": (Record(X, "x"), 8),
    "array": ((np.asarray(X), 3), 1),
    "nothing": (None, 1),
    "text": ("text", 1),
    "number": (3, 1),
    "other rows": ((X, torch.zeros(7)), 1),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_arrives_as_it_is(name):
    """A loss gets a plain value itself, whatever it holds; its rows are the weight, or 1 is."""
    value, rows = VALUES[name]
    seen = []
    _, metrics = stepped(lambda net, batch: seen.append(batch) or net(X).mean(), value)
    assert seen[0] is value
    assert metrics.sums["loss"].weight == rows


@pytest.mark.parametrize("name", ["tensor", "tuple", "namedtuple", "dict", "nested"])
def test_micro_batches_keep_the_container(name):
    """Splitting keeps every container's kind and hands other leaves to all parts."""
    value, _ = VALUES[name]
    parts = af.micro_batches(value, 2)
    assert [type(value)] * 2 == [type(part) for part in parts]
    if name == "nested":
        assert [part["a"][1][1]["b"] for part in parts] == [3, 3]
    with pytest.raises(BatchError, match=r"8.*3|3.*8"):
        af.micro_batches({"x": X, "y": torch.zeros(3)}, 2)


TWO = {"setup": af.accumulate(num_micro_batches=2)}


def test_micro_batch_without_rows_needs_a_weight():
    """Under accumulation a mean needs its rows; the refusal says what to return."""
    with pytest.raises(BatchError, match=r"number of samples.*af\.Loss"):
        stepped(lambda net, _: net(X).mean(), ["a", "b"], **TWO)
    state, _ = stepped(lambda net, _: af.Loss(net(X).sum(), 8), ["a", "b"], **TWO)
    assert state.step == 1


COMBINED = {
    "with micro-batches": (1, af.accumulate(num_micro_batches=2)),
    "with ranks": (2, af.wrap_ddp()),
}


@pytest.mark.parametrize("how", COMBINED)
def test_a_mean_over_nobody_knows_how_many(how):
    """A mean that is combined with others needs its number; alone, or with a weight, none."""
    size, setup = COMBINED[how]

    def loss_of(world, setup, loss):
        several = how == "with micro-batches" and setup is not None
        value = ["no tensor", "none"] if several else "no tensor"
        return float(stepped(loss, value, setup=setup, world=world)[1]["loss"])

    def mean(model, _):
        return model(X).mean()

    def total(model, _):
        return af.Loss(model(X).sum(), len(X))

    with pytest.raises(BatchError, match="Cannot find the number of samples"):
        simulate(size, lambda world: loss_of(world, setup, mean))
    alone = loss_of(af.World.single(), None, mean)
    together = simulate(size, lambda world: loss_of(world, setup, total)).results
    assert together == pytest.approx([alone] * size)


# What a loss may not return.


def no_grad(net, batch):
    with torch.no_grad():
        return net(batch).mean()


def total(change, **aux):
    """Return a loss of a changed sum, with further totals that are computed."""
    return lambda net, x: af.Loss(
        change(net(x)), 8, **{n: f(net(x)) for n, f in aux.items()}
    )


BAD = [
    (lambda net, x: net(x)[:, 0], r"shape \(8,\).*scalar.*mean\(\)"),
    (lambda net, x: net(x).mean().reshape(1), r"shape \(1,\).*scalar"),
    (lambda net, x: net(x).mean().detach(), "no gradient.*detached"),
    (no_grad, "no gradient.*no_grad"),
    (lambda net, x: (net(x) > 0).sum(), "no gradient"),
    (lambda *_: None, r"NoneType.*scalar tensor"),
    (lambda net, x: net(x).mean().item(), r"float.*scalar tensor"),
    (lambda net, x: {"loss": net(x).mean()}, r"dict.*af\.Loss"),
    (lambda net, x: (net(x).mean(), net(x)), r"tuple.*af\.Loss"),
    (lambda net, x: (net(x) * 1j).sum(), "complex"),
    (total(lambda out: out.sum().item()), "float"),
    (total(lambda out: out[:, 0]), r"shape \(8,\).*scalar"),
    (total(lambda out: out.sum().detach()), "no gradient"),
    (total(torch.sum, errors=lambda o: o[:, 0]), r"errors.*\(8,\)"),
    (total(torch.sum, note=lambda _: "fine"), "note"),
    (
        total(torch.sum, phase=lambda out: out.sum() * 1j),
        "phase.*complex64.*real number",
    ),
    (total(torch.sum, loss=torch.sum), "loss"),
    (lambda _, x: (x * LEAF).sum(), "trainable parameter"),
    (
        lambda net, x: af.Loss(net(x).sum(), net(x).abs().sum()),
        r"requires a gradient, .* weight\.detach\(\)",
    ),
]
LEAF = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(("loss", "words"), BAD)
def test_bad_returns(loss, words):
    """What is no scalar with a gradient is refused by the function's name; nothing moves."""
    state = make()
    before = bits(state.params)
    with pytest.raises(LossError, match=f"(?s){words}") as caught:
        af.make_step(loss)(state, X)
    # what af.Loss itself refuses is raised inside the function, which the traceback shows
    said = str(caught.value)
    assert loss.__name__ in said or said.startswith(("af.Loss(", "The loss does"))
    assert isinstance(caught.value, ValueError)
    assert before == bits(state.params)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["mean", "total"])
def test_loss_that_is_not_finite(bad, form):
    """NaN and infinity are refused by value; the state is as it was, and usable."""

    def spoilt(model, batch):
        loss = model(batch).mean() + bad
        return loss if form == "mean" else af.Loss(loss, 8)

    state = make()
    before = bits(state.params)
    words = rf"spoilt returned {bad}.*step did not change(.|\n)*skip_nonfinite"
    with pytest.raises(NonFiniteLossError, match=words) as caught:
        af.make_step(spoilt)(state, X)
    assert isinstance(caught.value, (ValueError, ArithmeticError))
    assert isinstance(caught.value, LossError)
    assert before == bits(state.params)
    assert STEP(state, X)[0].step == 1


ONE = torch.ones((), requires_grad=True)
WEIGHTS = [-1, -0.5, math.nan, math.inf, "3", None, [3], ONE < 0, np.int64(3)]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_weight_is_a_count(weight):
    """A weight that is no number of at least 0 is refused with its value, any total's."""
    with pytest.raises(LossError, match=r"af\.Loss\(weight=.*expected"):
        af.Loss(ONE, weight)
    with pytest.raises(LossError, match=r"rare=\(total, weight\)"):
        af.Loss(ONE, 8, rare=(ONE, weight))


@pytest.mark.parametrize(
    ("weight", "aux", "words"),
    [
        (torch.ones(2), {}, r"weight=.*\(2,\).*one real number"),
        (2, {"size": (1.0, 2.0, 3.0)}, r"af\.Loss\(size=.*expected"),
        (2, {"size": (1.0,)}, r"af\.Loss\(size=.*expected"),
        (2, {"size": ONE < 0}, r"af\.Loss\(size=.*expected"),
    ],
)
def test_totals_and_weights_are_numbers(weight, aux, words):
    """A truth counts for nothing that was meant, and a total has one weight."""
    with pytest.raises(LossError, match=words):
        af.Loss(ONE, weight, **aux)


@given(
    weight=st.sampled_from([0, -1, -0.5, 3, 0.25, math.inf, math.nan]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    setup=st.sampled_from([af.identity(), af.skip_nonfinite()]),
)
def test_a_weight_is_one_that_totals_are_divided_by(weight, dtype, setup):
    """Of a tensor, too; 0 is one, with which a total counts for nothing."""

    def loss(model, batch):
        return af.Loss(model(batch).sum(), torch.tensor([weight]).to(dtype))

    if 0 <= weight < math.inf:
        stepped(loss, setup=setup)
        return
    with pytest.raises(LossError, match="weight=.*expected a finite"):
        stepped(loss, setup=setup)


# Metrics.


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("total", [0.0, math.nan, math.inf, 3.0])
def test_a_metric_of_nothing_is_0(weight, total):
    """Whatever a sum over no samples says, as the mean of an empty mask, its mean is 0."""
    metrics = af.Metrics({"rare": (torch.tensor(total), weight)})
    assert float(metrics["rare"]) == 0.0
    assert metrics.all_reduce_mean(af.World()) == {"rare": 0.0}


COUNTED = st.dictionaries(
    st.sampled_from(["loss", "right", "only"]),
    st.tuples(st.integers(-9, 9), st.integers(0, 9)),
)


@given(told=st.lists(COUNTED, min_size=1, max_size=4), cut=st.integers(0, 4))
def test_metrics_add_by_weight(told, cut):
    """Totals and weights add by name, however they are grouped; what is added stays."""

    def sums_of(metrics):
        return {name: (each.total, each.weight) for name, each in metrics.sums.items()}

    parts = [af.Metrics(each) for each in told]
    nothing = af.Metrics({})
    grouped = sum(parts[:cut], nothing) + sum(parts[cut:], nothing)
    whole = sum(parts)
    expected = {
        name: tuple(map(sum, zip(*(t[name] for t in told if name in t), strict=True)))
        for name in {name for each in told for name in each}
    }
    assert expected == sums_of(whole) == sums_of(grouped)
    assert told == [sums_of(each) for each in parts]
    assert whole.all_reduce_mean(af.World()) == {
        name: total / weight if weight else 0.0
        for name, (total, weight) in expected.items()
    }


def test_metrics_are_a_mapping():
    """They have length, names and a KeyError for others, with the names that there are."""
    metrics = af.Metrics({"a": (1.0, 1), "loss": (1.0, 1)})
    assert list(metrics) == ["a", "loss"]
    assert (len(metrics), len(af.Metrics())) == (2, 0)
    with pytest.raises(KeyError, match="los.*loss"):
        metrics["los"]


def test_what_is_reported_keeps_no_graph():
    """No metric, of whichever weight, has a gradient: added up over a run they are numbers."""

    def loss(model, batch):
        out = model(batch)
        weight, size = out.abs().sum().detach(), out.square().sum()
        return af.Loss(out.sum(), weight, size=size, own=(out.sum(), out.std()))

    _, metrics = stepped(loss)
    for each in metrics.sums.values():
        parts = (each.amount, each.weight, each.total)
        assert not any(torch.is_tensor(part) and part.requires_grad for part in parts)
    assert not any(mean.requires_grad for mean in metrics.values())


# Numbers that are odd.


@pytest.mark.parametrize("clip", [af.clip_grad_norm(1.0), af.clip_grad_value(1.0)])
def test_sparse_gradients_are_not_clipped(clip):
    """What torch cannot clip is refused by name; the state is as it was, and trains."""
    table = partial(nn.EmbeddingBag, 5, 3, sparse=True, mode="sum")
    state, rows = make(setup=clip, model=table), torch.tensor([[0, 1], [1, 3]])
    with pytest.raises(GradsError, match="'weight' is sparse"):
        STEP(state, rows)
    STEP(state.with_setup(None), rows)


@pytest.mark.parametrize("count", [2**53 + 1, 2**63 - 2])
def test_huge_counts(count, tmp_path):
    """A step and a cursor below 2**63 are saved, loaded, and counted on."""
    cursor = attrs.evolve(make().cursor, epoch=count)
    state = attrs.evolve(make(), step=count, num_skipped=count, cursor=cursor)
    af.save(state, tmp_path / "at")
    loaded = af.load(make(), tmp_path / "at")
    assert_states_equal(state, loaded)
    loaded, _ = STEP(loaded, X)
    assert (loaded.step, loaded.num_skipped) == (count + 1, count)
