# SPDX-License-Identifier: Apache-2.0
"""Optimizers of other packages, schedule-free ones and those of lomo-optim: what they do here."""

from functools import partial

import pytest
import schedulefree
import torch
from lomo_optim import AdaLomo, Lomo
from torch import nn

import accelfn as af
from accelfn.errors import CompositionError, OptimizerError
from accelfn.testing import assert_states_equal, simulate
from tests.states import linear_state

X = torch.linspace(-1, 1, 24).reshape(8, 3)
FREE = partial(schedulefree.AdamWScheduleFree, lr=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)
STEP = af.make_step(lambda model, x: model(x).square().mean())


def create(optimizer=FREE, setup=af.schedule_free(), **options):  # noqa: B008 - a value
    return linear_state(3, 2, optimizer=optimizer, setup=setup, **options)


def stepped(state, updates=3):
    for i in range(updates):
        state, _ = STEP(state, X + i)
    return state


def same(one, two):
    return [name for name in one if torch.equal(one[name], two[name])]


def test_views_are_of_the_average(tmp_path):
    """Models that are lent or exported are at the average, or where the state trains."""
    state = stepped(create())
    x = af.eval_params(state)
    assert same(x, state.params) == []
    snapshot = af.snapshot_model(state, at="eval")
    assert same(x, dict(snapshot.named_parameters())) == list(x)
    raw = dict(af.snapshot_model(state, at="train").named_parameters())
    assert same(state.params, raw) == list(x)
    with af.borrow_model(state, at="eval") as model:
        assert same(x, dict(model.named_parameters())) == list(x)
    af.export_model(state, tmp_path / "out", at="eval")
    loaded = nn.Linear(3, 2)
    af.import_model(loaded, tmp_path / "out")
    assert same(x, dict(loaded.named_parameters())) == list(x)


def test_parts_of_a_partition():
    """In a partition the average is of the parts that are schedule-free."""
    parted = af.combine_optimizers((lambda _, p: p.ndim == 2, FREE), (..., SGD))
    state = stepped(create(parted))
    assert same(af.eval_params(state), state.params) == ["bias"]


def test_a_ready_optimizer():
    """One that has taken steps is gone on with where it trains, not at its average."""
    model = nn.Linear(3, 2)
    optimizer = FREE(list(model.named_parameters()))
    optimizer.train()
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.eval()
    with pytest.raises(OptimizerError, match=r"evaluation mode.*train\(\)"):
        create(optimizer, model=model)
    optimizer.train()
    numbers = stepped(create(optimizer, model=model), 2).opt_state["<group 0>"]
    assert numbers["k"] == 3
    assert "train_mode" not in numbers  # which is of the moment


def test_schedule_free_by_the_transform_alone():
    """A schedule-free optimizer needs the transform, which needs such an optimizer."""
    with pytest.raises(OptimizerError, match="SGD is not schedule-free.*schedulef"):
        create(SGD)
    with pytest.raises(OptimizerError, match="not schedule-free"):
        af.schedule_free()(create(SGD, None))
    with pytest.raises(OptimizerError, match="ScheduleFreeWrapper; expected"):
        create(lambda named: schedulefree.ScheduleFreeWrapper(SGD(named)))
    state = create(setup=None)
    with pytest.raises(OptimizerError, match=r"schedule-free.*af\.schedule_free"):
        STEP(state, X)
    assert stepped(af.schedule_free()(state)).step == 3


@pytest.mark.parametrize("other", [af.ema(0.5), af.local_sgd(sync_every=2)])
def test_beside_another_average(other):
    """Two transforms that say what is evaluated do not compose."""
    for order in ((af.schedule_free(), other), (other, af.schedule_free())):
        with pytest.raises(CompositionError, match="both set the parameters to evalua"):
            af.chain(*order)


LIVE = af.optimizer_in_backward()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def mean_loss(model, batch):
    return (model(batch) - 1).square().mean()


LOMO_STEP = af.make_step(mean_loss)


@pytest.mark.parametrize("setup", [None, LIVE], ids=repr)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lomo, {"lr": 0.1}),
        (Lomo, {"lr": 0.1, "weight_decay": 0.5, "clip_grad_value": 0.01}),
        (AdaLomo, {"lr": 0.1}),
        (AdaLomo, {"lr": 0.1, "weight_decay": 0.5}),
    ],
)
def test_an_update_is_the_packages(monkeypatch, kind, options, setup):
    """In the backward pass or after it, parameters are bitwise those of the package's loop."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)  # its loop wants a GPU
    model = net()
    unscaled = {"loss_scale": None} if kind is AdaLomo else {}
    optimizer = kind(model, **options, **unscaled)
    state = create(af.lomo(kind, **options), setup, model=net())
    for _ in range(4):
        optimizer.fused_backward(mean_loss(model, X), options["lr"])
        state, _ = LOMO_STEP(state, X)
    names = [name for name, _ in model.named_parameters()]
    assert same(dict(model.named_parameters()), state.params) == names


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_lomo_on_ranks_with_a_schedule(kind):
    """Two ranks train what one does, at the schedule's rates."""

    def run(world):
        state = create(
            af.lomo(kind, lr=0.1),
            af.chain(af.shard_data(), af.wrap_ddp(), LIVE),
            model=net(),
            schedule=af.schedules.linear(4),
            data=af.Data(X, global_batch_size=6),
            world=world,
        )
        for batch in af.batches(state, until_epoch=2):
            state, _ = LOMO_STEP(state, batch)
        return {name: param.clone() for name, param in state.params.items()}

    (alone,) = simulate(1, run).results
    for found in simulate(2, run).results:
        torch.testing.assert_close(found, alone)


def test_moments_of_lomo_are_saved(tmp_path):
    """AdaLomo's moments belong to the state: saved, loaded, and gone on with bitwise."""
    make = partial(create, af.lomo(AdaLomo, lr=0.1), LIVE, model=net())
    state, _ = LOMO_STEP(make(model=net()), X)
    names = {"step", "exp_avg_sq_row", "exp_avg_sq_col"}
    assert set(state.opt_state["0.weight"]) == names
    af.save(state, tmp_path / "saved")
    loaded = af.load(make(), tmp_path / "saved")
    assert_states_equal(state, loaded)
    assert_states_equal(LOMO_STEP(state, X)[0], LOMO_STEP(loaded, X)[0])


def test_what_lomo_cannot_do_is_refused():
    """Options that transforms stand for, and moments of what is no vector or matrix."""
    with pytest.raises(OptimizerError, match=r"clip_grad_norm=.*af\.clip_grad_norm"):
        af.lomo(Lomo, lr=0.1, clip_grad_norm=1.0)
    words = r"0\.weight.*\(2, 1, 3, 3\).*af\.combine_optimizers"
    with pytest.raises(OptimizerError, match=words):
        create(af.lomo(AdaLomo, lr=0.1), model=nn.Sequential(nn.Conv2d(1, 2, 3)))
