# SPDX-License-Identifier: Apache-2.0
"""Ranks whose samples take different ways through a model train what one process trains."""

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import attrs
import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import local
from tests.strategies import differences

pytestmark = pytest.mark.filterwarnings(  # of a skipped tower's input
    "ignore:FSDP2-wrapped module"
)

WIDTH, MOST = 3, 3
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Expert(nn.Module):
    """A layer; experts of one size have parts that fit one another."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Branches(nn.Module):
    """Experts: each sample goes through one, and they run as the samples come."""

    expert = Expert

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(map(self.expert, sizes))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        out, route = x.clone(), route % len(self.experts)
        for i in dict.fromkeys(route.tolist()):
            out[route == i] = out[route == i] + self.experts[i](x[route == i])
        return out


class Tower(nn.Module):
    """A layer for some samples, which a batch without such samples skips."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = Expert(sizes[0])

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        some = (route == 1)[:, None]
        return torch.where(some, x + self.layer(x), x) if some.any() else x


class Layer(nn.Module):
    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = Expert(sizes[0])

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Norm(nn.BatchNorm1d):
    """Batch normalization of two values for each sample, so one sample is enough."""

    def __init__(self, _: object = None) -> None:
        super().__init__(WIDTH)


def _normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return norm(torch.cat([x, x / 2 - 1]))[: len(x)]


class Normed(nn.Module):
    def __init__(self, _: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return _normed(self.norm, x)


class NormedExpert(Expert):
    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.norm = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_normed(self.norm, x))


class NormedBranches(Branches):
    expert = NormedExpert


KINDS = {"experts": Branches, "tower": Tower, "layer": Layer}
NORMS = {"norm": Normed, "normed experts": NormedBranches}


class Net(nn.Module):
    """Stages one after the other; the route of a sample differs between them."""

    def __init__(self, stages: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
        super().__init__()
        self.count = len(stages)
        for i, (kind, sizes) in enumerate(stages):
            setattr(self, f"stage{i}", {**KINDS, **NORMS}[kind](sizes))
        self.last = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        for i in range(self.count):
            x = getattr(self, f"stage{i}")(x, routes[:, i])
        return self.last(x)


def _nested(_: str, module: nn.Module) -> bool:
    return isinstance(module, (Expert, Branches, Tower))


UNITS = {"lists": None, "experts": Expert, "layers": nn.Linear, "nested": _nested}


@attrs.frozen
class Branching:
    """A training of a model whose samples take different ways."""

    stages: tuple[tuple[str, tuple[int, ...]], ...]
    n: int
    batch_size: int
    wrap: str
    options: Mapping[str, Any]
    units: str
    axes: Mapping[str, int]
    micro: int
    recomputes: bool
    asks: bool
    seed: int
    syncs: bool = False

    def data(self) -> af.Data:
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        shape = self.n, len(self.stages)
        routes = torch.randint(0, MOST, shape, generator=generator)
        values = draw(self.n, WIDTH), routes, draw(self.n, 1)
        return af.Data(values, global_batch_size=self.batch_size)

    def loss(self, net, batch, world, *, sample_weight):
        """Return a total over samples; ranks may talk in the midst of it."""
        x, routes, y = batch
        found = net(x, routes)
        if self.asks:
            af.all_reduce(sample_weight.sum(), world)
        return af.Loss((found - y).square().sum(), len(y))

    def __call__(self, world, errors):
        """Return the parameters and a metric after some updates; note an error of a step."""
        setup: list[object] = [af.accumulate(num_micro_batches=self.micro)]
        if world.size > 1:
            wrap = getattr(af, self.wrap)
            units = {"units": UNITS[self.units]} if self.wrap == "wrap_fsdp" else {}
            setup = [af.shard_data(), wrap(**self.options, **units), *setup]
        if self.syncs and world.size > 1:
            setup.append(af.sync_batchnorm())
        if self.recomputes:
            setup.append(af.checkpoint_activations(Expert))
        state = af.TrainState.create(
            model=partial(Net, self.stages),
            optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.5, weight_decay=0.1),
            data=self.data(),
            setup=af.chain(*setup),
            world=world,
            seed=self.seed,
        )
        loss = partial(self.loss, world=world)
        step = af.make_step(loss)
        for batch in af.batches(state, until_epoch=1):
            before = {n: local(p).clone() for n, p in state.params.items()}
            try:
                state, _ = step(state, batch)
            except af.errors.Error as error:
                now = {n: local(p) for n, p in state.params.items()}
                assert differences(before, now) == []
                errors.append(error)
                raise
        found = af.evaluate(state, self.data(), loss)["loss"]
        return {
            **af.full_params(state, at="train"),
            "evaluated": torch.tensor(found, dtype=torch.float64),
        }


