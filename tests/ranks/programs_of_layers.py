# SPDX-License-Identifier: Apache-2.0
"""Trainings of models whose layers are split, by accelfn and by torch alone."""

from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import accelfn as af
from tests.laws.parallel_layers import PLAN, Lying, Speaker, Speech, loss_of_tokens

UPDATES = 2


def by_accelfn(world: af.World, speech: Speech, lying: Lying) -> dict[str, Any]:
    """Return the parameters after some updates, and the metrics of the last."""
    state = speech.state(world, *lying.setup(speech.plan))
    step, metrics = af.make_step(loss_of_tokens), af.Metrics({})
    for batch in islice(af.batches(state), UPDATES):
        state, metrics = step(state, batch)
    return {**af.full_params(state, at="train"), **metrics.all_reduce_mean(world)}


STYLES = {
    "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate()),
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
}


def by_hand(world: af.World, speech: Speech) -> dict[str, torch.Tensor]:
    """Train with torch's parallelize_module and optimizer alone, as its tutorial does.

    What stands between a column and a row layer has its gradients summed by hand.
    """
    net = Speaker(speech.dtype, tied=False, dropout=0.0, frozen=speech.frozen)
    begun = speech.state(af.World())
    net.load_state_dict({**net.state_dict(), **begun.params})
    plan = {name: STYLES[word]() for name, word in PLAN.items() if word in STYLES}
    parallelize_module(net, world.mesh, plan)
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=1e-3, foreach=False)
    for batch in islice(af.batches(begun), UPDATES):
        loss = loss_of_tokens(net, batch.value)
        (loss.total / loss.weight).backward()
        inside: Any = net.blocks[0]
        for param in nn.Module.parameters(inside.of_heads):
            param.grad = af.all_reduce(param.grad, world)
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach()
        for name, param in net.named_parameters()
    }
