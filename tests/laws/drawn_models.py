# SPDX-License-Identifier: Apache-2.0
"""What the laws of models that are drawn module by module draw: layers of many kinds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.strategies import tensors

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
