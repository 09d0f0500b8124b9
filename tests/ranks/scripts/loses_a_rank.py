# SPDX-License-Identifier: Apache-2.0
"""Trains where ranks come and go: one kills itself, and another comes in at update 8."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch.distributed as dist

import accelfn as af
from tests.internals import meeting as regrouping_module
from tests.laws.elastic import elastic
from tests.ranks.programs_of_elastic import COMES_IN, DIES, checkpoints, training
from tests.waiting import wait_until


def killed(*_given: object, **_named: object) -> None:
    """End as a process does that is killed where torch was to join it."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_once(there: Path) -> None:
    """End so as soon as there is a file."""
    wait_until(there.exists)
    killed()


def main(setup: str, victim: int, folder: Path, then: str) -> None:
    """Train, and write what came of it; a newcomer may be killed as it waits, or not come."""
    is_second = os.environ["ACCELFN_ELASTIC"] == "1"
    again, awaited = folder / "again", folder / "awaited"
    if is_second and then in ("is late", "another dies as it opens"):
        again.touch()
        signal.pause()
    if is_second and then == "is killed as it waits":
        threading.Thread(target=killed_once, args=(awaited,), daemon=True).start()
    with af.World.from_env(timeout=60) as world:
        regrouping = world.connection.regrouping
        assert regrouping is not None
        is_new = regrouping.is_newcomer

        if then == "another dies as it opens" and world.rank == world.size - 1:
            regrouping_module.open_default_group = killed

        def seen(step: int, _ids: list[int]) -> None:
            if step + 1 == DIES and world.rank == victim and not is_new:
                os.kill(os.getpid(), signal.SIGKILL)

        save, restore = checkpoints(setup, folder / "saved")

        def averaged(state: af.TrainState) -> None:
            save(state)
            if state.step != COMES_IN or state.world.size != world.size - 1:
                return
            if then == "is killed as it waits":
                wait_until(regrouping.is_awaited)
                awaited.touch()
                wait_until(lambda: not regrouping.is_awaited())
            else:
                wait_until(
                    regrouping.is_awaited if then == "comes in" else again.exists
                )

        trained, told = elastic(
            *(world, training(setup)), seen=seen, averaged=averaged, restore=restore
        )
        plain = {path: tensor.tolist() for path, tensor in trained.items()}
        (folder / f"{os.getpid()}.json").write_text(json.dumps([plain, told]))
    assert not dist.is_initialized(), "a world that ranks made anew was left open"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
