# SPDX-License-Identifier: Apache-2.0
"""What ranks run whose world changes: real processes and simulated ones."""

from collections.abc import Callable
from pathlib import Path

import accelfn as af
from tests.internals import Restore
from tests.laws.elastic import Training

DIES, COMES_IN = 5, 8
"""The update at which a rank is gone, and the one after which another comes in."""
SETUPS = {
    "ddp": af.wrap_ddp(),
    "local sgd": af.local_sgd(sync_every=2),
    "diloco": af.diloco(sync_every=2, bits=8),
    "fsdp": af.wrap_fsdp(),
}


def training(setup: str) -> Training:
    """Return a training that averages every second update."""
    return Training(setup=SETUPS[setup], every=2, updates=12)


def checkpoints(setup: str, folder: Path) -> tuple[Callable[..., object], Restore]:
    """Return what saves a state, and what restores one; where each rank has all, neither does."""
    store = af.CheckpointStore(folder, async_=False)
    return (store.save if setup == "fsdp" else lambda _: None), store.restore
