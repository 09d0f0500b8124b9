# SPDX-License-Identifier: Apache-2.0
"""Results of loss functions, backward passes and steps: `Loss`, `Grads` and `Metrics`."""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import attrs
import torch

from accelfn.base import tree
from accelfn.base.arguments import (
    Number,
    explain_call_errors,
    find_hint,
    hint_attributes,
    is_number,
)
from accelfn.base.tree import is_shard, is_within, split_as
from accelfn.collectives.failures import check_world, format_tensor
from accelfn.collectives.packed import sum_named
from accelfn.data.plan import Batch, Cursor
from accelfn.errors import (
    ArgumentError,
    CallError,
    Error,
    GradsError,
    LossError,
    RecordError,
    UnknownMetricError,
)
from accelfn.world import World

# `Loss` and `Metrics`: the results of loss functions and steps, as weighted sums.
#
# Means over different numbers of samples cannot be combined without these numbers. So a value
# that is combined over micro-batches or ranks is stored as a total and a weight
# (`WeightedSum`), and divided once, at the end.


@explain_call_errors
@attrs.frozen(init=False)
class Loss:
    """A loss as a total and its weight, for losses other than a plain mean over samples.

    accelfn adds the totals' gradients over micro-batches and ranks, and divides the sum once
    by the sum of the weights. So `Loss(token_losses.sum(), num_tokens)` is the mean over all
    tokens of an update, no matter how the tokens are split over micro-batches and ranks.

    Attributes:
        total: the sum to differentiate; a scalar tensor with a gradient.
        weight: the divisor of the total, 0 or more: a number, or a scalar tensor without
            a gradient. With 0 the total has no effect.
        aux: further totals by name, for the metrics. Each total is divided by `weight`; pass a
            pair `(total, weight)` for another divisor.

    Example:
        >>> Loss(torch.tensor(6.0), 3, num_right=torch.tensor(2.0))
        Loss(total=tensor(6.), weight=3, aux={'num_right': tensor(2.)})
    """

    total: torch.Tensor
    weight: Number
    aux: Mapping[str, Number | tuple[Number, Number]]

    def __init__(
        self, total: torch.Tensor, weight: Number, **aux: Number | tuple[Number, Number]
    ) -> None:
        """Create a loss from a total, its weight, and further totals by name."""
        if not isinstance(total, torch.Tensor):
            msg = f"af.Loss(total={total!r}): got {type(total).__name__}; expected a scalar tensor."
            raise LossError(msg)
        _check_weight("weight", weight)
        if isinstance(weight, torch.Tensor) and weight.requires_grad:
            msg = (
                "af.Loss(weight=...): the weight requires a gradient, but must be a constant. Pass"
                " weight.detach(), or return the mean without af.Loss."
            )
            raise LossError(msg)
        if "loss" in aux:
            msg = 'af.Loss(loss=...): the metric "loss" is the total. Use another name.'
            raise LossError(msg)
        for name, entry in aux.items():
            if isinstance(entry, tuple) and len(cast("tuple[Any, ...]", entry)) != 2:
                msg = f"af.Loss({name}={entry!r}): expected a total or (total, weight)."
                raise LossError(msg)
            amount, over = entry if isinstance(entry, tuple) else (entry, weight)
            _check_number(name, amount)
            _check_weight(f"{name}=(total, weight)", over)
        # set here, because torch.compile cannot trace the __init__ that attrs generates
        object.__setattr__(self, "total", total)
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "aux", aux)


