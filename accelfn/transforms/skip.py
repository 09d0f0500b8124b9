# SPDX-License-Identifier: Apache-2.0
"""Leave out updates whose gradients are not finite."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import attrs
import torch

from accelfn.base import lists
from accelfn.base.arguments import integer
from accelfn.collectives import gather_text
from accelfn.definition.transform import transform
from accelfn.errors import NonFiniteGradsError
from accelfn.state.grads import Grads
from accelfn.state.skips import LOOK_EVERY
from accelfn.state.state import TrainState
from accelfn.state.update import Update

Slot: TypeAlias = dict[str, Any]


@transform
class skip_nonfinite:
    """Skip updates whose gradients are infinite or not a number, on all ranks alike.

    A skipped update leaves parameters, buffers, optimizer, `state.step` and the schedule
    as they are; its batch counts as seen. A loss that is not finite no longer raises.
    `metrics["skipped"]` is 1 for such an update, else 0. Beside `wrap_deepspeed` it is DeepSpeed
    that finds them.

    Acts on: init, grads, after_update.

    Args:
        max_consecutive: how many updates may be skipped in a row; the next one raises.

    Law:
        One element that is not finite, on one rank, skips exactly that update on every
        rank, and leaves all else bitwise as it was; without one, it changes nothing.

    Cost:
        One pass over the gradients, and the host waits for it, to learn whether to skip. On an
        accelerator a fused optimizer skips by itself and the count stays there: nobody waits,
        unless a transform acts after updates. Where gradients are not reduced, as under
        `local_sgd`, also one number crosses the ranks.

    Raises:
        NonFiniteGradsError: one more than `max_consecutive` in a row; parameters and the
            ranks whose loss was not finite are named, and the state is as it was. Where the
            count stays on an accelerator, it is looked at every 100 updates.

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
    max_consecutive: int = attrs.field(
        default=10, validator=integer(0, "a number of updates"), kw_only=True
    )

    def init(self, state: TrainState) -> Slot:
        """Begin without a skip."""
        return {"consecutive": _none(state.world.device)}

    def grads(self, grads: Grads, slot: Slot, update: Update) -> tuple[Grads, Slot]:
        """Look for what is not finite."""
        if not update.num_tried % LOOK_EVERY:
            self._check(int(slot["consecutive"]), grads, update)
        found = lists.non_finite(grads.as_taken.values())
        return grads.with_skip(found, agreed=update.replicated), slot

    def after_update(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Count updates that are skipped in a row, and give up after too many."""
        count, flag = slot["consecutive"], update.grads.metrics["skipped"]
        if isinstance(
            flag, torch.Tensor
        ):  # which nobody has read; too many stay too many
            more = torch.where(flag != 0, count + 1, 0)
            kept = torch.where(count > self.max_consecutive, count, more)
            return state, {"consecutive": kept.to(count.dtype)}
        if not update.skipped:
            return state, {"consecutive": _none(count.device)} if count else slot
        self._check(int(count) + 1, update.grads, update)
        return state, {"consecutive": count + 1}

    def _check(self, count: int, grads: Grads, update: Update) -> None:
        """Give up, with what is known; a collective, for all ranks come here."""
        if count <= self.max_consecutive:
            return
        if grads.taken.is_held:
            own = "not told by DeepSpeed, which holds them"
        else:
            bad = [n for n, g in grads.as_taken.items() if lists.non_finite([g])]
            own = f"{len(bad)} ({', '.join(bad[:5])})" if bad else "none"
        loss = "" if grads.taken.finite_loss else "; its loss is not finite"
        rows = gather_text(own + loss, update.world, label="skip_nonfinite")
        told = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))
        msg = (
            f"{count} updates in a row had gradients that are infinite or not a number, the"
            f" last at update {update.state.step}, which {self!r} does not skip any more."
            " Parameters with such gradients:\n"
            f"{told}\nThe state is as it was. Look at the batch, the loss and the learning"
            " rate."
        )
        raise NonFiniteGradsError(msg)


def _none(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int32, device=device)
