# SPDX-License-Identifier: Apache-2.0
"""One idea more: a GPT of Megatron-core's layers, which say for themselves how they are split.

`accelfn launch --nproc 2 --axes tp=2` gives each process half of the heads, of the features
and of the letters, and the same numbers. Needs `accelfn[megatron]`.
"""

from functools import partial
from itertools import islice
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import accelfn as af

LENGTH, WIDTH, HEAD = 64, 64, 16
CODES = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
TEXTS = CODES[: len(CODES) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


class Block(nn.Module):
    """A transformer's block: two parts, each from column layers to a row layer."""

    def __init__(self, layers: af.megatron.Layers) -> None:
        """Make its layers."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v = (layers.column(WIDTH, WIDTH) for _ in range(3))
        self.out = layers.row(WIDTH, WIDTH)
        # a layer may give its bias on, for one kernel to add it and to bend the sum
        self.up = layers.column(WIDTH, 4 * WIDTH, skip_bias_add=True)
        self.down = layers.row(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Let each letter look at those before it, by the heads that are here, and think."""
        y = self.norms[0](x)
        heads = [
            layer(y)[0].unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))[0]
        up, bias = self.up(self.norms[1](x))
        return x + self.down(gelu(up + bias))[0]


class GPT(nn.Module):
    """Two blocks, on letters and their places; the head is the embedding."""

    def __init__(self, layers: af.megatron.Layers) -> None:
        """Make its layers."""
        super().__init__()
        self.letters = layers.vocabulary(128, WIDTH, init_method=small)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(layers) for _ in range(2))
        self.head = layers.column(WIDTH, 128, bias=False, gather_output=True)
        self.head.weight = self.letters.weight

    def forward(self, codes: Tensor) -> Tensor:
        """Return how likely each letter comes next, as logits."""
        x = self.letters(codes) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)[0]


small = partial(nn.init.normal_, std=0.1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a letter, in nats."""
    codes, following = batch
    return cross_entropy(model(codes).mT, following)


def train(world: af.World, *, num_updates: int = 30) -> dict[str, float]:
    """Train, and return the mean loss of a letter in the last update, in nats."""
    state = af.TrainState.create(
        model=partial(GPT, af.megatron.layers(world)),
        optimizer=partial(torch.optim.AdamW, lr=0.005),
        data=af.Data((TEXTS[:, :-1], TEXTS[:, 1:]), global_batch_size=8, shuffle=True),
        setup=af.chain(af.shard_data(), af.tensor_parallel(), af.wrap_ddp()),
        world=world,
    )
    step, metrics = af.make_step(loss_fn), af.Metrics({})
    for batch in islice(af.batches(state), num_updates):
        state, metrics = step(state, batch)
    return metrics.all_reduce_mean(world)


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        last = train(world)
        af.print_once(world, f"axes {dict(world.axes)}, last loss {last['loss']:.5f}")
