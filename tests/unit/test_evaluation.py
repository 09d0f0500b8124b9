# SPDX-License-Identifier: Apache-2.0
"""`evaluate` and `predict`: each sample once, exactly, and nothing is changed."""

from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset

import accelfn as af
from accelfn.errors import AccelfnWarning, StateError
from accelfn.testing import simulate
from tests.states import create, values

X = torch.linspace(-1, 1, 33).reshape(11, 3)
Y = torch.arange(11) % 2


def net():
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
    )


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


STEP = af.make_step(loss)


def make(model=net, **options):
    """Return a state with buffers, optimizer state and a slot, one update old."""
    options = {"setup": af.ema(0.9), **options}
    state = create(model=model, optimizer=partial(torch.optim.Adam, lr=0.1), **options)
    return STEP(state, (X, Y))[0]


def data(size=4, **options):
    return af.Data((X, Y), global_batch_size=size, **options)


def outputs(model, batch):
    return model(batch[0])


def right(model, batch):
    return {"right": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


STATE = make()


def test_forms_of_a_measure():
    """Numbers and tensors are taken, with a name or none, also of functions written in C."""
    state = make()
    assert af.evaluate(state, data(), lambda *_: 3) == {"value": 3.0}
    measures = lambda *_: {"a": 1.5, "b": torch.tensor(2.0)}  # noqa: E731
    assert af.evaluate(state, data(), measures) == {"a": 1.5, "b": 2.0}
    extra = lambda _model, _batch, number: number  # noqa: E731
    assert af.evaluate(state, data(), extra, 7) == {"value": 7.0}
    named = af.Data(X, global_batch_size=4, collate=lambda _: "training")
    assert af.evaluate(STATE, named, getattr) == {"getattr": 0.0}


def test_a_complex_metric_of_a_transform_is_rejected():
    """`all_reduce_mean` names a complex metric, which only a transform can report."""
    metrics = af.Metrics({}).with_values({"phase": torch.tensor(1j)})
    with pytest.raises(af.errors.ArgumentError, match=r"'phase'.*\.real and \.imag"):
        metrics.all_reduce_mean(af.World())


def test_a_count_is_no_mean():
    """A10: an integer tensor over several samples is told; what may be a mean is not."""
    state = make()
    count = lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).sum()  # noqa: E731
    words = r"'value'. It is probably a count or a sum.*af\.Loss"
    for size in (2, 4):
        with pytest.warns(AccelfnWarning, match=words):
            af.evaluate(state, data(size), count)
    with pytest.warns(AccelfnWarning, match=r"'right'\. It is probably"):
        af.evaluate(state, data(), lambda *given: {"right": count(*given)})
    af.evaluate(state, data(1), count)  # of one sample, it is the mean
    af.evaluate(state, data(1), lambda *given: count(*given) == 1)
    af.evaluate(state, data(), lambda *given: count(*given) == 1)  # it is or it is not
    af.evaluate(state, data(), lambda *given: count(*given).float())  # nobody can tell
    af.evaluate(
        state, data(), lambda *given: af.Loss(count(*given), 4, n=count(*given))
    )


@given(
    words=st.lists(st.sampled_from(["token", "right", "loss", "mean"]), max_size=3),
    end=st.sampled_from(["", "_fn", "_function"]),
    form=st.sampled_from(["function", "partial", "object"]),
)
@example([], "_fn", "function")
def test_a_measure_has_its_function_s_name(words, end, form):
    """Section D: a scalar is named for what it measures; loss only where that is said."""
    bare = "_".join(words)
    name = f"{bare}{end}" if bare else "accuracy"

    def measure(*_, number=2.0):
        return number

    measure.__name__ = name
    fn = {
        "function": measure,
        "partial": partial(partial(measure), number=2.0),
        "object": type(name, (), {"__call__": lambda *_: 2.0})(),
    }[form]
    expected = "loss" if bare.endswith("loss") else name
    assert af.evaluate(STATE, data(), fn) == {expected: 2.0}
    assert af.evaluate(STATE, data(), lambda *_: {"loss": 1.0}) == {"loss": 1.0}
    nll = type("CrossEntropyLoss", (), {"__call__": lambda *_: torch.tensor(1.0)})()
    for fn in (nll, lambda *_: af.Loss(torch.ones(()), 1)):
        assert list(af.evaluate(STATE, data(), fn)) == ["loss"]


MEASURES = {
    "vector": lambda model, batch: model(batch[0])[:, 0],
    "vector by name": lambda model, batch: {"a": model(batch[0])},
    "text": lambda *_: "fine",
    "nothing": lambda *_: None,
    "tuple": lambda *_: (1.0, 2.0),
    "complex": lambda *_: torch.ones(()) * 1j,
    "complex by name": lambda *_: {"a": torch.ones(()) * 1j},
    "complex number": lambda *_: 1j,
    "complex total": lambda *_: af.Loss(torch.ones(()) * 1j, 1),
    "vector total": lambda *_: af.Loss(torch.ones(2), 1),
}


