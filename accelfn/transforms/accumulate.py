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

    Each rank splits its share of a batch into micro-batches before collation. Their sizes
    differ by at most one sample. The gradients of loss totals are added and then divided once
    by the total weight, so micro-batches may have different sizes. Ranks communicate only in
    the last micro-batch. If the state has no `af.Data`, pass a list of micro-batches to the
    step; `af.micro_batches(value, k)` splits a value into such a list.

    Acts on: data, value_and_grad.

    Args:
        num_micro_batches: the number of micro-batches.
        micro_batch_size: the maximum number of samples in a micro-batch. Pass exactly one of
        the two arguments.

    Law:
        The result of a step equals the result without `accumulate`, up to rounding, for any
        number of micro-batches. Exceptions: batch normalization, dropout, `spectral_norm` (it
        makes one power iteration per micro-batch), and losses that couple samples, because they
        see only one micro-batch at a time.

    Cost:
        A rank keeps the activations of one micro-batch, not of its whole share. No
        communication.

    Raises:
        ArgumentError: both arguments or none are given, or a number is not positive.
        BatchError: at a step, a batch that does not come from `af.batches` is not a list of the
        right number of micro-batches.

    Example:
        >>> accumulate(num_micro_batches=4)
        af.accumulate(num_micro_batches=4)
    """

    num_micro_batches: int | None = option(None, _is_count)
    micro_batch_size: int | None = option(None, _is_count)

    def __attrs_post_init__(self) -> None:
        """Raise unless exactly one of the two arguments is given."""
        if (self.num_micro_batches is None) == (self.micro_batch_size is None):
            msg = (
                f"{self!r}: expected exactly one of num_micro_batches= and micro_batch_size="
                " (the number of samples in each micro-batch)."
            )
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell other transforms how a batch is split into micro-batches."""
        return {"draws_nothing": True, "micro_batches": self._parts}

    def data(self, plan: Plan) -> Plan:
        """Set how a share is split into micro-batches."""
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
        """Return the micro-batches of a batch; a batch that is not a `Batch` must be a list."""
        if isinstance(batch, Batch):
            return batch.parts()
        count = self.num_micro_batches
        parts = cast("list[Any]", batch) if isinstance(batch, list) else []
        if parts and count in (None, len(parts)):
            self._refuse_columns(parts)
            return parts
        kind = type(batch).__name__
        subject = f"a list of {len(parts)}" if isinstance(batch, list) else f"a {kind}"
        msg = (
            f"step(state, batch): under {self!r} a batch that is not from af.batches must be a list"
            f" of {count or 'one or more'} micro-batches, but this batch is {subject}. To split"
            f" it along dim 0 of its tensors, write af.micro_batches(batch, {count or 'k'})."
        )
        raise BatchError(msg)

    def _warn_of_rows(self, extras: tuple[Any, ...], num_samples: int) -> None:
        """Warn if an extra has one row per sample: each micro-batch would get all its rows."""
        for extra in extras:
            leaves = () if isinstance(extra, Mapping) else tree.tensor_leaves(extra)
            if {leaf.shape[:1] for leaf in leaves} == {torch.Size([num_samples])}:
                advise(
                    f"step(state, batch, extra): the extra has {num_samples} rows, and this"
                    f" rank's batch has {num_samples} samples, but under {self!r} every"
                    " micro-batch gets all rows of the extra. If each row belongs to a sample,"
                    " write step(state, batch.zip(extra)): the loss gets (value, extra), split"
                    " together. Otherwise pass the extra in a dict, to turn off this warning."
                )

    def _refuse_columns(self, parts: Sequence[Any]) -> None:
        """Raise if a list is probably one batch (inputs, targets), not micro-batches."""
        kinds = {
            (part.dtype, part.ndim) if isinstance(part, torch.Tensor) else None
            for part in parts
        }
        if None not in kinds and len(kinds) > 1:
            shapes = " and ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
            msg = (
                f"step(state, batch): under {self!r} a list is a list of micro-batches, but the"
                f" tensors of this list are of different kinds ({shapes}), like the inputs and"
                " targets of one batch. To split such a batch, write"
                f" af.micro_batches(tuple(value), {self.num_micro_batches or 'k'})."
            )
            raise BatchError(msg)


def micro_batches(value: Any, num: int) -> list[Any]:
    """Split the rows of every tensor in a value into `num` micro-batches.

    The micro-batches' numbers of rows differ by at most one. All tensors must have the same
    number of rows. Do not pass a tensor without one row per sample, such as class weights.

    Args:
        value: a tree of tensors of shape `(rows, ...)`. Leaves that are not tensors are part of
        every micro-batch.
        num: the number of micro-batches.

    Raises:
        BatchError: the tensors have different numbers of rows, or fewer rows than `num`.

    Example:
        >>> micro_batches(torch.arange(5), 2)
        [tensor([0, 1, 2]), tensor([3, 4])]
    """
    rows = tree.num_rows(value)
    if not is_integer(num, 1) or num > rows:
        msg = (
            f"af.micro_batches(value, {num!r}): expected a number of micro-batches from 1 to"
            f" {rows}, because the value has {rows} rows."
        )
        raise BatchError(msg)
    return [tree.rows(value, *even_part((0, rows), i, num)) for i in range(num)]
