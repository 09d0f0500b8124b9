# SPDX-License-Identifier: Apache-2.0
"""Compute one step's gradients from several micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import torch

from accelfn.base import tree
from accelfn.base.arguments import advise, integer, is_integer, option
from accelfn.data import Batch, Plan
from accelfn.data.plan import even_part
from accelfn.definition.transform import transform
from accelfn.errors import ArgumentError, BatchError
from accelfn.state.results import Grads, Metrics
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.step.value_and_grad import ValueAndGrad

_is_count = attrs.validators.optional(integer(1))


@transform
class accumulate:
    """Compute one step's gradients from several micro-batches (gradient accumulation).

    A rank's share is cut into micro-batches before collation; their sizes differ by at most one
    sample. Gradients of loss totals are added and divided once by the total weight, so
    micro-batches need not have equal sizes. Only the last micro-batch communicates. Without
    `af.Data`, pass a list of micro-batches; `af.micro_batches(value, k)` splits a value into
    such a list.

    Acts on: data, value_and_grad.

    Args:
        num_micro_batches: the number of micro-batches; or
        micro_batch_size: the maximum number of samples in a micro-batch.

    Law:
        The step's result equals the result on the whole batch, up to rounding, for any number
        of micro-batches. Exceptions: batch normalization, dropout, `spectral_norm` (one power
        iteration per micro-batch), and losses that couple samples, which only see one
        micro-batch.

    Cost:
        Activations of one micro-batch instead of the whole share. No communication.

    Raises:
        ArgumentError: neither or both are given, or a count is not positive.
        BatchError: a plain value is not a list of micro-batches of the right number.

    Example:
        >>> accumulate(num_micro_batches=4)
        af.accumulate(num_micro_batches=4)
    """

    num_micro_batches: int | None = option(None, _is_count)
    micro_batch_size: int | None = option(None, _is_count)

    def __attrs_post_init__(self) -> None:
        """Reject neither or both of the two counts."""
        if (self.num_micro_batches is None) == (self.micro_batch_size is None):
            msg = (
                f"{self!r}: give either num_micro_batches= (how many) or"
                " micro_batch_size= (how large)."
            )
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """How a batch is split into micro-batches."""
        return {"draws_nothing": True, "micro_batches": self._parts}

    def data(self, plan: Plan) -> Plan:
        """Cut a share into micro-batches."""
        if self.num_micro_batches is None:
            return attrs.evolve(plan, micro_batch_size=self.micro_batch_size)
        return attrs.evolve(
            plan, num_micro_batches=self.num_micro_batches, micro_batch_size=None
        )

    def value_and_grad(
        self, inner: ValueAndGrad, slot: None, update: Update
    ) -> tuple[ValueAndGrad, None]:
        """Run the inner function once per micro-batch and add up the results."""

        def accumulate_step(
            state: TrainState,
            batch: Any,
            /,
            *extras: Any,
            into: Grads | None = None,
            sync: bool = True,
        ) -> tuple[Metrics, Grads]:
            is_batch = isinstance(batch, Batch)
            *rest, last = batch.parts() if is_batch else self._parts(batch)
            if extras and rest and is_batch:
                self._warn_of_rows(extras, sum(map(len, batch.parts_indices)))
            total = Metrics({})
            for part in rest:
                metrics, into = inner(state, part, *extras, into=into, sync=False)
                total = total + metrics
            metrics, grads = inner(state, last, *extras, into=into, sync=sync)
            return total + metrics, grads

        return accumulate_step, slot

    def _parts(self, batch: Any) -> Sequence[Any]:
        """Return the micro-batches; a plain value is a list of them."""
        if isinstance(batch, Batch):
            return batch.parts()
        count = self.num_micro_batches
        parts = cast("list[Any]", batch) if isinstance(batch, list) else []
        if parts and count in (None, len(parts)):
            self._refuse_columns(parts)
            return parts
        kind = type(batch).__name__
        subject = f"a list of {len(parts)}" if isinstance(batch, list) else kind
        msg = (
            f"Under {self!r} a plain value is a list of {count or 'one or more'}"
            f" micro-batches; this one is {subject}. af.micro_batches(value, k) splits a"
            " value along the rows of all its tensors."
        )
        raise BatchError(msg)

    def _warn_of_rows(self, extras: tuple[Any, ...], num_samples: int) -> None:
        """Warn of an extra with one row per sample: each micro-batch gets all rows."""
        for extra in extras:
            leaves = () if isinstance(extra, Mapping) else tree.tensor_leaves(extra)
            if {leaf.shape[:1] for leaf in leaves} == {torch.Size([num_samples])}:
                advise(
                    f"step(state, batch, extra): under {self!r} each micro-batch gets all"
                    f" {num_samples} rows of the extra, as many as this rank has samples. If"
                    " the rows are of the samples, write step(state, batch.zip(extra)), and the"
                    " loss gets (value, extra), cut together. Otherwise pass the extra in a dict,"
                    " and this warning does not come."
                )

    def _refuse_columns(self, parts: Sequence[Any]) -> None:
        """Reject a list that is one (inputs, targets) batch of a torch DataLoader."""
        kinds = {
            (part.dtype, part.ndim) if isinstance(part, torch.Tensor) else None
            for part in parts
        }
        if None not in kinds and len(kinds) > 1:
            shapes = " and ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
            msg = (
                f"Under {self!r} a list holds micro-batches, and this one holds tensors of other"
                f" kinds, {shapes}, as inputs and targets are. Give a list of such pairs:"
                " af.micro_batches(tuple(value), k) makes one."
            )
            raise BatchError(msg)


def micro_batches(value: Any, num: int) -> list[Any]:
    """Split the rows of every tensor in a value into `num` micro-batches.

    Sizes differ by at most one. All tensors must have the same number of rows, because a tensor
    with another meaning (class weights, a table) must not be cut.

    Args:
        value: a tree of tensors with shape `(rows, ...)`; every micro-batch gets all other
            leaves.
        num: the number of micro-batches.

    Raises:
        BatchError: tensors differ in their number of rows, or there are fewer than `num`.

    Example:
        >>> micro_batches(torch.arange(5), 2)
        [tensor([0, 1, 2]), tensor([3, 4])]
    """
    rows = tree.num_rows(value)
    if not is_integer(num, 1) or num > rows:
        msg = (
            f"micro_batches(num={num!r}): the value has {rows} rows, so 1 to {rows} parts"
            " can be made."
        )
        raise BatchError(msg)
    return [tree.rows(value, *even_part((0, rows), i, num)) for i in range(num)]
