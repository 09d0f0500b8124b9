# SPDX-License-Identifier: Apache-2.0
"""One idea more: layers that are split over the ranks, each of which computes a part.

`accelfn launch --nproc 2 --axes tp=2` gives each process half of the heads, of the features
and of the letters, and the same numbers. The model is that of one process.
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
PLAN = {
    "letters": "vocabulary",
    "blocks.*.[qkv]": "column",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "vocabulary",
}


class Block(nn.Module):
    """A transformer's block: two parts, each from column layers to a row layer."""

    def __init__(self) -> None:
        """Make its layers."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Let each letter look at those before it, by the heads that are here, and think."""
        y = self.norms[0](x)
        heads = [
            layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Two blocks, on letters and their places."""

    def __init__(self) -> None:
        """Make its layers."""
        super().__init__()
        self.letters, self.places = (
            nn.Embedding(128, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 128, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Return how likely each letter comes next, as logits."""
        x = self.letters(codes) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a letter, in nats."""
    codes, following = batch
    return cross_entropy(model(codes).mT, following)


def train(world: af.World, *, num_updates: int = 30) -> dict[str, float]:
    """Train, and return the mean loss of a letter in the last update, in nats."""
    state = af.TrainState.create(
        model=Decoder,
        optimizer=partial(torch.optim.AdamW, lr=0.005),
        data=af.Data((TEXTS[:, :-1], TEXTS[:, 1:]), global_batch_size=8, shuffle=True),
        setup=af.chain(af.shard_data(), af.tensor_parallel(PLAN), af.wrap_fsdp()),
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
