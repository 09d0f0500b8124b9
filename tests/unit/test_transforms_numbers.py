# SPDX-License-Identifier: Apache-2.0
"""What transforms compute, against the same by hand, in a world of one."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.states import bits

torch.set_num_threads(1)

X = torch.linspace(-1, 1, 24).reshape(8, 3)
SGD = partial(torch.optim.SGD, lr=1.0)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss(model, batch):
    return (model(batch) * 100).square().mean()


STEP = af.make_step(loss)


def make(setup=None, model=net, make_optimizer=SGD):
    return af.TrainState.create(model=model, optimizer=make_optimizer, setup=setup)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bound", [0.5, 1e6, math.inf])
def test_clip_grad_norm(bound, norm_type):
    """It is torch's, up to torch's epsilon, and reports the norm before."""
    state = make(af.clip_grad_norm(bound, norm_type=norm_type))
    _, grads = af.value_and_grad(loss)(state, X)
    tensors = [grad.clone() for grad in grads.tensors.values()]
    norm = torch.nn.utils.get_total_norm(tensors, norm_type)
    before = {name: param.clone() for name, param in state.params.items()}
    after, metrics = STEP(state, X)
    assert float(norm) == float(metrics["grad_norm"])
    moved = [before[name] - param for name, param in after.params.items()]
    expected = min(float(norm), bound)
    found = float(torch.nn.utils.get_total_norm(moved, norm_type))
    assert pytest.approx(expected, rel=1e-4) == found


@given(
    norm_type=st.sampled_from([0.5, 1, 1.5, 2, 3, math.inf]),
    bound=st.sampled_from([0.01, 1.0, math.inf]),
    cut=st.integers(1, 3),
)
def test_norms_of_groups_are_the_norm(norm_type, bound, cut):
    """By group too, the whole norm that is told is the p-norm of all gradients."""

    def by_group(named):
        params = [param for _, param in named]
        return SGD([{"params": params[:cut]}, {"params": params[cut:]}])

    whole, parts = (
        STEP(
            make(
                af.clip_grad_norm(bound, norm_type=norm_type, per_group=per_group),
                make_optimizer=by_group,
            ),
            X,
        )[1]
        for per_group in (False, True)
    )
    assert float(parts["grad_norm"]) == pytest.approx(float(whole["grad_norm"]), 1e-5)


def test_clip_within_the_bound_is_bitwise_nothing():
    """Gradients within the bound are left as they are."""
    expected = bits(STEP(make(), X)[0].params)
    assert expected == bits(STEP(make(af.clip_grad_norm(1e9)), X)[0].params)
    assert expected == bits(STEP(make(af.clip_grad_value(1e9)), X)[0].params)


def test_clip_of_zero_gradients():
    """A norm of 0 divides nothing."""
    state, metrics = af.make_step(lambda model, batch: (model(batch) * 0).sum())(
        make(af.clip_grad_norm(1.0)), X
    )
    assert float(metrics["grad_norm"]) == 0.0
    assert all(param.isfinite().all() for param in state.params.values())


@pytest.mark.parametrize("every", [1, 3])
def test_local_sgd_in_a_world_of_one(every):
    """In a world of one it changes nothing, bitwise."""
    state, plain = make(af.local_sgd(sync_every=every)), make()
    for _ in range(4):
        state, _ = STEP(state, X)
        plain, _ = STEP(plain, X)
    assert bits(plain.params) == bits(af.finalize(state).params)


def test_autocast_runs_the_loss_alone():
    """The loss runs in bfloat16; parameters, gradients and the optimizer do not."""
    seen = []

    def spy(model, batch):
        seen.append(model(batch).dtype)
        return model(batch).float().square().mean()

    state = make(af.autocast("bf16"), make_optimizer=partial(torch.optim.Adam, lr=0.1))
    _, grads = af.value_and_grad(spy)(state, X)
    state, _ = af.make_step(spy)(state, X)
    assert [torch.bfloat16] * 2 == seen
    kinds = {t.dtype for t in (*grads.tensors.values(), *state.params.values())}
    kinds |= {entry["exp_avg"].dtype for entry in state.opt_state.values()}
    assert {torch.float32} == kinds
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_around_and_inside():
    """It is torch's autocast around the loss, bitwise."""
    state = make(af.autocast("bf16"))
    with af.borrow_model(state.copy()) as model:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model, X)
        value.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        expected = bits(dict(model.named_parameters()))
    assert expected == bits(STEP(state, X)[0].params)


def test_plateau():
    """It lets `patience` values pass that are no better, then lowers every rate."""
    state = make(af.reduce_lr_on_plateau(0.5, patience=1, cooldown=1, min_lr=0.02))
    (base,) = state.lrs
    rates = []
    for value in (1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5):
        state = af.report_metric(state, torch.tensor(value))
        rates.append(state.lrs[0] / base)
    assert rates == [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_plateau_of_two_groups_and_three_floors():
    """As many least rates as groups, or one; another number is refused with both."""
    with pytest.raises(
        af.errors.ArgumentError, match="min_lr has 3 values, .* 1 parameter groups"
    ):
        make(af.reduce_lr_on_plateau(min_lr=[0.1, 0.1, 0.1]))
    assert make(af.reduce_lr_on_plateau(min_lr=[0.1])).setup.transforms[0].min_lr == (
        0.1,
    )


@pytest.mark.parametrize("value", [None, "0.1", True, torch.zeros(1), {"loss": 0.1}])
def test_what_is_observed_is_a_number(value):
    """Something else is refused; of a dict one number is to be chosen."""
    hint = (
        "Pass one value of the dict" if isinstance(value, dict) else "expected a number"
    )
    with pytest.raises(af.errors.ArgumentError, match=hint):
        af.report_metric(make(af.reduce_lr_on_plateau()), value)


def test_somebody_takes_reports():
    """Without a transform that takes reports, a value would be lost; one is named."""
    with pytest.raises(af.errors.StateError, match=r"af\.reduce_lr_on_plateau"):
        af.report_metric(make(), 0.5)


def test_reporting_shares_the_tensors():
    """The state after a report is the given one but for slots, and given away with it."""
    state = make(af.reduce_lr_on_plateau())
    after = af.report_metric(state, 0.5)
    assert state.slots["reduce_lr_on_plateau"]["reported"] == ()
    assert after.slots["reduce_lr_on_plateau"]["reported"] == (0.5,)
    assert all(after.params[name] is state.params[name] for name in state.params)


def test_a_transform_of_ones_own_takes_reports():
    """Each slot with the entry `reported` gets all values, in order."""

    @af.transform
    class Best:
        def init(self, state):
            return {"reported": ()}

    state = make(af.chain(Best(), Best(name="other")))
    state = af.report_metric(af.report_metric(state, 2), 1.0)
    reported = {"reported": (2.0, 1.0)}
    assert dict(state.slots) == {"best": reported, "other": reported}
