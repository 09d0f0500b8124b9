# SPDX-License-Identifier: Apache-2.0
"""Mixed precision and non-finite gradients: `autocast`, `skip_nonfinite`, `identity`."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, cast

import attrs
import torch

from accelfn.base import devices, tree
from accelfn.base.arguments import (
    integer,
    is_integer,
    is_number,
    option,
    option_of,
    satisfies,
    value_of,
)
from accelfn.base.draws import NOTHING
from accelfn.base.tree import computes_on
from accelfn.collectives.packed import all_reduce_, gather_text
from accelfn.definition.transform import transform
from accelfn.engine.modules import Predicate, check_installed, to_float8
from accelfn.engine.runner import LossFunction
from accelfn.errors import ModelError, NonFiniteGradsError
from accelfn.state.results import Grads
from accelfn.state.state import TrainState
from accelfn.state.update import LOOK_EVERY, Update

ScaleSlot: TypeAlias = dict[str, torch.Tensor]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_SMALLEST_SCALE = 2.0**-24


def _is_installed(_owner: object, _field: object, value: object) -> None:
    if value == "fp8":
        check_installed("af.autocast('fp8')")


def _between(
    low: float, high: float, usual: float, is_kind: Callable[[object], bool] = is_number
) -> Any:
    """Return an option of fp16: a number between two bounds."""
    is_valid = satisfies(
        lambda value: is_kind(value) and low < value < high,
        f"a number above {low:g} and below {high:g}",
    )
    return option_of("precision", "fp16", is_valid, usual)


_is_choice = satisfies(callable, "a function (name, layer) -> bool")


_is_precision: Any = satisfies(
    lambda value: value in tuple(_DTYPES),
    f"{', '.join(map(repr, _DTYPES))}. For full precision, leave out af.autocast",
)


@transform
class autocast:
    """Run the loss under torch's autocast, with matrix products in 16 bits.

    Parameters, gradients and the optimizer keep their dtype. Evaluation and prediction also run
    under autocast.

    With "fp8", linear layers multiply in float8, with torchao's scaling per tensor. Everything
    else is as with "bf16".

    In "fp16", gradients below 6e-8 become 0. Therefore losses are multiplied by a scale, and
    gradients are divided by it before other transforms see them. If any gradient on any rank is
    infinite or NaN, all ranks skip the update and lower the scale. After `growth_interval`
    updates without a skip, the scale grows. `metrics["skipped"]` is 1 for a skipped update,
    else 0. `metrics["loss_scale"]` is the scale of the mean loss: losses that are totals are
    first divided by a power of 2 near the last update's weight.

    Acts on: loss; with "fp16" also init, grads, after_update; with "fp8" module.

    Args:
        precision: "bf16", "fp16" or "fp8".
        init_scale: the first scale of fp16; by default 65536.
        growth_factor: the scale is multiplied by this to grow; 2.
        backoff_factor: the scale is multiplied by this after a skipped update; 0.5.
        growth_interval: the number of updates without a skip before the scale grows; 2000.
        layers: for fp8, a function `(name, layer) -> bool` that selects linear layers; by
        default all.

    Law:
        The dtypes of parameters and gradients do not change. If nothing overflows or
        underflows, and the scale is a power of 2, the scale changes no bit of a gradient. A
        skipped update leaves parameters, buffers, optimizer and step bitwise unchanged.

    Cost:
        A 16-bit copy of each weight during a pass. With fp16, one pass over the gradients. On
        an accelerator, a fused optimizer skips updates on the device; the host waits only for a
        schedule, which needs the number of updates that were not skipped. With another
        optimizer, or a transform that acts after updates, the host waits in every update.

    Raises:
        ArgumentError: the precision is unknown, or an option belongs to another precision; fp8
        is used without torchao (`pip install 'accelfn[fp8]'`) or, when the engine is built, on
        a GPU without float8.
        ModelError: fp16 with float16 parameters; fp8, when the engine is built, with a layer
        size that is not a multiple of 16.
        NonFiniteGradsError: at a step, the scale fell below its minimum, and gradients are
        still not finite.

    References:
        Micikevicius et al. 2018, "Mixed Precision Training"; Micikevicius et al. 2022, "FP8
        Formats for Deep Learning".

    Example:
        >>> autocast("fp16", init_scale=1024.0)
        af.autocast('fp16', init_scale=1024.0)
    """

    precision: Literal["bf16", "fp16", "fp8"] = attrs.field(
        validator=[_is_precision, _is_installed]
    )
    init_scale: float | None = _between(0, 2.0**100, 2.0**16)
    growth_factor: float | None = _between(1, 2.0**20, 2.0)
    backoff_factor: float | None = _between(0, 1, 0.5)
    growth_interval: int | None = _between(0, 2**31, 2000, is_integer)
    layers: Predicate | None = option_of("precision", "fp8", _is_choice)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell other transforms the compute dtype, and how updates are skipped."""
        scales = self.precision == "fp16"
        return {
            "computes_in": _DTYPES[self.precision],
            "draws_nothing": True,
            "eight_bits": self.precision == "fp8",
            "judges_finite": scales,
            "loss_scale": self._loss_scale if scales else None,
            "sees_skips": scales,
            "skips_on_device": scales,
        }

    @property
    def without(self) -> tuple[str, ...]:
        """Leave out the methods that only other precisions need."""
        scaling = ("init", "grads", "after_update")
        without = () if self.precision == "fp16" else scaling
        return without if self.precision == "fp8" else (*without, "module")

    def loss(
        self, loss_fn: LossFunction, slot: ScaleSlot | None, update: Update
    ) -> tuple[LossFunction, ScaleSlot | None]:
        """Run the loss function under autocast, on the model's device."""
        dtype = _DTYPES[self.precision]

        def autocast_loss(model: torch.nn.Module, batch: Any, *extras: Any) -> Any:
            param = next(model.parameters())
            is_plain = type(param) is torch.nn.Parameter
            kind = param.device.type if is_plain else computes_on(param)
            # torch caches cast weights until the outermost autocast region ends. If a caller's
            # region contains many updates, later updates would use old weights
            torch.clear_autocast_cache()
            # a model that is used in an evaluation is not converted to float8 yet
            if self.precision == "fp8":
                to_float8(model, self.layers, repr(self))
            try:
                # meta tensors have no autocast
                with torch.autocast(kind, dtype) if kind != "meta" else NOTHING:
                    return loss_fn(model, batch, *extras)
            finally:
                torch.clear_autocast_cache()

        vars(autocast_loss)["__wrapped__"] = loss_fn  # for its name in error messages
        return autocast_loss, slot

    def module(self, module: torch.nn.Module, state: TrainState) -> torch.nn.Module:
        """Convert the linear layers of the engine's module to float8 products."""
        del state
        to_float8(module, self.layers, repr(self))
        return module

    def init(self, state: TrainState) -> ScaleSlot:
        """Create a slot with the initial scale."""
        half = [n for n, p in state.params.items() if p.dtype is torch.float16]
        if half:
            msg = (
                f"{self!r}: parameters have the dtype float16"
                f" ({', '.join(half[:5])}), and rounding would discard small updates. Keep"
                " parameters in float32: call model.float() before TrainState.create."
            )
            raise ModelError(msg)

        def number(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(value, dtype=dtype, device=state.world.device)

        return {
            "scale": number(value_of(self, "init_scale"), torch.float32),
            "good": number(0, torch.int32),
            "unit": _power_of_2(number(_rows(state), torch.float32)),
        }

    def _loss_scale(self, state: TrainState) -> torch.Tensor:
        """Return the scale of losses that are totals."""
        slot = state.slots[cast("Any", self).name]
        return slot["scale"] / slot["unit"]

    def grads(
        self, grads: Grads, slot: ScaleSlot, update: Update
    ) -> tuple[Grads, ScaleSlot]:
        """Check whether the gradients of all ranks are finite, and adjust the scale."""
        overflow = tree.non_finite(grads.as_taken.values()).to(slot["scale"].device)
        if not update.replicated:
            all_reduce_([overflow], update.world, label="autocast: overflow?")
        scale, good = slot["scale"].clone(), slot["good"].clone()
        names = ("growth_factor", "backoff_factor", "growth_interval")
        rule = [value_of(self, name) for name in names]
        torch._amp_update_scale_(scale, good, overflow, *rule)  # pyright: ignore[reportPrivateUsage]
        weight = grads.weight
        if not isinstance(weight, torch.Tensor):
            # `full` does not wait for the device, but a copy from the host does
            weight = torch.full((), weight, dtype=torch.float32, device=overflow.device)
        unit = torch.where(weight > 0, _power_of_2(weight.float()), slot["unit"])
        if not update.num_tried % LOOK_EVERY:
            self._check_scale(update, slot)
        result = grads.with_metrics(loss_scale=slot["scale"])
        result = result.with_skip(overflow, agreed=True)
        return result, {"scale": scale, "good": good, "unit": unit}

    def after_update(
        self, state: TrainState, slot: ScaleSlot, update: Update
    ) -> tuple[TrainState, ScaleSlot]:
        """Keep the adjusted scale, even after a skipped update."""
        if update.skipped and slot["scale"].is_cpu:
            self._check_scale(update, slot)
        return state, slot

    def _check_scale(self, update: Update, slot: ScaleSlot) -> None:
        if float(slot["scale"]) < _SMALLEST_SCALE:
            msg = (
                f"Update {update.state.step}: the loss scale of {self!r} fell to"
                f" {float(slot['scale']):g}, but gradients are still infinite or NaN, so fp16"
                " is not the cause. Check the loss, the data and the learning rate."
            )
            raise NonFiniteGradsError(msg)


def _rows(state: TrainState) -> float:
    """Estimate the number of samples per update, until the first weight is known."""
    data = state.data
    if data is None:
        return 1.0
    if isinstance(data.global_batch_size, int):
        return data.global_batch_size
    return max(1.0, len(data) / (data.num_updates_of(0, seed=state.seed) or 1))


def _power_of_2(number: torch.Tensor) -> torch.Tensor:
    """Return the largest power of 2 that is at most `number`, which is above 0."""
    exponent = torch.frexp(number).exponent.to(number.dtype)  # in the number's dtype
    return torch.ldexp(torch.ones_like(number), exponent - 1)


@contextlib.contextmanager
def full_precision(*values: Any) -> Generator[Any]:
    """Run a part of a loss without autocast.

    Args:
        values: trees of tensors that the part uses; 16-bit tensors are cast to float32.

    Yields:
        The cast values: None, the single value, or a tuple of all values.

    Example:
        >>> import accelfn as af
        >>> def loss_fn(model, batch):
        ...     inputs, targets = batch
        ...     with af.full_precision(model(inputs)) as outputs:
        ...         return (outputs.exp().sum(-1).log() - targets).square().mean()
    """
    wide = tuple(tree.tree_map(_widen, value) for value in values)
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", devices.kind()}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield wide[0] if len(wide) == 1 else wide or None


def _widen(leaf: Any) -> Any:
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return tree.wide(leaf) if is_float else leaf


# `skip_nonfinite`: skip updates with gradients that are not finite.


Slot: TypeAlias = dict[str, Any]


@transform
class skip_nonfinite:
    """Skip updates with infinite or NaN gradients, on all ranks together.

    A skipped update does not change parameters, buffers, optimizer, `state.step` or the
    schedule, but its batch counts as seen. A loss that is infinite or NaN no longer raises an
    error. `metrics["skipped"]` is 1 for a skipped update, else 0. Under `wrap_deepspeed`,
    DeepSpeed checks the gradients.

    Acts on: init, grads, after_update.

    Args:
        max_consecutive: the number of updates in a row that may be skipped; the next skip
        raises an error.

    Law:
        If one element of a gradient is not finite on one rank, every rank skips exactly that
        update, and everything else stays bitwise unchanged. Otherwise nothing changes.

    Cost:
        One pass over the gradients; the host waits for the result. On an accelerator, a fused
        optimizer skips on the device, and the number of skips stays there, so the host does not
        wait, unless a transform acts after updates. If gradients are not reduced, as under
        `local_sgd`, one number is all-reduced.

    Raises:
        NonFiniteGradsError: there were more than `max_consecutive` skips in a row. The error
        names the parameters, and the ranks with a loss that was not finite; the state is
        unchanged. If the number of skips is on an accelerator, it is checked every 100 updates.

    Example:
        >>> skip_nonfinite(max_consecutive=3)
        af.skip_nonfinite(max_consecutive=3)
    """

    tells: ClassVar[Mapping[str, Any]] = {
        "draws_nothing": True,
        "judges_finite": True,
        "sees_skips": True,
        "skips_alone": True,
        "skips_on_device": True,
    }
    max_consecutive: int = option(10, integer(0, "a number of updates"))

    def init(self, state: TrainState) -> Slot:
        """Create a slot without skipped updates."""
        zero = torch.zeros((), dtype=torch.int32, device=state.world.device)
        return {"consecutive": zero}

    def grads(self, grads: Grads, slot: Slot, update: Update) -> tuple[Grads, Slot]:
        """Check whether all gradients are finite, and ask to skip the update otherwise."""
        if not update.num_tried % LOOK_EVERY:
            self._check(int(slot["consecutive"]), grads, update)
        overflow = tree.non_finite(grads.as_taken.values())
        return grads.with_skip(overflow, agreed=update.replicated), slot

    def after_update(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Count the skips in a row, and raise if there are too many."""
        count, flag = slot["consecutive"], update.grads.metrics["skipped"]
        if isinstance(flag, torch.Tensor):
            # the host does not read the count here; a count above the limit stays above it
            more = torch.where(flag != 0, count + 1, 0)
            streak = torch.where(count > self.max_consecutive, count, more)
            return state, {"consecutive": streak.to(count.dtype)}
        if not update.skipped:
            return state, {"consecutive": torch.zeros_like(count)} if count else slot
        self._check(int(count) + 1, update.grads, update)
        return state, {"consecutive": count + 1}

    def _check(self, count: int, grads: Grads, update: Update) -> None:
        """Raise after too many skips, with details of all ranks; a collective."""
        if count <= self.max_consecutive:
            return
        if grads.taken.owned_by_engine:
            summary = "unknown, because DeepSpeed holds the gradients"
        else:
            bad = [n for n, g in grads.as_taken.items() if tree.non_finite([g])]
            summary = f"{len(bad)} ({', '.join(bad[:5])})" if bad else "none"
        loss = "" if grads.taken.finite_loss else "; its loss is not finite"
        rows = gather_text(summary + loss, update.world, label="skip_nonfinite")
        listing = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))
        msg = (
            f"{count} updates in a row had infinite or NaN gradients, the last one at update"
            f" {update.state.step}, and {self!r} does not allow more. Parameters with such"
            f" gradients:\n{listing}\nThe state was not changed. Check the batch, the loss and"
            " the learning rate."
        )
        raise NonFiniteGradsError(msg)


# `identity`: change nothing.


@transform
class identity:
    """Change nothing. Laws compare other transforms with it.

    Acts on: nothing.

    Law:
        `chain(identity(), t)` and `chain(t)` make bitwise equal steps.

    Example:
        >>> identity()
        af.identity()
    """
