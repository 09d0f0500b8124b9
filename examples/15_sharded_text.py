# SPDX-License-Identifier: Apache-2.0
"""One idea more: a model that is split over the ranks, however many there are this time.

Each rank holds some rows of every parameter, and gathers a block at a time. Each start takes
sixty updates more: begin on two processes, and go on with one.
"""

from functools import partial
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import accelfn as af

FOLDER = Path("sharded-text")  # delete it to begin anew
CODES = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
WINDOWS = CODES[: len(CODES) // 65 * 65].view(-1, 65)


class Block(nn.Module):
    """A transformer's block: what is gathered together."""

    def __init__(self, width: int = 64) -> None:
        """Make its layers."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each letter look at those before it, and think."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        seen = scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Two blocks, and one matrix that is embedding and head; that one lies in no block."""

    def __init__(self, width: int = 64) -> None:
        """Make its layers."""
        super().__init__()
        self.letters, self.places = nn.Embedding(128, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, codes: Tensor) -> Tensor:
        """Return how likely each letter comes next, as logits."""
        x = self.letters(codes) + self.places.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x @ self.letters.weight.T / 8


def loss_fn(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of a letter, in nats."""
    return cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:])


def train(world: af.World, *, num_updates: int = 60) -> dict[str, float]:
    """Go on from the newest checkpoint; save, export, and return the held-out loss."""
    state = af.TrainState.create(
        model=Decoder,
        optimizer=partial(torch.optim.AdamW, lr=0.005),
        data=af.Data(WINDOWS[:-500], global_batch_size=32, shuffle=True),
        setup=af.chain(af.shard_data(), af.wrap_fsdp(), af.clip_grad_norm(1.0)),
        world=world,
    )
    step = af.make_step(loss_fn)
    with af.CheckpointStore(FOLDER) as store:
        state = store.restore(state)
        af.print_once(world, f"from update {state.step}, on {world.size} ranks")
        for batch in islice(af.batches(state), num_updates):
            state, _ = step(state, batch)
        store.save(state)
    held_out = af.evaluate(
        state, af.Data(WINDOWS[-500:], global_batch_size=100), loss_fn
    )
    af.print_once(world, f"to update {state.step}, held-out {held_out}")
    af.print_once(world, af.memory(state))
    af.export_model(state, f"sharded-text-{state.step}")
    return held_out


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        train(world)
