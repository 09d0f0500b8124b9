# SPDX-License-Identifier: Apache-2.0
"""Rank 1 hangs in a block of `af.stopping`, and rank 0 waits for it, for three seconds."""

import sys
import time

import accelfn as af

with af.World.from_env(device="cpu", timeout=60) as world, af.stopping(world) as stop:
    world.connection.set_timeout(3)  # from here on, once all have met
    stop.requested()
    if world.rank == 1:
        time.sleep(600)
    sys.stdout.write("waits\n")
    sys.stdout.flush()
    stop.requested()
