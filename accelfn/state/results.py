# SPDX-License-Identifier: Apache-2.0
"""What passes and steps return: `Grads` and `Metrics`, as values."""

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
# Two means cannot be combined; totals with their weights can. So every value that crosses
# micro-batches or ranks is kept as a `WeightedSum`, and divided once, at the end.


@attrs.frozen(init=False)
class Loss:
    """A loss as a total and its weight, for losses other than a plain mean over samples.

    Gradients of totals are added over micro-batches and ranks and divided once by the
    global weight: `Loss(token_losses.sum(), num_tokens)` gives the mean over all tokens
    of an update, for every split of the tokens.

    Attributes:
        total: the sum that is differentiated; a scalar tensor with a gradient.
        weight: the divisor of the total, 0 or more: a number, or a scalar tensor without
            a gradient. With 0 the total has no effect.
        aux: further totals by name, reported as means over the same weight; pass
            `(total, weight)` for a total with another weight.

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
        """Take a total, its weight, and further totals by name."""
        if not isinstance(total, torch.Tensor):
            msg = (
                f"af.Loss(total={total!r}): got {type(total).__name__}; expected a scalar"
                " tensor with a gradient."
            )
            raise LossError(msg)
        _check_weight("weight", weight)
        if isinstance(weight, torch.Tensor) and weight.requires_grad:
            msg = (
                "af.Loss(weight=...): the weight has a gradient, but it must be a constant: the"
                " loss of all ranks is the sum of totals over the sum of weights. Detach the"
                " weight; or divide yourself, and return the mean."
            )
            raise LossError(msg)
        if "loss" in aux:
            msg = "af.Loss(loss=...): this name reports the total itself; use another."
            raise LossError(msg)
        for name, entry in aux.items():
            if isinstance(entry, tuple) and len(cast("tuple[Any, ...]", entry)) != 2:
                msg = (
                    f"af.Loss({name}={entry!r}): expected a total, or (total, weight)."
                )
                raise LossError(msg)
            amount, over = entry if isinstance(entry, tuple) else (entry, weight)
            _check_number(name, amount)
            _check_weight(f"{name}=(total, weight)", over)
        # not by attrs' own __init__, which torch.compile cannot trace
        object.__setattr__(self, "total", total)
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "aux", aux)


def own_number(value: Number) -> Number:
    """Copy a tensor that other code may write into; return a plain number as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def check_whole(result: object, name: str) -> None:
    """Raise if a loss function returned values computed from shards of parameters.

    Raises:
        LossError: a value is a DTensor.
    """
    for part in result if isinstance(result, tuple) else (result,):
        if type(part) is not torch.Tensor and is_shard(part):
            msg = (
                f"{name} returned a DTensor: it is computed of parameters that are split over"
                " the ranks, and were read outside of the model's forward pass, as in"
                " sum(p.square().sum() for p in model.parameters()). They are whole within"
                " the forward of the module that is split with them: compute it there. For a"
                " penalty on weights, let the optimizer have weight_decay, or a transform's"
                " `grads` add the penalty's gradient."
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
    msg = (
        f"af.Loss({name}={text}): expected one real number, an int or float of Python's or"
        " a tensor."
    )
    raise LossError(msg)


def _check_weight(name: str, value: object) -> None:
    _check_number(name, value)
    if isinstance(value, (int, float)) and not 0 <= value < math.inf:
        msg = f"af.Loss({name}={value!r}): expected a finite count or sum, 0 or more."
        raise LossError(msg)


@attrs.frozen
class WeightedSum:
    """The total `amount * unit` with its `weight`; the unit saves a multiplication per step.

    A lone mean over n samples is `WeightedSum(mean, weight=n, unit=n)`.
    """

    amount: Number
    weight: Number
    unit: float = 1

    @property
    def total(self) -> Number:
        """The sum itself."""
        return self.amount if self.unit == 1 else self.amount * self.unit

    @property
    def mean(self) -> torch.Tensor:
        """The total divided by its weight, or 0 if the weight is 0."""
        if self.unit is self.weight or self.unit == self.weight:
            mean = own_number(self.amount) if self.weight else 0.0
        elif isinstance(self.weight, torch.Tensor):
            nothing = self.weight == 0
            mean = torch.where(
                nothing, 0, self.total / torch.where(nothing, 1, self.weight)
            )
        else:
            mean = self.total / self.weight if self.weight else 0.0
        return torch.as_tensor(mean)

    def __add__(self, other: Self) -> "WeightedSum":
        """Add totals and weights."""
        return WeightedSum(self.total + other.total, self.weight + other.weight)


class Metrics(Mapping[str, torch.Tensor]):
    """Metrics of a step on this rank, as weighted sums by name, without communication.

    Reading a name gives its mean as a scalar tensor. You can add metrics, for example over
    steps. `metrics.all_reduce_mean(world)` reduces them exactly over all ranks. On a device nothing
    is copied to the host before you read it.

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
        """Take `(total, weight)` by name."""
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
            msg = f"No metric {name!r}; there are {sorted(self._sums)}."
            raise UnknownMetricError(msg)
        return self._sums[name].mean

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._sums)

    def __len__(self) -> int:
        """Return how many names there are."""
        return len(self._sums)

    if not TYPE_CHECKING:  # where it would allow every name

        def __getattr__(self, name: str) -> NoReturn:
            """Say how a metric is read."""
            if name.startswith("_"):  # copy and pickle look for hooks
                raise AttributeError(name)
            advice = find_hint("Metrics", name) or f"there are {sorted(self._sums)}"
            if name in self._sums:
                advice = f'write metrics["{name}"]'
            msg = f"Metrics have no attribute {name}: {advice}."
            raise RecordError(msg, obj=type(self))

    def __setitem__(self, name: str, _: Any) -> NoReturn:
        """Refuse to be written into."""
        msg = f'Metrics are not written into: write metrics.with_values({{"{name}": ...}}).'
        raise CallError(msg)

    def __float__(self) -> NoReturn:
        """Refuse to be one number."""
        first = next(iter(self._sums), "loss")
        msg = f'Metrics are several numbers; write float(metrics["{first}"]).'
        raise CallError(msg)

    def __add__(self, other: "Metrics") -> "Metrics":
        """Add the sums and weights of equal names; other names are kept."""
        if not isinstance(other, Metrics):
            return NotImplemented
        sums = dict(self._sums)
        for name, entry in other._sums.items():
            sums[name] = sums[name] + entry if name in sums else entry
        return Metrics(sums)

    def __radd__(self, nothing: object) -> "Metrics":
        """Let `sum` of some metrics begin at its 0."""
        return self if nothing == 0 else NotImplemented

    def with_values(self, values: Mapping[str, Number]) -> "Metrics":
        """Return the metrics with more plain values, each with weight 1.

        Raises:
            LossError: a value has the name of an existing metric.
        """
        twice = self._sums.keys() & values.keys()
        if twice:
            msg = (
                f"The loss reports {min(twice)!r}, and so does a transform of the setup."
                " Let the loss give it another name."
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

        Totals and weights are added over ranks and divided once. So the result is the mean
        over all samples, even if ranks have different numbers of samples. The call reads the
        device, as a log line must; a step does not.

        Args:
            world: the ranks to reduce over; ranks that share a layer ("tp") count once.
            label: name of the call for error messages.

        Cost: one all-reduce of 16 float64 numbers, including six to compare the names; for
        more than five names a second all-reduce, of two numbers per name.

        Law: on any number of ranks the result is the metric of the union of their samples.

        Raises:
            CollectiveMismatchError: ranks have metrics of other names, or more.
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
        if not pairs:
            return {}
        sums = sum_named(pairs, world.loss, kind="mean", label=label, noun="metrics")
        return {name: total / w if w else 0.0 for name, (total, w) in sums.items()}


# Leases: records of donated tensors raise when they are used.


class Lease:
    """A validity flag that all records of the same tensors share, until the tensors change."""

    __slots__ = ("__weakref__", "_ended", "_heirs", "_line", "is_loaded", "is_mean")

    def __init__(self, *, is_loaded: bool = False) -> None:
        """Create a valid lease; `is_loaded`: the tensors are as a checkpoint has them."""
        self._ended: tuple[type[Error], str, int] | None = None
        self.is_loaded = is_loaded
        self.is_mean = False  # of gradients: whether they were divided by their weight
        self._heirs: _Line | None = None
        self._line: weakref.ref[_Line] | None = None

    def check(self) -> None:
        """Raise if the lease has ended.

        Raises:
            Error: the error class and message that `end` was called with.
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
        """The newest record that took the tensors over, or None."""
        return None if self._heirs is None else self._heirs.newest

    def end(self, kind: type[Error], message: str, *, update: int) -> None:
        """End the lease: every later use of the tensors through an old record raises this.

        Every step ends a lease, so the message is formatted only when it is raised.
        """
        self._ended = (kind, message, update)

    def hand_over(
        self, heir: Any, kind: type[Error], message: str, *, update: int
    ) -> None:
        """End the lease, and pass the tensors to `heir`, which old records can find.

        All records of a chain refer to the newest only, so an old record keeps one other
        record alive, and not all between. The newest does not refer to old records, so it
        lives as long as it, or an old record, is referenced.
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
    """A chain of leases, each handed over to the next."""

    __slots__ = ("__weakref__", "newest")
    newest: Any


_GIVEN = (
    "These gradients of update {update} were given to apply_grads or into=, which worked on"
    " their tensors in place. Take new ones, or keep grads.map(torch.Tensor.clone) before."
)


# The one division of a gradient by its weight.
#
# A backward pass computes gradients of a total: a mean loss is multiplied by its number of
# samples first. Totals and weights add exactly over micro-batches and ranks, so a gradient is
# divided once, by the weight of the whole update. Otherwise ranks and micro-batches with
# fewer samples would count too much. `divide_` does this for each engine:
#
# - before transforms of `grads`, and when somebody reads `grads.tensors` (`Grads.divide`);
# - else just before the optimizer step (`Engine.prepare`, which calls `Grads.divide`);
# - in the backward pass, if that steps the optimizer (`LiveUpdate`).
#
# A fused kernel, or DeepSpeed, divides by itself; then `divide_` leaves the divisor to it. DDP
# and FSDP divide gradients by the number of ranks, and the weight too: both are averages, and
# the number of ranks cancels.


def divide_(
    tensors: Iterable[torch.Tensor],
    divisor: Number,
    kernel_divides: Callable[[Number], bool] | None = None,
) -> Number | None:
    """Divide gradients by one number in place, unless the optimizer's kernel will.

    16 bits cannot hold a count, so gradients of 16 bits are divided in float32.

    Returns: the divisor that is left to the kernel, or None.
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
    """Return a divisor, or 1 if it is 0: gradients without weight are 0, and stay 0."""
    if isinstance(divisor, torch.Tensor):
        return torch.where(divisor == 0, 1, divisor)
    return divisor or 1


@attrs.frozen(eq=False)
class Skip:
    """A request to skip an update.

    Attributes:
        flag: a scalar; 0 means no skip.
        agreed: whether the flag is the same on all ranks.
    """

    flag: torch.Tensor
    agreed: bool

    def __or__(self, other: "Skip") -> "Skip":
        """Combine two requests: skip if one of them does."""
        flag = torch.maximum(self.flag, other.flag)
        return Skip(flag, self.agreed and other.agreed)


@attrs.frozen(kw_only=True, eq=False)
class GradInfo:
    """Internal information about gradients: how they were computed.

    Attributes:
        divisor: the weight of the losses, to divide by; of this rank or of all ranks,
            up to the factor `num_averaged`.
        num_averaged: number of ranks over which tensors and divisor are averaged.
        has_weight: whether the divisor is known not to be 0, without reading a device.
        loss_scale: the factor of the losses against underflow; None means 1.
        cursor: the data's cursor after the batches; None for plain values.
        start: the cursor before the batch of gradients that a user made.
        num_micro_batches: number of backward passes in the sum.
        update: the state's `num_tried` when the gradients were computed; None if a user made
            them.
        skip: whether transforms of `grads` skip the update; None if no transform checks.
        trained: names of the trained parameters when the gradients were computed; None
            means not checked.
        finite_loss: False if a loss of this rank was infinite or not a number.
        owned_by_engine: whether an engine holds the gradients, so that nobody can read them.
        slots: slots of transforms that took part in the reduction, by name.
        shows_totals: whether `tensors` are of totals, as in a transform's `reduce`.
        lease: ends when the gradients are passed to `apply_grads` or to `into=`. Its
            `is_mean` says whether the division is done; a lone mean needs no division.
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
        """The number that turns gradients of totals into gradients of the mean."""
        weight = self.divisor if self.has_weight else never_zero(self.divisor)
        return weight if self.loss_scale is None else self.loss_scale.double() * weight


@hint_attributes("setattr", "getitem")
@attrs.frozen(init=False, eq=False)
class Grads:
    """Gradients by parameter name, and the total weight of the losses.

    `value_and_grad` returns them. `Grads(tensors, weight=n)` makes them of gradients that were
    found in another way, as for DP-SGD, evolution strategies or reinforcement learning.

    Gradients are stored as totals and divided once: by `apply_grads`, or when you read
    `tensors`. So they add exactly over micro-batches and ranks. A parameter that the loss
    does not use is left out.

    Attributes:
        as_taken: the stored gradients: a tensor per parameter, of totals or of the mean.
        tensors: the gradients of the mean; in a transform's `reduce` of this rank's totals.
        weight: the total weight: samples, or the weights of `af.Loss`.
        buffers: the buffers (running statistics) that the forward passes wrote.
        reduced: whether the gradients are reduced over all ranks.
        metrics: values that transforms of `grads` report, by name.
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
        """Make gradients of this rank. `apply_grads`, `sync_grads` and `into=` take them.

        Args:
            tensors: gradients of the mean over this rank's samples, by parameter name, in the
                parameters' shapes and dtypes. An update changes them in place.
            weight: what the mean is over, such as the number of samples; over ranks and
                micro-batches, gradients are averaged by weight. With 0 they have no effect.
                By default the number of samples in `batch`, or 1 without a batch.
            batch: the batch of `af.batches` that they are of, if any: the next state's cursor
                is after it.
            metrics: numbers for the step's metrics, by name.
            buffers: the buffers after the forward passes.
            reduced: whether all ranks pass the same gradients, of all samples.
            taken: leave it out.

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
        """A tensor per parameter: of the mean, or of this rank's totals in `reduce`.

        Raises:
            GradsError: the gradients are of totals, and were donated.
        """
        if self.taken.shows_totals or self.taken.owned_by_engine:
            return self.as_taken
        if not self.taken.lease.is_mean:
            self.taken.lease.check()
        self.divide(None)
        return self.as_taken

    @property
    def weight(self) -> Number:
        """The total weight: samples, or the weights of `af.Loss`."""
        info = self.taken
        if info.num_averaged == 1:
            return info.divisor
        return info.divisor * info.num_averaged

    def divide(self, kernel_divides: Callable[[Number], bool] | None) -> Number | None:
        """Divide gradients of totals in place, to those of the mean; see `divide_`.

        No kernel knows the loss scale, so with a loss scale nothing is left to it.
        """
        info = self.taken
        if info.lease.is_mean:
            return None
        kernel = kernel_divides if info.loss_scale is None else None
        divisor = divide_(self.as_taken.values(), info.scale, kernel)
        info.lease.is_mean = divisor is None
        return divisor

    def multiply_back(self) -> None:
        """Multiply divided gradients in place, back to those of totals."""
        if self.taken.lease.is_mean:
            tree.mul_(self.as_taken.values(), self.taken.scale)
            self.taken.lease.is_mean = False

    def give_away(self) -> None:
        """End the lease: these gradients, and records that share it, raise from now on."""
        update = self.taken.update
        text = (
            _GIVEN if update is not None else _GIVEN.replace(" of update {update}", "")
        )
        self.taken.lease.end(GradsError, text, update=update or 0)

    def check_fit(
        self,
        params: Mapping[str, torch.Tensor],
        dtypes: Collection[torch.dtype] = (),
        device: torch.device | None = None,
    ) -> None:
        """Raise unless every gradient fits the parameter of its name.

        Args:
            params: the parameters.
            dtypes: further dtypes that a gradient may have.
            device: a further device that a gradient may be on.

        Raises:
            GradsError: a gradient does not fit.
        """
        for name, grad in self.as_taken.items():
            param = params.get(name)
            if param is None:
                msg = f"Gradients hold {name!r}, which is no parameter that is trained."
                raise GradsError(msg)
            want = (tuple(param.shape), param.dtype, param.device)
            if not isinstance(grad, torch.Tensor):
                msg = (
                    f"The gradient of {name!r} is {type(grad).__name__}, not a tensor."
                )
                raise GradsError(msg)
            dtype = param.dtype if grad.dtype in dtypes else grad.dtype
            place = param.device if grad.device == device else grad.device
            have = (tuple(grad.shape), dtype, place)
            if have != want:
                msg = (
                    f"The gradient of {name!r} is {have}, but the parameter is {want}."
                )
                raise GradsError(msg)

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the record with `fn` applied to every gradient.

        If `fn` returns copies, the copies are donated independently of the original
        gradients. If `fn` returns a gradient or a view, both are donated together.
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
        """Return the record with other gradients of the mean, of the same weight.

        In `reduce` the weight is only this rank's: return `with_sums` there.
        """
        had = self.tensors  # which DeepSpeed lets nobody see
        split = {
            n: split_as(tensor, had.get(n)) if is_shard(tensor) else tensor
            for n, tensor in tensors.items()
        }
        return attrs.evolve(self, tensors=split)

    def with_sums(self, tensors: Mapping[str, torch.Tensor], weight: Number) -> Self:
        """Return the record with the sums and the weight of all ranks.

        Return this from a transform's `reduce`. In `reduce`, `tensors` are the gradients of
        this rank's loss totals, and `weight` is their weight: add both over the ranks. Then
        every rank divides by the same weight, and replicas agree to the last bit. For means
        pass a weight of 1.

        Args:
            tensors: by name, for at least all existing gradients, in the parameters' dtypes.
            weight: a number, or a scalar of at least 32 bits; the same on all ranks.

        Raises:
            GradsError: a gradient of this rank is left out, or the weight is not valid.
        """
        missing = sorted(self.as_taken.keys() - tensors.keys())
        if missing:
            msg = (
                f"with_sums leaves out {', '.join(missing[:5])}, but this rank has a"
                " gradient: these parameters would not be trained. Pass zeros, if you mean"
                " that."
            )
            raise GradsError(msg)
        info = attrs.evolve(
            self.taken,
            divisor=_whole_weight(weight, "with_sums"),
            num_averaged=1,
            has_weight=not isinstance(weight, torch.Tensor) and weight != 0,
            lease=Lease(),
        )
        return attrs.evolve(self, tensors=tensors, taken=info, reduced=True)

    def with_metrics(self, **values: Number) -> Self:
        """Return the record with more values for the step's metrics."""
        return attrs.evolve(self, metrics={**self.metrics, **values})

    def with_skip(self, flag: torch.Tensor | int, *, agreed: bool = False) -> Self:
        """Return the record with a request to skip the update, in addition to earlier ones.

        Call it on all ranks or on no rank, because it leads to a collective. A rank that
        does not want to skip calls `with_skip(False)`. If any rank wants to skip, all ranks
        skip: parameters, buffers, optimizer and step stay as they are, the batch counts as
        seen, and `metrics["skipped"]` is 1.

        Args:
            flag: True, or a scalar other than 0, to skip.
            agreed: whether all ranks pass the same flag; else a collective combines the
                flags.
        """
        wish = Skip((torch.as_tensor(flag) != 0).to(torch.float32), agreed)
        before = self.taken.skip
        info = attrs.evolve(self.taken, skip=wish if before is None else before | wish)
        return attrs.evolve(self, taken=info)

    def __repr__(self) -> str:
        """Show a summary, without reading a device."""
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
        GradsError: they are not tensors by name.
    """
    if isinstance(tensors, Mapping):
        grads = cast("Mapping[Any, Any]", tensors)
        if all(isinstance(grad, torch.Tensor) for grad in grads.values()):
            return {name: grad.detach() for name, grad in grads.items()}
    msg = (
        "af.Grads(tensors): expected a tensor for each parameter name, such as"
        " dict(zip(state.params, torch.autograd.grad(loss, state.params.values())))."
    )
    raise GradsError(msg)


def _count_samples(batch: Batch | None) -> Number:
    """Return the number of this rank's samples in a batch; 1 without a batch.

    Raises:
        GradsError: the batch does not say the number.
    """
    counts = [1] if batch is None else batch.weights
    if None not in counts:
        return sum(cast("Sequence[int]", counts))
    msg = (
        "af.Grads(tensors, batch=batch): this batch does not know its number of samples. Pass"
        " weight=, such as the number of rows that count."
    )
    raise GradsError(msg)


def _without_weight(
    tensors: dict[str, torch.Tensor], weight: Number
) -> dict[str, torch.Tensor]:
    """Return gradients of the mean as 0 if the weight is 0; a mean of nothing may be NaN.

    Raises:
        GradsError: the weight is a negative number.
    """
    if isinstance(weight, torch.Tensor):
        return {n: torch.where(weight == 0, 0, grad) for n, grad in tensors.items()}
    if weight < 0:
        msg = f"af.Grads(weight={weight}): expected a number of samples, 0 or more."
        raise GradsError(msg)
    return tensors if weight else {n: torch.zeros_like(g) for n, g in tensors.items()}


def _whole_weight(weight: Any, call: str) -> Number:
    """Return a weight that divides gradients precisely enough."""
    if is_number(weight) and math.isfinite(weight):
        return weight
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        if weight.is_floating_point() and weight.dtype.itemsize >= 4:
            return weight.detach().reshape(())
        if not weight.is_floating_point() and not weight.is_complex():
            return weight.detach().reshape(()).double()
    text = format_tensor(weight) if isinstance(weight, torch.Tensor) else repr(weight)
    msg = (
        f"{call}(weight={text}): expected a number, or a scalar of at least 32 bits, because"
        " 16 bits cannot hold a count:"
        " torch.as_tensor(grads.weight, dtype=torch.float64), summed over the ranks."
    )
    raise GradsError(msg)
