# SPDX-License-Identifier: Apache-2.0
"""One idea more: gradients made by hand: DP-SGD, which hides whether a sample was there.

Each sample's gradient is clipped, and noise is added to their sum (Abadi et al. 2016). A rank
gives the mean of its clipped gradients to `af.Grads`, with the number of its samples as weight.
`af.sync_grads` averages over the ranks; then all ranks add the same noise, so it is added once.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import accelfn as af

BATCH, RATE, MOMENTUM, NUM_SAMPLES = 128, 0.5, 0.9, 2051  # the last batch has 3
CLIP, NOISE = 0.5, 1.0  # of a sample's gradient, and its multiple that the noise is
INPUTS, KINDS = 8, 5


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return points around five centers, and which center each is near."""
    center_draw, draw = (torch.Generator().manual_seed(number) for number in (7, seed))
    centers = torch.randn(KINDS, INPUTS, generator=center_draw)
    labels = torch.randint(KINDS, (count,), generator=draw)
    return centers[labels] + 0.7 * torch.randn(count, INPUTS, generator=draw), labels


def net() -> nn.Module:
    """Return two layers."""
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, KINDS))


def clipped_sum(
    model: nn.Module, params: dict[str, Tensor], batch: af.Batch
) -> dict[str, Tensor]:
    """Return the sum of the clipped gradients of samples, without filler."""

    def sample_loss(params: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, params, x), label)

    grads = vmap(grad(sample_loss), in_dims=(None, 0, 0))(params, *batch.value)
    square = sum(each.flatten(1).square().sum(1) for each in grads.values())
    scale = (CLIP / square.sqrt()).clamp(max=1) * ~batch.filler
    return {name: torch.einsum("n,n...->...", scale, g) for name, g in grads.items()}


def add_noise(grads: af.Grads, state: af.TrainState, num_samples: int) -> af.Grads:
    """Return gradients of a mean with the noise of a sum, the same on all ranks."""
    spread = NOISE * CLIP / num_samples
    with af.fork_rng(state, "noise", shared=True):
        return grads.map(lambda each: each + spread * torch.randn_like(each))


def train(world: af.World, epochs: int = 20, parts: int = 1) -> dict[str, Tensor]:
    """Return the parameters after some epochs; take updates in so many micro-batches."""
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM),
        data=af.Data(samples(NUM_SAMPLES), global_batch_size=BATCH, shuffle=True),
        setup=af.chain(af.shard_data(), af.accumulate(num_micro_batches=parts)),
        world=world,
    )
    for batch in af.batches(state, until_epoch=epochs):
        params = dict(state.params)
        with af.borrow_model(state) as model:
            sums = [clipped_sum(model, params, part) for part in batch.parts()]
        count = int((~batch.filler).sum())
        means = {n: sum(each[n] for each in sums) / max(count, 1) for n in params}
        grads = af.Grads(means, weight=count, batch=batch)
        grads = add_noise(af.sync_grads(state, grads), state, batch.num_samples)
        state = af.apply_grads(state, grads)
    return af.full_params(state)


if __name__ == "__main__":
    torch.manual_seed(0)  # noqa: TID251 - the model before training
    with af.World.from_env(device="cpu") as world:
        model = net()
        for says, params in ("before", {}), ("after", train(world)):
            model.load_state_dict(params, strict=False)
            inputs, labels = samples(1000, seed=1)
            hits = model(inputs).argmax(1) == labels
            af.print_once(world, f"{says}: {hits.sum()} of 1000 new samples right")
