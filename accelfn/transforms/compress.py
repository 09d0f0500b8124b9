# SPDX-License-Identifier: Apache-2.0
"""Let gradients cross the ranks in fewer bytes."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import torch

from accelfn.base.arguments import is_integer, is_number
from accelfn.definition.transform import transform
from accelfn.engine.compression import Compression, LowRank, Narrow
from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState
from accelfn.world import World

Slot: TypeAlias = dict[str, Any]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWERSGD = "powersgd"
_DEFAULTS: Mapping[str, float] = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 1000,
    "min_compression_rate": 2.0,
}


def _is_method(_owner: object, _field: object, value: object) -> None:
    known = (*_DTYPES, _POWERSGD)
    if value not in known:
        msg = (
            f"af.compress({value!r}): unknown method; expected one of"
            f" {', '.join(map(repr, known))}."
        )
        raise ArgumentError(msg)


def _of_powersgd(least: float) -> Any:
    """Return an option of PowerSGD, a number of at least `least`."""

    def check(owner: Any, field: Any, value: Any) -> None:
        if value is None:
            return
        if owner.method != _POWERSGD:
            msg = (
                f"af.compress({owner.method!r}, {field.name}={value!r}): only 'powersgd'"
                " has this option. Leave it out."
            )
            raise ArgumentError(msg)
        whole = isinstance(_DEFAULTS[field.name], int)
        is_kind = is_integer if whole else is_number
        if not is_kind(value) or not value >= least:
            what = "an integer" if whole else "a number"
            msg = f"af.compress({field.name}={value!r}): expected {what} of at least {least}."
            raise ArgumentError(msg)

    return attrs.field(default=None, validator=check, kw_only=True)


@transform
class compress:
    """Let `wrap_ddp` send gradients in fewer bytes, by a communication hook of torch's DDP.

    "fp16" and "bf16" sum them in 16 bits; parameters and the optimizer keep their dtype.
    Gradients are divided by the update's weight first, or the next power of 2, so a total
    over many samples overflows no sooner than their mean; under a loss scale, as that of
    `autocast("fp16")`, they cross as it has scaled them. "powersgd" sends matrices as products
    of two thin ones; what that leaves out on a rank is added to the rank's next gradient.
    Its memory is in the slot: it is saved, and a skipped update leaves it. The weight of the
    losses itself is summed exactly. `af.sync_grads` sends gradients whole.

    Acts on: how `wrap_ddp` reduces; with "powersgd" also init, merge.

    Args:
        method: "fp16", "bf16" or "powersgd".
        matrix_approximation_rank: how many columns the thin matrices have; 1.
        start_powerSGD_iter: updates that are sent whole before; 1000.
        min_compression_rate: compress what becomes smaller by more than this factor; 2.
            Vectors are sent whole.

    Law:
        Ranks agree bitwise, and in a world of 1 nothing changes. In 16 bits the result is the
        plain one, up to rounding in these. With PowerSGD the sum of the gradients applied
        and of what is left out in the end is that of the true ones; at full rank nothing is.

    Cost:
        Half the bytes, and a pass over the gradients. PowerSGD: (n + m) r numbers for a
        matrix of n by m, two matrix products and two decompositions, memory of one more
        gradient; and it does not overlap with the backward pass. For each, one number more
        crosses the ranks before the backward pass.

    Raises:
        ArgumentError: an unknown method, or an option that it has not.
        CompositionError: nothing to compress, because `wrap_ddp` is not there; or PowerSGD and
            parameters that may be unused, whose rest would be lost.

    References:
        Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization".

    Example:
        >>> compress("powersgd", matrix_approximation_rank=2)
        af.compress('powersgd', matrix_approximation_rank=2)
    """

    needs: ClassVar[Mapping[str, str]] = {
        "buckets": "is about gradients that af.wrap_ddp() reduces, which the setup lacks. Put"
        " af.wrap_ddp() into the chain, or leave it out."
    }
    method: str = attrs.field(validator=_is_method)
    matrix_approximation_rank: int | None = _of_powersgd(1)
    start_powerSGD_iter: int | None = _of_powersgd(0)  # noqa: N815 - torch's name
    min_compression_rate: float | None = _of_powersgd(0)

    @property
    def tells(self) -> Mapping[str, Any]:
        """How buckets cross the ranks, and what of its slot is each rank's own."""
        return {
            "draws_nothing": True,
            "compression": self._compression,
            "by_rank": ("error",) if self.method == _POWERSGD else (),
        }

    @property
    def gives_up(self) -> Mapping[str, str]:
        """PowerSGD sends less than a gradient, and the rest later."""
        late = {
            "splits_alike": "what is left out of a gradient is added to a later one"
        }
        return late if self.method == _POWERSGD else {}

    @property
    def refuses(self) -> Mapping[str, str]:
        """What PowerSGD would lose."""
        if self.method != _POWERSGD:
            return {}
        return {
            "finds_unused": "keeps what is left out of a gradient for the next update, and"
            " would lose that of parameters that {other!r} allows to be unused. Leave out"
            " {told}.",
        }

    @property
    def without(self) -> tuple[str, ...]:
        """Sums in 16 bits have no memory."""
        return () if self.method == _POWERSGD else ("init", "merge")

    def _option(self, name: str) -> Any:
        given = getattr(self, name)
        return _DEFAULTS[name] if given is None else given

    def init(self, state: TrainState) -> Slot:
        """Begin with nothing left out."""
        del state
        return {"iter": 0, "error": {}, "q": {}}

    def merge(self, slots: Sequence[Slot], _: World) -> tuple[list[float], Slot]:
        """Give every rank the mean of what was left out, so the mean stays what it was."""
        first, count = slots[0], len(slots)
        errors = {
            name: torch.stack([slot["error"][name] for slot in slots]).sum(0) / count
            for name in first["error"]
        }
        return [1.0] * count, {**first, "error": errors}

    def _compression(self, state: TrainState) -> Compression:
        """Return what works on one engine's gradients."""
        name: str = cast("Any", self).name
        ranks = state.definition.copy
        if self.method != _POWERSGD:
            return Narrow(name, _DTYPES[self.method], ranks)
        return LowRank(
            name,
            state.name,
            ranks,
            rank=self._option("matrix_approximation_rank"),
            start=self._option("start_powerSGD_iter"),
            rate=self._option("min_compression_rate"),
        )
