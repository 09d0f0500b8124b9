# SPDX-License-Identifier: Apache-2.0
"""Keep an exponential moving average of the parameters, and evaluate at it."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import attrs
import torch

from accelfn.base import lists
from accelfn.base.arguments import is_number
from accelfn.definition.transform import transform
from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState
from accelfn.state.update import Update

Params: TypeAlias = dict[str, torch.Tensor]


def _is_decay(_owner: object, _field: object, value: Any) -> None:
    if not is_number(value) or not 0 <= value <= 1:
        msg = f"af.ema({value!r}): expected a decay between 0 and 1, such as 0.999."
        raise ArgumentError(msg)


@transform
class ema:
    """Average the parameters over updates, and evaluate and export the average.

    After update t: `average = decay * average + (1 - decay) * params`, from the
    parameters at the start. Training itself is unchanged.

    Where ranks train apart, as under `local_sgd`, each has an average of its own, and their
    average is evaluated, as `local_sgd` takes it; whichever stands first.

    Acts on: init, after_update, eval_params.

    Args:
        decay: the weight of the past, 0 (no memory) to 1 (never moves).

    Law:
        `average(T) = decay**T * p(0) + (1 - decay) * sum(decay**(T - t) * p(t))`; bitwise
        the parameter where that does not move; equal on all ranks where the parameters are.

    Cost:
        One copy of the parameters, of those in 16 bits in float32, in which small moves are
        not lost; one pass over them an update.

    References:
        Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging".

    Example:
        >>> ema(0.999)
        af.ema(0.999)
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    decay: float = attrs.field(validator=_is_decay)

    def init(self, state: TrainState) -> Params:
        """Start at the parameters."""
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
        lists.lerp_([slot[name] for name in moving], params, 1 - self.decay)
        return state, slot

    def eval_params(
        self, params: Mapping[str, torch.Tensor], slot: Params, update: Update
    ) -> tuple[Mapping[str, torch.Tensor], Params]:
        """Return the average, in the parameters' dtypes."""
        return {n: p.to(params[n].dtype) for n, p in slot.items()}, slot


def _is_narrow(param: torch.Tensor) -> bool:
    """Whether a step of the average would be lost to rounding."""
    return param.is_floating_point() and param.dtype.itemsize < 4


def _averages(param: torch.Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()
