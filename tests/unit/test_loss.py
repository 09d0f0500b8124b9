# SPDX-License-Identifier: Apache-2.0
"""`Loss` and `Metrics`, and what a loss function may not return."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.states import linear_state

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def make(lr=0.1, **options):
    """Return a small state."""
    return linear_state(3, optimizer=partial(torch.optim.SGD, lr=lr), **options)


def bits(state):
    """Return the parameters' bytes by name."""
    return {name: p.numpy().tobytes() for name, p in state.params.items()}


def vector_loss(model, batch):
    return model(batch)[:, 0]


def one_element_loss(model, batch):
    return model(batch).mean().reshape(1)


def detached_loss(model, batch):
    return model(batch).mean().detach()


def no_grad_loss(model, batch):
    with torch.no_grad():
        return model(batch).mean()


def integer_loss(model, batch):
    return (model(batch) > 0).sum()


def forgotten_return(model, batch):
    model(batch).mean()


def number_loss(model, batch):
    return model(batch).mean().item()


def dict_loss(model, batch):
    return {"loss": model(batch).mean()}


def tuple_loss(model, batch):
    return model(batch).mean(), model(batch)


def complex_loss(model, batch):
    return (model(batch) * 1j).sum()


def number_in_loss(model, batch):
    return af.Loss(model(batch).sum().item(), 8)


def vector_in_loss(model, batch):
    return af.Loss(model(batch)[:, 0], 8)


def detached_in_loss(model, batch):
    return af.Loss(model(batch).sum().detach(), 8)


def vector_beside(model, batch):
    return af.Loss(model(batch).sum(), 8, errors=model(batch)[:, 0])


def text_beside(model, batch):
    return af.Loss(model(batch).sum(), 8, note="fine")


def complex_beside(model, batch):
    return af.Loss(model(batch).sum(), 8, phase=torch.ones(()) * 1j)


BAD = {
    vector_loss: r"shape \(8,\).*scalar.*mean\(\)",
    one_element_loss: r"shape \(1,\).*scalar",
    detached_loss: "no gradient.*detached",
    no_grad_loss: "no gradient.*no_grad",
    integer_loss: "no gradient",
    forgotten_return: r"NoneType.*scalar tensor",
    number_loss: r"float.*scalar tensor",
    dict_loss: r"dict.*af\.Loss",
    tuple_loss: r"tuple.*af\.Loss",
    complex_loss: "complex",
    number_in_loss: "float",
    vector_in_loss: r"shape \(8,\).*scalar",
    detached_in_loss: "no gradient",
    vector_beside: r"errors.*shape \(8,\)",
    text_beside: "note",
    complex_beside: "phase.*complex64.*real number",
}


@pytest.mark.parametrize("loss_fn", BAD, ids=lambda fn: fn.__name__)
def test_bad_returns(loss_fn):
    """What is no scalar with a gradient is refused by the function's name; nothing moves."""
    state = make()
    before = bits(state)
    with pytest.raises(af.errors.LossError, match=rf"(?s){BAD[loss_fn]}") as caught:
        af.make_step(loss_fn)(state, X)
    # what af.Loss itself refuses is raised inside the function, which the traceback shows
    said = str(caught.value)
    assert loss_fn.__name__ in said or said.startswith("af.Loss(")
    assert isinstance(caught.value, ValueError)
    assert before == bits(state)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["mean", "total"])
