# SPDX-License-Identifier: Apache-2.0
"""Whether an update is skipped: by all ranks alike, on the host or by the device itself."""

import attrs
import torch

from accelfn.collectives import all_reduce_
from accelfn.definition.facts import facts_of
from accelfn.engine.engine import Engine
from accelfn.state.grads import Skip
from accelfn.state.update import Update
from accelfn.world import World


def decided(
    update: Update, wish: Skip, engine: Engine
) -> tuple[Update, torch.Tensor | None]:
    """Return the update, skipped or not, or a flag by which the device will know."""
    grads, flag = update.grads, _agreed(wish, update.world)
    if _left_to_device(update, engine):
        return update.with_grads(grads.with_metrics(skipped=flag)), flag
    skip = bool(flag)
    noted = update.with_grads(grads.with_metrics(skipped=float(skip)))
    return attrs.evolve(noted, skipped=skip), None


def _agreed(skip: Skip, world: World) -> torch.Tensor:
    """Return 1 if any rank wants to skip, else 0, without reading it."""
    if not skip.agreed:
        all_reduce_([skip.flag], world, label="skip the update?")
    return (skip.flag != 0).to(torch.float32)


def _reads_at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _left_to_device(update: Update, engine: Engine) -> bool:
    """Whether the device skips the update by itself, so that nobody waits.

    It can where an update changes nothing beside the optimizer's state and buffers.
    """
    if _reads_at_once(update.world.device) or not engine.can_skip(update.grads):
        return False
    if "offloads" in update.state.setup.facts:  # its optimizer runs on the host
        return False
    told = {o.name: facts_of(o) for o in update.state.setup.owners["after_update"]}
    noted = {name for name, facts in told.items() if "sees_skips" in facts}
    kept = update.state.slots.items()
    return all("skips_on_device" in facts for facts in told.values()) and all(
        update.slots[name] is slot for name, slot in kept if name not in noted
    )