def own_number(value: Number) -> Number:
    """Return a copy of a tensor, because other code may change it; return a number as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def check_whole(result: object, name: str) -> None:
    """Raise if a loss function returned a value that it computed from sharded parameters.

    Raises:
        LossError: a value is a DTensor.
    """
    for part in result if isinstance(result, tuple) else (result,):
        if type(part) is not torch.Tensor and is_shard(part):
            msg = (
                f"{name} returned a DTensor. It computes with parameters outside of the model's"
                " forward pass, as in sum(p.square().sum() for p in model.parameters()), and"
                " there each rank has only shards. Compute this value inside the forward of the"
                " module with the parameters. For a penalty on weights, set weight_decay of the"
                " optimizer, or add the penalty's gradient in a transform's `grads`."
            )
            raise LossError(msg)


def _pair(name: str, entry: object) -> "WeightedSum":
    """Return a total and its weight as a `WeightedSum`."""
    pair = cast("tuple[Any, ...]", entry if isinstance(entry, tuple) else ())
    if len(pair) == 2 and all(map(is_scalar, pair)):
        amount, weight = cast("tuple[Number, Number]", entry)
        return WeightedSum(own_number(amount), own_number(weight))
    msg = f"af.Metrics({{{name!r}: {entry!r}}}): expected (total, weight), two real numbers."
    raise ArgumentError(msg)


def is_scalar(value: object) -> bool:
    """Return whether a value is one real number."""
    if isinstance(value, torch.Tensor):
        is_real = value.dtype is not torch.bool and not value.is_complex()
        return value.numel() == 1 and is_real
    return is_number(value)


def _check_number(name: str, value: object) -> None:
    if is_scalar(value):
        return
    tensor = isinstance(value, torch.Tensor)
    text = f"<{value.dtype}, shape {tuple(value.shape)}>" if tensor else repr(value)
    msg = f"af.Loss({name}={text}): expected one real number, or a tensor with one element."
    raise LossError(msg)


def _check_weight(name: str, value: object) -> None:
    _check_number(name, value)
    if isinstance(value, (int, float)) and not 0 <= value < math.inf:
        msg = f"af.Loss({name}={value!r}): expected a finite number, 0 or more."
        raise LossError(msg)


@attrs.frozen
class WeightedSum:
    """A total, stored as the product `amount * unit`, and its `weight`.

    The mean over n samples is `WeightedSum(mean, weight=n, unit=n)`. It needs no multiplication
    before it is added to one with another unit.
    """

    amount: Number
    weight: Number
    unit: float = 1

    @property
    def total(self) -> Number:
        """The total: the product `amount * unit`."""
        return self.amount if self.unit == 1 else self.amount * self.unit

    @property
    def mean(self) -> torch.Tensor:
        """The total divided by its weight, or 0 if the weight is 0."""
        if self.unit is self.weight or self.unit == self.weight:
            mean = own_number(self.amount) if self.weight else 0.0
        elif isinstance(self.weight, torch.Tensor):
            mean = torch.where(
                self.weight == 0, 0, self.total / never_zero(self.weight)
            )
        else:
            mean = self.amount / (self.weight / self.unit) if self.weight else 0.0
        return torch.as_tensor(mean)

    def __add__(self, other: Self) -> "WeightedSum":
        """Add totals and weights."""
        if self.unit == other.unit:  # such as micro-batches of equal size
            amount = self.amount + other.amount
            return WeightedSum(amount, self.weight + other.weight, self.unit)
        return WeightedSum(self.total + other.total, self.weight + other.weight)


class Metrics(Mapping[str, torch.Tensor]):
    """Metrics of a step on this rank, as weighted sums by name.

    `metrics[name]` is the mean on this rank, as a scalar tensor. `metrics_a + metrics_b` is the
    metrics of both, for example of two steps. `metrics.all_reduce_mean(world)` returns the exact
    means over all ranks. Values stay on the device until you read them.

    Example:
        >>> a, b = Metrics({"loss": (6.0, 2)}), Metrics({"loss": (3.0, 1)})
        >>> (a + b)["loss"]
        tensor(3.)
    """

    __slots__ = ("_sums",)

    def __init__(
        self,
        sums: Mapping[str, tuple[Number, Number] | WeightedSum] = MappingProxyType({}),
    ) -> None:
        """Create metrics from pairs `(total, weight)` by name."""
        if not isinstance(sums, Mapping):
            msg = f"af.Metrics({sums!r}): expected a dict, {{name: (total, weight)}}."
            raise ArgumentError(msg)
        self._sums: dict[str, WeightedSum] = {}
        for name, entry in sums.items():
            is_sum = isinstance(entry, WeightedSum)
            self._sums[name] = entry if is_sum else _pair(name, entry)

    @property
    def sums(self) -> Mapping[str, WeightedSum]:
        """The weighted sums by name."""
        return MappingProxyType(self._sums)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the mean of a metric on this rank."""
        if name not in self._sums:
            names = ", ".join(sorted(self._sums)) or "none"
            msg = f"No metric {name!r}; the metrics are: {names}."
            raise UnknownMetricError(msg)
        return self._sums[name].mean

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._sums)

    def __len__(self) -> int:
        """Return the number of metrics."""
        return len(self._sums)

    if not TYPE_CHECKING:  # a type checker would then accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that shows how to read a metric."""
            if name.startswith("_"):  # copy and pickle look for special methods
                raise AttributeError(name)
            names = ", ".join(sorted(self._sums)) or "none"
            advice = find_hint("Metrics", name) or f"the metrics are: {names}"
            if name in self._sums:
                advice = f'write metrics["{name}"]'
            msg = f"Metrics have no attribute {name}: {advice}."
            raise RecordError(msg, obj=type(self))

    def __setitem__(self, name: str, _: Any) -> NoReturn:
        """Raise, because metrics are immutable."""
        msg = f'Metrics are immutable: write metrics.with_values({{"{name}": ...}}).'
        raise CallError(msg)

    def __float__(self) -> NoReturn:
        """Raise, because metrics are several numbers."""
        first = next(iter(self._sums), "loss")
        msg = f'Metrics contain several numbers: write float(metrics["{first}"]).'
        raise CallError(msg)

    def __add__(self, other: "Metrics") -> "Metrics":
        """Add totals and weights by name; a name in only one of the metrics is kept."""
        if not isinstance(other, Metrics):
            return NotImplemented
        sums = dict(self._sums)
        for name, entry in other._sums.items():
            sums[name] = sums[name] + entry if name in sums else entry
        return Metrics(sums)

    def __radd__(self, nothing: object) -> "Metrics":
        """Return the metrics for `0 + metrics`, so that `sum(list_of_metrics)` works."""
        return self if nothing == 0 else NotImplemented

    def with_values(self, values: Mapping[str, Number]) -> "Metrics":
        """Return the metrics with more values, each with weight 1.

        Raises:
            LossError: there is already a metric with the name of a value.
        """
        twice = self._sums.keys() & values.keys()
        if twice:
            msg = (
                f"The loss function and a transform of the setup both report a metric"
                f" {min(twice)!r}. Rename the metric in the loss function."
            )
            raise LossError(msg)
        sums = dict(self._sums)
        for name, value in values.items():
            sums[name] = WeightedSum(own_number(value), 1)
        return Metrics(sums)

    def __repr__(self) -> str:
        """Show the means."""
        inside = ", ".join(f"{name}={float(self[name]):.6g}" for name in self)
        return f"Metrics({inside})"

    @explain_call_errors
    def all_reduce_mean(
        self, world: World, *, label: str = "mean of metrics"
    ) -> dict[str, float]:
        """Compute the exact mean of every metric over all ranks, with a collective.

        Totals and weights are added over the ranks, and divided once. So the result is the mean
        over all samples, even if ranks have different numbers of samples. The call waits for
        the device, so call it only when you need the numbers, for example for a log line.

        Args:
            world: the ranks to reduce over. Ranks along "tp" compute the same samples, and
                count once.
            label: the name of the operation, for errors.

        Cost: one all-reduce of 16 float64 numbers; six of them compare the names. For more than
        five names, a second all-reduce with two numbers for each further name.

        Law: on any number of ranks, the result is the mean over all of their samples.

        Raises:
            CollectiveMismatchError: ranks have metrics with different names.
            PeerFailedError: another rank failed.
        """
        where = "metrics.all_reduce_mean(world)"
        check_world(where, world)
        pairs = {name: (total.total, total.weight) for name, total in self.sums.items()}
        for name, (total, _) in pairs.items():
            if isinstance(total, torch.Tensor) and total.is_complex():
                msg = (
                    f"{where}: metric {name!r} is {total!r}; expected one real number."
                    " Report .real and .imag of a complex number as two metrics."
                )
                raise ArgumentError(msg)
        sums = sum_named(pairs, world.loss, kind="mean", label=label, noun="metrics")
        return {name: total / w if w else 0.0 for name, (total, w) in sums.items()}


