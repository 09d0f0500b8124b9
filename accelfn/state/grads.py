# SPDX-License-Identifier: Apache-2.0
"""`Grads`: the gradients of one or several backward passes, as a value."""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self

import attrs
import torch

from accelfn.base import tree
from accelfn.base.arguments import is_number
from accelfn.base.hints import hint_attributes
from accelfn.base.tree import have_memory_in_common, is_shard, split_as
from accelfn.data.plan import Cursor
from accelfn.errors import Error, GradsError
from accelfn.state.metrics import Number

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
        num_micro_batches: number of backward passes in the sum.
        update: the state's `num_tried` when the gradients were computed.
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
    num_micro_batches: int = 1
    update: int = 0
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
@attrs.frozen(kw_only=True, eq=False)
class Grads:
    """Gradients by parameter name, and the total weight of the losses.

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
    buffers: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    reduced: bool = True
    metrics: Mapping[str, Number] = attrs.field(factory=dict)
    taken: GradInfo = attrs.field(repr=False)

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
        left = divide_(self.as_taken.values(), info.scale, kernel)
        info.lease.is_mean = left is None
        return left

    def multiply_back(self) -> None:
        """Multiply divided gradients in place, back to those of totals."""
        if self.taken.lease.is_mean:
            tree.mul_(self.as_taken.values(), self.taken.scale)
            self.taken.lease.is_mean = False

    def give_away(self) -> None:
        """End the lease: these gradients, and records that share it, raise from now on."""
        self.taken.lease.end(GradsError, _GIVEN, update=self.taken.update)

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
        if have_memory_in_common(tensors.values(), self.tensors.values()):
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
            n: split_as(each, had.get(n)) if is_shard(each) else each
            for n, each in tensors.items()
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
            divisor=_whole_weight(weight),
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
        return (
            f"<Grads of {len(self.as_taken)} parameters, {kind}, "
            f"{self.taken.num_micro_batches} micro-batches, at update {self.taken.update}>"
        )


def _whole_weight(weight: Any) -> Number:
    """Return a weight that divides gradients precisely enough."""
    if is_number(weight) and math.isfinite(weight):
        return weight
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        if weight.is_floating_point() and weight.dtype.itemsize >= 4:
            return weight.detach().reshape(())
        if not weight.is_floating_point() and not weight.is_complex():
            return weight.detach().reshape(()).double()
    shown = (
        f"a tensor of shape {tuple(weight.shape)} and {weight.dtype}"
        if isinstance(weight, torch.Tensor)
        else repr(weight)
    )
    msg = (
        f"with_sums(weight={shown}): expected a number, or a scalar of at least 32 bits, because"
        " 16 bits cannot hold a count:"
        " torch.as_tensor(grads.weight, dtype=torch.float64), summed over the ranks."
    )
    raise GradsError(msg)
