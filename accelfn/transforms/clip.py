# SPDX-License-Identifier: Apache-2.0
"""Bound gradients before the optimizer sees them."""

import math
from typing import Any, ClassVar

import attrs
import torch

from accelfn import foreach
from accelfn.errors import ArgumentError
from accelfn.grads import Grads
from accelfn.state import TrainState
from accelfn.transform import transform


def _is_positive(owner: object, field: Any, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        msg = (
            f"af.{type(owner).__name__}({field.name}={value!r}): expected a number"
            " above 0."
        )
        raise ArgumentError(msg)


@transform
class clip_grad_norm:
    """Scale the gradients down so that their global norm is at most `max_norm`.

    It sees true gradients: of the mean over the whole update, reduced over ranks. The norm
    before clipping is `metrics["grad_norm"]`. Gradients within the bound are left
    bitwise as they are, and so are those whose norm is not finite: scaling them would
    make all of them NaN or 0.

    Acts on: grads.

    Args:
        max_norm: the bound, above 0; may be infinite, to report the norm alone.
        norm_type: p of the p-norm over all elements of all gradients; may be infinite.

    Law:
        The result's norm is at most `max_norm` up to rounding, its direction is kept, and
        clipping twice is clipping once.

    Cost:
        One pass over the gradients, and one more to scale them; nothing waits for the device.

    References:
        Pascanu et al. 2013, "On the difficulty of training recurrent neural networks".

    Example:
        >>> clip_grad_norm(1.0)
        af.clip_grad_norm(1.0)
    """

    _draws: ClassVar[bool] = False
    max_norm: float = attrs.field(validator=_is_positive)
    norm_type: float = attrs.field(default=2.0, validator=_is_positive, kw_only=True)

    def grads(self, grads: Grads, slot: None, state: TrainState) -> tuple[Grads, None]:
        """Clip, in place."""
        del slot, state
        tensors = list(grads.tensors.values())
        if not tensors:
            return grads, None
        norm = torch.nn.utils.get_total_norm(tensors, norm_type=self.norm_type)
        if not math.isinf(self.max_norm):
            scale = self.max_norm / norm
            # 1 within the bound, and for a norm of 0, inf or NaN
            scale = torch.where((norm > self.max_norm) & norm.isfinite(), scale, 1.0)
            foreach.mul_(tensors, scale)
        return grads.with_metrics(grad_norm=norm), None


@transform
class clip_grad_value:
    """Clamp every element of the gradients to `-max_value .. max_value`.

    It sees true gradients: of the mean over the whole update, reduced over ranks.

    Acts on: grads.

    Args:
        max_value: the bound, above 0.

    Law:
        Every element lies within the bound; clamping twice is clamping once.

    Cost:
        One pass over the gradients.

    Example:
        >>> clip_grad_value(0.5)
        af.clip_grad_value(0.5)
    """

    _draws: ClassVar[bool] = False
    max_value: float = attrs.field(validator=_is_positive)

    def grads(self, grads: Grads, slot: None, state: TrainState) -> tuple[Grads, None]:
        """Clamp, in place."""
        del slot, state
        foreach.clamp_(grads.tensors.values(), -self.max_value, self.max_value)
        return grads, None