@pytest.mark.parametrize("case", MEASURES)
def test_measure_that_is_no_scalar(case):
    """A function that returns no scalar is refused by its name; nothing changed."""
    state = make()
    before = values(state)
    with pytest.raises(
        af.errors.LossError, match=r"lambda.*(expected a scalar|one real number)"
    ):
        af.evaluate(state, data(), MEASURES[case])
    assert before == values(state)
    assert torch.is_grad_enabled()


def test_trees_of_predictions():
    """A prediction is a tree, in the setup's precision; a state that was donated has no more."""
    found = list(
        af.predict(make(), data(), lambda _, batch: {"x": batch[0], "y": [batch[1]]})
    )
    assert len(found) == 11
    assert torch.equal(X[10], found[10]["x"])
    assert Y.tolist() == [int(each["y"][0]) for each in found]
    state = make()
    predictions = af.predict(state, data(), outputs)
    next(predictions)
    STEP(state, (X, Y))
    with pytest.raises(af.errors.StateDonatedError):
        list(predictions)
    state = make(setup=af.autocast("bf16"))
    found = list(af.predict(state, data(), outputs))
    assert found[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda model, batch: model(batch[0]).mean(), r"lambda.*\(\).*4 samples"),
        (lambda model, batch: model(batch[0])[:1], r"lambda.*\(1, 2\).*4 samples"),
        (lambda *_: "text", "lambda.*str.*4 samples"),
        (lambda *_: None, "lambda.*NoneType.*4 samples"),
    ],
)
def test_prediction_without_rows(fn, words):
    """A result that has not the batch's rows is refused by the function's name."""
    with pytest.raises(af.errors.BatchError, match=words):
        list(af.predict(make(), data(), fn))
    assert torch.is_grad_enabled()


def clipped(model, batch):
    with torch.no_grad():
        model[0].bias.clamp_(-0.01, 0.01)
    return right(model, batch)


@pytest.mark.parametrize("setup", [None, af.ema(0.9), af.wrap_ddp()])
@pytest.mark.parametrize("call", [af.evaluate, af.predict])
def test_a_function_that_writes_into_the_model_is_refused(call, setup):
    """What it evaluates is the state's, or its average; reading and a step between are not."""
    state = make(setup=setup)
    with pytest.raises(StateError, match=r"changed the parameter '0\.bias' in place"):
        list(call(state, data(), clipped))
    state = make(setup=setup)
    found = call(state, data(), outputs if call is af.predict else right)
    if call is af.predict:
        next(found)
        with af.borrow_model(state, at="train") as model, torch.no_grad():
            model[0].bias.clamp_(-0.01, 0.01)
        list(found)


def test_between_predictions_the_caller_is_himself():
    """Between two predictions, modes and draws are the caller's own."""
    torch.manual_seed(3)
    expected = torch.rand(12).tolist()
    torch.manual_seed(3)
    drawn = [float(torch.rand(1))]
    for _ in af.predict(make(), data(), outputs):
        assert torch.is_grad_enabled()
        drawn.append(float(torch.rand(1)))
    assert expected == drawn


def test_a_backward_pass_in_what_is_evaluated_says_where_it_is():
    """torch's error has a note; with gradients for its inputs a function has them."""

    def slope(model, batch):
        with torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            (found,) = torch.autograd.grad(model(inputs).sum(), inputs)
        return found

    def trains(model, batch):
        loss(model, batch).backward()

    for use in (af.evaluate, lambda *all_: list(af.predict(*all_))):
        with pytest.raises(RuntimeError) as refused:
            use(make(), data(), trains)
        (note,) = refused.value.__notes__
        assert "under torch.no_grad()" in note
    assert len(list(af.predict(make(), data(), slope))) == 11


class Streamed(IterableDataset):
    def __init__(self, first, every):
        self.first, self.every = first, every

    def __iter__(self):
        rows = slice(self.first, None, self.every)
        return zip(X[rows], Y[rows], strict=True)


@pytest.mark.parametrize("size", [1, 2])
def test_samples_of_each_rank_have_no_order_to_predict_in(size):
    """Data of which each rank reads its own are evaluated, and refused to `predict`."""

    def each_rank(world):
        own = af.Data(Streamed(world.rank, size), global_batch_size=4, sharded=True)
        state = make(world=world, setup=af.wrap_ddp())
        with pytest.raises(
            StateError, match=r"sharded=True\) each rank has other samples"
        ):
            list(af.predict(state, own, outputs))
        return af.evaluate(state, own, lambda _, batch: {"y": batch[1].float().mean()})

    for found in simulate(size, each_rank):
        assert pytest.approx(5 / 11) == found["y"]


def test_wrong_data_and_functions_are_refused():
    """Something else than af.Data, and a function that cannot be called."""
    for rows in ((X, Y), [1], None):
        with pytest.raises(StateError, match=r"af\.Data\("):
            af.evaluate(STATE, rows, outputs)
    for use in (af.evaluate, lambda *all_: list(af.predict(*all_))):
        with pytest.raises(af.errors.Error, match="3"):
            use(STATE, data(), 3)