# Leases: after tensors were donated, their old records raise an error if you use them.


class Lease:
    """A flag that says whether tensors may still be used.

    All records of the same tensors, such as a state and its copy with another setup, share one
    lease. It ends when the tensors are donated to a step. Then all these records are invalid.
    """

    __slots__ = ("__weakref__", "_ended", "_heirs", "_line", "is_loaded", "is_mean")

    def __init__(self, *, is_loaded: bool = False) -> None:
        """Create a valid lease; `is_loaded`: the tensors are unchanged since af.load."""
        self._ended: tuple[type[Error], str, int] | None = None
        self.is_loaded = is_loaded
        self.is_mean = False  # for gradients: whether they are divided by their weight
        self._heirs: _Line | None = None
        self._line: weakref.ref[_Line] | None = None

    def check(self) -> None:
        """Raise if the lease has ended.

        Raises:
            Error: an error of the class, and with the message, that was passed to `end`.
        """
        if self._ended is not None:
            kind, message, update = self._ended
            raise kind(message.format(update=update))

    @property
    def is_over(self) -> bool:
        """Whether the lease has ended, so that the tensors are no longer valid."""
        return self._ended is not None

    @property
    def heir(self) -> Any:
        """The newest record that now owns the tensors, or None."""
        return None if self._heirs is None else self._heirs.newest

    def end(self, kind: type[Error], message: str, *, update: int) -> None:
        """End the lease: later uses of the tensors through an old record raise this error.

        The message is formatted only when the error is raised, because every step ends a lease.
        """
        self._ended = (kind, message, update)

    def hand_over(
        self, heir: Any, kind: type[Error], message: str, *, update: int
    ) -> None:
        """End the lease; the new record `heir` owns the tensors, and old records can find it.

        All old records of the same tensors refer only to the newest record, so an old record
        does not keep the records between them alive.
        """
        line = None if self._line is None else self._line()
        if line is None:
            line = _Line()
        line.newest = heir
        heir.lease._line = weakref.ref(line)
        self._heirs = line
        self.end(kind, message, update=update)

    def restore(self) -> None:
        """Make the lease valid again, after a call that changed no tensor."""
        self._ended = None


