# SPDX-License-Identifier: Apache-2.0
"""One idea more: a loss over all samples of an update, whichever rank has them: CLIP's.

Each picture should be nearest to its own text among all texts of the batch, and each text to
its own picture (Radford et al. 2021). `af.all_gather(grad=True)` joins what the ranks have.
In micro-batches GradCache trains the same (Gao et al. 2021): it embeds all pairs, asks the loss
how each embedding should move, and embeds again, with gradients, a micro-batch at a time.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import accelfn as af

BATCH, RATE, WARMTH = 64, 0.003, 0.2
NUM_PAIRS = 643  # the last batch of an epoch has 3


def pairs(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of points, and texts about the same points."""
    map_draw, draw = (torch.Generator().manual_seed(number) for number in (7, seed))
    paint, describe = (torch.randn(4, n, generator=map_draw) for n in (16, 9))
    points = torch.randn(count, 4, generator=draw)
    noise = 0.1 * torch.randn(count, 16, generator=draw)
    return (points @ paint).tanh() + noise, (points @ describe).tanh()


def net(size: int) -> nn.Module:
    """Return two layers."""
    return nn.Sequential(nn.Linear(size, 64), nn.SiLU(), nn.Linear(64, 8))


def towers() -> nn.ModuleList:
    """Return a net for pictures and a net for texts."""
    return nn.ModuleList(map(net, (16, 9)))


def embed(model: nn.ModuleList, batch: list[Tensor]) -> Tensor:
    """Return the embeddings of each pair: of its picture, and of its text."""
    outputs = [tower(inputs) for tower, inputs in zip(model, batch, strict=True)]
    return normalize(torch.stack(outputs, 1), dim=2)


def clip_loss(embeddings: Tensor) -> Tensor:
    """Return how hard it is to find the text of each picture, and the reverse."""
    scores = embeddings[:, 0] @ embeddings[:, 1].T / WARMTH
    labels = torch.arange(len(scores))
    return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2


def loss_fn(model: nn.ModuleList, batch: list[Tensor], world: af.World) -> Tensor:
    """Return the loss over the pairs of all ranks."""
    return clip_loss(af.all_gather(embed(model, batch), world, grad=True))


def cached_loss(model: nn.ModuleList, batch: tuple[list[Tensor], Tensor]) -> Tensor:
    """Return a mean over pairs whose gradients are those of the loss over all pairs."""
    return (embed(model, batch[0]) * batch[1]).sum((1, 2)).mean()


def slopes(state: af.TrainState, batch: af.Batch) -> Tensor:
    """Return how the loss changes with each embedding of this rank, times all pairs."""
    with af.borrow_model(state) as model, torch.no_grad():
        rows = torch.cat([embed(model, value) for value in batch.micro_batches])
    pairs = rows.requires_grad_()[~batch.filler]
    everyone = af.all_gather(pairs, state.world, ragged=True, grad=True)
    (clip_loss(everyone) / state.world.size).backward()  # all ranks have this loss
    return rows.grad * batch.num_samples


def train(world: af.World, epochs: int = 20, parts: int = 1) -> dict[str, Tensor]:
    """Return the parameters after some epochs; take updates in so many micro-batches."""
    in_parts = af.accumulate(num_micro_batches=parts)
    state = af.TrainState.create(
        model=towers,
        optimizer=partial(torch.optim.Adam, lr=RATE),
        data=af.Data(pairs(NUM_PAIRS), global_batch_size=BATCH, shuffle=True),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), in_parts),
        world=world,
    )
    step, cached_step = map(af.make_step, (loss_fn, cached_loss))
    for batch in af.batches(state, until_epoch=epochs):
        if parts == 1:
            state, _ = step(state, batch, world)
        else:
            state, _ = cached_step(state, batch.zip(slopes(state, batch)))
    return af.full_params(state)


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        model = towers()
        model.load_state_dict(train(world))
        pictures, texts = embed(model, pairs(100, seed=1)).unbind(1)
        hits = (pictures @ texts.T).argmax(1) == torch.arange(100)
        af.print_once(world, f"{hits.sum()} of 100 new pictures find their text")
