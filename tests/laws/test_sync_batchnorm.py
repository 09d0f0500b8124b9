# SPDX-License-Identifier: Apache-2.0
"""sync_batchnorm: however a batch is shared out, its statistics are those of the whole."""

import functools
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.worlds import Found, single
from tests.strategies import differences, tensors

CHANNELS = 3
KINDS = {"rows": (), "1d": (4,), "2d": (2, 3), "3d": (2, 1, 2)}
CLASSES = {
    "rows": nn.BatchNorm1d,
    "1d": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}


class Net(nn.Module):
    """Two layers of batch normalisation, the second on what depends on the first."""

    def __init__(self, case: "Case") -> None:
        super().__init__()
        options = {
            "affine": case.affine,
            "momentum": case.momentum,
            "track_running_stats": case.tracks,
        }
        self.first = nn.Linear(CHANNELS, CHANNELS)
        self.norm = CLASSES[case.kind](CHANNELS, **options)
        self.again = CLASSES[case.kind](CHANNELS, **options)
        self.head = nn.Linear(CHANNELS, 2)
        self.double()
        if not case.training:
            self.norm.eval()
            self.again.eval()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        channels_last = self.first(given.movedim(1, -1))
        normed = self.again(torch.tanh(self.norm(channels_last.movedim(-1, 1))))
        return self.head(normed.flatten(2).mean(-1) if normed.ndim > 2 else normed)


def mean_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def weighted_loss(net: nn.Module, batch: Any) -> af.Loss:
    weights = batch[1][:, 0].abs()
    each = (net(batch[0]) - batch[1]).square().sum(1)
    return af.Loss((each * weights).sum(), weights.sum())


@attrs.frozen
class Case:
    """A model, its data and how long it is trained."""

    kind: str
    affine: bool
    momentum: float | None
    tracks: bool
    loss: Any
    n: int
    batch_size: int
    seed: int
    training: bool = True

    def state(self, world: af.World, *setup: object) -> af.TrainState:
        generator = torch.Generator().manual_seed(self.seed)
        draw = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
        inputs = 3 * draw(self.n, CHANNELS, *KINDS[self.kind]) + 5
        return af.TrainState.create(
            model=lambda: Net(self),
            optimizer=functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5),
            data=af.Data(
                torch.utils.data.TensorDataset(inputs, draw(self.n, 2)),
                global_batch_size=self.batch_size,
                shuffle=True,
            ),
            setup=af.chain(*setup),
            world=world,
        )

    def train(self, world: af.World, *setup: object) -> list[Found]:
        state, step = self.state(world, *setup), af.make_step(self.loss)
        found = []
        for batch in af.batches(state, until_epoch=2):
            state, _ = step(state, batch)
            found.append(tensors(state))
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch_size = draw(st.integers(2, 6))
    # every batch has 2 samples or more, as batch normalisation of one process needs
    whole, rest = (
        draw(st.integers(1, 2)),
        draw(st.sampled_from([0, *range(2, batch_size)])),
    )
    return Case(
        kind=draw(st.sampled_from(sorted(KINDS))),
        affine=draw(st.booleans()),
        momentum=draw(st.sampled_from([0.1, 0.5, None])),
        tracks=draw(st.booleans()),
        loss=draw(st.sampled_from([mean_loss, weighted_loss])),
        n=whole * batch_size + rest,
        batch_size=batch_size,
        seed=draw(st.integers(0, 5)),
    )


SYNCED = (af.shard_data(), af.wrap_ddp(), af.sync_batchnorm())


@given(case=cases(), size=st.integers(2, 4))
def test_ranks_normalise_as_one(case: Case, size: int) -> None:
    """Parameters, running statistics and all else are those of one rank on whole batches."""
    expected = case.train(single())
    results = simulate(size, lambda world: case.train(world, *SYNCED)).results
    for found in results:
        assert len(found) == len(expected)
        for one, two in zip(expected, found, strict=True):
            assert differences(one, two, within=1e-9) == []


@given(case=cases(), size=st.integers(2, 4), parts=st.integers(1, 3))
def test_running_statistics_agree(case: Case, size: int, parts: int) -> None:
    """All ranks hold the same buffers, bitwise, whatever shares and micro-batches are empty."""
    setup = (*SYNCED, af.accumulate(num_micro_batches=parts))
    case = attrs.evolve(case, batch_size=6, n=12, tracks=True, kind="2d")
    first, *others = simulate(size, lambda world: case.train(world, *setup)).results
    for found in others:
        for one, two in zip(first, found, strict=True):
            assert differences(one, two) == []


@given(case=cases(), size=st.integers(2, 3), parts=st.integers(2, 3))
def test_a_micro_batch_is_that_of_all_ranks(case: Case, size: int, parts: int) -> None:
    """Under accumulation a layer sees what the ranks' micro-batches are together."""
    case = attrs.evolve(case, batch_size=size * parts * 2, n=size * parts * 2)

    def micro_batches(world: af.World) -> tuple[Found, list[Any]]:
        state = case.state(world, *SYNCED, af.accumulate(num_micro_batches=parts))
        batch = next(iter(af.batches(state, until_epoch=1)))
        values = [part.value for part in batch.parts()]
        state, _ = af.make_step(case.loss)(state, batch)
        return tensors(state), values

    results = simulate(size, micro_batches).results
    joined = [
        tuple(torch.cat([values[k][i] for _, values in results]) for i in range(2))
        for k in range(parts)
    ]
    state = case.state(single(), af.accumulate(num_micro_batches=parts))
    state, _ = af.make_step(case.loss)(state, joined)
    expected = tensors(state)
    for found, _ in results:
        both = [
            {k: v for k, v in f.items() if "cursor" not in k} for f in (expected, found)
        ]
        assert differences(*both, within=1e-9) == []


@given(case=cases(), size=st.integers(2, 3), training=st.booleans())
def test_it_costs_two_collectives_a_layer(case, size, training):
    """One forward and one backward, of a few numbers a channel; running statistics none.

    In each pass ranks say once that they are through; in the first one for each layer, too.
    """
    case = attrs.evolve(case, training=training)
    log = simulate(size, lambda world: case.train(world, *SYNCED)).log
    asks = training or not case.tracks
    updates = 2 * -(-case.n // case.batch_size)
    found = [(e.label, e.num_bytes) for e in log if "sync_batchnorm" in (e.label or "")]
    layers = ["sync_batchnorm norm", "sync_batchnorm again"]
    forward = [(label, 8 * (2 * CHANNELS + 1)) for label in layers]
    backward = [(f"{label} backward", 8 * 2 * CHANNELS) for label in layers[::-1]]
    assert found == [*forward, *backward] * (updates if asks else 0)
    orders = [e.num_bytes for e in log if e.label == "order of calls"]
    assert orders == [24] * (updates + (2 if asks else 0))
