# SPDX-License-Identifier: Apache-2.0
"""Transforms of accelfn written again as a user would: public names only, a field each.

Between them they have every field of a transform. They are short of options, not of rules.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accelfn as af


@af.transform
class Shard:
    """`shard_data`: a share of each batch for each rank."""

    def data(self, plan: af.typing.Plan) -> af.typing.Plan:
        return plan.sharded()


@af.transform
class Accumulate:
    num: int

    @property
    def tells(self) -> Mapping[str, Any]:
        return {"micro_batches": self._parts}

    def data(self, plan: af.typing.Plan) -> af.typing.Plan:
        return attrs.evolve(plan, num_micro_batches=self.num)

    def value_and_grad(self, inner: Callable[..., Any], slot: Any, update: Any) -> Any:
        def summed(state, batch, /, *extras, into=None, sync=True):
            total, parts = af.Metrics({}), self._parts(batch)
            for number, part in enumerate(parts, 1):
                last = number == len(parts)
                metrics, into = inner(
                    state, part, *extras, into=into, sync=sync and last
                )
                total = total + metrics
            return total, into

        return summed, slot

    def _parts(self, batch: Any) -> Sequence[Any]:
        return batch if isinstance(batch, list) else batch.parts()


@af.transform
class Ema:
    """`ema`: an average of the parameters, at which is evaluated."""

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    decay: float

    def init(self, state: af.TrainState) -> dict[str, torch.Tensor]:
        return {name: param.clone() for name, param in state.params.items()}

    def after_update(self, state, slot, update):
        for name, param in state.params.items():
            slot[name].lerp_(param, 1 - self.decay)
        return state, slot

    def eval_params(self, params, slot, update):
        return dict(slot), slot


@af.transform
class LocalSgd:
    """`local_sgd`: ranks train apart, and are averaged every few updates."""

    gives_up: ClassVar[Mapping[str, str]] = {"replicas_agree": "between averages"}
    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True, "by_rank": ("weight",)}
    reduce: ClassVar[None] = None
    sync_every: int

    def init(self, state: af.TrainState) -> dict[str, Any]:
        return {"weight": 0, "since": state.step}

    def grads(self, grads: af.Grads, slot: Any, update: af.Update) -> Any:
        return grads, {**slot, "weight": slot["weight"] + update.weight}

    def after_update(self, state: af.TrainState, slot: Any, update: af.Update) -> Any:
        if state.step - slot["since"] < self.sync_every:
            return state, slot
        return self.finalize(state, slot, update)

    def finalize(self, state: af.TrainState, slot: Any, update: af.Update) -> Any:
        if state.step > slot["since"] and update.world.size > 1:
            means = self._mean(state.params, slot["weight"], update.world)
            for name, mean in means.items():
                state.params[name].copy_(mean)
        return state, {"weight": 0, "since": state.step}

    def merge(self, slots: Sequence[Any], world: af.World) -> tuple[list[float], Any]:
        return [float(slot["weight"]) for slot in slots], {**slots[0], "weight": 0}

    def eval_params(self, params, slot, update):
        own = update.state.params.items()
        agree = update.state.step == slot["since"]
        if update.world.size == 1 or (agree and all(params[n] is p for n, p in own)):
            return params, slot
        return self._mean(params, slot["weight"], update.world), slot

    def _mean(self, params: Any, weight: Any, world: af.World) -> dict[str, Any]:
        mine = torch.as_tensor(weight, dtype=torch.float64)
        sums, whole = af.all_reduce(
            ({name: param * mine for name, param in params.items()}, mine), world
        )
        if whole == 0:
            return self._mean(params, 1, world)
        return {name: each / whole for name, each in sums.items()}


@af.transform
class Mean:
    """What `wrap_ddp` does for gradients, by a `reduce` of one's own."""

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}

    def reduce(self, grads: af.Grads, slot: None, update: af.Update) -> Any:
        mine = torch.as_tensor(grads.weight, dtype=torch.float64)
        sums, weight = af.all_reduce((dict(grads.tensors), mine), update.world)
        return grads.with_sums(sums, weight), slot


@af.transform
class Plateau:
    """`plateau` without cooldown: rates that are reduced when a value stalls."""

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    factor: float
    patience: int

    def init(self, state: af.TrainState) -> dict[str, Any]:
        counts = {"num_bad": 0, "cooling": 0, "num_reductions": 0}
        return {"best": float("inf"), **counts, "reported": ()}

    def _take(self, value: float, slot: Any) -> Any:
        num_bad, times = slot["num_bad"] + 1, slot["num_reductions"]
        best = slot["best"]
        if value < best * (1.0 - 1e-4):
            best, num_bad = value, 0
        if num_bad > self.patience:
            num_bad, times = 0, times + 1
        after = {"best": best, "num_bad": num_bad, "num_reductions": times}
        return {**slot, **after, "reported": ()}

    def hyper(self, hyper: Mapping[Any, Any], slot: Any, update: af.Update) -> Any:
        for value in slot["reported"]:
            slot = self._take(value, slot)
        times = slot["num_reductions"]
        groups = update.state.definition.optimizer.param_groups
        rates = {
            (i, "lr"): float(hyper.get((i, "lr"), g["lr"]))
            for i, g in enumerate(groups)
        }
        for where in rates if times else ():
            for _ in range(times):
                rates[where] *= self.factor
        return rates if times else {}, slot


@af.transform
class SkipNonFinite:
    """`skip_nonfinite`: it wishes a skip, and counts those in a row."""

    tells: ClassVar[Mapping[str, Any]] = {
        "draws_nothing": True,
        "judges_finite": True,
        "sees_skips": True,
    }

    def init(self, state: af.TrainState) -> dict[str, int]:
        return {"consecutive": 0}

    def grads(self, grads: af.Grads, slot: Any, update: af.Update) -> Any:
        bad = not all(grad.isfinite().all() for grad in grads.tensors.values())
        return grads.with_skip(bad, agreed=grads.reduced), slot

    def after_update(self, state: af.TrainState, slot: Any, update: af.Update) -> Any:
        return state, {"consecutive": slot["consecutive"] + 1 if update.skipped else 0}


@af.transform
class Autocast:
    def loss(self, loss_fn: Callable[..., Any], slot: Any, update: Any) -> Any:
        def inside(model, batch, *extras):
            torch.clear_autocast_cache()
            try:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return loss_fn(model, batch, *extras)
            finally:
                torch.clear_autocast_cache()

        return inside, slot


@af.transform
class Recompute:
    """`checkpoint_activations`: modules of the engine's own run again when gradients are due."""

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True, "recomputes": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "recomputes": "and {other!r} may select the same modules."
    }

    def module(self, module: nn.Module, state: af.TrainState) -> nn.Module:
        for each in module.children():
            each.forward = _again(each.forward)
        return module


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given, **named):
        return checkpoint(forward, *given, use_reentrant=False, **named)

    return call


@af.transform
class Parts:
    """`wrap_fsdp` under another name, without its checks: rows of all on each rank."""

    def layout(self, name, meta, axes):
        del name, axes
        return {"dp_shard": 0} if meta.ndim else None

    def engine(self, state: af.TrainState) -> Any:
        return af.wrap_fsdp().engine(state)
