# SPDX-License-Identifier: Apache-2.0
"""One idea more: a teacher that is the student's average, and a center of its outputs.

From one view of a sample the student predicts what the teacher outputs for the other view
(DINO, Caron et al. 2021). `af.ema` is the teacher. A center keeps it from the same output for
all samples. The center is a running mean over the samples of all ranks, in a slot of the state.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import accelfn as af

BATCH, RATE, NUM_SAMPLES = 64, 0.003, 643  # the last batch of an epoch has 3
KEEP_TEACHER, KEEP_CENTER = 0.99, 0.9
WARM, COLD = 0.1, 0.04  # temperatures of student and teacher
SIGNAL, NOISE, KINDS, OUTPUTS = 8, 56, 10, 32


class Views(Dataset[Tensor]):
    """Two views of each sample: some numbers tell its kind, most are noise of the view."""

    def __init__(self, count: int, seed: int) -> None:
        """Draw the kinds, and samples that are near the center of their kind."""
        centers = torch.randn(KINDS, SIGNAL, generator=torch.Generator().manual_seed(7))
        draw = torch.Generator().manual_seed(seed)
        self.kinds = torch.randint(KINDS, (count,), generator=draw)
        self.rows = centers[self.kinds]
        self.rows = self.rows + 0.3 * torch.randn(self.rows.shape, generator=draw)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.kinds)

    def __getitem__(self, index: int) -> Tensor:
        """Draw two views; accelfn seeds the draws, alike for any number of ranks."""
        noise = torch.randn(2, NOISE)
        return torch.cat([self.rows[index].expand(2, -1), noise], 1)


def net() -> nn.Module:
    """Return three layers."""
    hidden = nn.Linear(SIGNAL + NOISE, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()
    return nn.Sequential(*hidden, nn.Linear(64, OUTPUTS))


def loss_fn(student: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return how far the student is from the teacher's output for the other view."""
    views, targets = batch
    scores = (student(views) / WARM).log_softmax(2)
    return -(targets.flip(1) * scores).sum(2).mean()


def train(world: af.World, epochs: int = 20, parts: int = 1) -> dict[str, object]:
    """Return student, teacher and center; take updates in so many micro-batches."""
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.Adam, lr=RATE),
        data=af.Data(Views(NUM_SAMPLES, 0), global_batch_size=BATCH, shuffle=True),
        setup=af.chain(
            *(af.shard_data(), af.wrap_ddp(), af.ema(KEEP_TEACHER)),
            af.accumulate(num_micro_batches=parts),
        ),
        world=world,
    ).with_slot("center", torch.zeros(OUTPUTS))
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=epochs):
        with af.borrow_model(state, at="eval") as teacher, torch.no_grad():
            outputs = torch.cat([teacher(views) for views in batch.micro_batches])
        center = state.slots["center"]
        targets = ((outputs - center) / COLD).softmax(2)
        total = af.all_reduce(outputs[~batch.filler].sum((0, 1)), world)
        mean = total / (2 * batch.num_samples)
        center = KEEP_CENTER * center + (1 - KEEP_CENTER) * mean
        state, _ = step(state.with_slot("center", center), batch.zip(targets))
    student, teacher = (af.full_params(state, at=at) for at in ("train", "eval"))
    return {"student": student, "teacher": teacher, "center": state.slots["center"]}


def nearest(samples: Tensor, kinds: Tensor, new: Tensor) -> Tensor:
    """Return the kind of the nearest sample of each new one."""
    return kinds[torch.cdist(new, samples).argmin(1)]


if __name__ == "__main__":
    torch.manual_seed(0)  # noqa: TID251 - for the views of the evaluation
    with af.World.from_env(device="cpu") as world:
        model, old, new = net(), Views(NUM_SAMPLES, 0), Views(500, 1)
        model.load_state_dict(train(world)["teacher"])
        x, y = (torch.stack([v[i] for i in range(len(v))])[:, 0] for v in (old, new))
        for name, embed in ("numbers", nn.Identity()), ("embeddings", model):
            hits = nearest(embed(x), old.kinds, embed(y)) == new.kinds
            af.print_once(world, f"nearest by {name}: {hits.sum()} of 500 of a kind")
