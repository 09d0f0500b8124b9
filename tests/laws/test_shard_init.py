# SPDX-License-Identifier: Apache-2.0
"""A model that no process ever holds whole is the same model, wherever it is drawn."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import ModelError
from accelfn.testing import simulate
from tests.internals import local, room
from tests.laws.alive import Alive
from tests.laws.parallel_layers import DDP, FSDP, Lying
from tests.laws.split_models import AXES
from tests.states import create
from tests.strategies import differences, tensors

WIDTH = 6
Tensors = dict[str, torch.Tensor]


class Scaled(nn.Module):
    """Two numbers of its own, one of which comes as it is set, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.empty(3, WIDTH))
        self.layer = nn.Linear(WIDTH, 2)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.trunc_normal_(self.shift, std=0.5)


class Zeroed(nn.Module):
    """A block that begins as nothing: it sets the last of its layers to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.down.weight)


class Convention(nn.Module):
    """As models of Transformers: it sets what is in all modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5)
        self.out.weight = self.words.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


class Layers(nn.ModuleDict):
    """Layers by name, that can be called as one, as a unit is."""

    def forward(self) -> None:
        """Do nothing: these models are drawn, and never run."""


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": partial(nn.Linear, WIDTH, 5),
    "wide": partial(nn.Linear, WIDTH, 11, bias=False),
    "embedding": partial(nn.Embedding, 7, WIDTH, padding_idx=2),
    "norm": partial(nn.LayerNorm, WIDTH),
    "batch_norm": partial(nn.BatchNorm1d, WIDTH),
    "conv": partial(nn.Conv1d, WIDTH, 3, 2),
    "attention": partial(nn.MultiheadAttention, WIDTH, 2),
    "encoder": partial(nn.TransformerEncoderLayer, WIDTH, 2, 8),
    "lstm": partial(nn.LSTM, WIDTH, 3),
    "transformer": partial(nn.Transformer, WIDTH, 2, 1, 1, 8, batch_first=True),
    "scaled": Scaled,
    "zeroed": Zeroed,
    "convention": Convention,
}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=0.02, initial_accumulator_value=0.1),
}


@attrs.frozen
class Drawing:
    """A model, and from what it is drawn."""

    layers: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    frozen: int = 0
    optimizer: str = "adamw"
    seed: int = 0

    def model(self) -> nn.Module:
        model = Layers({kind: LAYERS[kind]() for kind in self.layers})
        params = list(model.parameters())
        for param in params[: min(self.frozen, len(params) - 1)]:
            param.requires_grad_(requires_grad=False)
        return model.to(self.dtype)

    def state(self, world, *engine, init="shard"):
        return af.TrainState.create(
            model=self.model,
            optimizer=OPTIMIZERS[self.optimizer],
            setup=af.chain(af.shard_data(), *engine, af.ema(0.5)),
            world=world,
            seed=self.seed,
            init=init,
        )


@st.composite
def drawings(draw: st.DrawFn, **fixed: Any) -> Drawing:
    kinds = st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, unique=True)
    drawn = {
        "layers": tuple(draw(kinds)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        "frozen": draw(st.integers(0, 3)),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "seed": draw(st.integers(0, 9)),
    }
    return Drawing(**{**drawn, **fixed})


def drawn_in(world: af.World, drawing: Drawing, engine: tuple[object, ...]) -> Tensors:
    return tensors(drawing.state(world, *engine))


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


class Nested(nn.Module):
    """Layers of some sizes, one inside another, with numbers of their own."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        first, *others = sizes
        self.layer = nn.Linear(first, 24, dtype=torch.float64)
        self.norm = nn.LayerNorm(first, dtype=torch.float64)
        self.table = nn.Parameter(torch.empty(first, 30, dtype=torch.float64))
        if others:
            self.inside = Nested(others)

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
    """At no moment of `create`, on any rank; along all axes it is the model of one process."""
    axes, setup = lying.axes, lying.engine
    if tp:
        axes = {"dp_shard": 2, "tp": 2}
        setup = (af.tensor_parallel({"*layer": "gathered"}), *FSDP[0])
    largest = max(map(own, Nested(sizes).modules()))
    # lone numbers that are looked at; small parameters, on which an optimizer is tried
    few, tried = 16, 60 * len(list(Nested(sizes).parameters()))

    def created(world, *setup):
        return create(
            model=partial(Nested, sizes),
            setup=af.chain(af.shard_data(), *setup),
            world=world,
            init="shard",
        )

    (alone,) = ALONE.on_ranks(lambda world: dict(created(world).params))

    def fn(world):
        with Alive(torch.float64) as alive:
            state = created(world, *setup)
        parts = sum(room(local(p)) for p in state.params.values())
        assert parts < sum(p.numel() for p in state.params.values())
        most = max(parts + largest + few, parts + tried)
        assert largest <= alive.most / 8 <= most
        memory = af.memory(state)
        assert memory.params.here <= parts * 8
        assert differences(alone, dict(af.full_params(state, at="train"))) == []

    Lying(axes).on_ranks(fn)


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


def in_part(_module: nn.Module, param: nn.Parameter) -> None:
    with torch.no_grad():
        param[:1] = 7.0


CHANGES = {
    "loaded": loaded,
    "assigned": assigned,
    "drawn again": lambda _, param: nn.init.normal_(param, std=0.125),
    "spread": lambda _, param: nn.init.uniform_(param, 0.25, 0.5),
    "truncated": lambda _, param: nn.init.trunc_normal_(param, std=0.125),
    "scaled": lambda _, param: param.data.mul_(0.5),
    "in part": in_part,
}


@given(
    kind=st.sampled_from(sorted(LAYERS)),
    change=st.sampled_from(sorted(CHANGES)),
    which=st.integers(0, 30),
    size=st.sampled_from([1, 2]),
)
def test_what_a_factory_sets_itself_is_refused(kind, change, which, size):
    """Whatever it does to a parameter that its modules do not, the parameter is named."""
    names = [name for name, _ in LAYERS[kind]().named_parameters()]
    name = names[which % len(names)]

    def make():
        module = LAYERS[kind]()
        CHANGES[change](module, module.get_parameter(name))
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
        if change != "loaded":  # which sets them all
            assert repr(name.rpartition(".")[2]) in str(caught.value)

    simulate(size, create)