def test_loss_that_is_not_finite(bad, form):
    """NaN and infinity are refused by value; the state is as it was, and usable."""

    def spoilt(model, batch):
        loss = model(batch).mean() + bad
        return loss if form == "mean" else af.Loss(loss, 8)

    state = make()
    before = bits(state)
    words = rf"spoilt returned {bad}.*step did not change(.|\n)*skip_nonfinite"
    with pytest.raises(af.errors.NonFiniteLossError, match=words) as caught:
        af.make_step(spoilt)(state, X)
    assert isinstance(caught.value, (ValueError, ArithmeticError))
    assert isinstance(caught.value, af.errors.LossError)
    assert before == bits(state)
    state, _ = af.make_step(lambda model, batch: model(batch).mean())(state, X)
    assert state.step == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_loss_of_another_precision(dtype):
    """A finite loss of any float dtype is taken, and one that is not finite refused."""
    state, _ = af.make_step(lambda model, batch: model(batch).mean().to(dtype))(
        make(), X
    )
    with pytest.raises(af.errors.NonFiniteLossError):
        af.make_step(lambda model, batch: model(batch).mean().to(dtype) / 0)(state, X)


def test_loss_of_no_parameter():
    """A loss whose gradient reaches no parameter of the model is refused."""
    other = torch.ones(3, requires_grad=True)
    state = make()
    with pytest.raises(af.errors.LossError, match="trainable parameter"):
        af.make_step(lambda _, batch: (batch * other).sum())(state, X)
    assert state.copy().step == 0


def test_loss_function_that_is_none():
    """What cannot be called is refused when the step is made."""
    for maker in (af.make_step, af.value_and_grad):
        with pytest.raises(af.errors.ArgumentError, match="model, batch"):
            maker(3)


@pytest.mark.parametrize("weight", [-1, -0.5, math.nan, math.inf])
def test_weight_is_a_count(weight):
    """A weight that is negative or not finite is refused with its value, any total's."""
    with pytest.raises(af.errors.LossError, match=r"weight="):
        af.Loss(torch.tensor(1.0), weight)
    with pytest.raises(af.errors.LossError, match=r"rare=\(total, weight\)"):
        af.Loss(torch.tensor(1.0), 8, rare=(torch.tensor(1.0), weight))


@pytest.mark.parametrize("weight", ["3", None, [3]])
def test_weight_is_a_number(weight):
    """A weight that is no number is refused."""
    with pytest.raises(af.errors.LossError, match=r"weight="):
        af.Loss(torch.tensor(1.0), weight)


def test_weight_is_one_number():
    """A weight of several numbers is refused with its shape."""
    with pytest.raises(af.errors.LossError, match=r"weight=.*\(2,\).*one real number"):
        af.Loss(torch.tensor(1.0), torch.ones(2))


def test_loss_is_not_reported_twice():
    """A further total named `loss` would hide the loss itself, and is refused."""
    state = make()
    with pytest.raises(af.errors.LossError, match="loss"):
        af.make_step(
            lambda model, batch: af.Loss(model(batch).sum(), 8, loss=torch.tensor(99.0))
        )(state, X)


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("total", [0.0, math.nan, math.inf, 3.0])
def test_a_metric_of_nothing_is_0(weight, total):
    """Whatever a sum over no samples says, as the mean of an empty mask, its mean is 0."""
    metrics = af.Metrics({"rare": (torch.tensor(total), weight)})
    assert float(metrics["rare"]) == 0.0
    assert metrics.all_reduce_mean(af.World()) == {"rare": 0.0}


COMBINED = {
    "with micro-batches": (1, af.accumulate(num_micro_batches=2)),
    "with ranks": (2, af.wrap_ddp()),
}


@pytest.mark.parametrize("how", COMBINED)
def test_a_mean_over_nobody_knows_how_many(how):
    """A mean that is combined with others needs its number; alone, or with a weight, none."""
    size, setup = COMBINED[how]

    def stepped(world, setup, loss_fn):
        value = ["no tensor", "none"] if how == "with micro-batches" else "no tensor"
        value = value if setup is not None else "no tensor"
        state = make(setup=setup, world=world)
        return float(af.make_step(loss_fn)(state, value)[1]["loss"])

    def mean(model, _):
        return model(X).mean()

    def total(model, _):
        return af.Loss(model(X).sum(), len(X))

    with pytest.raises(af.errors.BatchError, match="Cannot find the number of samples"):
        simulate(size, lambda world: stepped(world, setup, mean))
    alone = stepped(af.World.single(), None, mean)
    together = simulate(size, lambda world: stepped(world, setup, total)).results
    assert together == pytest.approx([alone] * size)


