# SPDX-License-Identifier: Apache-2.0
"""One idea more: two workers a rank stream a text, and a run that was killed goes on.

Its stream says where it stands, `af.save` keeps that, and what was left is read, no more.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import accelfn as af

FOLDER = Path("text-checkpoints")  # delete it to begin anew
CODES = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))


class Windows(IterableDataset[Tensor]):
    """Windows of 64 letters of Python's help, which has 465,000."""

    place = 0

    def __iter__(self) -> Iterator[Tensor]:
        """Yield windows from where the stream stands; each begins at random near there."""
        while self.place + 128 <= len(CODES):
            self.place += 64
            yield CODES[self.place - int(torch.randint(64, ())) :][:64]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        """Return where the stream stands."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Stand there."""
        self.place = state["place"]


def net() -> nn.Module:
    """Return layers that see 16 letters, and say which may come next."""
    layers = nn.Embedding(128, 32), nn.Flatten(), nn.Linear(16 * 32, 256), nn.SiLU()
    return nn.Sequential(*layers, nn.Linear(256, 128))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean loss of a letter, in nats."""
    rows = batch.unfold(1, 17, 1).flatten(0, 1)
    return nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])


def train(world: af.World, *, epochs: int = 3, every: int = 50) -> None:
    """Take the updates that are left; save, and print the loss, every so many."""
    adamw = partial(torch.optim.AdamW, lr=0.005)
    data = af.Data(Windows(), global_batch_size=64, num_workers=2)
    setup = af.chain(af.shard_data(), af.wrap_ddp())
    state = af.TrainState.create(
        model=net, optimizer=adamw, data=data, setup=setup, world=world
    )
    step = af.make_step(loss_fn)
    if saved := sorted(FOLDER.glob("[0-9]*")):  # one that has its name is whole
        state = af.load(state, saved[-1])
    for batch in af.batches(state, until_epoch=epochs):
        state, metrics = step(state, batch)
        if state.step % every == 0:
            af.print_once(
                world, f"update {state.step}, {metrics.all_reduce_mean(world)}"
            )
            af.save(state, FOLDER / f"{state.step:06d}")
    writer, text = af.snapshot_model(state), "The statement is"
    for _ in range(64):
        logits = writer(torch.tensor([list(text[-16:].encode())]))
        text += chr(int(logits.argmax()))
    af.print_once(world, repr(text))


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        train(world)
