# SPDX-License-Identifier: Apache-2.0
"""The models of `parallel_layers`, whose layers are Megatron-core's."""

from collections.abc import Mapping
from typing import Any, Self

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn

import accelfn as af
from tests.laws.parallel_layers import (
    HEADS,
    INNER,
    LETTERS,
    WIDTH,
    Batch,
    Block,
    Speaker,
    Speech,
    freeze,
)

HEAD_NORMS = {"blocks.*.of_heads": "replicated"}
"""What of the model is no layer of Megatron's, and stands between two."""


class MegatronBlock(Block):
    """A block of the same parameters; two layers give their bias on, for others to add."""

    def __init__(
        self, layers: af.megatron.Layers, dtype: torch.dtype, dropout: float
    ) -> None:
        super().__init__(dropout)
        self.to(dtype)
        self.query, self.both = (
            layers.column(WIDTH, size) for size in (WIDTH, 2 * WIDTH)
        )
        self.out = layers.row(WIDTH, WIDTH, bias=False)
        self.up = layers.column(WIDTH, INNER, skip_bias_add=True)
        self.down = layers.row(INNER, WIDTH, skip_bias_add=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        query = self._by_head(self.query(y)[0])
        both = self.both(y)[0].unflatten(-1, (-1, 2, WIDTH // HEADS)).transpose(1, 2)
        key, value = both.unbind(-2)
        attended = F.scaled_dot_product_attention(
            self.of_heads(query), self.of_heads(key), value, is_causal=True
        )
        x = x + self.outside(self.out(attended.transpose(1, 2).flatten(2))[0])
        up, bias = self.up(x)
        down, other = self.down(self.inside(torch.tanh(up + bias)))
        return x + down + other


class MegatronSpeaker(Speaker):
    """A speaker of Megatron's layers; what it saw it remembers, too."""

    def __init__(
        self,
        layers: af.megatron.Layers,
        dtype: torch.dtype,
        *,
        tied: bool,
        dropout: float,
        frozen: tuple[str, ...],
        rows: bool,
    ) -> None:
        super().__init__(dtype, tied=False, dropout=dropout)
        self.tokens = layers.vocabulary(LETTERS, WIDTH)
        self.blocks = nn.ModuleList([MegatronBlock(layers, dtype, dropout)])
        if rows:
            self.head = layers.row(WIDTH, LETTERS, input_is_parallel=False)
        else:
            self.head = layers.column(WIDTH, LETTERS, bias=not tied, gather_output=True)
        if tied:
            self.head.weight = self.tokens.weight
        freeze(self, frozen)

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(batch["places"].mean(), 0.5)
        tokens = self.tokens(batch["tokens"].t()).transpose(0, 1)
        x = tokens + self.places(batch["places"].unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)[0] * self.scale


@attrs.frozen
class MegatronSpeech(Speech):
    """A training of such a model.

    Attributes:
        rows: whether the head has some input features on each rank, not some letters.
        start: the values that it begins with; none: what it draws.
    """

    rows: bool = False
    start: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def like(cls, speech: Speech, **more: Any) -> Self:
        """Return the same training, of Megatron's layers; a tied head has some letters."""
        made = cls(**attrs.asdict(speech, recurse=False), **more)
        return attrs.evolve(made, rows=made.rows and not made.tied)

    def model(self, world: af.World) -> Any:
        """Return what makes the model."""
        layers = af.megatron.layers(world, dtype=self.dtype)

        def make() -> MegatronSpeaker:
            net = MegatronSpeaker(
                layers,
                self.dtype,
                tied=self.tied,
                dropout=self.dropout,
                frozen=self.frozen,
                rows=self.rows,
            )
            if self.start is not None:
                net.load_state_dict(self.start, strict=False)
            return net

        return make
