# SPDX-License-Identifier: Apache-2.0
"""Gradients as a value: what one backward pass, or several, found."""

from collections.abc import Callable, Mapping
from typing import Self

import attrs
import torch

from accelfn.cursor import Cursor
from accelfn.errors import GradsError
from accelfn.lease import Lease
from accelfn.loss import Number

_GIVEN = (
    "These gradients of update {update} were given to apply_grads or into=, which worked on"
    " their tensors in place. Take new ones, or keep grads.map(torch.Tensor.clone) before."
)


@attrs.frozen(kw_only=True, eq=False)
class Grads:
    """Gradients of loss totals by parameter name, and the weight to divide them by.

    `apply_grads` divides once, so gradients add exactly over micro-batches and ranks. A
    parameter that took no part is left out.

    Attributes:
        tensors: one tensor a parameter, of its shape and dtype.
        divisor: what to divide them by; the weight of the losses seen, on this rank or
            on all, up to `num_averaged`.
        num_averaged: over how many ranks tensors and divisor are averages of sums.
        has_weight: whether the divisor is known not to be 0, without reading a device.
        is_mean: whether the division is done; a lone mean is differentiated as it is.
        buffers: the buffers (running statistics) that the forward passes wrote.
        reduced: whether they are of all ranks.
        cursor: where the data stands after the batches seen; None for plain values.
        num_micro_batches: how many backward passes they are the sum of.
        update: the number of updates of the state they were taken at.
        metrics: values that transforms of `grads` report, by name.
        lease: ended when they are given to `apply_grads` or to `into=`.
    """

    tensors: Mapping[str, torch.Tensor]
    divisor: Number
    num_averaged: int = 1
    has_weight: bool = False
    is_mean: bool = False
    buffers: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    reduced: bool = True
    cursor: Cursor | None = None
    num_micro_batches: int = 1
    update: int = 0
    metrics: Mapping[str, Number] = attrs.field(factory=dict)
    lease: Lease = attrs.field(factory=Lease, repr=False)

    @property
    def weight(self) -> Number:
        """The weight of all that was seen: samples, or what `af.Loss` says."""
        if self.num_averaged == 1:
            return self.divisor
        return self.divisor * self.num_averaged

    @property
    def denominator(self) -> Number:
        """The divisor, or where it is 0, a number by which zeros stay zeros.

        Gradients that come with a weight of 0 are 0.
        """
        if self.has_weight:
            return self.divisor
        if isinstance(self.divisor, torch.Tensor):
            return torch.where(self.divisor == 0, 1, self.divisor)
        return self.divisor or 1

    def give_away(self) -> None:
        """Let these gradients be used no more; they and their kin raise from now on."""
        self.lease.end(GradsError, _GIVEN, update=self.update)

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the record with `fn` of each gradient."""
        self.lease.check()
        tensors = {name: fn(grad) for name, grad in self.tensors.items()}
        return attrs.evolve(self, tensors=tensors, lease=Lease())

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the record with other gradients in it."""
        return attrs.evolve(self, tensors=tensors)

    def with_metrics(self, **values: Number) -> Self:
        """Return the record with values to report among the step's metrics."""
        return attrs.evolve(self, metrics={**self.metrics, **values})

    def __repr__(self) -> str:
        """Show what is known without reading a device."""
        kind = "reduced" if self.reduced else "of this rank"
        return (
            f"<Grads of {len(self.tensors)} parameters, {kind}, "
            f"{self.num_micro_batches} micro-batches, at update {self.update}>"
        )
