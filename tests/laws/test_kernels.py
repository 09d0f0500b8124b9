# SPDX-License-Identifier: Apache-2.0
"""A fused optimizer whose lists are made once does what torch's own step does."""

from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.internals import fused_step
from tests.laws.worlds import single

DTYPES = st.sampled_from([torch.float32, torch.float64])
OPTIONS = st.fixed_dictionaries(
    {"lr": st.sampled_from([0.1, 0.01]), "fused": st.sampled_from([True])},
    optional={
        "betas": st.sampled_from([(0.5, 0.75), (0.0, 0.99)]),
        "eps": st.sampled_from([1e-8, 1e-2]),
        "weight_decay": st.sampled_from([0.0, 0.5]),
        "maximize": st.booleans(),
        "amsgrad": st.booleans(),
    },
)
DECOUPLED = partial(torch.optim.Adam, decoupled_weight_decay=True)
KINDS = st.sampled_from([torch.optim.Adam, torch.optim.AdamW, DECOUPLED])


class Net(nn.Module):
    """Three parameters, the last of which takes part in some losses only."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype))
        self.b = nn.Parameter(torch.tensor([[0.5]], dtype=dtype))
        self.c = nn.Parameter(torch.tensor([3.0, 0.25, -1.0], dtype=dtype))

    def loss(self, batch: tuple[float, bool]) -> torch.Tensor:
        factor, whole = batch
        loss = (self.a.sum() * self.b).square().sum() * factor
        return loss + self.c.pow(3).sum() * factor if whole else loss


def grouped(named: Any, kind: Any, options: dict, groups: int) -> torch.optim.Optimizer:
    """Return the optimizer with one parameter group, or two of which one differs."""
    params = [param for _, param in named]
    if groups == 1:
        return kind(params, **options)
    second = {"params": params[1:], "weight_decay": 0.25}
    return kind([{"params": params[:1]}, second], **options)


@given(
    kind=KINDS,
    options=OPTIONS,
    groups=st.integers(1, 2),
    dtype=DTYPES,
    batches=st.lists(
        st.tuples(st.sampled_from([0.5, -1.0, 2.0]), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    forks=st.frozensets(st.integers(0, 5), max_size=2),
    scheduled=st.booleans(),
)
def test_fused_steps_are_torchs_own(
    kind, options, groups, dtype, batches, forks, scheduled
):
    """Bitwise, for any options, groups, unused parameters, schedules and forks."""
    state = af.TrainState.create(
        model=lambda: Net(dtype),
        optimizer=partial(grouped, kind=kind, options=options, groups=groups),
        schedule=af.schedules.linear(8) if scheduled else None,
        world=single(),
    )
    step = af.make_step(lambda net, batch: net.loss(batch))
    net = Net(dtype)
    optimizer = grouped(net.named_parameters(), kind, options, groups)
    rates = [group["lr"] for group in optimizer.param_groups]
    for i, batch in enumerate(batches):
        if i in forks:  # other tensors are bound, and these come back
            step(state, batch, donate=False)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (af.schedules.linear(8)(i) if scheduled else 1)
        optimizer.zero_grad()
        net.loss(batch).backward()
        optimizer.step()
        state, _ = step(state, batch)
        for name, param in net.named_parameters():
            assert torch.equal(param, state.params[name])
            own = optimizer.state[param]
            assert own.keys() == state.opt_state.get(name, {}).keys()
            for key, value in own.items():
                assert torch.equal(value, state.opt_state[name][key])


@given(
    kind=KINDS,
    options=OPTIONS.filter(lambda options: not options.get("amsgrad")),
    dtype=DTYPES,
    skips=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_what_a_flag_skips_counts_for_nothing(kind, options, dtype, skips):
    """Where a device says that gradients overflowed, torch's scaler has the same left alone."""
    ours, theirs = Net(dtype), Net(dtype)
    own = grouped(ours.named_parameters(), kind, options, 1)
    optimizer = grouped(theirs.named_parameters(), kind, options, 1)
    both = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    for net, each in ((ours, own), (theirs, optimizer)):
        net.loss((1.0, True)).backward()
        each.step()
    kernel = fused_step(own)
    assert kernel is not None
    for number, skip in enumerate(skips):
        scale, flag = torch.tensor(4.0), torch.tensor(float(skip))
        for mine, param in both:
            mine.grad, param.grad = torch.full((2, *param.shape), number + 1.0).to(
                param
            )
        assert kernel(scale, flag)
        optimizer.grad_scale, optimizer.found_inf = scale, flag  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
        for mine, param in both:
            assert torch.equal(mine, param)
            for key, value in optimizer.state[param].items():
                assert torch.equal(own.state[mine][key], value)
