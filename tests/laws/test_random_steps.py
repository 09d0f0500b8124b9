# SPDX-License-Identifier: Apache-2.0
"""However a step is put together, it updates, and measures, what a loop by hand does.

Losses with metrics of their own weights or several counts, some 0; batches that are added, or
taken again; a look at another batch in between; shares and micro-batches that are empty.
"""

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reducing import SumAll

LR = 0.125
Rows = list[int]
Values = tuple[torch.Tensor, ...]


class Net(nn.Module):
    """Two outputs, and the running mean of what was seen, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        for i, param in enumerate(self.parameters()):
            ramp = torch.arange(param.numel(), dtype=torch.float64).view_as(param)
            param.data = (ramp + i) % 3 / 2 - 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(x.mean(0), 0.5)
        return self.head(x)


def parts_of(net: nn.Module, batch: Values) -> tuple[torch.Tensor, torch.Tensor]:
    x, _, _ = batch
    found = net(x)
    return found[:, 0].square(), torch.tanh(found[:, 1])


def mean_loss(net: nn.Module, batch: Values) -> torch.Tensor:
    one, two = parts_of(net, batch)
    return (one + two).mean()


def weighted_loss(net: nn.Module, batch: Values) -> af.Loss:
    """Return a total over tokens, and over boxes a metric, which may be of none."""
    one, two = parts_of(net, batch)
    _, tokens, boxes = batch
    return af.Loss(
        ((one + two) * tokens).sum(),
        tokens.sum(),
        boxes=((two * boxes).sum(), boxes.sum()),
        each=(one * tokens).sum(),
    )


def counted_loss(net: nn.Module, batch: Values, count: Any) -> af.Loss:
    """Return a part of the mean over tokens and that over boxes."""
    one, two = parts_of(net, batch)
    _, tokens, boxes = batch
    of_boxes = (two * boxes).sum() / count["boxes"]
    total = (one * tokens).sum() / count["tokens"] + of_boxes
    return af.Loss(total, 1, boxes=of_boxes, mine=(boxes.sum(), len(boxes)))


def lone_loss(net: nn.Module, batch: Values, count: Any) -> torch.Tensor:
    one, two = parts_of(net, batch)
    return ((one + two) * batch[2]).sum() / count


LOSSES: dict[str, tuple[Any, Any]] = {
    "mean": (mean_loss, None),
    "weighted": (weighted_loss, None),
    "counted": (
        counted_loss,
        lambda batch: {"tokens": batch[1].sum(), "boxes": batch[2].sum()},
    ),
    "lone": (lone_loss, lambda batch: int(batch[2].sum())),
}
HOWS = ["step", "halves", "by hand", "looks", "added", "again"]


@attrs.frozen
class Setup:
    """A loss, how each update is put together, and who sees which samples."""

    loss: str
    hows: tuple[str, ...]
    reduce: str
    size: int
    micro: int
    n: int
    batch_size: int
    seed: int
    empty: tuple[int, ...]

    def samples(self) -> Values:
        """Return inputs, tokens and boxes; of some batches all tokens, or boxes, are 0."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.randint, generator=generator)
        x = torch.randn(self.n, 3, generator=generator, dtype=torch.float64)
        counts = [draw(0, 3, (self.n,)).double() for _ in range(2)]
        for i in self.empty:
            counts[i][: self.batch_size] = 0
        return x, *counts

    def batches(self) -> list[Rows]:
        """Return the samples of each batch, in their own order, for all updates."""
        epoch = torch.arange(self.n).split(self.batch_size)
        return [rows.tolist() for rows in epoch] * (2 * len(self.hows))

    def state(self, world: af.World) -> af.TrainState:
        reduce = {
            "ddp": af.wrap_ddp(),
            "fsdp": af.wrap_fsdp(),
            "sums": SumAll(),
            "nothing": None,
            "local": af.local_sgd(sync_every=1),
        }
        return af.TrainState.create(
            model=Net,
            optimizer=partial(torch.optim.SGD, lr=LR),
            data=af.Data(self.samples(), global_batch_size=self.batch_size),
            setup=af.chain(
                af.shard_data(),
                reduce[self.reduce],
                af.accumulate(num_micro_batches=self.micro),
            ),
            world=world,
        )


@attrs.frozen
class Moment:
    params: dict[str, torch.Tensor]
    seen: torch.Tensor
    means: dict[str, float]
    samples: int


def mean_of(total: Any, weight: Any) -> float:
    return (total / weight).item() if weight else 0.0


def measured(loss: str, net: Net, batch: Values) -> tuple[Any, Any, dict[str, float]]:
    """Return total, weight and metrics of a whole update, in plain torch."""
    one, two = parts_of(net, batch)
    _, tokens, boxes = batch
    if loss == "mean":
        return (one + two).sum(), len(tokens), {}
    if loss == "lone":
        return ((one + two) * boxes).sum(), boxes.sum(), {}
    of_boxes, of_tokens = ((two * boxes).sum(), (one * tokens).sum())
    if loss == "weighted":
        means = {
            "boxes": mean_of(of_boxes, boxes.sum()),
            "each": mean_of(of_tokens, tokens.sum()),
        }
        return ((one + two) * tokens).sum(), tokens.sum(), means
    total = of_tokens / (tokens.sum() or 1) + of_boxes / (boxes.sum() or 1)
    means = {
        "boxes": mean_of(of_boxes, boxes.sum()),
        "mine": mean_of(boxes.sum(), len(boxes)),
    }
    return total, 1, means