class _Line:
    """Refers to the newest record of the tensors; all earlier leases share this object."""

    __slots__ = ("__weakref__", "newest")
    newest: Any


_GIVEN = (
    "These gradients of update {update} were passed to af.apply_grads or into=, which changed"
    " their tensors in place. Compute new gradients, or first copy these:"
    " grads.map(torch.Tensor.clone)."
)


# Division of gradients by their weight, which happens exactly once.
#
# A backward pass computes gradients of a total: a mean loss is first multiplied by its number
# of samples. Totals and weights are added over micro-batches and ranks, so a gradient is
# divided once, by the weight of the whole update. Otherwise ranks and micro-batches with fewer
# samples would count too much. `divide_` divides for every engine:
#
# - before methods `grads` of transforms, and when `grads.tensors` is read (`Grads.divide`);
# - otherwise just before the optimizer step (`Engine.prepare`, which calls `Grads.divide`);
# - in the backward pass, if the optimizer steps there (`LiveUpdate`).
#
# If a fused optimizer kernel or DeepSpeed divides itself, `divide_` returns the divisor. DDP and
# FSDP average gradients over the ranks. The weight is averaged, too, so the number of ranks
# cancels.


def divide_(
    tensors: Iterable[torch.Tensor],
    divisor: Number,
    kernel_divides: Callable[[Number], bool] | None = None,
) -> Number | None:
    """Divide gradients by one number, in place, unless the optimizer's kernel divides.

    16-bit gradients are divided in float32, because 16 bits cannot represent a large count.

    Returns: the divisor for the kernel, or None if the gradients are divided.
    """
    if kernel_divides is not None and kernel_divides(divisor):
        return divisor
    if not isinstance(divisor, torch.Tensor):
        if divisor != 1:
            tree.div_(tensors, divisor)
        return None
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        wide = tensor.dtype if tensor.dtype.itemsize >= 4 else torch.float32
        by_dtype.setdefault(wide, []).append(tensor)
    for dtype, same in by_dtype.items():
        tree.div_(same, divisor.to(dtype))
    return None


