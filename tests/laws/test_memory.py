# SPDX-License-Identifier: Apache-2.0
"""The bytes that are estimated are those of a real state."""

from functools import partial
from math import prod
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from accelfn.testing.strategies import chains
from tests.internals import local, tree

NAMES = [
    *("SGD", "AdamW", "Adafactor", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam"),
    *("Rprop", "ASGD", "Adamax"),
]
ADAFACTOR = torch.optim.Adafactor  # which is not updated element by element
OPTIMIZERS = [
    *(partial(getattr(torch.optim, name), lr=0.1) for name in NAMES),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    partial(torch.optim.AdamW, lr=0.1, fused=True),
]


class Net(nn.Module):
    """Layers with buffers, an integer among them, a tied weight and a frozen one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width, bias=False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.middle.weight
        self.frozen = nn.Linear(width, 2).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.frozen(self.tied(self.middle(x)))


class Parts(nn.Module):
    """Layers in a list, which are units, one of them frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, width), nn.Linear(width, 2)])
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks[1].bias.requires_grad_(requires_grad=False)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def bytes_of(value: object) -> int:
    """Return the bytes of all tensors in a tree."""
    return sum(t.numel() * t.element_size() for t in tree.tensor_leaves(value))


@given(
    width=st.integers(1, 5),
    optimizer=st.sampled_from(OPTIMIZERS),
    setup=chains(max_size=3, exclude=[af.accumulate]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    device=st.sampled_from([None, "cpu", "meta"]),
)
def test_an_estimate_is_exact(width, optimizer, setup, dtype, device) -> None:
    """Parameters, buffers, gradients, optimizer state and slots have as many bytes in a state
    that has taken an update, whatever the optimizer and the setup; of a factory, of a model,
    and of one without values alike.
    """
    model = partial(Net, width)
    if device is not None:
        with torch.device(device):
            model = Net(width)
    estimate = af.memory_estimate(model, setup, optimizer=optimizer)
    state = af.TrainState.create(
        model=lambda: Net(width).to(dtype), optimizer=optimizer
    )
    loss = af.value_and_grad(lambda model, x: model(x).float().square().mean())
    _, grads = loss(state, torch.ones(4, 3, dtype=dtype))
    found = estimate.by_dtype[dtype]

    assert found.grads == bytes_of(dict(grads.tensors))
    state = af.apply_grads(state, grads)
    slots = setup(state).slots
    assert found.params == bytes_of(dict(state.params))
    assert found.buffers == bytes_of(dict(state.buffers))
    assert found.opt_state == bytes_of(dict(state.opt_state))
    assert found.slots == {name: bytes_of(slot) for name, slot in slots.items()}
    assert found.total == sum(size for _, size in found.rows())
    assert estimate.num_parameters == sum(p.numel() for p in state.params.values())


@given(
    width=st.integers(1, 7),
    optimizer=st.sampled_from([o for o in OPTIMIZERS if o.func is not ADAFACTOR]),
    setup=st.sampled_from([None, af.ema(0.5), af.optimizer_in_backward()]),
    axes=st.sampled_from(
        [{"dp_shard": 2}, {"dp_shard": 3}, {"dp_replicate": 2, "dp_shard": 2}]
    ),
    is_split=st.booleans(),
)
def test_an_estimate_of_parts_is_exact(width, optimizer, setup, axes, is_split) -> None:
    """Along axes it is what the first rank has, and parts of ranks are all of the whole."""
    if is_split and isinstance(setup, type(af.optimizer_in_backward())):
        setup = None
    wrap = af.wrap_fsdp() if is_split else af.wrap_ddp()
    setup = af.chain(wrap, setup)
    model = partial(Parts, width)
    estimate = af.memory_estimate(model, setup, optimizer=optimizer, axes=axes)
    loss = af.make_step(lambda model, x: model(x).square().mean())

    def fn(world: af.World) -> tuple[Any, dict[str, int]]:
        state = af.TrainState.create(
            model=model, optimizer=optimizer, setup=setup, world=world
        )
        state, _ = loss(state, torch.ones(4, 3))
        held = {n: bytes_of(local(p)) for n, p in state.params.items()}
        return af.memory(state), held

    ranks = list(simulate(prod(axes.values()), fn, axes=axes))
    first, _ = ranks[0]
    found = estimate.by_dtype[torch.float32]
    assert (found.params, found.opt_state, found.buffers) == (
        *(first.params.here, first.opt_state.here, first.buffers.here),
    )
    assert found.slots == {name: each.here for name, each in first.slots.items()}
    assert first.total.here == max(memory.total.here for memory, _ in ranks)
    for name, param in model().named_parameters():
        is_cut = is_split and param.ndim
        sharing = ranks[: axes["dp_shard"]] if is_cut else ranks[:1]
        assert sum(held[name] for _, held in sharing) == bytes_of(param)


@given(
    width=st.sampled_from([1, 3, 4]),
    axes=st.sampled_from(
        [{"cp": 3}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}]
    ),
)
def test_an_estimate_counts_parts_of_sequences(width: int, axes: Any) -> None:
    """Along "cp", too, ranks have parts of the model, and the first has most."""
    adamw, model = OPTIMIZERS[1], partial(Parts, width)
    setup = af.chain(
        af.shard_data(), af.context_parallel(seq_dim=1), af.wrap_fsdp(), af.ema(0.5)
    )
    estimate = af.memory_estimate(model, setup, optimizer=adamw, axes=axes)
    found = estimate.by_dtype[torch.float32]

    def fn(world: af.World) -> Any:
        state = af.TrainState.create(
            model=model, optimizer=adamw, setup=setup, world=world
        )
        return af.memory(state)

    first, *_ = simulate(prod(axes.values()), fn, axes=axes)
    assert (found.params, found.buffers) == (first.params.here, first.buffers.here)
    assert found.slots == {name: each.here for name, each in first.slots.items()}


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    places=st.lists(st.integers(0, 99), max_size=6),
)
def test_a_tensor_in_two_places_is_there_once(sizes, places):
    """Wherever in a slot it stands, and however often."""
    each = [torch.zeros(size) for size in sizes]
    some = [each[place % len(each)] for place in places]
    slot = {"here": some[:2], "there": tuple(some[2:])}
    state = af.TrainState.create(model=partial(Net, 1), optimizer=OPTIMIZERS[0])
    found = af.memory(state.with_slot("mine", slot)).slots["mine"]
    expected = sum(bytes_of(t) for t in {id(t): t for t in some}.values())
    assert (found.here, found.whole) == (expected, expected)
