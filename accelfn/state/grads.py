# SPDX-License-Identifier: Apache-2.0
"""Gradients as a value: what one backward pass, or several, found."""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, Self

import attrs
import torch

from accelfn.base import tree, words
from accelfn.base.arguments import is_number
from accelfn.base.tree import have_memory_in_common, is_shard, split_as
from accelfn.base.words import hint_attributes
from accelfn.data.plan import Cursor
from accelfn.errors import Error, GradsError
from accelfn.state.metrics import Number

# `Lease`: whether tensors still are what the records that hold them say.


class Leased(Protocol):
    """A record of tensors."""

    @property
    def lease(self) -> "Lease":
        """Whether they still are what it says."""
        ...


class Lease:
    """Shared by all records of the same tensors; once they have changed, it is over for good."""

    __slots__ = ("__weakref__", "_ended", "_heirs", "_line", "is_loaded", "is_mean")

    def __init__(self, *, is_loaded: bool = False) -> None:
        """Begin valid; `is_loaded` of tensors that came from a checkpoint, as they are."""
        self._ended: tuple[type[Error], str, int] | None = None
        self.is_loaded = is_loaded
        self.is_mean = False  # of gradients: whether they were divided by their weight
        self._heirs: _Line | None = None
        self._line: weakref.ref[_Line] | None = None

    def check(self) -> None:
        """Raise if the tensors were given away.

        Raises:
            Error: they were; of the kind and with the message that ended the lease.
        """
        if self._ended is not None:
            kind, message, update = self._ended
            raise kind(message.format(update=update))

    @property
    def is_over(self) -> bool:
        """Whether the tensors were given away."""
        return self._ended is not None

    @property
    def heir(self) -> Any:
        """The newest record that came of those of this lease, if they were handed over."""
        return None if self._heirs is None else self._heirs.newest

    def end(self, kind: type[Error], message: str, *, update: int) -> None:
        """End it; whoever uses the tensors through an old record gets this error.

        Every step ends a lease, so the message is made when somebody asks.
        """
        self._ended = (kind, message, update)

    def hand_over(
        self, heir: Leased, kind: type[Error], message: str, *, update: int
    ) -> None:
        """End it, for the tensors are another record's, which old ones remember.

        All that were handed over one after another know the newest, and no other: an old
        record keeps one more alive, not all that came between. The newest itself does not
        know them, so it lives no longer than somebody has it, or one of them.
        """
        line = None if self._line is None else self._line()
        if line is None:
            line = _Line()
        line.newest = heir
        heir.lease._line = weakref.ref(line)
        self._heirs = line
        self.end(kind, message, update=update)

    def restore(self) -> None:
        """Make it valid again: what it was ended for has changed nothing."""
        self._ended = None


class _Line:
    """Leases that were handed over one to the next."""

    __slots__ = ("__weakref__", "newest")
    newest: Leased


_GIVEN = (
    "These gradients of update {update} were given to apply_grads or into=, which worked on"
    " their tensors in place. Take new ones, or keep grads.map(torch.Tensor.clone) before."
)


def divide_(tensors: Iterable[torch.Tensor], divisor: Number) -> None:
    """Divide gradients by one number, in place.

    A count is more than 16 bits can hold, so those divide by it in float32.
    """
    if not isinstance(divisor, torch.Tensor):
        if divisor != 1:
            tree.div_(tensors, divisor)
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        wide = tensor.dtype if tensor.dtype.itemsize >= 4 else torch.float32
        by_dtype.setdefault(wide, []).append(tensor)
    for dtype, same in by_dtype.items():
        tree.div_(same, divisor.to(dtype))


@attrs.frozen(eq=False)
class Skip:
    """Whether an update is to be skipped.

    Attributes:
        flag: a scalar, 0 if not.
        agreed: whether it is the same on all ranks.
    """

    flag: torch.Tensor
    agreed: bool

    def __or__(self, other: "Skip") -> "Skip":
        """Skip for either reason."""
        flag = torch.maximum(self.flag, other.flag)
        return Skip(flag, self.agreed and other.agreed)