def never_zero(divisor: Number) -> Number:
    """Return the divisor, or 1 instead of 0, because then all gradients are 0 anyway."""
    if isinstance(divisor, torch.Tensor):
        return torch.where(divisor == 0, 1, divisor)
    return divisor or 1


@attrs.frozen(eq=False)
class Skip:
    """A request to skip an update.

    Attributes:
        flag: a scalar tensor; 0 means not to skip.
        agreed: whether the flag is known to be the same on all ranks.
    """

    flag: torch.Tensor
    agreed: bool

    def __or__(self, other: "Skip") -> "Skip":
        """Combine two requests: the update is skipped if at least one flag is not 0."""
        flag = torch.maximum(self.flag, other.flag)
        return Skip(flag, self.agreed and other.agreed)


@attrs.frozen(kw_only=True, eq=False)
class GradInfo:
    """Internal information about gradients: how they were computed.

    Attributes:
        divisor: the weight that the gradients must be divided by, of this rank or of all
            ranks. If it is averaged over ranks, it is the weight divided by `num_averaged`.
        num_averaged: the number of ranks over which gradients and divisor are averaged.
        has_weight: whether the divisor is known not to be 0, without reading it from a device.
        loss_scale: the factor of the losses that avoids underflow; None means 1.
        cursor: the data's cursor after the batches; None if the batches were plain values.
        start: the cursor before the batch, for gradients from `Grads(tensors, batch=batch)`.
        num_micro_batches: the number of backward passes whose gradients were added.
        update: the state's `num_tried` when the gradients were computed; None for gradients
            from `Grads(tensors)`.
        skip: the request to skip the update; None if no transform asked.
        trained: the names of the trained parameters when the gradients were computed; None if
            unknown.
        finite_loss: False if a loss on this rank was infinite or NaN.
        owned_by_engine: whether the gradients are inside an engine and cannot be read.
        slots: the new slots of transforms that took part in the reduction, by name.
        shows_totals: whether `grads.tensors` are gradients of totals, as in `reduce`.
        lease: the flag that says whether the gradients may still be used. It ends when the
            gradients are passed to `apply_grads` or `into=`. Its `is_mean` says whether the
            gradients are divided already.
    """

    divisor: Number
    num_averaged: int = 1
    has_weight: bool = False
    loss_scale: torch.Tensor | None = None
    cursor: Cursor | None = None
    start: Cursor | None = None
    num_micro_batches: int = 1
    update: int | None = None
    skip: Skip | None = None
    trained: tuple[str, ...] | None = None
    finite_loss: bool = True
    owned_by_engine: bool = False
    slots: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    shows_totals: bool = False
    lease: Lease = attrs.field(factory=Lease, repr=False)

    @property
    def scale(self) -> Number:
        """The divisor that turns gradients of totals into mean gradients, with the loss scale."""
        weight = self.divisor if self.has_weight else never_zero(self.divisor)
        return weight if self.loss_scale is None else self.loss_scale.double() * weight


