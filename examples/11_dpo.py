# SPDX-License-Identifier: Apache-2.0
"""One idea more: preferences. A language model learns from pairs which answer is better.

First it learns Python's help, letter by letter. Then, by direct preference optimisation
(Rafailov et al. 2023) against a frozen copy of itself, to prefer short words: of two texts
that may follow, that with more spaces. Held-out pairs show what it has learnt.
"""

from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

import accelfn as af

BETA = 0.1
CODES = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
TEXTS = CODES[: 4096 * 32].view(-1, 32)


def pairs() -> tuple[Tensor, Tensor]:
    """Return rows of 16 letters, and 16 that follow: with more spaces, and with fewer."""
    ends, others = TEXTS[:, 16:], TEXTS[:, 16:].roll(2048, 0)
    more = (ends == ord(" ")).sum(1) - (others == ord(" ")).sum(1)
    swap = (more < 0)[:, None]
    answers = torch.where(swap, others, ends), torch.where(swap, ends, others)
    starts = TEXTS[more != 0, :16]
    better, worse = (torch.cat([starts, each[more != 0]], 1) for each in answers)
    return better, worse


class Writer(nn.Module):
    """Sees 8 letters, and says which may come next."""

    def __init__(self) -> None:
        """Make two layers."""
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        sight = nn.ConstantPad1d((7, 0), 0.0), nn.Conv1d(32, 128, 8), nn.SiLU()
        self.layers = nn.Sequential(*sight, nn.Conv1d(128, 128, 1))

    def forward(self, letters: Tensor) -> Tensor:
        """Return logits of the letter after each, `(batch, 128, letters)`."""
        return self.layers(self.embed(letters).mT)


def letter_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean loss of a letter."""
    return letter_losses(model, batch[0]).mean()


def letter_losses(model: nn.Module, letters: Tensor) -> Tensor:
    """Return the loss of each letter but the first, `(batch, letters - 1)`."""
    return cross_entropy(model(letters[:, :-1]), letters[:, 1:], reduction="none")


def dpo_loss(model: nn.Module, batch: list[Tensor], reference: nn.Module) -> af.Loss:
    """Return the loss of pairs, and how many of them the model finds the right way round."""
    # the log likelihood of an answer, the second half, given the first
    better, worse = (-letter_losses(model, each)[:, 15:].sum(1) for each in batch)
    with torch.no_grad():
        known = [-letter_losses(reference, each)[:, 15:].sum(1) for each in batch]
    margin = (better - known[0]) - (worse - known[1])
    total = -logsigmoid(BETA * margin).sum()
    return af.Loss(total, len(margin), accuracy=(better > worse).sum())


def train(world: af.World) -> tuple[float, float]:
    """Return how many held-out pairs it finds the right way round, before and after."""
    create = partial(
        af.TrainState.create,
        model=Writer,
        optimizer=partial(torch.optim.AdamW, lr=0.003),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), af.clip_grad_norm(1.0)),
        world=world,
    )
    texts = af.Data((TEXTS[:3072],), global_batch_size=64, shuffle=True)
    better, worse = pairs()
    data = af.Data((better[:2048], worse[:2048]), global_batch_size=64, shuffle=True)
    held_out = af.Data((better[2048:], worse[2048:]), global_batch_size=1024)

    state, step = create(data=texts), af.make_step(letter_loss)
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)
    reference, step = af.snapshot_model(state), af.make_step(dpo_loss)
    state = create(data=data, name="tuned").with_params(state.params)
    before = af.evaluate(state, held_out, dpo_loss, reference)
    for batch in af.batches(state, until_epoch=3):
        state, _ = step(state, batch, reference)
    after = af.evaluate(state, held_out, dpo_loss, reference)
    return before["accuracy"], after["accuracy"]


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        before, after = train(world)
        af.print_once(world, f"prefers short words: {before:.1%}, tuned {after:.1%}")