@attrs.frozen(kw_only=True, eq=False)
class GradInfo:
    """What a step knows of gradients beside what their holder does: how they were taken.

    Attributes:
        divisor: what to divide them by; the weight of the losses seen, on this rank or
            on all, up to `num_averaged`.
        num_averaged: over how many ranks tensors and divisor are averages of sums.
        has_weight: whether the divisor is known not to be 0, without reading a device.
        loss_scale: what the losses were multiplied by besides, against underflow; None is 1.
        cursor: where the data stands after the batches seen; None for plain values.
        num_micro_batches: how many backward passes they are the sum of.
        update: how many updates the state they were taken at had tried.
        skip: whether transforms of `grads` want the update to be skipped; None: none looks.
        trained: names of the parameters that were trained when they were taken; None is
            not looked at.
        finite_loss: False if a loss of this rank was seen to be infinite or not a number.
        is_held: whether an engine holds the gradients, which nobody sees.
        slots: of transforms that had a say in how they crossed the ranks, by name.
        shows_totals: whether `tensors` are those of totals, as in a transform's `reduce`.
        lease: ended when they are given to `apply_grads` or to `into=`. It says whether the
            division is done; a lone mean is differentiated as it is.
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
    is_held: bool = False
    slots: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    shows_totals: bool = False
    lease: Lease = attrs.field(factory=Lease, repr=False)

    @property
    def denominator(self) -> Number:
        """The divisor, or where it is 0, a number by which zeros stay zeros.

        Gradients that come with a weight of 0 are 0.
        """
        return self.divisor if self.has_weight else never_zero(self.divisor)

    @property
    def scale(self) -> Number:
        """What gradients of totals are to be divided by for those of the mean."""
        if self.loss_scale is None:
            return self.denominator
        return self.loss_scale.double() * self.denominator


def never_zero(divisor: Number) -> Number:
    """Return a divisor, or 1 in place of 0."""
    if isinstance(divisor, torch.Tensor):
        return torch.where(divisor == 0, 1, divisor)
    return divisor or 1


@hint_attributes(
    words.GRADS,
    changes="grads.map(fn) and grads.with_tensors(...) return another",
    getitem=words.GRADS_ARE_NO_DICT,
)
@attrs.frozen(kw_only=True, eq=False)
class Grads:
    """Gradients by parameter name, and the weight of all that was seen.

    They are kept as they were taken, of totals, and divided once: by `apply_grads`, or when
    somebody reads `tensors`. So they add exactly over micro-batches and ranks. A parameter
    that took no part is left out.

    Attributes:
        as_taken: one tensor a parameter, of its shape and dtype; of totals, or of the mean.
        tensors: the same, of the mean; in a transform's `reduce` of this rank's totals.
        weight: of all that was seen: samples, or what `af.Loss` says.
        buffers: the buffers (running statistics) that the forward passes wrote.
        reduced: whether they are of all ranks.
        metrics: values that transforms of `grads` report, by name.
        taken: how they were taken, which is the step's own.
    """

    as_taken: Mapping[str, torch.Tensor] = attrs.field(alias="tensors")
    buffers: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    reduced: bool = True
    metrics: Mapping[str, Number] = attrs.field(factory=dict)
    taken: GradInfo = attrs.field(repr=False)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """One tensor a parameter: of the mean, or of this rank's totals in `reduce`.

        Raises:
            GradsError: they are of totals, and were given away.
        """
        if self.taken.shows_totals or self.taken.is_held:
            return self.as_taken
        if not self.taken.lease.is_mean:
            self.taken.lease.check()
        return self.divided().as_taken

    @property
    def weight(self) -> Number:
        """The weight of all that was seen: samples, or what `af.Loss` says."""
        taken = self.taken
        if taken.num_averaged == 1:
            return taken.divisor
        return taken.divisor * taken.num_averaged

    def divided(self) -> Self:
        """Return them as gradients of the mean, divided in place.

        Those of a weight of 0 are zeros, and stay that.
        """
        lease = self.taken.lease
        if not lease.is_mean:
            divide_(self.as_taken.values(), self.taken.scale)
            lease.is_mean = True
        return self

    def multiplied(self) -> Self:
        """Return them as gradients of totals, multiplied in place, if they were divided."""
        if self.taken.lease.is_mean:
            tree.mul_(self.as_taken.values(), self.taken.scale)
            self.taken.lease.is_mean = False
        return self

    def give_away(self) -> None:
        """Let these gradients be used no more; they and their kin raise from now on."""
        self.taken.lease.end(GradsError, _GIVEN, update=self.taken.update)

    def check_fit(
        self,
        params: Mapping[str, torch.Tensor],
        dtypes: Collection[torch.dtype] = (),
        device: torch.device | None = None,
    ) -> None:
        """Raise unless each is a gradient of the parameter of its name.

        Args:
            params: the parameters.
            dtypes: which a gradient may have beside its parameter's.
            device: where a gradient may be beside where its parameter is.

        Raises:
            GradsError: one is not.
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
        """Return the record with `fn` of each gradient.

        Where `fn` gives copies, these are given away apart from the gradients that they were
        made of; where it gives one of those, or a view of it, together.
        """
        self.taken.lease.check()
        tensors = {n: split_as(fn(grad), grad) for n, grad in self.tensors.items()}
        if have_memory_in_common(tensors.values(), self.tensors.values()):
            return attrs.evolve(self, tensors=tensors)
        taken = attrs.evolve(self.taken, lease=Lease())
        taken.lease.is_mean = self.taken.lease.is_mean
        return attrs.evolve(self, tensors=tensors, taken=taken)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the record with other gradients of the mean in it, of the same weight.

        In `reduce`, where the weight is this rank's own, return `with_sums`.
        """
        had = self.tensors  # which DeepSpeed lets nobody see
        split = {
            n: split_as(each, had.get(n)) if is_shard(each) else each
            for n, each in tensors.items()
        }
        return attrs.evolve(self, tensors=split)

    def with_sums(self, tensors: Mapping[str, torch.Tensor], weight: Number) -> Self:
        """Return the record with the sums of all ranks in it, and the weight of all.

        It is what `reduce` of a transform returns. There `tensors` are the gradients of this
        rank's loss totals, and `weight` is their weight: add both up over the ranks. Each
        rank divides by the same weight then, and replicas agree to the last bit. Means go
        with a weight of 1.

        Args:
            tensors: by name, at least those that there are, in the parameters' dtypes.
            weight: a number, or a scalar of at least 32 bits; the same on all ranks.

        Raises:
            GradsError: a gradient of this rank is left out, or the weight is no such number.
        """
        missing = sorted(self.as_taken.keys() - tensors.keys())
        if missing:
            msg = (
                f"with_sums leaves out {', '.join(missing[:5])}, of which this rank has a"
                " gradient: these parameters would not be trained. Give zeros, if that is"
                " what is meant."
            )
            raise GradsError(msg)
        taken = attrs.evolve(
            self.taken,
            divisor=_whole_weight(weight),
            num_averaged=1,
            has_weight=not isinstance(weight, torch.Tensor) and weight != 0,
            lease=Lease(),
        )
        return attrs.evolve(self, tensors=tensors, taken=taken, reduced=True)

    def with_metrics(self, **values: Number) -> Self:
        """Return the record with values to report among the step's metrics."""
        return attrs.evolve(self, metrics={**self.metrics, **values})

    def with_skip(self, flag: torch.Tensor | int, *, agreed: bool = False) -> Self:
        """Return the record with a wish to skip the update, beside those there are.

        Call it on all ranks, or on none, for they ask one another: `with_skip(False)` is a
        rank that has no wish. If any rank has one, all skip: parameters, buffers, optimizer
        and step stay as they are, the batch counts as seen, and `metrics["skipped"]` is 1.

        Args:
            flag: True, or a scalar that is not 0, to skip.
            agreed: whether all ranks say the same; else they ask one another, which is a
                collective.
        """
        wish = Skip((torch.as_tensor(flag) != 0).to(torch.float32), agreed)
        before = self.taken.skip
        taken = attrs.evolve(self.taken, skip=wish if before is None else before | wish)
        return attrs.evolve(self, taken=taken)

    def __repr__(self) -> str:
        """Show what is known without reading a device."""
        kind = "reduced" if self.reduced else "of this rank"
        return (
            f"<Grads of {len(self.as_taken)} parameters, {kind}, "
            f"{self.taken.num_micro_batches} micro-batches, at update {self.taken.update}>"
        )


def _whole_weight(weight: Any) -> Number:
    """Return a weight by which gradients can be divided, exactly enough."""
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
        f"with_sums(weight={shown}): expected a number, or a scalar of at least 32 bits, for"
        " a count is more than 16 bits can hold:"
        " torch.as_tensor(grads.weight, dtype=torch.float64), summed over the ranks."
    )
    raise GradsError(msg)