@hint_attributes("setattr", "getitem")
@attrs.frozen(init=False, eq=False)
class Grads:
    """Gradients by parameter name, and the weight of their losses.

    `value_and_grad` returns a `Grads`. If you compute gradients yourself, as for DP-SGD,
    evolution strategies or reinforcement learning, create it with `Grads(tensors, weight=n)`.

    Gradients are stored as gradients of the loss total, and divided by the weight once: in
    `apply_grads`, or when you read `tensors`. So gradients of micro-batches and ranks can be
    added exactly. Parameters that the loss does not use have no entry.

    Attributes:
        as_taken: internal: the stored gradients by parameter name, of totals or of the mean.
        tensors: the gradients of the mean loss by parameter name. In a transform's `reduce`,
            the gradients of this rank's total.
        weight: the number of samples, or the sum of the weights of `af.Loss`.
        buffers: the buffers (running statistics) after the forward passes.
        reduced: whether the gradients are reduced over all ranks.
        metrics: values that methods `grads` of transforms report, by name.
        taken: internal information for the step.
    """

    as_taken: Mapping[str, torch.Tensor] = attrs.field(alias="tensors")
    buffers: Mapping[str, torch.Tensor]
    reduced: bool
    metrics: Mapping[str, Number]
    taken: GradInfo = attrs.field(repr=False)

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        weight: Number | None = None,
        batch: Batch | None = None,
        metrics: Mapping[str, Number] = MappingProxyType({}),
        buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
        reduced: bool = False,
        taken: GradInfo | None = None,
    ) -> None:
        """Create gradients of this rank, for `apply_grads`, `sync_grads` or `into=`.

        Args:
            tensors: gradients of the mean over this rank's samples, by parameter name, with the
                parameters' shapes and dtypes. An update changes these tensors in place.
            weight: the divisor of the mean, such as the number of samples. Gradients of several
                ranks or micro-batches are averaged with these weights; a weight of 0 means no
                effect. Default: the number of samples in `batch`, or 1 without a batch.
            batch: the batch of `af.batches` from which the gradients were computed, if any. The
                cursor of the next state is then after this batch.
            metrics: numbers for the step's metrics, by name.
            buffers: the buffers after the forward passes.
            reduced: whether all ranks pass the same gradients, computed from all samples.
            taken: internal; do not pass it.

        Raises:
            GradsError: a gradient is not a tensor, or the weight is not a number.
        """
        if taken is None:
            weight = _count_samples(batch) if weight is None else weight
            divisor = _whole_weight(weight, "af.Grads")
            tensors = _without_weight(_detach_grads(tensors), divisor)
            is_positive = not isinstance(divisor, torch.Tensor) and divisor > 0
            start = None if batch is None else batch.start
            cursor = None if batch is None else batch.cursor
            taken = GradInfo(
                divisor=divisor, has_weight=is_positive, cursor=cursor, start=start
            )
            taken.lease.is_mean = True
        set_field = object.__setattr__
        set_field(self, "as_taken", tensors)
        set_field(self, "buffers", buffers)
        set_field(self, "reduced", reduced)
        set_field(self, "metrics", metrics)
        set_field(self, "taken", taken)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The gradients of the mean by parameter name; in `reduce`, of this rank's total.

        Raises:
            GradsError: the gradients are not divided, and were passed to `apply_grads` or `into=`.
        """
        if self.taken.shows_totals or self.taken.owned_by_engine:
            return self.as_taken
        if not self.taken.lease.is_mean:
            self.taken.lease.check()
        self.divide(None)
        return self.as_taken

    @property
    def weight(self) -> Number:
        """The number of samples, or the sum of the weights of `af.Loss`."""
        info = self.taken
        if info.num_averaged == 1:
            return info.divisor
        return info.divisor * info.num_averaged

    def divide(self, kernel_divides: Callable[[Number], bool] | None) -> Number | None:
        """Divide gradients of totals by the weight, in place; see `divide_`.

        With a loss scale, the optimizer's kernel never divides, because it does not know the
        scale.
        """
        info = self.taken
        if info.lease.is_mean:
            return None
        kernel = kernel_divides if info.loss_scale is None else None
        divisor = divide_(self.as_taken.values(), info.scale, kernel)
        info.lease.is_mean = divisor is None
        return divisor

    def multiply_back(self) -> None:
        """Undo `divide`: multiply gradients of the mean by the weight, in place."""
        if self.taken.lease.is_mean:
            tree.mul_(self.as_taken.values(), self.taken.scale)
            self.taken.lease.is_mean = False

    def give_away(self) -> None:
        """Mark the gradients as used: from now on, all records of the same tensors raise."""
        update, text = self.taken.update, _GIVEN
        if update is None:
            text = text.replace(" of update {update}", "")
        self.taken.lease.end(GradsError, text, update=update or 0)

    def check_fit(
        self,
        params: Mapping[str, torch.Tensor],
        dtypes: Collection[torch.dtype] = (),
        device: torch.device | None = None,
    ) -> None:
        """Raise unless every gradient has the shape, dtype and device of its parameter.

        Args:
            params: the parameters by name.
            dtypes: other dtypes that a gradient may have.
            device: another device that a gradient may be on.

        Raises:
            GradsError: a gradient has no parameter, or does not fit its parameter.
        """
        for name, grad in self.as_taken.items():
            param = params.get(name)
            if param is None:
                msg = (
                    f"The gradients contain {name!r}, but the state trains no parameter of this"
                    " name. Use the names in state.trainable."
                )
                raise GradsError(msg)
            want = (param.dtype, tuple(param.shape), param.device)
            if not isinstance(grad, torch.Tensor):
                kind = type(grad).__name__
                msg = f"The gradient of {name!r} has type {kind}; expected a tensor."
                raise GradsError(msg)
            dtype = param.dtype if grad.dtype in dtypes else grad.dtype
            place = param.device if grad.device == device else grad.device
            have = (dtype, tuple(grad.shape), place)
            if have != want:
                msg = (
                    "The gradient of {!r} is a {} tensor of shape {} on {}, but the parameter is"
                    " a {} tensor of shape {} on {}.".format(name, *have, *want)
                )
                raise GradsError(msg)

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a `Grads` with `fn` applied to every gradient.

        If `fn` returns new tensors, you can pass the result and the original to different
        updates. If `fn` returns a gradient itself or a view, only one of both can be used.
        """
        self.taken.lease.check()
        tensors = {n: split_as(fn(grad), grad) for n, grad in self.tensors.items()}
        is_shared = is_within(self.tensors.values())
        if any(map(is_shared, tensors.values())):
            return attrs.evolve(self, tensors=tensors)
        info = attrs.evolve(self.taken, lease=Lease())
        info.lease.is_mean = self.taken.lease.is_mean
        return attrs.evolve(self, tensors=tensors, taken=info)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return a `Grads` with other gradients of the mean, and the same weight.

        Do not use it in `reduce`, where the weight is only that of this rank; use `with_sums`.
        """
        had = self.tensors  # if DeepSpeed owns the gradients, `had.get` raises
        split = {
            n: split_as(tensor, had.get(n)) if is_shard(tensor) else tensor
            for n, tensor in tensors.items()
        }
        return attrs.evolve(self, tensors=split)

    def with_sums(self, tensors: Mapping[str, torch.Tensor], weight: Number) -> Self:
        """Return a `Grads` with sums of gradients over all ranks, and the sum of the weights.

        Return the result from a transform's `reduce`. There, `grads.tensors` are gradients of
        this rank's loss total, and `grads.weight` is its weight: add both over the ranks. Then
        every rank divides by the same weight, and all ranks have bitwise equal gradients. If
        your `reduce` computes means, pass a weight of 1.

        Args:
            tensors: the sums by parameter name, at least for all gradients of this rank, in the
                parameters' dtypes.
            weight: a number, or a scalar tensor of at least 32 bits; the same on all ranks.

        Raises:
            GradsError: a gradient of this rank is left out, or the weight is not valid.
        """
        missing = sorted(self.as_taken.keys() - tensors.keys())
        if missing:
            msg = (
                f"grads.with_sums: the tensors lack {', '.join(missing[:5])}, so this rank's"
                " gradients of these parameters would be lost. Pass their sums, or zeros."
            )
            raise GradsError(msg)
        info = attrs.evolve(
            self.taken,
            divisor=_whole_weight(weight, "grads.with_sums"),
            num_averaged=1,
            has_weight=not isinstance(weight, torch.Tensor) and weight != 0,
            lease=Lease(),
        )
        return attrs.evolve(self, tensors=tensors, taken=info, reduced=True)

    def with_metrics(self, **values: Number) -> Self:
        """Return a `Grads` with more values for the step's metrics."""
        return attrs.evolve(self, metrics={**self.metrics, **values})

    def with_skip(self, flag: torch.Tensor | int, *, agreed: bool = False) -> Self:
        """Return a `Grads` with a request to skip the update, added to earlier requests.

        Call this on all ranks or on no rank, because it leads to a collective. A rank that
        does not need to skip calls `with_skip(False)`. If any rank asks to skip, all ranks
        skip: parameters, buffers, optimizer state and step number do not change, the batch
        counts as seen, and `metrics["skipped"]` is 1.

        Args:
            flag: True, or a scalar other than 0, to skip.
            agreed: whether you know that all ranks pass the same flag. Otherwise a collective
                combines the flags.
        """
        wish = Skip((torch.as_tensor(flag) != 0).to(torch.float32), agreed)
        before = self.taken.skip
        info = attrs.evolve(self.taken, skip=wish if before is None else before | wish)
        return attrs.evolve(self, taken=info)

    def __repr__(self) -> str:
        """Return a summary, without reading values from a device."""
        kind = "reduced" if self.reduced else "of this rank"
        update = self.taken.update
        origin = "made by hand" if update is None else f"at update {update}"
        return (
            f"<Grads of {len(self.as_taken)} parameters, {kind}, "
            f"{self.taken.num_micro_batches} micro-batches, {origin}>"
        )


