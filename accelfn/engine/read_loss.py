# SPDX-License-Identifier: Apache-2.0
"""What a loss function returned, checked and in one form."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import torch

from accelfn.base import tree
from accelfn.base.advice import advise
from accelfn.base.signatures import qualname
from accelfn.data import Batch
from accelfn.errors import BatchError, LossError, NonFiniteLossError
from accelfn.state.metrics import Loss, Number, WeightedSum, check_whole, own

_IGNORED = -100
"""The label that Transformers leaves out of a loss."""
_MANY = 4
"""Features that a batch may well have: inputs, targets, a mask, weights."""


@attrs.frozen
class ReadLoss:
    """A scalar to differentiate, its weight, and what to report.

    Attributes:
        scalar: the total, or the mean that a loss function returned.
        weight: what the total is divided by.
        is_mean: whether `scalar` is the mean, so that the total is `scalar * weight`.
        sums: what the step reports.
        is_finite: False if it was seen not to be.
    """

    scalar: torch.Tensor
    weight: Number
    is_mean: bool
    sums: dict[str, WeightedSum]
    is_finite: bool = True


@attrs.frozen
class Samples:
    """What a loss function is given beside the model, and how many samples that is.

    Attributes:
        value: a batch.
        extras: what else.
        known: their number, where the data say it; 0 for an empty share's stand-in.
        lone: whether nothing else is combined with this loss, so that it need not be known.
        judged: whether a transform looks at the gradients, so that a loss may be infinite.
        begins: whether they are the first of an update.
        is_whole: whether they are all that the update has on this rank.
        is_weighed: whether the loss function asks which of them count.
        batch: in which they are, if they are of `af.batches`.
    """

    value: Any
    extras: tuple[Any, ...]
    known: int | None
    lone: bool
    judged: bool = False
    begins: bool = True
    is_whole: bool = True
    is_weighed: bool = False
    batch: Batch | None = None

    def counts(self) -> Sequence[int | None]:
        """Return how many each rank has, None for unknown; nothing for plain values."""
        batch = self.batch
        shares = () if batch is None or batch.shares is None else batch.shares()
        return [share[cast("Batch", batch).part] for share in shares]

    def with_weight(self, device: torch.device) -> "Samples":
        """Return them with a number for each row as the last extra: 1, or 0 for a stand-in.

        Raises:
            BatchError: its tensors differ in their number of rows.
        """
        rows = tree.num_rows(self.value)
        weight = torch.full((rows,), float(self.known != 0), device=device)
        return attrs.evolve(self, extras=(*self.extras, weight))

    def count(self) -> int:
        """Return their number.

        Raises:
            BatchError: it cannot be told, and it matters.
        """
        if self.known is not None:
            return self.known
        try:
            rows = tree.num_rows(self.value) or 1
        except BatchError:
            if self.lone:
                return 1
            raise
        _say_what_rows_are(self.value, rows)
        return rows


def _say_what_rows_are(value: Any, rows: int) -> None:
    """Tell of a list that is likely one of samples, and taken for features of a few."""
    if isinstance(value, list) and len(cast("list[Any]", value)) > max(rows, _MANY):
        advise(
            f"This batch is a list of {len(cast('list[Any]', value))} values of {rows} rows each,"
            f" and counts for {rows} samples beside other batches. If it is a list of samples,"
            " stack them: torch.stack(samples), or torch.utils.data.default_collate(samples);"
            " or return af.Loss(total, weight) from the loss function."
        )


def say_what_tokens_weigh(batch: Any) -> None:
    """Tell of labels that are left out of a mean over tokens, which a model has taken itself."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and bool((labels == _IGNORED).any()):
        advise(
            "A Transformers model's own loss is a mean over the labels that are not -100, and"
            " counts here for the number of samples, so training depends on how ranks and"
            " micro-batches share them. Return kept = (batch['labels'][:, 1:] != -100).sum();"
            " af.Loss(model(**batch).loss * kept, kept), without [:, 1:] where labels are not"
            " shifted."
        )


