# SPDX-License-Identifier: Apache-2.0
"""One idea more: experts that share the samples of an update, counted over all ranks.

A router sends each sample to one expert. The loss keeps experts in balance: it adds the share
of samples that an expert gets, times the probability that the router gives it (Fedus et al.
2021), each over the whole batch (Qiu et al. 2025). `af.all_reduce` averages shares by the
samples of each rank. With micro-batches the router is asked before the first of them.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import accelfn as af

BATCH, RATE, NUM_SAMPLES = 64, 0.01, 1027  # the last batch of an epoch has 3
INPUTS, OUTPUTS, EXPERTS = 6, 4, 8


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs, and outputs of one of eight linear maps that three signs choose."""
    map_draw, draw = (torch.Generator().manual_seed(number) for number in (7, seed))
    maps = torch.randn(8, INPUTS, OUTPUTS, generator=map_draw)
    inputs = torch.randn(count, INPUTS, generator=draw)
    number = (inputs[:, :3] > 0).long() @ torch.tensor([4, 2, 1])
    return inputs, torch.einsum("ni,nio->no", inputs, maps[number])


class Mixture(nn.Module):
    """A router, and experts that are linear maps."""

    def __init__(self) -> None:
        """Make all layers."""
        super().__init__()
        self.router = nn.Linear(INPUTS, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS) for _ in range(EXPERTS))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs, and the probability of each expert."""
        probs = self.router(inputs).softmax(1)
        gate, choice = probs.max(1)
        outputs = inputs.new_zeros(len(inputs), OUTPUTS)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == number)  # there may be none
            outputs = outputs.index_copy(0, rows, expert(inputs[rows]))
        return gate[:, None] * outputs, probs


def shares(probs: Tensor) -> Tensor:
    """Return which share of samples each expert gets."""
    return one_hot(probs.argmax(1), EXPERTS).to(probs.dtype).mean(0)


def loss_fn(
    model: nn.Module, batch: list[Tensor], world: af.World, table: dict[str, Tensor]
) -> Tensor:
    """Return the error, and how far experts are from balance."""
    outputs, probs = model(batch[0])
    if "share" not in table:  # a mean that weighs each rank by its samples
        table = {"share": af.all_reduce(shares(probs), world, "mean")}
    balance = EXPERTS * (table["share"] * probs.mean(0)).sum()
    return (outputs - batch[1]).square().mean() + balance


def count_first(state: af.TrainState, batch: af.Batch) -> dict[str, Tensor]:
    """Return the shares of a whole batch, before a loss sees its micro-batches."""
    with af.borrow_model(state) as model, torch.no_grad():
        probs = torch.cat([model.router(x).softmax(1) for x, _ in batch.micro_batches])
    return {"share": shares(af.all_gather_valid(probs, batch, state.world))}


def train(world: af.World, epochs: int = 60, parts: int = 1) -> dict[str, Tensor]:
    """Return the parameters after some epochs; take updates in so many micro-batches."""
    in_parts = af.accumulate(num_micro_batches=parts)
    state = af.TrainState.create(
        model=Mixture,
        optimizer=partial(torch.optim.Adam, lr=RATE),
        data=af.Data(samples(NUM_SAMPLES), global_batch_size=BATCH, shuffle=True),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), in_parts),
        world=world,
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, until_epoch=epochs):
        table = {} if parts == 1 else count_first(state, batch)
        state, _ = step(state, batch, world, table)
    return af.full_params(state)


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        model = Mixture()
        model.load_state_dict(train(world))
        inputs, targets = samples(1000, seed=1)
        outputs, probs = model(inputs)
        error = (outputs - targets).square().mean() / targets.square().mean()
        numbers = " ".join(f"{share:.0%}" for share in shares(probs))
        af.print_once(world, f"error {error:.0%} of the first; experts get {numbers}")