def _detach_grads(tensors: Any) -> dict[str, torch.Tensor]:
    """Return a user's gradients without their graphs.

    Raises:
        GradsError: the argument is not a dict from names to tensors.
    """
    if isinstance(tensors, Mapping):
        grads = cast("Mapping[Any, Any]", tensors)
        if all(isinstance(grad, torch.Tensor) for grad in grads.values()):
            return {name: grad.detach() for name, grad in grads.items()}
    msg = (
        "af.Grads(tensors): expected a dict from parameter names to tensors, such as"
        " dict(zip(state.params, torch.autograd.grad(loss, state.params.values())))."
    )
    raise GradsError(msg)


def _count_samples(batch: Batch | None) -> Number:
    """Return the number of this rank's samples in a batch; 1 without a batch.

    Raises:
        GradsError: the number of samples in the batch is unknown.
    """
    counts = [1] if batch is None else batch.weights
    if None not in counts:
        return sum(cast("Sequence[int]", counts))
    msg = (
        "af.Grads(tensors, batch=batch): the number of samples in this batch is unknown. Pass"
        " weight=, such as the number of samples."
    )
    raise GradsError(msg)


def _without_weight(
    tensors: dict[str, torch.Tensor], weight: Number
) -> dict[str, torch.Tensor]:
    """Replace gradients by 0 if their weight is 0, because a mean over 0 samples may be NaN.

    Raises:
        GradsError: the weight is a negative number.
    """
    if isinstance(weight, torch.Tensor):
        return {n: torch.where(weight == 0, 0, grad) for n, grad in tensors.items()}
    if weight < 0:
        msg = f"af.Grads(weight={weight}): expected a number of samples or tokens, 0 or more."
        raise GradsError(msg)
    return tensors if weight else {n: torch.zeros_like(g) for n, g in tensors.items()}


def _whole_weight(weight: Any, call: str) -> Number:
    """Return a weight as a number, or a scalar tensor of at least 32 bits.

    Raises:
        GradsError: the weight is not a finite number, or has too few bits.
    """
    if is_number(weight) and math.isfinite(weight):
        return weight
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        if weight.is_floating_point() and weight.dtype.itemsize >= 4:
            return weight.detach().reshape(())
        if not weight.is_floating_point() and not weight.is_complex():
            return weight.detach().reshape(()).double()
    text = format_tensor(weight) if isinstance(weight, torch.Tensor) else repr(weight)
    msg = (
        f"{call}(weight={text}): expected a finite number, or a scalar tensor of at least 32"
        " bits, because a large count does not fit in 16 bits. Write"
        " torch.as_tensor(grads.weight, dtype=torch.float64), and sum this tensor over the ranks."
    )
    raise GradsError(msg)
