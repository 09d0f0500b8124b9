# SPDX-License-Identifier: Apache-2.0
"""Schedule-free optimizers: which state they go with, and what evaluation and export see."""

from functools import partial

import pytest
import schedulefree
import torch
from torch import nn, optim

import accelfn as af

X = torch.linspace(-1, 1, 24).reshape(8, 3)
FREE = partial(schedulefree.AdamWScheduleFree, lr=0.1)
SGD = partial(optim.SGD, lr=0.1)
STEP = af.make_step(lambda model, x: model(x).square().mean())


def net():
    return nn.Linear(3, 2)


def create(optimizer=FREE, setup=af.schedule_free(), model=net):  # noqa: B008 - a value
    return af.TrainState.create(model=model, optimizer=optimizer, setup=setup)


def stepped(state, updates=3):
    for i in range(updates):
        state, _ = STEP(state, X + i)
    return state


def same(one, two):
    return [name for name in one if torch.equal(one[name], two[name])]


def test_views_are_of_the_average(tmp_path):
    """Frozen modules, `bind(at="eval")` and exports are at x, those that are trained at y."""
    state = stepped(create())
    x = af.eval_params(state)
    assert same(x, state.params) == []
    assert same(
        x, dict(af.snapshot_model(state, at="eval").named_parameters())
    ) == list(x)
    raw = dict(af.snapshot_model(state, at="train").named_parameters())
    assert same(state.params, raw) == list(x)
    with af.borrow_model(state, at="eval") as model:
        assert same(x, dict(model.named_parameters())) == list(x)
    af.export_model(state, tmp_path / "out", at="eval")
    loaded = net()
    af.import_model(loaded, tmp_path / "out")
    assert same(x, dict(loaded.named_parameters())) == list(x)


def test_before_the_first_update_they_are_one():
    """Where there is no average yet, the parameters are evaluated."""
    state = create()
    assert same(af.eval_params(state), state.params) == ["weight", "bias"]


def test_parts_of_a_partition():
    """In a partition the average is of the parts that are schedule-free."""
    parted = af.combine_optimizers((lambda _, p: p.ndim == 2, FREE), (..., SGD))
    state = stepped(create(parted))
    assert same(af.eval_params(state), state.params) == ["bias"]


def test_a_ready_optimizer_in_its_training_mode():
    """One that has taken steps is gone on with where it trains."""
    model = net()
    optimizer = FREE(list(model.named_parameters()))
    optimizer.train()
    model(X).square().mean().backward()
    optimizer.step()
    twin = net()
    twin.load_state_dict(model.state_dict())
    state = stepped(create(optimizer, model=model), 2)
    assert state.opt_state["<group 0>"]["k"] == 3


def test_numbers_of_groups_are_saved_and_modes_are_not():
    """The average's weight is state; the mode belongs to the moment."""
    numbers = stepped(create()).opt_state["<group 0>"]
    assert numbers["k"] == 3
    assert "train_mode" not in numbers


# What is refused.


def test_another_optimizer():
    """An optimizer that is not schedule-free is refused when the setup is applied."""
    with pytest.raises(
        af.errors.OptimizerError, match="SGD is not schedule-free.*schedulef"
    ):
        create(SGD)
    state = create(SGD, None)
    with pytest.raises(af.errors.OptimizerError, match="not schedule-free"):
        af.schedule_free()(state)


def test_without_the_transform():
    """A schedule-free optimizer alone is refused at its first update; the state stays whole."""
    state = create(setup=None)
    with pytest.raises(
        af.errors.OptimizerError, match=r"schedule-free.*af\.schedule_free"
    ):
        STEP(state, X)
    assert stepped(af.schedule_free()(state)).step == 3


def test_a_ready_optimizer_in_its_evaluation_mode():
    """One whose parameters are at its average would train there; its train() is asked for."""
    model = net()
    optimizer = FREE(list(model.named_parameters()))
    optimizer.train()
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.eval()
    with pytest.raises(af.errors.OptimizerError, match=r"evaluation mode.*train\(\)"):
        create(optimizer, model=model)


@pytest.mark.parametrize("other", [af.ema(0.5), af.local_sgd(sync_every=2)])
def test_beside_another_average(other):
    """Two transforms that say what is evaluated do not compose."""
    for order in ((af.schedule_free(), other), (other, af.schedule_free())):
        with pytest.raises(
            af.errors.CompositionError, match="both set the parameters to evaluate"
        ):
            af.chain(*order)


def test_its_wrapper_is_refused():
    """The package's wrapper of another optimizer is no torch optimizer."""
    with pytest.raises(af.errors.OptimizerError, match="ScheduleFreeWrapper; expected"):
        create(lambda named: schedulefree.ScheduleFreeWrapper(SGD(named)))
