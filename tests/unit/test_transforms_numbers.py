# SPDX-License-Identifier: Apache-2.0
"""What transforms compute, against the same by hand, in a world of one."""

from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from tests.states import bits

X = torch.linspace(-1, 1, 24).reshape(8, 3)
SGD = partial(torch.optim.SGD, lr=1.0)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss(model, batch):
    return (model(batch) * 100).square().mean()


STEP = af.make_step(loss)


def make(setup=None, model=net, make_optimizer=SGD):
    return af.TrainState.create(model=model, optimizer=make_optimizer, setup=setup)


def test_clip_of_zero_gradients():
    """A norm of 0 divides nothing."""
    state, metrics = af.make_step(lambda model, batch: (model(batch) * 0).sum())(
        make(af.clip_grad_norm(1.0)), X
    )
    assert float(metrics["grad_norm"]) == 0.0
    assert all(param.isfinite().all() for param in state.params.values())


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
