# SPDX-License-Identifier: Apache-2.0
"""Leave out updates whose gradients are not finite."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import attrs

from accelfn.base import lists
from accelfn.base.arguments import integer
from accelfn.collectives import gather_text
from accelfn.definition.transform import transform
from accelfn.errors import NonFiniteGradsError
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.state.update import Update

Slot: TypeAlias = dict[str, Any]


@transform
class skip_nonfinite:
    """Skip updates whose gradients are infinite or not a number, on all ranks alike.

    A skipped update leaves parameters, buffers, optimizer, `state.step` and the schedule
    as they are; its batch counts as seen. A loss that is not finite no longer raises.
    `metrics["skipped"]` is 1 for such an update, else 0.

    Acts on: init, grads, after_update.

    Args:
        max_consecutive: how many updates may be skipped in a row; the next one raises.

    Law:
        One element that is not finite, on one rank, skips exactly that update on every
        rank, and leaves all else bitwise as it was; without one, it changes nothing.

    Cost:
        One pass over the gradients, and the host waits for it, to learn whether to skip.
        Where gradients are not reduced, as under `local_sgd`, also one number crosses the ranks.

    Raises:
        NonFiniteGradsError: one more than `max_consecutive` in a row; parameters and the
            ranks whose loss was not finite are named, and the state is as it was.

    Example:
        >>> skip_nonfinite(max_consecutive=3)
        af.skip_nonfinite(max_consecutive=3)
    """

    tells: ClassVar[Mapping[str, Any]] = {
        "draws_nothing": True,
        "judges_finite": True,
        "sees_skips": True,
    }
    max_consecutive: int = attrs.field(
        default=10, validator=integer(0, "a number of updates"), kw_only=True
    )

    def init(self, state: TrainState) -> Slot:
        """Begin without a skip."""
        del state
        return {"consecutive": 0}

    def grads(self, grads: Grads, slot: Slot, update: Update) -> tuple[Grads, Slot]:
        """Look for what is not finite."""
        found = lists.non_finite(grads.tensors.values())
        return grads.with_skip(found, agreed=update.replicated), slot

    def after_update(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Count updates that are skipped in a row, and give up after too many."""
        if not update.skipped:
            return state, {"consecutive": 0} if slot["consecutive"] else slot
        count = slot["consecutive"] + 1
        if count > self.max_consecutive:
            raise NonFiniteGradsError(self._told(update, count))
        return state, {"consecutive": count}

    def _told(self, update: Update, count: int) -> str:
        """Return what is known; a collective, for all ranks come here."""
        grads = update.grads
        bad = [n for n, g in grads.tensors.items() if lists.non_finite([g])]
        own = f"{len(bad)} ({', '.join(bad[:5])})" if bad else "none"
        loss = "" if grads.taken.finite_loss else "; its loss is not finite"
        rows = gather_text(own + loss, update.world, label="skip_nonfinite")
        told = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))
        return (
            f"{count} updates in a row had gradients that are infinite or not a number, the"
            f" last at update {update.state.step}, which {self!r} does not skip any more."
            " Parameters with such gradients:\n"
            f"{told}\nThe state is as it was. Look at the batch, the loss and the learning"
            " rate."
        )