AXES = [{"dp_shard": 2}, {"dp_shard": 3}, {"dp_shard": 4}]
HSDP = {"dp_replicate": 2, "dp_shard": 2}


@st.composite
def branchings(draw: st.DrawFn, *, syncs: bool = False) -> Branching:
    """Draw a model, its data, and how ranks train it."""
    sizes = st.lists(st.integers(1, 3), min_size=1, max_size=MOST).map(tuple)
    stage = st.tuples(st.sampled_from([*KINDS, *(NORMS if syncs else ())]), sizes)
    options: dict[str, Any] = {"find_unused_parameters": draw(st.integers(0, 3)) > 0}
    wrap = draw(st.sampled_from(["wrap_ddp", "wrap_fsdp"]))
    if wrap == "wrap_fsdp":
        options["reshard_after_forward"] = draw(st.booleans())
        options["keep_grads"] = draw(st.sampled_from(["whole", "sharded"]))
    else:
        options["bucket_cap_mb"] = draw(st.sampled_from([1e-4, 25]))
    axes = (
        [*AXES, HSDP]
        if wrap == "wrap_fsdp"
        else [{"dp_replicate": 2}, {"dp_replicate": 4}]
    )
    stages = draw(st.lists(stage, min_size=1, max_size=3))
    has_units = any(kind != "norm" for kind, _ in stages)
    return Branching(
        stages=tuple(stages if has_units else [*stages, ("layer", (1,))]),
        n=draw(st.integers(2, 14)),
        batch_size=draw(st.integers(1, 8)),
        wrap=wrap,
        options=options,
        units=draw(st.sampled_from([*UNITS])),
        axes=draw(st.sampled_from(axes)),
        micro=1 if syncs else draw(st.integers(1, 3)),
        recomputes=draw(st.booleans()),
        asks=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        syncs=syncs,
    )


APART = Branching(
    stages=(("experts", (2, 2, 2)),),
    n=8,
    batch_size=4,
    wrap="wrap_fsdp",
    options={"find_unused_parameters": True},
    units="experts",
    axes={"dp_shard": 2},
    micro=1,
    recomputes=False,
    asks=False,
    seed=0,
)
"""Ranks of which one needs an expert that the other does not."""


@given(run=branchings())
@example(run=APART)
def test_ranks_run_other_layers(run):
    """Experts, heads and towers that ranks run in other orders, or not: right numbers, or an
    error on every rank before the optimizer runs; by replicas and by units of any kind.
    """
    may_raise = run.options["find_unused_parameters"] is False
    check(run, af.errors.UnusedParametersError if may_raise else ())


@given(run=branchings(syncs=True))
def test_ranks_normalize_in_other_layers(run):
    """`sync_batchnorm` in branches is right, or an error on every rank names the layers."""
    may_raise = run.options["find_unused_parameters"] is False
    unused = (af.errors.UnusedParametersError,) if may_raise else ()
    check(run, (*unused, af.errors.CollectiveMismatchError))


def check(run, raised):
    errors: list[af.errors.Error] = []
    size, told, found = prod(run.axes.values()), None, ()
    try:
        found = simulate(size, partial(run, errors=errors), axes=run.axes)
    except raised as error:
        event(f"{run.wrap} raises {type(error).__name__}")
        told = str(error)
    if told is not None:
        assert len(errors) == size
        assert "parameters" in told or "sync_batchnorm stage" in told
        return
    event(f"{run.wrap} trains")
    alone = run(af.World.single(device="cpu"), errors)
    for each in found:
        assert differences(alone, each, within=1e-12) == []
