# SPDX-License-Identifier: Apache-2.0
"""Run the loss in a lower precision."""

from typing import Any

import attrs
import torch

from accelfn.engine.runner import LossFunction
from accelfn.errors import ArgumentError
from accelfn.transform import transform

_DTYPES = {"bf16": torch.bfloat16}


def _is_precision(_owner: object, _field: object, value: object) -> None:
    if not isinstance(value, str) or value not in _DTYPES:
        msg = (
            f"af.autocast({value!r}): unknown precision; expected one of"
            f" {', '.join(map(repr, _DTYPES))}."
        )
        raise ArgumentError(msg)


@transform
class autocast:
    """Run the loss under torch's autocast: matrix products in bfloat16, the rest as torch says.

    Parameters, gradients and the optimizer stay in their own dtype. Evaluation and
    prediction run under it too.

    Acts on: loss.

    Args:
        precision: "bf16".

    Law:
        It changes neither the dtype of a parameter nor that of a gradient.

    Cost:
        A copy of each weight in bfloat16 during a pass; products at its speed.

    Raises:
        ArgumentError: an unknown precision.

    Example:
        >>> autocast("bf16")
        af.autocast('bf16')
    """

    precision: str = attrs.field(validator=_is_precision)

    def loss(self, loss_fn: LossFunction) -> LossFunction:
        """Run the loss function inside autocast on the device of the model."""
        dtype = _DTYPES[self.precision]

        def autocast_loss(model: torch.nn.Module, batch: Any, *extras: Any) -> Any:
            kind = next(model.parameters()).device.type
            # torch keeps cast weights until the outermost region ends, which may be one of
            # the caller's around many updates: these would see the first one's weights
            torch.clear_autocast_cache()
            try:
                with torch.autocast(kind, dtype=dtype):
                    return loss_fn(model, batch, *extras)
            finally:
                torch.clear_autocast_cache()

        autocast_loss.__qualname__ = getattr(loss_fn, "__qualname__", repr(loss_fn))
        return autocast_loss
