# SPDX-License-Identifier: Apache-2.0
"""Train ranks apart, and average their parameters every few updates."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import attrs
import torch

from accelfn.arguments import integer, truth
from accelfn.collectives import pack, sum_, unpack_
from accelfn.grads import Grads
from accelfn.loss import Number
from accelfn.state import TrainState
from accelfn.transform import transform
from accelfn.world import World

Slot: TypeAlias = dict[str, Any]


@transform
class local_sgd:
    """Let each rank train on its own shares, and average parameters every `sync_every` updates.

    No gradient is communicated. Batch size, learning rate and schedule stay as they are.
    Ranks are averaged by the weight of the samples they have seen since the last
    average, so short and empty shares count for what they are. `af.finalize` averages
    once more at the end; evaluation and export see the average at any time.

    Acts on: init, reduce, grads, after_update, eval_params, finalize, merge.

    Args:
        sync_every: updates between averages, at least 1.
        buffers: average floating-point buffers (running statistics) too.
        opt_state: average the optimizer's tensors too.

    Law:
        With `sync_every=1` and plain SGD it is `wrap_ddp`; in a world of 1 it changes nothing,
        bitwise. It gives up that replicas agree between averages.

    Cost:
        One flattened all-reduce every `sync_every` updates, of the parameters that are
        trained, or were before `with_trainable` froze them.

    References:
        Stich 2019, "Local SGD Converges Fast and Communicates Little".

    Example:
        >>> local_sgd(sync_every=8)
        af.local_sgd(sync_every=8)
    """

    gives_up: ClassVar[Mapping[str, str]] = {"replicas_agree": "between averages"}
    reduce: ClassVar[None] = None

    _draws: ClassVar[bool] = False
    sync_every: int = attrs.field(
        validator=integer(1, "a number of updates"), kw_only=True
    )
    buffers: bool = attrs.field(default=False, validator=truth(), kw_only=True)
    opt_state: bool = attrs.field(default=False, validator=truth(), kw_only=True)

    def init(self, state: TrainState) -> Slot:
        """Start with ranks that agree."""
        return {"weight": 0, "since": state.step}

    def grads(self, grads: Grads, slot: Slot, state: TrainState) -> tuple[Grads, Slot]:
        """Count the weight of what this rank has seen since the last average."""
        del state
        return grads, {**slot, "weight": slot["weight"] + grads.weight}

    def after_update(self, state: TrainState, slot: Slot) -> tuple[TrainState, Slot]:
        """Average when the period is over."""
        if state.step - slot["since"] < self.sync_every:
            return state, slot
        return self.finalize(state, slot)

    def finalize(self, state: TrainState, slot: Slot) -> tuple[TrainState, Slot]:
        """Average now, in place, unless nothing was updated since the last time."""
        if state.step > slot["since"]:
            average_(self._averaged(state), slot["weight"], state.world)
        return state, {"weight": 0, "since": state.step}

    def merge(self, slots: Sequence[Slot]) -> tuple[list[float], Slot]:
        """Average by the weight of what each rank has seen; go on as after an average."""
        weights = [float(slot["weight"]) for slot in slots]
        return weights, {**slots[0], "weight": 0}

    def eval_params(self, state: TrainState, slot: Slot) -> Mapping[str, torch.Tensor]:
        """Return the average over ranks; a collective unless they were just averaged."""
        if state.world.size == 1 or state.step == slot["since"]:
            return state.params
        trained = state.definition.skeleton.once_trained
        copies = {n: p.clone() for n, p in state.params.items() if n in trained}
        average_(list(copies.values()), slot["weight"], state.world)
        return {**state.params, **copies}

    def _averaged(self, state: TrainState) -> list[torch.Tensor]:
        # the others are as they were created, and rounding would move them
        trained = state.definition.skeleton.once_trained
        tensors = [param for name, param in state.params.items() if name in trained]
        if self.buffers:
            tensors += state.buffers.values()
        if self.opt_state:
            entries = state.opt_state.values()
            tensors += [
                value
                for entry in entries
                for name, value in entry.items()
                if isinstance(value, torch.Tensor) and name != "step"
            ]
        return tensors


def average_(tensors: list[torch.Tensor], weight: Number, world: World) -> None:
    """Set floating-point tensors to their mean over ranks by weight, in place.

    The weight travels at the end of the same buffer. Integer tensors are left alone.
    """
    moving = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    if world.size == 1 or not moving:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in moving):
        same = [tensor for tensor in moving if tensor.dtype == dtype]
        # below float32 a weight could not be counted: average in float32
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        # a weight of 0 on all ranks gives the plain mean; beside a count this is nothing
        seen = torch.full((1,), 1e-30, dtype=wide, device=world.device) + weight
        flat = pack([*same, seen.to(dtype)]).to(wide)
        flat[-1:] = 1
        flat.mul_(seen)
        sum_(flat, world, label="local_sgd")
        flat.div_(flat[-1].clone())
        unpack_(flat[:-1], same)
