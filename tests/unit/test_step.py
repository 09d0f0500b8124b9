# SPDX-License-Identifier: Apache-2.0
"""The step: what raises before the update leaves no trace, whatever it is."""

import gc
import re
import weakref
from functools import partial

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn

import accelfn as af
from accelfn.errors import BatchError, GradsError, OptimizerError
from tests.states import STEP, create, square, values

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def net():
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
    )


COMPUTE = af.value_and_grad(square)
ADAM = partial(torch.optim.Adam, lr=0.1)
SETUPS = {
    "plain": af.chain,
    "rich": lambda: af.chain(
        af.accumulate(num_micro_batches=2), af.clip_grad_norm(0.1), af.ema(0.9)
    ),
}


def make(setup="plain", **options):
    """Return a state with buffers, optimizer state and slots, two updates old."""
    options = {"model": net, "optimizer": ADAM, "setup": SETUPS[setup](), **options}
    state = create(data=af.Data(X, global_batch_size=4), **options)
    for batch in af.batches(state, until_epoch=1):
        state, _ = STEP(state, batch)
    return state


@af.transform
class Sets:
    """A transform that sets a hyperparameter at some updates."""

    where: object
    value: object = 0.5
    until: int = 99

    def hyper(self, hyper, slot, update):
        found = {self.where: self.value} if update.state.step < self.until else {}
        return found, slot


@pytest.mark.parametrize(
    "where",
    ["lrr", ("body", "lr"), (3, "lr"), (-1, "lr"), ("lr",), (0, "lr", "betas"), 7],
)
def test_hyper_of_nothing(where):
    """A hyperparameter or group that is not there is named; the state is as it was."""
    state = make().with_setup(Sets(where))
    before = values(state)
    with pytest.raises(OptimizerError, match=rf"hyper .*{re.escape(repr(where))}"):
        STEP(state, X)
    assert before == values(state)


def test_batch_that_does_not_follow():
    """A batch from elsewhere in the data is refused with both places."""
    state = make()
    first, second = list(af.batches(state, until_epoch=2))
    with pytest.raises(
        BatchError, match=r"epoch 1, sample 4.*epoch 1, sample 0.*af\.batches"
    ) as caught:
        STEP(state, second)
    assert isinstance(caught.value, ValueError)
    after, _ = STEP(state, first)
    with pytest.raises(BatchError, match=r"sample 0.*sample 4"):
        STEP(after, first)
    STEP(after, second)


@pytest.mark.parametrize("place", ["batch", "extras"])
def test_a_batch_on_another_device_is_told(place):
    """The error of torch's becomes one that names both devices, and its state is as it was."""
    state, away = make(), X.to("meta")
    before = values(state)

    def shifted(model, batch, by):
        return square(model, batch + by)

    given = (away, 0.0) if place == "batch" else (X, away)
    words = r"loss function failed \(.*on meta, but the state is on cpu\. .*batch\.to\("
    with pytest.raises(BatchError, match=words) as caught:
        af.make_step(shifted)(state, *given)
    assert type(caught.value.__cause__) is RuntimeError
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        STEP(state, X[:, :2])  # a shape that does not fit is no question of devices
    assert type(caught.value) is RuntimeError
    assert before == values(state)


@pytest.mark.parametrize("setup", SETUPS)
def test_a_step_that_nobody_holds_is_forgotten(setup):
    """A state goes through step after step, and keeps none but those that can be called."""
    state, batch = make(setup), [X[:4], X[4:]] if setup == "rich" else X
    forgotten = []
    for factor in range(1, 5):

        def loss_fn(model, batch, factor=factor):
            return model(batch).square().mean() * factor

        forgotten.append(weakref.ref(loss_fn))
        step = af.make_step(loss_fn)
        state, _ = step(state, batch)
    held = step
    del step, loss_fn
    gc.collect()
    assert [ref() is None for ref in forgotten] == [True, True, True, False]
    held(state, batch)


def test_a_loss_that_is_a_view_of_a_parameter_is_what_it_was():
    """The metrics of a step are of the parameters with which it began."""
    state = create(
        model=lambda: nn.Linear(1, 3), optimizer=partial(torch.optim.SGD, lr=1.0)
    )
    before = float(state.params["bias"][0])
    step = af.make_step(lambda net, _: net.bias[0])
    after, metrics = step(state, torch.ones(2, 1))
    assert float(metrics["loss"]) == before == float(after.params["bias"][0]) + 1


# Batches and gradients that do not fit.


@pytest.mark.parametrize(
    "value", [X, (X[:4], X[4:]), [X], [], [X] * 3, None, iter([X])]
)
def test_plain_value_under_accumulation(value):
    """Anything but a list of the right number is refused with what it is."""
    state = make("rich")
    with pytest.raises(BatchError, match=r"num_micro_batches=2.*list of 2"):
        STEP(state, value)
    assert state.copy().step == 2
    batch = next(iter(af.batches(state)))
    with pytest.raises(BatchError, match=r"2 micro-batches.*micro_batches"):
        STEP(state.with_setup(af.chain()), batch)


