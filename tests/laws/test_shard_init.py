# SPDX-License-Identifier: Apache-2.0
"""A model that no process ever holds whole is the same model, wherever it is drawn."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import accelfn as af
from accelfn.errors import ModelError
from accelfn.testing import simulate
from tests.internals import is_shard, local, room
from tests.laws.drawn_models import LAYERS, OPTIMIZERS, Tensors, drawings, drawn_in
from tests.laws.parallel_layers import (
    DDP,
    FSDP,
    LYING,
    UNSPLIT,
    Lying,
    Speech,
    loss_of_tokens,
    speeches,
)
from tests.laws.split_models import AXES
from tests.strategies import differences, tensors

ALONE = Lying({"dp_shard": 1})
OVER = [
    *(Lying(axes, (af.wrap_fsdp(nn.Module),)) for axes in AXES),
    *(Lying(axes, FSDP[0]) for axes in AXES[:4]),
    *(Lying({"dp_shard": size}, DDP) for size in (2, 3)),
]


@given(drawing=drawings(), lying=st.sampled_from(OVER))
def test_what_is_drawn_is_the_same_in_any_layout(drawing, lying):
    """Parameters, buffers, what the optimizer begins with and averages, bitwise."""
    engine = lying.engine
    (alone,) = ALONE.on_ranks(partial(drawn_in, drawing=drawing, engine=()))
    for found in lying.on_ranks(partial(drawn_in, drawing=drawing, engine=engine)):
        assert differences(alone, found) == []


def spoken(speech: Speech, world: af.World, *engine: object, init: str) -> Any:
    micro = af.accumulate(num_micro_batches=speech.micro)
    return af.TrainState.create(
        model=speech.model(world),
        optimizer=OPTIMIZERS[sorted(OPTIMIZERS)[speech.seed % 2]],
        data=speech.data(),
        setup=af.chain(af.shard_data(), *engine, micro, *speech.behind),
        world=world,
        seed=speech.seed,
        init=init,
    )


@given(speech=speeches(), lying=st.sampled_from([*LYING, *UNSPLIT]))
def test_it_trains_as_what_was_cut_trains(speech, lying):
    """A state that was drawn in parts is that of one process, along every axis; and it is
    updated, bitwise, as a state that was drawn whole and was given its values.
    """

    alone = spoken(speech, af.World.single(device="cpu"), init="shard").params

    def parts(world):
        setup = lying.setup(speech.plan)
        one = spoken(speech, world, *setup, init="shard")
        values = af.full_params(one, at="train")
        other = spoken(speech, world, *setup, init="whole").with_params(values)
        assert differences(dict(alone), {n: values[n] for n in alone}) == []
        return updated(one), updated(other)

    def updated(state):
        step = af.make_step(loss_of_tokens)
        state, _ = step(state, next(iter(af.batches(state))))
        return tensors(state)

    for one, other in lying.on_ranks(parts):
        averages = {name for name in one if name.startswith("slots.ema")}
        assert differences(without(one, averages), without(other, averages)) == []


def without(found: Tensors, names: set[str]) -> Tensors:
    """Return tensors but for averages, which began at other values."""
    return {name: value for name, value in found.items() if name not in names}


@given(drawing=drawings(), rest=st.data())
def test_a_module_draws_for_itself(drawing, rest):
    """What others draw changes nothing of it. It has the dtypes, and takes the gradients, that
    the factory says; where the factory writes one number everywhere, so do its modules; what
    others are drawn as has their size.
    """
    world = af.World.single(device="cpu")
    fewer = rest.draw(st.sets(st.sampled_from(drawing.layers), min_size=1))
    kinds = tuple(kind for kind in drawing.layers if kind in fewer)
    some = attrs.evolve(drawing, layers=kinds).state(world)
    state, whole = drawing.state(world), drawing.state(world, init="whole")
    for name, param in some.params.items():
        assert torch.equal(param, state.params[name])
    assert state.params.keys() == whole.params.keys()
    trained = [each.definition.skeleton.trainable for each in (state, whole)]
    assert trained[0] == trained[1]
    assert differences(dict(whole.buffers), dict(state.buffers)) == []
    for name, drawn in whole.params.items():
        mine = state.params[name]
        assert (drawn.shape, drawn.dtype) == (mine.shape, mine.dtype)
        if name == "scaled.shift":  # the factory leaves it as memory was
            assert 0.1 < mine.std() < 1
        elif (drawn == drawn.reshape(-1)[0]).all():
            assert torch.equal(mine, drawn)
        else:
            assert not torch.equal(mine, drawn)
            largest = mine.abs().max(), drawn.abs().max()
            assert drawn.numel() < 30 or max(largest) < 4 * min(largest)


class Alive(TorchDispatchMode):
    """Counts the elements of one dtype that are alive in this thread at a time."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.most = dtype, 0
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        if isinstance(returned, torch.Tensor) and self.counts(returned):
            storage = returned.untyped_storage()
            count = storage.nbytes() // returned.element_size()
            self.found[storage._cdata] = StorageWeakRef(storage), count
            del storage
        self.found = {k: v for k, v in self.found.items() if not v[0].expired()}
        self.most = max(self.most, sum(count for _, count in self.found.values()))
        return returned

    def counts(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.dtype == self.dtype
            and tensor.device.type == "cpu"
            and not is_shard(tensor)
        )


