# SPDX-License-Identifier: Apache-2.0
"""Whether an update is skipped: by all ranks alike, on the host or by the device itself."""

from collections.abc import Mapping
from typing import Any

import torch

from accelfn.collectives import all_reduce_
from accelfn.engine.engine import engine_of
from accelfn.state.grads import Grads, Skip
from accelfn.state.skips import Skips
from accelfn.state.state import TrainState
from accelfn.world import World


def decided(
    state: TrainState, grads: Grads, slots: Mapping[str, Any]
) -> tuple[bool, torch.Tensor | None]:
    """Return whether to skip the update, or a flag by which the device will know."""
    if grads.skip is None:
        return False, None
    flag = _agreed(grads.skip, state.definition.world)
    if _left_to_device(state, grads, slots):
        return False, flag
    return bool(flag), None


def _agreed(skip: Skip, world: World) -> torch.Tensor:
    """Return 1 if any rank wants to skip, else 0, without reading it."""
    if not skip.agreed and world.size > 1:
        all_reduce_([skip.flag], world, label="skip the update?")
    return (skip.flag != 0).to(torch.float32)


def _reads_at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _left_to_device(state: TrainState, grads: Grads, slots: Mapping[str, Any]) -> bool:
    """Whether the optimizer's kernel skips the update by itself, so that nobody waits.

    It can where the optimizer is all that an update changes.
    """
    setup = state.definition.setup
    owners = setup.having("after_skip")
    noted = {each.name for each in owners}
    return (
        not _reads_at_once(state.definition.world.device)
        and not grads.buffers
        and not setup.having("after_update")
        and all(getattr(each, "_skips_on_device", False) for each in owners)
        and all(slots[n] is s for n, s in state.slots.items() if n not in noted)
        and engine_of(state).skips
    )


def counts_after(
    state: TrainState, flag: torch.Tensor | None
) -> tuple[int | Skips, int]:
    """Return how many updates were taken and skipped, after one with this flag."""
    skips, tried = state.skips, state.num_tried + 1
    if skips is None and flag is None:
        return state.step + 1, state.num_skipped
    before = skips.count if skips is not None else state.num_skipped
    count = before if flag is None else before + flag.long()
    return Skips.sent(tried, torch.as_tensor(count)), 0