def test_gradients_of_another_update():
    """Stale gradients are refused with both numbers; nor may new ones be added to them."""
    state = make()
    _, grads = COMPUTE(state, X)
    after, _ = STEP(state, X)
    adds = lambda state, grads: COMPUTE(state, X, into=grads)  # noqa: E731
    for use in (af.apply_grads, af.sync_grads, adds):
        with pytest.raises(GradsError, match=r"update 2.*update 3") as caught:
            use(after, grads)
        assert isinstance(caught.value, ValueError)
    STEP(after, X)


WRONG = [
    (lambda g: {**g, "extra": X}, "extra"),
    (lambda g: {**g, "0.bias": torch.zeros(7)}, r"0\.bias"),
    (lambda g: {**g, "0.bias": g["0.bias"].double()}, r"0\.bias"),
    (lambda g: {**g, "0.bias": 3.0}, r"0\.bias"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_gradients_that_do_not_fit(change, words):
    """Gradients of unknown names or wrong shapes are named; the state is as it was."""
    state = make()
    before = values(state)
    for use in (af.apply_grads, lambda state, grads: COMPUTE(state, X, into=grads)):
        _, grads = COMPUTE(state, X)
        with pytest.raises(GradsError, match=words):
            use(state, grads.with_tensors(change(dict(grads.tensors))))
    assert before == values(state)
    assert values(STEP(make(), X)[0]) == values(STEP(state, X)[0])


@pytest.mark.parametrize("given", [None, {"0.bias": torch.zeros(4)}, X], ids=type)
def test_what_is_no_record_of_gradients_is_refused(given):
    """A dict of gradients, a tensor or nothing is named by what it is."""
    words = f"that af.value_and_grad returned, got {type(given).__name__}"
    for use in (af.apply_grads, af.sync_grads):
        with pytest.raises(GradsError, match=words):
            use(make(), given)
    if given is not None:
        with pytest.raises(GradsError, match=words):
            COMPUTE(make(), X, into=given)


def test_gradients_are_reduced_once():
    """Among ranks, those that nothing reduces are refused, and so are reduced ones elsewhere."""
    # rank 0 of a world of two whose group refuses any collective
    world = af.World(rank=0, size=2, group=dist.ProcessGroup(0, 2))
    state = create(model=net, world=world)
    before = values(state)
    _, grads = COMPUTE(state, X)
    assert not grads.reduced
    words = r"not reduced over the 2 ranks.*wrap_ddp.*sync_grads"
    with pytest.raises(GradsError, match=words):
        af.apply_grads(state, grads)
    with pytest.raises(GradsError, match=words):
        STEP(state, X)
    reduced = attrs.evolve(COMPUTE(state, X)[1], reduced=True)
    with pytest.raises(GradsError, match=r"reduced over the ranks.*sync=False"):
        COMPUTE(state, X, into=reduced)
    with pytest.raises(GradsError, match="already reduced over the ranks"):
        af.sync_grads(state, reduced)
    assert before == values(state)


WEIGHTS = [4, 4.0, torch.tensor(4, dtype=torch.int16), torch.tensor([4.0]).double()]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("factor", [0, 1])
def test_sums_are_divided_by_their_weight(weight, factor):
    """Whatever kind of number it is; sums of no weight are zeros, and stay that."""
    state = make(optimizer=partial(torch.optim.SGD, lr=1.0))
    before = {name: each.clone() for name, each in state.params.items()}
    _, grads = COMPUTE(state, X)
    exact = torch.tensor(2**24 + 1)  # which float32 has not
    assert int(grads.with_sums(grads.tensors, exact).weight) == 2**24 + 1
    sums = {name: torch.full_like(each, factor) for name, each in before.items()}
    grads = grads.with_sums(sums, weight * factor)
    assert float(grads.weight) == 4 * factor
    state = af.apply_grads(state, grads)
    for key, each in state.params.items():
        torch.testing.assert_close(each, before[key] - factor / 4)


NO_WEIGHTS = [
    (torch.ones((), dtype=torch.bfloat16), r"\(\) bfloat16"),
    (torch.ones((), dtype=torch.float16), r"\(\) float16"),
    (torch.ones((), dtype=torch.complex64), ".*complex64"),
    (torch.ones(2), r"\(2,\)"),
    (torch.ones(0), r"\(0,\)"),
    (float("inf"), "inf"),
    (float("nan"), "nan"),
    ("4", "'4'"),
    (None, "None"),
]


@pytest.mark.parametrize(("weight", "shown"), NO_WEIGHTS)
def test_what_is_no_weight_of_sums_is_refused(weight, shown):
    """A sum of counts that 16 bits would round, several numbers, or none."""
    _, grads = COMPUTE(make(), X)
    with pytest.raises(GradsError, match=rf"weight={shown}.*at least 32 bits"):
        grads.with_sums(grads.tensors, weight)
