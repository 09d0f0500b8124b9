# SPDX-License-Identifier: Apache-2.0
"""Ways for gradients to cross the ranks, written as users write them, with public names only."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

import accelfn as af


def weight_of(grads: af.Grads, world: af.World) -> torch.Tensor:
    """Return this rank's weight, to be summed."""
    return torch.as_tensor(grads.weight, dtype=torch.float64, device=world.device)


@af.transform
class SumAll:
    """Sum gradients and their weight in one call a dtype: what `wrap_ddp` is for."""

    def reduce(self, grads, slot, update):
        world = update.world
        sums, weight = af.all_reduce((grads.tensors, weight_of(grads, world)), world)
        return grads.with_sums(sums, weight), slot


@af.transform
class GatherAll:
    """Let every rank see all gradients, and add them up itself."""

    def reduce(self, grads, slot, update):
        world = update.world
        sums = {
            n: af.all_gather(g[None], world).sum(0) for n, g in grads.tensors.items()
        }
        weight = af.all_gather(weight_of(grads, world), world).sum()
        return grads.with_sums(sums, weight), slot


@af.transform
class HalfPrecision:
    """Sum gradients in 16 bits, as `compress("fp16")` does: near their mean."""

    def reduce(self, grads, slot, update):
        world = update.world
        weight = af.all_reduce(weight_of(grads, world), world)
        scale = weight.clamp(min=1)
        narrow = {n: (g / scale).half() for n, g in grads.tensors.items()}
        summed = af.all_reduce(narrow, world)
        wide = {n: s.to(grads.tensors[n].dtype) * scale for n, s in summed.items()}
        return grads.with_sums(wide, weight), slot


@af.transform
class ErrorFeedback:
    """Send multiples of an eighth of the mean, and what that leaves out with the next ones."""

    tells: ClassVar[Mapping[str, Any]] = {"by_rank": ("rest",)}

    def init(self, state):
        return {"rest": {n: torch.zeros_like(p) for n, p in state.params.items()}}

    def merge(self, slots, world):
        rests = [slot["rest"] for slot in slots]
        rest = {n: sum(rest[n] for rest in rests) / world.size for n in rests[0]}
        return [1.0] * len(slots), {"rest": rest}

    def reduce(self, grads, slot, update):
        world, rest = update.world, slot["rest"]
        weight = af.all_reduce(weight_of(grads, world), world)
        scale = weight.clamp(min=1)
        wanted = {n: g / scale + rest[n] for n, g in grads.tensors.items()}
        sent = {n: (8 * each).round() / 8 for n, each in wanted.items()}
        left = {n: wanted[n] - sent[n] for n in wanted}
        return grads.with_sums(af.all_reduce(sent, world), 1), {
            "rest": {**rest, **left}
        }
