# SPDX-License-Identifier: Apache-2.0
"""A training of Megatron-core's layers without accelfn."""

import dataclasses
from itertools import islice
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch import nn

import accelfn as af
from tests.internals import all_gather_list
from tests.laws.layers_of_megatron import MegatronSpeaker, MegatronSpeech
from tests.laws.parallel_layers import loss_of_tokens
from tests.ranks.programs_of_layers import UPDATES


class Gather(torch.autograd.Function):
    """Puts features together, as Megatron's does on GPUs."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, tp: af.World) -> torch.Tensor:
        ctx.tp = tp
        return torch.cat(all_gather_list(part, tp, label="gather"), -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].chunk(ctx.tp.size, -1)[ctx.tp.rank], None


class Gathered(ColumnParallelLinear):
    """A column layer of which all ranks get all features."""

    tp: af.World

    def forward(self, input_: torch.Tensor) -> Any:
        made, bias = super().forward(input_)
        return Gather.apply(made, self.tp), bias


class Raw:
    """Makes Megatron's layers of a rank's part, as Megatron's users do."""

    def __init__(self, tp: af.World, config: Any) -> None:
        self.tp = tp
        self.common = {
            "config": config,
            "init_method": nn.init.normal_,
            "tp_group": tp.group,
        }

    def column(self, *sizes: int, gather_output: bool = False, **options: Any) -> Any:
        if not gather_output:
            return ColumnParallelLinear(*sizes, **self.common, **options)
        made = Gathered(*sizes, **self.common, **options)
        made.tp = self.tp
        return made

    def row(self, *sizes: int, bias: bool = True, **said: Any) -> RowParallelLinear:
        said = {"bias": bias, "skip_bias_add": False, "input_is_parallel": True, **said}
        return RowParallelLinear(*sizes, **self.common, **said)

    def vocabulary(self, *sizes: int) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(*sizes, **self.common)


def by_hand(world: af.World, speech: MegatronSpeech) -> dict[str, torch.Tensor]:
    """Train with Megatron's layers and torch's optimizer alone.

    What stands between a column and a row layer has its gradients summed by hand.
    """
    begun = speech.state(af.World())
    tp = world.along("tp")
    config = af.megatron.layers(world, dtype=speech.dtype).config
    # which is when Megatron says at which dim a parameter is cut
    made: Any = Raw(tp, dataclasses.replace(config, perform_initialization=True))
    said = {"tied": speech.tied, "frozen": speech.frozen, "rows": False}
    net = MegatronSpeaker(made, speech.dtype, dropout=0.0, **said)
    for name, param in net.named_parameters():
        whole, dim = begun.params[name], cut_of(param)
        part = whole if dim is None else whole.chunk(tp.size, dim)[tp.rank]
        param.data.copy_(part)
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
    found = {}
    for name, param in net.named_parameters():
        dim = cut_of(param)
        parts = all_gather_list(param.detach(), tp, label="parts")
        found[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return found


def cut_of(param: Any) -> int | None:
    """Return at which dim Megatron has cut a parameter."""
    is_cut = getattr(param, "tensor_model_parallel", False)
    return param.partition_dim if is_cut else None
