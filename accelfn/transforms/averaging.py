# SPDX-License-Identifier: Apache-2.0
"""Average parameters over updates (EMA, schedule-free optimizers), and evaluate the average."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.base import tree
from accelfn.base.arguments import number
from accelfn.definition.transform import transform
from accelfn.errors import OptimizerError
from accelfn.model.optimizer import Hyper, parts_of
from accelfn.state.state import TrainState
from accelfn.state.update import Update

Params: TypeAlias = dict[str, torch.Tensor]


_is_decay = number(
    lambda decay: 0.5 <= decay <= 1,
    "a decay from 0.5 to 1, the weight of the old average, such as 0.999",
)


@transform
class ema:
    """Keep an exponential moving average (EMA) of the parameters, to evaluate and export.

    After each update: `average = decay * average + (1 - decay) * params`. The average starts as
    a copy of the initial parameters. Training itself does not change.

    Under `local_sgd` ranks train independently, so each rank has its own average, and
    evaluation uses the mean of these averages. The order of the two transforms does not matter.

    Acts on: init, after_update, eval_params.

    Args:
        decay: the weight of the old average, from 0.5 to 1 (the average never changes).

    Law:
        `average(T) = decay**T * p(0) + (1 - decay) * sum(decay**(T - t) * p(t))`. The average
        of a parameter that does not change is bitwise equal to the parameter. If ranks have equal
        parameters, they have equal averages.

    Cost:
        One copy of the parameters, and one pass over it per update. The copy of a 16-bit
        parameter is in float32, so that small changes are not lost.

    References:
        Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging".

    Example:
        >>> ema(0.999)
        af.ema(0.999)
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    decay: float = attrs.field(validator=_is_decay)

    def init(self, state: TrainState) -> Params:
        """Start with a copy of the parameters."""
        return {
            name: param.float() if _is_narrow(param) else param.clone()
            for name, param in state.params.items()
        }

    def after_update(
        self, state: TrainState, slot: Params, update: Update
    ) -> tuple[TrainState, Params]:
        """Move the average towards the parameters, in place."""
        moving = [name for name, param in state.params.items() if _averages(param)]
        params = [state.params[name].to(slot[name].dtype) for name in moving]
        tree.lerp_([slot[name] for name in moving], params, 1 - self.decay)
        return state, slot

    def eval_params(
        self, params: Mapping[str, torch.Tensor], slot: Params, update: Update
    ) -> tuple[Mapping[str, torch.Tensor], Params]:
        """Return the average, in the parameters' dtypes."""
        return {n: p.to(params[n].dtype) for n, p in slot.items()}, slot


def _is_narrow(param: torch.Tensor) -> bool:
    """Return whether small changes of the average would be lost in the parameter's dtype."""
    return param.is_floating_point() and param.dtype.itemsize < 4


def _averages(param: torch.Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()


# Schedule-free optimizers evaluate other parameters than those that they train.


@transform
class schedule_free:
    """Evaluate and export the averaged parameters of a schedule-free optimizer.

    Use it with the optimizers of the package `schedulefree`, or with others that have
    `train()`, `eval()` and `train_mode`. Such an optimizer keeps two sets of parameters. It
    computes gradients at y, which is in `state.params` and in checkpoints, and evaluates x, a
    running average. You do not switch modes: steps run in training mode, and `eval_params`,
    `evaluate`, `snapshot_model` and exports use the optimizer's own `eval()` on a copy. If the
    state uses `combine_optimizers`, this applies to its schedule-free optimizers.

    Acts on: init (checks the optimizer), hyper, eval_params.

    Law:
        The evaluated parameters are bitwise equal to those of the optimizer's `eval()`.
        Evaluation does not change the state.

    Cost:
        Nothing in a step, and one copy of the parameters per evaluation. BatchNorm statistics
        belong to y: after training, run some batches through the exported model in training
        mode.

    Raises:
        CompositionError: another transform also sets the evaluated parameters, such as `ema`.
        OptimizerError: when applied to a state, the optimizer is not schedule-free, or it had
        made steps and was in evaluation mode when the state was created. Without this
        transform, a schedule-free optimizer raises an error at the first update.

    References:
        Defazio et al. 2024, "The Road Less Scheduled".

    Example:
        >>> schedule_free()
        af.schedule_free()
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "eval_params": "and {other!r} both set the parameters to evaluate. Leave out one."
    }

    def hyper(self, hyper: Hyper, slot: None, update: Update) -> tuple[Hyper, None]:
        """Set the optimizer's training mode for every update."""
        groups = update.state.definition.optimizer.param_groups
        indices = (i for i, group in enumerate(groups) if "train_mode" in group)
        return {(i, "train_mode"): True for i in indices}, slot

    def eval_params(
        self, params: Mapping[str, torch.Tensor], slot: None, update: Update
    ) -> tuple[Mapping[str, torch.Tensor], None]:
        """Return a copy of the parameters, converted by the optimizer's own `eval()`."""
        state = update.state
        copies = {n: nn.Parameter(p.clone(), False) for n, p in params.items()}  # noqa: FBT003 - requires_grad
        optimizer = state.definition.optimizer_over(copies)
        entries = cast("dict[Any, Any]", optimizer.state)
        for name, param in copies.items():
            if name in state.opt_state:
                entries[param] = dict(state.opt_state[name])
        for part in filter(_is_schedule_free, parts_of(optimizer)):
            for group in part.param_groups:
                group["train_mode"] = True
            cast("Any", part).eval()
        return {name: param.detach() for name, param in copies.items()}, slot

    def init(self, state: TrainState) -> None:
        """Raise unless the optimizer is schedule-free and in training mode."""
        optimizer = state.definition.optimizer
        parts = [part for part in parts_of(optimizer) if _is_schedule_free(part)]
        if not parts:
            kinds = {type(part).__name__: None for part in parts_of(optimizer)}
            msg = (
                f"{self!r}: the optimizer {', '.join(kinds)} is not schedule-free: it has no"
                " train() and eval() that move the parameters. Use one of the package schedulefree,"
                " such as schedulefree.AdamWScheduleFree, or leave this transform out."
            )
            raise OptimizerError(msg)
        away = [part for part in parts if state.step == 0 and _is_away(part, state)]
        if away:
            msg = (
                f"{self!r}: the optimizer {type(away[0]).__name__} has made steps and is now in"
                " evaluation mode, so the model has the averaged parameters, not those that"
                " the optimizer trains. Call optimizer.train() before TrainState.create."
            )
            raise OptimizerError(msg)


def _is_away(optimizer: Optimizer, state: TrainState) -> bool:
    """Return whether an optimizer has made steps and is in evaluation mode."""
    metas = state.definition.skeleton.module.named_parameters()
    ids = {id(meta) for name, meta in metas if state.opt_state.get(name)}
    return any(
        not group["train_mode"] and any(id(param) in ids for param in group["params"])
        for group in optimizer.param_groups
    )


def _is_schedule_free(optimizer: Optimizer) -> bool:
    switches = (getattr(optimizer, name, None) for name in ("train", "eval"))
    groups = optimizer.param_groups
    return all(map(callable, switches)) and all("train_mode" in g for g in groups)
