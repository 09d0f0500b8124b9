# SPDX-License-Identifier: Apache-2.0
"""Each backend, in its offline or local mode, holds what it was told: its own files say so.

Each runs in a process of its own, for some change the process they are imported into.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANGS

pytestmark = pytest.mark.slow(together=True)  # what ran once
SCRIPT = Path(__file__).parent / "scripts/tracks.py"
BACKENDS = ("tensorboard", "wandb", "comet", "mlflow")
SETUP = "af.chain(\n    af.shard_data(),\n    af.clip_grad_norm(1.0),\n)"
SHAPES = [["grey", 5, 4], ["seen", 5, 4]]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return what the files of each backend hold; the backends run at once."""
    quiet = {"WANDB_SILENT": "true", "COMET_LOGGING_CONSOLE": "ERROR"}
    started = {
        name: subprocess.Popen(
            [sys.executable, str(SCRIPT), name],
            cwd=tmp_path_factory.mktemp(name),
            env={**os.environ, "OMP_NUM_THREADS": "1", **quiet},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in BACKENDS
    }
    said = {
        name: process.communicate(timeout=HANGS) for name, process in started.items()
    }
    found = {}
    for name, (out, errors) in said.items():
        assert started[name].returncode == 0, f"{name}: {out}{errors}"
        (line,) = [row for row in out.splitlines() if row.startswith("told: ")]
        found[name] = json.loads(line.removeprefix("told: "))
    return found


def test_tensorboard_reads_what_was_tracked(told):
    """Its event accumulator has the numbers, and not those of steps that were gone back on."""
    loss = [[1, "2.0"], [2, "nan"], [4, "9.0"]]
    assert told["tensorboard"] == {
        "loss": loss,
        "setup": SETUP,
        "lr": 0.1,
        "images": SHAPES,
    }


def test_wandb_holds_what_was_tracked(told):
    """The offline run's records are the numbers by step, and say that the run failed."""
    assert told["wandb"] == {
        "loss": [[1, "2"], [2, "nan"], [3, "1"]],
        "setup": SETUP,
        "lr": 0.1,
        "images": SHAPES,
        "exit": 1,
    }


def test_comet_holds_what_was_tracked(told):
    """The offline experiment's archive has the numbers by step, and says that it failed."""
    assert told["comet"] == {
        "loss": [[1, "2.0"], [2, "nan"], [3, "1.0"]],
        "setup": SETUP,
        "lr": 0.1,
        "images": ["grey", "seen"],
        "failed": True,
    }


def test_mlflow_holds_what_was_tracked(told):
    """Its client has the numbers of a run that failed, and of its going on."""
    assert told["mlflow"] == {
        "loss": [[1, "2.0"], [2, "nan"], [3, "1.0"], [4, "0.5"]],
        "setup": SETUP,
        "lr": 0.1,
        "images": ["grey", "seen"],
        "status": ["FAILED", "FINISHED"],
    }
