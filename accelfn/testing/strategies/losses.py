# SPDX-License-Identifier: Apache-2.0
"""Losses: a plain mean, and totals with a weight of their own."""

from typing import Any, TypeAlias

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

from accelfn.errors import ArgumentError
from accelfn.state.metrics import Loss
from accelfn.testing.strategies.code import as_code, print_code
from accelfn.testing.strategies.lift import lifted

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_REDUCTIONS = ("mean", "sum", "weighted", "masked")


def _is_reduction(_owner: object, _field: object, value: object) -> None:
    if value not in _REDUCTIONS:
        msg = (
            f"Criterion({value!r}): expected one of"
            f" {', '.join(map(repr, _REDUCTIONS))}."
        )
        raise ArgumentError(msg)


@attrs.frozen(repr=False)
class Criterion:
    """A loss of `(inputs, targets)`, and how the errors of samples become one number.

    Attributes:
        reduction: "mean", a tensor; or an `af.Loss`: "sum", over the number of samples;
            "weighted", by weights of which some are 0, with totals beside it; "masked",
            over the samples that count, which may be none.
        squared: errors are squared distances; else products with the targets, whose sums
            are exact on dyadic data.

    Example:
        >>> Criterion("masked", squared=True)
        Criterion('masked', squared=True)
    """

    reduction: str = attrs.field(default="mean", validator=_is_reduction)
    squared: bool = attrs.field(default=False, kw_only=True)

    __repr__ = as_code
    _repr_pretty_ = print_code

    def __call__(self, model: nn.Module, batch: Pair) -> torch.Tensor | Loss:
        """Return the loss of a batch."""
        inputs, targets = batch
        outputs = model(inputs)
        errors = (outputs - targets).square() if self.squared else outputs * targets
        each = errors.sum(1)
        if self.reduction == "mean":
            return each.mean()
        if self.reduction == "sum":
            return Loss(each.sum(), len(each))
        if self.reduction == "weighted":
            weights = targets[:, 0].abs()
            size = (inputs.sum(), float(len(inputs)))
            return Loss((each * weights).sum(), weights.sum(), size=size)
        counts = targets[:, 0] > 0
        return Loss(each[counts].sum(), counts.sum())


def losses(**fields: Any) -> st.SearchStrategy[Criterion]:
    """Draw losses.

    Args:
        fields: fields of `Criterion` that are given: a value, or a strategy of values.
    """
    return st.builds(Criterion, **lifted(fields, _DRAWN))


_DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "reduction": st.sampled_from(_REDUCTIONS),
    "squared": st.booleans(),
}
