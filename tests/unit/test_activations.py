# SPDX-License-Identifier: Apache-2.0
"""What `checkpoint_activations` keeps, and what it refuses."""

import functools

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.strategies import differences, tensors

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Counts(nn.Module):
    """Multiplies by how often it was called, which is a buffer that it assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.mask[0, 0] += 1
        return (self.layer(x) * self.calls).sigmoid() * self.mask[0, 0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout())
            for _ in range(3)
        )
        self.counts = Counts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.counts(x)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def begun(*setup: object, world: af.World | None = None) -> af.TrainState:
    chain = af.chain(*setup)
    return af.TrainState.create(model=Net, optimizer=SGD, setup=chain, world=world)


def trained(*setup: object, world: af.World | None = None) -> dict[str, torch.Tensor]:
    state, step = begun(*setup, world=world), af.make_step(loss_fn)
    for i in range(3):
        generator = torch.Generator().manual_seed(i)
        state, _ = step(state, torch.randn(8, 6, generator=generator))
    return tensors(state)


def saved(state: af.TrainState) -> int:
    """Return how many numbers a forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return loss_fn(model, x)

    af.value_and_grad(loss)(state, torch.randn(64, 6))
    return sum(kept.values())


def test_less_is_kept():
    """The more modules are recomputed, the fewer numbers wait for the backward pass."""
    few = saved(begun(af.checkpoint_activations(nn.Sequential)))
    some = saved(begun(af.checkpoint_activations(lambda name, _: name == "layers.1")))
    assert few < some < saved(begun())


@pytest.mark.parametrize(
    "beside",
    [(), (af.autocast("bf16"),), (af.autocast("fp16"), af.clip_grad_norm(0.1))],
    ids=repr,
)
@pytest.mark.parametrize("regions", [None, nn.Sequential, Counts, lambda *_: True])
def test_every_bit_is_kept(beside, regions):
    """Statistics, counters and draws are those of one pass, under autocast too."""
    found = trained(*beside, af.checkpoint_activations(regions))
    assert differences(trained(*beside), found) == []


def test_under_ddp():
    """Gradients are reduced as they are without it, in small buckets."""
    ddp = af.wrap_ddp(bucket_cap_mb=1e-4)
    own = af.checkpoint_activations()
    plain = simulate(2, lambda world: trained(ddp, world=world)).results
    found = simulate(2, lambda world: trained(own, ddp, world=world)).results
    for one, two in zip(plain, found, strict=True):
        assert differences(one, two) == []


def test_the_model_is_not_touched():
    """The modules that a state lends have their own forward."""
    state = begun(af.checkpoint_activations())
    af.prepare_engine(state)
    with af.borrow_model(state) as model:
        assert all("forward" not in vars(each) for each in model.modules())


@pytest.mark.parametrize("regions", [3, "Linear", nn.Linear(2, 2), (), int, (int,)])
def test_what_is_no_region(regions):
    """Only classes of modules and functions say which modules are meant."""
    with pytest.raises(af.errors.ArgumentError, match="module class"):
        af.checkpoint_activations(regions)


def test_no_such_module():
    """A model without such a module is refused when the engine is built, with what it has."""
    state = begun(af.checkpoint_activations(nn.Conv2d))
    with pytest.raises(
        af.errors.ModelError, match="BatchNorm1d, Counts, Dropout, Linear"
    ):
        af.prepare_engine(state)


def test_two_of_them():
    """Two may mean the same modules."""
    own = af.checkpoint_activations
    with pytest.raises(af.errors.CompositionError, match="same modules"):
        af.chain(own(nn.Linear), own(nn.Tanh, name="other"))


class Codes(nn.Module):
    """Writes a large buffer in a way that counts as no version."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(70_000)
        self.register_buffer("codes", torch.ones(70_000))
        self.register_buffer("mask", torch.ones(70_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.data.mul_(0.5)
        return self.norm(x) * self.codes * self.mask


def test_large_buffers_move_once():
    """Wide statistics, and codes written by `.data`, are those of one pass."""

    def moved(*setup: object) -> dict[str, torch.Tensor]:
        make = functools.partial(nn.Sequential, Codes())
        state = af.TrainState.create(
            model=make, optimizer=SGD, setup=af.chain(*setup), seed=3
        )
        x = torch.randn(3, 70_000, generator=torch.Generator().manual_seed(0))
        state, _ = af.make_step(loss_fn)(state, x)
        return tensors(state)

    assert differences(moved(), moved(af.checkpoint_activations())) == []


class Broken(nn.Module):
    """A layer that cannot be one graph, or can."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.breaks = nn.Linear(6, 6), nn.BatchNorm1d(6), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x.relu()


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize("regions", [None, Broken])
def test_between_graphs(breaks, regions):
    """Statistics move once where compiled code has to go on outside of a graph."""
    compiled = af.compile(backend="aot_eager", fullgraph=False, regions=regions)

    def moved(*setup: object) -> dict[str, torch.Tensor]:
        state = af.TrainState.create(
            model=lambda: nn.Sequential(Broken(breaks=breaks), nn.Linear(6, 1)),
            optimizer=SGD,
            setup=af.chain(*setup, compiled),
        )
        for i in range(2):
            generator = torch.Generator().manual_seed(i)
            x = torch.randn(8, 6, generator=generator)
            state, _ = af.make_step(loss_fn)(state, x)
        return tensors(state)

    found = moved(af.checkpoint_activations(Broken))
    assert differences(moved(), found, within=1e-6) == []