def read_loss(returned: Any, loss_fn: Callable[..., Any], samples: Samples) -> ReadLoss:
    """Return a loss in one form; that of an empty share's stand-in counts for nothing.

    Raises:
        LossError: it is not a scalar tensor or an `af.Loss`, or has no gradient; or its weight
            is negative, infinite or not a number.
        NonFiniteLossError: it is infinite or not a number itself. On a GPU neither is looked
            at, because that would wait for the device.
    """
    if isinstance(returned, torch.Tensor):
        seen = _checked(returned, loss_fn)
        finite = _finite(seen, loss_fn, samples)
        weight = samples.count()
        sums = {"loss": WeightedSum(seen, weight, weight)}
        return ReadLoss(returned, weight, is_mean=True, sums=sums, is_finite=finite)
    if isinstance(returned, Loss):
        seen = _checked(returned.total, loss_fn)
        finite = _finite(seen, loss_fn, samples)
        totals = {"loss": (seen, returned.weight), **returned.aux}
        if samples.known == 0:
            nothing = dict.fromkeys(totals, WeightedSum(0.0, 0))
            return ReadLoss(
                returned.total, 0, is_mean=True, sums=nothing, is_finite=finite
            )
        weight = _detached(returned.weight)
        _check_weight(weight, loss_fn)
        for entry in returned.aux.values():
            check_whole(entry, qualname(loss_fn))
        sums = {
            name: WeightedSum(_detached(entry[0]), _detached(entry[1]))
            if isinstance(entry, tuple)
            else WeightedSum(_detached(entry), weight)
            for name, entry in totals.items()
        }
        return ReadLoss(
            returned.total, weight, is_mean=False, sums=sums, is_finite=finite
        )
    msg = (
        f"{qualname(loss_fn)} returned {type(returned).__name__}; expected a scalar tensor"
        " (the mean over the samples), or af.Loss(total, weight, name=total)."
    )
    raise LossError(msg)


def _is_finite(value: torch.Tensor) -> bool:
    """Return False for a CPU scalar that is not finite; a device is not waited for."""
    known = _on_host(value)
    return known is None or math.isfinite(known)


def _on_host(value: torch.Tensor) -> float | None:
    """Return a number that is on the host, and None for one on a device, which is not read."""
    # not by `item`, an operator that waits for a device, so that none is seen in a step
    known: Any = value.tolist() if value.is_cpu else None
    return known


def _check_weight(weight: Number, loss_fn: Callable[..., Any]) -> None:
    """Refuse a tensor that totals can't be divided by; numbers are looked at in `af.Loss`."""
    known = _on_host(weight) if isinstance(weight, torch.Tensor) else None
    if known is not None and not 0 <= known < math.inf:
        msg = (
            f"{qualname(loss_fn)} returned af.Loss(total, weight={known}): expected a finite"
            " count or sum, 0 or more."
        )
        raise LossError(msg)


def _checked(scalar: torch.Tensor, loss_fn: Callable[..., Any]) -> torch.Tensor:
    """Return the scalar's value, detached, which no update moves."""
    if type(scalar) is not torch.Tensor:
        check_whole(scalar, qualname(loss_fn))
    if scalar.ndim != 0:
        msg = (
            f"{qualname(loss_fn)} returned a tensor of shape {tuple(scalar.shape)};"
            " expected a scalar. Take its mean(), or return af.Loss(total.sum(),"
            " weight)."
        )
        raise LossError(msg)
    if scalar.is_complex():
        msg = f"{qualname(loss_fn)} returned a complex number; a loss is real. Take its abs()."
        raise LossError(msg)
    if not scalar.requires_grad:
        msg = (
            f"The loss that {qualname(loss_fn)} returned has no gradient: it does not"
            " depend on a trainable parameter. Was it detached, computed under no_grad, or"
            " rebuilt from numbers? If no sample of a batch counts, run the model on none"
            " and return af.Loss(model(x[:0]).sum(), weight=0), not a constant."
        )
        raise LossError(msg)
    value = scalar.detach()
    # one that was computed is nobody else's; a parameter itself, or a view of one, is
    return value.clone() if scalar.is_leaf or scalar._is_view() else value


def _finite(value: torch.Tensor, loss_fn: Callable[..., Any], samples: Samples) -> bool:
    """Return whether a loss is finite, where that can be seen, or else may be otherwise."""
    finite = _is_finite(value)
    if finite or samples.judged:
        return finite
    empty = _has_no_rows(samples.value)
    of = " for a batch without samples" if empty else ""
    msg = (
        f"{qualname(loss_fn)} returned {float(value)}{of}. The state is as it was before this"
        " step. Look at the batch, the learning rate and the precision; af.skip_nonfinite()"
        " skips such updates."
    )
    raise NonFiniteLossError(msg)


def _has_no_rows(value: Any) -> bool:
    leaves = [each for each in tree.tensor_leaves(value) if each.ndim]
    return bool(leaves) and all(len(each) == 0 for each in leaves)


def _detached(value: Number) -> Number:
    """Return a number's value, which stays when a parameter or a counter that it is moves."""
    return own(value.detach().reshape(())) if isinstance(value, torch.Tensor) else value
