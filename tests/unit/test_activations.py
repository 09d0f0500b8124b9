# SPDX-License-Identifier: Apache-2.0
"""What `checkpoint_activations` keeps, and what it refuses."""

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, CompositionError, ModelError
from accelfn.testing import simulate
from tests.states import bits, linear_state
from tests.strategies import differences, tensors

OWN = af.checkpoint_activations


class Counts(nn.Module):
    """Multiplies by how often it was called, which is a buffer that it assigns anew."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(300, 300))

    def forward(self, x):
        self.calls = self.calls + 1
        self.mask[0, 0] += 1
        return (self.layer(x) * self.calls).sigmoid() * self.mask[0, 0]


def net():
    layer = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout()
    return nn.Sequential(nn.Sequential(*layer), nn.Sequential(*layer[:2]), Counts())


def loss_fn(model, x):
    return model(x).square().mean()


STEP = af.make_step(loss_fn)


def begun(*setup, model=net, world=None):
    return linear_state(model=model, setup=af.chain(*setup), world=world)


def trained(*setup, updates=3, shape=(8, 6), **options):
    state = begun(*setup, **options)
    for i in range(updates):
        generator = torch.Generator().manual_seed(i)
        state, _ = STEP(state, torch.randn(*shape, generator=generator))
    return tensors(state)


def test_less_is_kept():
    """The more modules are recomputed, the fewer numbers wait for the backward pass."""

    def saved(state):
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        def loss(model, x):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return loss_fn(model, x)

        af.value_and_grad(loss)(state, torch.randn(64, 6))
        return sum(kept.values())

    few = saved(begun(OWN(nn.Sequential)))
    some = saved(begun(OWN(lambda name, _: name == "0")))
    assert few < some < saved(begun())


@pytest.mark.parametrize(
    "beside",
    [(), (af.autocast("bf16"),), (af.autocast("fp16"), af.clip_grad_norm(0.1))],
    ids=repr,
)
@pytest.mark.parametrize("regions", [None, nn.Sequential, Counts, lambda *_: True])
def test_every_bit_is_kept(beside, regions):
    """Statistics, counters and draws are those of one pass, under autocast too."""
    assert bits(trained(*beside)) == bits(trained(*beside, OWN(regions)))


def test_under_ddp():
    """Gradients are reduced as they are without it, in small buckets."""
    ddp = af.wrap_ddp(bucket_cap_mb=1e-4)
    plain = simulate(2, lambda world: trained(ddp, world=world))
    found = simulate(2, lambda world: trained(OWN(), ddp, world=world))
    assert bits(list(plain)) == bits(list(found))


def test_the_model_is_not_touched():
    """The modules that a state lends have their own forward."""
    state = begun(OWN())
    af.prepare_engine(state)
    with af.borrow_model(state) as model:
        assert all("forward" not in vars(each) for each in model.modules())


@pytest.mark.parametrize("regions", [3, "Linear", nn.Linear(2, 2), (), int, (int,)])
def test_what_is_no_region(regions):
    """Only classes of modules and functions say which modules are meant."""
    with pytest.raises(ArgumentError, match="module class"):
        OWN(regions)


def test_what_is_refused_of_regions():
    """A model without such a module, with what it has; two that may mean the same modules."""
    with pytest.raises(ModelError, match="BatchNorm1d, Counts, Dropout, Linear"):
        af.prepare_engine(begun(OWN(nn.Conv2d)))
    with pytest.raises(CompositionError, match="same modules"):
        af.chain(OWN(nn.Linear), OWN(nn.Tanh, name="other"))


class Codes(nn.Module):
    """Writes a large buffer in a way that counts as no version."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(70_000)
        self.register_buffer("codes", torch.ones(70_000))
        self.register_buffer("mask", torch.ones(70_000))

    def forward(self, x):
        self.codes.data.mul_(0.5)
        return self.norm(x) * self.codes * self.mask


def test_large_buffers_move_once():
    """Wide statistics, and codes written by `.data`, are those of one pass."""
    wide = {"model": lambda: nn.Sequential(Codes()), "updates": 1, "shape": (3, 70_000)}
    assert bits(trained(**wide)) == bits(trained(OWN(), **wide))


class Broken(nn.Module):
    """A layer that cannot be one graph, or can."""

    def __init__(self, *, breaks):
        super().__init__()
        self.layer, self.norm, self.breaks = nn.Linear(6, 6), nn.BatchNorm1d(6), breaks

    def forward(self, x):
        x = self.norm(self.layer(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x.relu()


@pytest.mark.parametrize(
    ("breaks", "regions"), [(True, None), (True, Broken), (False, None)]
)
def test_between_graphs(breaks, regions):
    """Statistics move once where compiled code has to go on outside of a graph."""
    compiled = af.compile(backend="aot_eager", fullgraph=False, regions=regions)

    def model():
        return nn.Sequential(Broken(breaks=breaks), nn.Linear(6, 1))

    found = trained(OWN(Broken), compiled, model=model, updates=2)
    expected = trained(compiled, model=model, updates=2)
    assert differences(expected, found, within=1e-6) == []