def test_aux_has_the_weight_of_the_loss_or_its_own():
    """Further totals are means over the loss's weight, or over the one they come with."""
    _, metrics = af.make_step(
        lambda model, batch: af.Loss(
            model(batch).sum(), 8, right=torch.tensor(4.0), rare=(torch.tensor(3.0), 2)
        )
    )(make(), X)
    assert {name: float(metrics[name]) for name in ("right", "rare")} == {
        "right": 0.5,
        "rare": 1.5,
    }


COUNTED = st.dictionaries(
    st.sampled_from(["loss", "right", "only"]),
    st.tuples(st.integers(-9, 9), st.integers(0, 9)),
)


@given(told=st.lists(COUNTED, min_size=1, max_size=4), cut=st.integers(0, 4))
def test_metrics_add_by_weight(told, cut):
    """Totals and weights add by name, however they are grouped; what is added stays."""
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


def sums_of(metrics):
    """Return totals and weights by name."""
    return {name: (each.total, each.weight) for name, each in metrics.sums.items()}


def test_metrics_are_a_mapping():
    """They have length, names and a KeyError for others."""
    metrics = af.Metrics({"a": (1.0, 1), "b": (1.0, 1)})
    assert list(metrics) == ["a", "b"]
    assert len(metrics) == 2
    with pytest.raises(KeyError):
        metrics["c"]


def test_metrics_sum():
    """sum() of metrics adds them, and a name that is not there is told with those that are."""
    parts = [af.Metrics({"loss": (6.0, 2)}), af.Metrics({"loss": (3.0, 1)})]
    assert float(sum(parts)["loss"]) == 3.0
    assert len(af.Metrics()) == 0
    with pytest.raises(KeyError, match="los.*loss"):
        parts[0]["los"]


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: (model(batch) + 7).square().mean(),
        lambda model, batch: af.Loss(
            (model(batch) + 7).square().sum(), len(batch), seen=9.0
        ),
    ],
    ids=["mean", "Loss"],
)
def test_an_empty_share_reports_nothing(loss):
    """What stands in for samples is in no metric: each is 0 there, and weighs nothing."""

    def rank(world):
        setup = af.chain(af.shard_data(), af.wrap_ddp())
        state = make(data=af.Data(X[:2], global_batch_size=2), setup=setup, world=world)
        _, metrics = af.make_step(loss)(state, next(iter(af.batches(state))))
        own = {name: float(mean) for name, mean in metrics.items()}
        return own, {n: float(m) for n, m in metrics.all_reduce_mean(world).items()}

    (one, mean), (two, _), (none, _) = simulate(3, rank)
    assert set(none.values()) == {0.0}
    assert mean == pytest.approx({name: (one[name] + two[name]) / 2 for name in one})


def test_what_is_reported_keeps_no_graph():
    """No metric, of whichever weight, has a gradient: added up over a run they are numbers."""

    def loss(model, batch):
        out = model(batch)
        return af.Loss(
            out.sum(),
            out.abs().sum().detach(),
            size=out.square().sum(),
            own=(out.sum(), out.std()),
        )

    _, metrics = af.make_step(loss)(make(), X)
    for each in metrics.sums.values():
        parts = (each.amount, each.weight, each.total)
        assert not any(torch.is_tensor(part) and part.requires_grad for part in parts)
    assert not any(mean.requires_grad for mean in metrics.values())


def test_metrics_are_not_what_a_program_goes_on_counting_with():
    """A total and a weight that are written again afterwards are those that were given."""
    total, weight = torch.tensor(6.0), torch.tensor(2.0)
    metrics = af.Metrics({"errors": (total, weight)})
    total.add_(1), weight.add_(1)
    assert float(metrics["errors"]) == 3
