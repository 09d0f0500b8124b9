# SPDX-License-Identifier: Apache-2.0
"""Train until asked to end, save then, and say who this is and what it did."""

import os
import sys
import time
from pathlib import Path

import accelfn as af

folder = Path(sys.argv[1])
with af.World.from_env(timeout=20) as world, af.stopping(world) as stop:
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    while not stop.requested():
        time.sleep(0.05)
    (folder / f"saved-{world.rank}").touch()
