# SPDX-License-Identifier: Apache-2.0
"""`Loss` and `Metrics`: the results of loss functions and steps, as weighted sums.

Two means cannot be combined; totals with their weights can. So every value that crosses
micro-batches or ranks is kept as a `WeightedSum`, and divided once, at the end.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import attrs
import torch

from accelfn.base.arguments import Number, explain_call_errors, is_number
from accelfn.base.hints import find_hint
from accelfn.base.tree import is_shard
from accelfn.collectives import sum_named
from accelfn.collectives.failures import check_world
from accelfn.errors import (
    ArgumentError,
    CallError,
    LossError,
    RecordError,
    UnknownMetricError,
)
from accelfn.world import World


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
        self,
        total: torch.Tensor,
        weight: Number,
        **aux: Number | tuple[Number, Number],
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


def check_whole(returned: object, name: str) -> None:
    """Raise if a loss function returned values computed from shards of parameters.

    Raises:
        LossError: a value is a DTensor.
    """
    for each in returned if isinstance(returned, tuple) else (returned,):
        if type(each) is not torch.Tensor and is_shard(each):
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
    shown = f"<{value.dtype}, shape {tuple(value.shape)}>" if tensor else repr(value)
    msg = (
        f"af.Loss({name}={shown}): expected one real number, an int or float of Python's or"
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
    steps. `af.mean(metrics, world)` reduces them exactly over all ranks. On a device nothing
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
        try:
            items = sums.items()
        except AttributeError:
            msg = f"af.Metrics({sums!r}): expected a dict, {{name: (total, weight)}}."
            raise ArgumentError(msg) from None
        self._sums: dict[str, WeightedSum] = {}
        for name, entry in items:
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
            own = value.clone() if isinstance(value, torch.Tensor) else value
            sums[name] = WeightedSum(own, 1)
        return Metrics(sums)

    def __repr__(self) -> str:
        """Show the means."""
        inside = ", ".join(f"{name}={float(self[name]):.6g}" for name in self)
        return f"Metrics({inside})"


@explain_call_errors
def mean(
    metrics: Metrics, world: World, *, label: str = "mean of metrics"
) -> dict[str, float]:
    """Compute the exact mean of every metric over all ranks, with a collective.

    Totals and weights are added over ranks and divided once. So the result is the mean over
    all samples, even if ranks have different numbers of samples. The call reads the device,
    as a log line must; a step does not.

    Args:
        metrics: the metrics of this rank.
        world: the ranks to reduce over; ranks that share a layer ("tp") count once.
        label: name of the call for error messages.

    Cost: one all-reduce of 16 float64 numbers, including six to compare the names; for more
    than five names a second all-reduce, of two numbers per name.

    Law: on any number of ranks the result is the metric of the union of their samples.

    Raises:
        CollectiveMismatchError: ranks have metrics of other names, or more.

        PeerFailedError: another rank failed.
    """
    if not isinstance(metrics, Metrics):
        msg = f"af.mean: expected Metrics, got {type(metrics).__name__}; add several first."
        raise ArgumentError(msg)
    check_world("af.mean", world)
    if not metrics:
        return {}
    pairs = {name: (each.total, each.weight) for name, each in metrics.sums.items()}
    for name, (total, _) in pairs.items():
        if isinstance(total, torch.Tensor) and total.is_complex():
            msg = (
                f"af.mean: metric {name!r} is {total!r}; expected one real number. Report"
                " .real and .imag of a complex number as two metrics."
            )
            raise ArgumentError(msg)
    sums = sum_named(pairs, world.loss, kind="mean", label=label, what="metrics")
    return {name: total / w if w else 0.0 for name, (total, w) in sums.items()}