class Layers(nn.Module):
    """Layers of some sizes, one inside another, with numbers of their own."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        first, *others = sizes
        self.layer = nn.Linear(first, 24, dtype=torch.float64)
        self.norm = nn.LayerNorm(first, dtype=torch.float64)
        self.table = nn.Parameter(torch.empty(first, 30, dtype=torch.float64))
        if others:
            self.inside = Layers(others)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.table)

    def forward(self) -> None:
        """Do nothing: it is made, and never run."""


def own(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters(recurse=False))


@given(
    sizes=st.lists(st.integers(20, 40), min_size=2, max_size=4),
    lying=st.sampled_from(
        [each for each in OVER if isinstance(each.engine[0], af.wrap_fsdp)]
    ),
    tp=st.booleans(),
)
def test_no_more_than_parts_and_a_module_is_alive(sizes, lying, tp):
    """At no moment of `create`, on any rank."""
    axes, setup = lying.axes, lying.engine
    if tp:
        axes = {"dp_shard": 2, "tp": 2}
        setup = (af.tensor_parallel({"*layer": "gathered"}), *FSDP[0])
    largest = max(map(own, Layers(sizes).modules()))
    # lone numbers that are looked at; small parameters, on which an optimizer is tried
    few, tried = 16, 60 * len(list(Layers(sizes).parameters()))

    def create(world):
        alive = Alive(torch.float64)
        with alive:
            state = af.TrainState.create(
                model=partial(Layers, sizes),
                optimizer=partial(torch.optim.SGD, lr=0.1),
                setup=af.chain(af.shard_data(), *setup),
                world=world,
                init="shard",
            )
        parts = sum(room(local(p)) for p in state.params.values())
        assert parts < sum(p.numel() for p in state.params.values())
        most = max(parts + largest + few, parts + tried)
        assert largest <= alive.most <= most
        memory = af.memory(state)
        assert memory.params.here <= parts * 8

    Lying(axes).on_ranks(create)


def loaded(module: nn.Module, param: nn.Parameter) -> None:
    del param
    values = {n: torch.ones(p.shape) for n, p in module.named_parameters()}
    with warnings.catch_warnings(action="ignore"):  # torch says that they are on meta
        module.load_state_dict(values, strict=False)


def assigned(module: nn.Module, param: nn.Parameter) -> None:
    for part in module.modules():
        for name, mine in list(part.named_parameters(recurse=False)):
            if mine is param:
                values = torch.arange(1.0, 1 + param.numel())
                setattr(part, name, nn.Parameter(values.view(param.shape)))


def drawn_again(_module: nn.Module, param: nn.Parameter) -> None:
    nn.init.normal_(param, std=0.125)


def spread(_module: nn.Module, param: nn.Parameter) -> None:
    nn.init.uniform_(param, 0.25, 0.5)


def truncated(_module: nn.Module, param: nn.Parameter) -> None:
    nn.init.trunc_normal_(param, std=0.125)


def scaled(_module: nn.Module, param: nn.Parameter) -> None:
    param.data.mul_(0.5)


def in_part(_module: nn.Module, param: nn.Parameter) -> None:
    with torch.no_grad():
        param[:1] = 7.0


CHANGES = [loaded, assigned, drawn_again, spread, truncated, scaled, in_part]


@given(
    kind=st.sampled_from(sorted(LAYERS)),
    change=st.sampled_from(CHANGES),
    which=st.integers(0, 30),
    size=st.sampled_from([1, 2]),
)
def test_what_a_factory_sets_itself_is_refused(kind, change, which, size):
    """Whatever it does to a parameter that its modules do not, the parameter is named."""
    count = len(list(LAYERS[kind]().parameters()))
    names = [name for name, _ in LAYERS[kind]().named_parameters()]
    name = names[which % count]

    def make():
        module = LAYERS[kind]()
        change(module, module.get_parameter(name))
        return module

    def create(world):
        with pytest.raises(ModelError, match='init="shard"') as caught:
            af.TrainState.create(
                model=make,
                optimizer=partial(torch.optim.SGD, lr=0.1),
                setup=af.chain(af.shard_data(), af.wrap_fsdp()),
                world=world,
                init="shard",
            )
        if change is not loaded:  # which sets them all
            assert repr(name.rpartition(".")[2]) in str(caught.value)

    simulate(size, create)
