# SPDX-License-Identifier: Apache-2.0
"""Collectives in a loss: ranks may have different numbers of samples, or only a stand-in."""

from collections.abc import Sequence

import torch

from accelfn.base.advice import advise
from accelfn.base.valueless import readable
from accelfn.collectives.agreed import await_turn, check_world
from accelfn.collectives.packed import all_gather
from accelfn.errors import LossError
from accelfn.world import World


def uneven_counts(world: World, label: str) -> list[int] | None:
    """Return how many samples of a loss each rank has; None outside of one, or if all agree.

    All ranks know without a collective whether shares differ. Where no rank of this world has
    a sample, as in a part of a world, all stand-ins count alike: None.

    Cost: one all-gather of an integer, only where shares differ.
    """
    counts = _counts(world, label)
    if not counts or (None not in counts and len({*counts}) == 1):
        return None
    await_turn(f"samples of {label}", world)
    known = world.connection.activity.samples.known
    mine = torch.tensor([1 if known is None else known], device=readable(world.device))
    held = torch.cat(all_gather(mine, world, label=label)).tolist()
    return held if any(held) else None


def check_stand_ins(call: str, world: World) -> None:
    """Raise in a loss that does not ask which samples count, if a rank has a stand-in only.

    Raises:
        LossError: the values of stand-ins would count; all ranks raise it.
    """
    counts = _counts(world, call)
    without = [rank for rank, count in enumerate(counts) if count == 0]
    asks = not without or world.connection.activity.samples.is_weighed
    if not asks and len(without) < len(counts):
        msg = (
            f"{call}: rank {', '.join(map(str, without))} has no sample in this pass, and the"
            " stand-in that it computes with would count. Write def loss_fn(model, batch, *,"
            " sample_weight), and multiply by sample_weight, which is 0 for a stand-in."
        )
        raise LossError(msg)


def warn_of_parts(world: World) -> None:
    """Warn in a loss on one of several micro-batches, whose samples alone are gathered."""
    samples = world.connection.activity.samples
    if samples is not None and not samples.is_whole:
        advise(
            "af.gather(grad=True) ran in an update of several micro-batches: the loss couples"
            " only the samples of one micro-batch, so it depends on their number. Leave out"
            " af.accumulate, or use af.checkpoint_activations() to save memory."
        )


def _counts(world: World, label: str) -> Sequence[int | None]:
    """Return how many samples of a loss each share has; nothing outside of one."""
    check_world(label, world)
    activity = world.connection.activity
    if activity.samples is None or world.size == 1:
        return ()
    activity.has_coupled = True
    return activity.samples.counts()