def by_hand(setup: Setup) -> list[list[Moment]]:
    """Train in plain torch; return what each rank has behind each update."""
    net, moments, at = Net(), list[list[Moment]](), 0
    seen = [net.seen.clone() for _ in range(setup.size)]
    samples, batches = setup.samples(), setup.batches()
    for how in setup.hows:
        first, second = batches[at : at + 2]
        passes = {"added": [first, second], "again": [first, second, first]}
        taken = passes.get(how, [first])
        rows = [row for each in taken for row in each]
        net.zero_grad()
        total, weight, means = measured(
            setup.loss, net, tuple(s[rows] for s in samples)
        )
        (total / (weight or 1)).backward()
        with torch.no_grad():
            for param in net.parameters():
                param.sub_(LR * param.grad)
        for i, part in ((i, part) for each in taken for i, part in shares(setup, each)):
            seen[i] = seen[i].lerp(samples[0][part].mean(0), 0.5)
        at += 2 if len(taken) > 1 else 1
        means |= {"loss": mean_of(total, weight)}
        params = {n: p.detach().clone() for n, p in net.named_parameters()}
        count = sum(len(batch) for batch in batches[:at])
        moments.append([Moment(params, kept, means, count) for kept in seen])
    return moments


def shares(setup: Setup, rows: Rows) -> list[tuple[int, torch.Tensor]]:
    """Return which micro-batches a rank has of a batch, those alone that have samples."""
    of_ranks = torch.tensor(rows).tensor_split(setup.size)
    return [
        (rank, part)
        for rank, share in enumerate(of_ranks)
        for part in share.tensor_split(setup.micro)
        if len(part)
    ]


def train(setup: Setup, world: af.World) -> list[Moment]:
    """Train, with each update put together as is said."""
    loss_fn, count = LOSSES[setup.loss]
    step = af.make_step(loss_fn, count=count)
    compute = af.value_and_grad(loss_fn, count=count)
    state, moments = setup.state(world), list[Moment]()
    for how in setup.hows:
        batches = iter(af.batches(state))
        first, second = next(batches), next(batches)
        if how == "step" and setup.reduce != "nothing":
            state, metrics = step(state, first)
        else:
            sync = setup.reduce != "nothing" and how in ("halves", "looks")
            metrics, grads = compute(state, first, sync=sync)
            others = {"added": [second], "again": [second, first]}.get(how, [])
            for batch in others:
                more, grads = compute(state, batch, into=grads, sync=False)
                metrics = metrics + more
            if how == "looks":
                row = tuple(each[:1] for each in setup.samples())
                compute(state, [row] * setup.micro, sync=sync)
            if not grads.reduced:
                grads = af.sync_grads(state, grads)
            state = af.apply_grads(state, grads)
        cursor = state.cursor
        moments.append(
            Moment(
                af.full_params(state, at="train"),
                state.buffers["seen"].clone(),
                metrics.all_reduce_mean(world),
                cursor.epoch * setup.n + cursor.samples,
            )
        )
    return moments


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    n = draw(st.integers(2, 9))
    loss = draw(st.sampled_from([*sorted(LOSSES), "mean"]))
    # counts are of an update, so none is added to
    hows = HOWS[:4] if loss in ("counted", "lone") else HOWS
    return Setup(
        loss=loss,
        hows=tuple(draw(st.lists(st.sampled_from(hows), min_size=2, max_size=5))),
        reduce=draw(
            st.sampled_from(["ddp", "fsdp", "sums", "nothing", "local", "local"])
        ),
        size=draw(st.sampled_from([2, 1, 3])),
        micro=draw(st.sampled_from([1, 1, 2, 3])),
        n=n,
        batch_size=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 99)),
        empty=tuple(draw(st.sets(st.integers(0, 1)))),
    )


@example(
    setup=Setup("weighted", ("halves", "looks", "halves"), "fsdp", 3, 1, 9, 1, 0, ())
)
@given(setup=setups())
def test_any_step_is_the_loop_by_hand(setup):
    """Parameters, buffers, metrics and the place in the data are those of a plain loop."""
    found = zip(*simulate(setup.size, partial(train, setup)), strict=True)
    for expected, ranks in zip(by_hand(setup), found, strict=True):
        for i, (one, two) in enumerate(zip(expected, ranks, strict=True)):
            for name, param in one.params.items():
                assert torch.allclose(param, two.params[name], rtol=1e-9, atol=1e-9)
            # to DDP and FSDP rank 0's buffers are those of all
            if i == 0 or setup.reduce not in ("ddp", "fsdp"):
                assert torch.allclose(one.seen, two.seen, rtol=1e-9, atol=1e-9)
            assert one.means == pytest.approx(two.means, rel=1e-9, abs=1e-9)
            assert one.samples == two.samples
