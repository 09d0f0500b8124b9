# SPDX-License-Identifier: Apache-2.0
"""One idea more: sequences that are split over the ranks, which attend to all of them.

`accelfn launch --nproc 2 --axes cp=2` gives each process half of every text: half of the
activations, and the same numbers. Positions come with the batch, for a rank that counted its
own would begin at 0.
"""

from functools import partial
from itertools import islice
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import accelfn as af

LENGTH = 256
CODES = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
TEXTS = CODES[: len(CODES) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
PLACES = torch.arange(LENGTH).expand(len(TEXTS), -1)


class Block(nn.Module):
    """A transformer's block: what is gathered, and computed again, together."""

    def __init__(self, width: int = 64) -> None:
        """Make its layers."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each letter look at those before it, on whatever rank, and think."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        seen = scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Two blocks, on letters and their places."""

    def __init__(self, width: int = 64) -> None:
        """Make its layers."""
        super().__init__()
        self.letters, self.places = (
            nn.Embedding(128, width),
            nn.Embedding(LENGTH, width),
        )
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, codes: Tensor, places: Tensor) -> Tensor:
        """Return how likely each letter comes next, as logits."""
        x = self.letters(codes) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return x @ self.letters.weight.T / 8


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> af.Loss:
    """Return the loss of the letters of this rank's part, and their number."""
    codes, following, places = batch
    logits = model(codes, places)
    total = cross_entropy(logits.mT, following, reduction="sum")
    return af.Loss(total, following.numel())


def train(world: af.World, *, num_updates: int = 30) -> dict[str, float]:
    """Train, and return the mean loss of a letter in the last update, in nats."""
    state = af.TrainState.create(
        model=Decoder,
        optimizer=partial(torch.optim.AdamW, lr=0.005),
        data=af.Data(
            (TEXTS[:, :-1], TEXTS[:, 1:], PLACES), global_batch_size=8, shuffle=True
        ),
        setup=af.chain(
            af.shard_data(),
            af.wrap_fsdp(),
            af.context_parallel(seq_dim=1),
            af.checkpoint_activations(Block),
            af.clip_grad_norm(1.0),
        ),
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
