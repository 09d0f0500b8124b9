# SPDX-License-Identifier: Apache-2.0
"""A split model's step is the loop that torch's tutorial on `fully_shard` writes by hand."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isclose, prod
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import accelfn as af
from accelfn.testing import simulate
from tests.laws.split_models import AXES
from tests.strategies import differences

WIDTH = 5
Params = dict[str, torch.Tensor]
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-3),
}


class Stack(nn.Module):
    """Layers in a list between two others; rows are 5 and 2."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 2, bias=False)
        self.to(dtype)

    def forward(self, x: Any) -> torch.Tensor:
        (x,) = x.values() if isinstance(x, dict) else x if isinstance(x, list) else [x]
        assert x.dtype is self.first.weight.dtype  # wherever it stood in the call
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


CALLS: Mapping[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "by place": lambda net, x: net(x),
    "by name": lambda net, x: net(x=x),
    "in a dict": lambda net, x: net({"x": x}),
    "in a list, by name": lambda net, x: net(x=[x]),
}
"""Ways in which a loss gives a model its inputs."""


@attrs.frozen
class Loop:
    """A training of equal shares, by accelfn and by hand."""

    optimizer: str
    micro: int
    clip: float | None
    options: Mapping[str, Any]
    dtype: torch.dtype = torch.float64
    updates: int = 2
    call: str = "by place"

    def loss(self, net, batch):
        """Return the mean squared error, in the dtype of the targets."""
        x, y = batch
        return (CALLS[self.call](net, x).to(y.dtype) - y).square().mean()

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the batch of each update, of two samples a rank and micro-batch."""
        generator = torch.Generator().manual_seed(size)
        rows = 2 * self.micro * size
        draw = partial(torch.randn, generator=generator, dtype=self.dtype)
        return ((draw(rows, WIDTH), draw(rows, 2)) for _ in range(self.updates))

    def by_accelfn(self, world: af.World) -> tuple[Params, list[Params], float]:
        """Return the parameters before, those after each update, and the last loss."""
        state = af.TrainState.create(
            model=partial(Stack, self.dtype),
            optimizer=OPTIMIZERS[self.optimizer],
            setup=af.chain(
                af.wrap_fsdp(**self.options),
                af.accumulate(num_micro_batches=self.micro),
                None if self.clip is None else af.clip_grad_norm(self.clip),
            ),
            world=world,
        )
        start, step = af.full_params(state, at="train"), af.make_step(self.loss)
        seen, metrics = [], None
        for batch in self.batches(world.size):
            own = [part.chunk(world.size)[world.rank] for part in batch]
            parts = af.micro_batches((own[0], own[1]), self.micro)
            state, metrics = step(state, parts)
            seen.append(af.full_params(state, at="train"))
        assert metrics is not None
        return start, seen, metrics.all_reduce_mean(world)["loss"]

    def by_hand(self, world: af.World, start: Params) -> tuple[list[Params], float]:
        """Return the parameters after each update, as torch's tutorial trains them."""
        net = Stack(self.dtype)
        net.load_state_dict(start)
        how: dict[str, Any] = {
            "mesh": world.mesh,
            "reshard_after_forward": self.options["reshard_after_forward"],
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.options["gather_dtype"],
                reduce_dtype=self.options["reduce_dtype"] or self.dtype,
            ),
        }
        for block in net.blocks:
            fully_shard(block, **how)
        split: Any = fully_shard(net, **how)
        optimizer = OPTIMIZERS[self.optimizer](net.parameters())
        seen, loss = [], torch.zeros(())
        for batch in self.batches(world.size):
            own = [part.chunk(world.size)[world.rank] for part in batch]
            parts = zip(*(part.chunk(self.micro) for part in own), strict=True)
            losses = []
            for i, part in enumerate(parts):
                sharded = self.options["keep_grads"] == "sharded"
                split.set_requires_gradient_sync(sharded or i == self.micro - 1)
                loss = self.loss(net, (part[0], part[1])) / self.micro
                loss.backward()
                losses.append(loss.detach())
            if self.clip is not None:
                _clip(net, self.clip)
            optimizer.step()
            optimizer.zero_grad()
            seen.append({n: _whole(p) for n, p in net.named_parameters()})
            loss = torch.stack(losses).sum()
        return seen, float(af.all_reduce(loss, world)) / world.size


def _clip(net: nn.Module, most: float) -> None:
    """Scale the gradients to a norm; torch's `clip_grad_norm_` adds 1e-6 to what they have."""
    gradients: list[Any] = [param.grad for param in net.parameters()]
    norm: Any = nn.utils.get_total_norm(gradients)
    scale = min(1.0, most / float(norm.full_tensor()))
    for gradient in gradients:
        gradient.to_local().mul_(scale)


def _whole(param: Any) -> torch.Tensor:
    return param.detach().full_tensor()


def both(world: af.World, loop: Loop) -> tuple[list[Params], list[Params], list[float]]:
    """Return the parameters after each update by accelfn and by hand, and the last losses."""
    start, ours, loss = loop.by_accelfn(world)
    theirs, by_hand = loop.by_hand(world, start)
    return ours, theirs, [loss, by_hand]


dtypes = st.sampled_from([None, None, torch.float32, torch.bfloat16])
options = st.fixed_dictionaries(
    {
        "reshard_after_forward": st.booleans(),
        "gather_dtype": dtypes,
        "reduce_dtype": dtypes,
        "keep_grads": st.sampled_from(["whole", "sharded"]),
    }
)
loops = st.builds(
    Loop,
    st.sampled_from(sorted(OPTIMIZERS)),
    micro=st.sampled_from([1, 2, 4]),  # by which a division is exact
    clip=st.sampled_from([None, None, 0.1]),
    options=options,
    dtype=st.sampled_from([torch.float64, torch.float32]),
    call=st.sampled_from(sorted(CALLS)),
)


@example(
    loop=Loop(
        "sgd",
        1,
        None,
        {
            "reshard_after_forward": True,
            "gather_dtype": torch.bfloat16,
            "reduce_dtype": None,
            "keep_grads": "whole",
        },
        call="by name",
    ),
    axes=AXES[0],
)
@given(loop=loops, axes=st.sampled_from([AXES[0], AXES[2], AXES[6]]))
def test_a_step_is_that_of_the_tutorial(loop, axes):
    """Bitwise, of equal shares, in any dtypes and axes, with micro-batches, however the model
    is called; up to rounding where a norm is clipped.
    """
    eps = torch.finfo(loop.dtype).eps

    def fn(world):
        try:
            ours, theirs, (loss, by_hand) = both(world, loop)
        except RuntimeError as error:
            if "same dtype" in str(error):
                pytest.fail(str(error))
            raise
        for one, other in zip(ours, theirs, strict=True):
            within = 0.0 if loop.clip is None else 64 * eps
            assert differences(other, one, within=within) == []
        assert isclose(loss, by_hand, rel_tol=64 * eps)

    simulate(prod(axes.values()), fn, axes=axes)
