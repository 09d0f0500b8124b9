# SPDX-License-Identifier: Apache-2.0
"""What trackers tell other people's packages: their files hold it, or their calls say it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import accelfn as af
from tests.waiting import HANGS

SCRIPT = Path(__file__).parent / "scripts/tracks.py"
SETUP = "af.chain(\n    af.shard_data(),\n    af.clip_grad_norm(1.0),\n)"
SHAPES = [["grey", 5, 4], ["seen", 5, 4]]
NAMES = ["grey", "seen"]
LOSS = [[1, "2.0"], [2, "nan"], [3, "1.0"]]
HOLDS = {
    # not the steps that were gone back on
    "tensorboard": {"loss": [*LOSS[:2], [4, "9.0"]], "images": SHAPES},
    "wandb": {"loss": [[1, "2"], [2, "nan"], [3, "1"]], "images": SHAPES, "exit": 1},
    "comet": {"loss": LOSS, "images": NAMES, "failed": True},
    "mlflow": {
        "loss": [*LOSS, [4, "0.5"]],  # it failed, and went on
        "images": NAMES,
        "status": ["FAILED", "FINISHED"],
    },
}


@pytest.mark.slow
def test_a_backend_holds_what_was_tracked(tmp_path):
    """Offline or local, its files have numbers by step, settings, images and the failure.

    Each runs in a process of its own, for some change the process they are imported into.
    """
    quiet = {"WANDB_SILENT": "true", "COMET_LOGGING_CONSOLE": "ERROR"}
    started = {}
    for name in HOLDS:
        (tmp_path / name).mkdir()
        started[name] = subprocess.Popen(
            [sys.executable, str(SCRIPT), name],
            cwd=tmp_path / name,
            env={**os.environ, "OMP_NUM_THREADS": "1", **quiet},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for name, process in started.items():
        out, errors = process.communicate(timeout=HANGS)
        assert process.returncode == 0, f"{name}: {out}{errors}"
        (line,) = [row for row in out.splitlines() if row.startswith("told: ")]
        told = json.loads(line.removeprefix("told: "))
        assert told == {"setup": SETUP, "lr": 0.1, **HOLDS[name]}, name


class Recording:
    """A package that notes what of it is called, by name, and with what."""

    def __init__(self, called, name=""):
        self._called, self._name = called, name

    def __getattr__(self, name):
        return Recording(self._called, name)

    def __call__(self, *args, **options):
        self._called.append((self._name, args, options))
        return self


FAR = {
    "wandb": ("init", ["wandb"]),
    "comet": ("start", ["comet_ml"]),
    "mlflow": ("create_run", ["mlflow", "mlflow.entities", "mlflow.tracking"]),
}


def opened(monkeypatch, backend, **options):
    """Return what a backend's package is told, by the names of its functions."""
    called = []
    for module in FAR[backend][1]:
        monkeypatch.setitem(sys.modules, module, Recording(called))
    tracker = getattr(af.track, backend)("digits", world=af.World.single(), **options)
    return tracker, called


def options_of(called, name):
    (found,) = [options for called_name, _, options in called if called_name == name]
    return found


def test_a_run_has_its_name_and_is_gone_on_with(monkeypatch):
    """Where other people's packages are told so, each in its words."""
    _, called = opened(monkeypatch, "wandb", name="first", run_id="abc", offline=True)
    init = options_of(called, "init")
    ours = ("project", "name", "id", "resume", "mode")
    expected = ["digits", "first", "abc", "allow", "offline"]
    assert [init[word] for word in ours] == expected
    _, called = opened(monkeypatch, "wandb")
    init = options_of(called, "init")
    assert [init[word] for word in ours] == ["digits", *[None] * 4]
    for run_id, mode in ((None, "create"), ("a" * 32, "get_or_create")):
        _, called = opened(monkeypatch, "comet", name="first", run_id=run_id)
        start = options_of(called, "start")
        assert (start["mode"], start["experiment_key"]) == (mode, run_id)
        assert start["online"]
        assert options_of(called, "ExperimentConfig").get("name") == "first"
    _, called = opened(monkeypatch, "mlflow", name="first")
    assert options_of(called, "create_run") == {"run_name": "first"}
    _, called = opened(monkeypatch, "mlflow", run_id="abc")
    assert [name for name, *_ in called if name == "create_run"] == []
    assert options_of(called, "update_run") == {"status": "RUNNING"}


def test_mlflow_is_given_no_more_than_it_takes_at_once(monkeypatch):
    """It refuses more than 100 parameters in a call; all numbers come, in several."""
    tracker, called = opened(monkeypatch, "mlflow")
    tracker({f"m{i}": float(i) for i in range(250)}, 1)
    tracker.hyperparameters({f"p{i}": i for i in range(250)})
    given = [options for name, _, options in called if name == "log_batch"]
    sizes = [(kind, len(each)) for told in given for kind, each in told.items()]
    of_each = [100, 100, 50]
    assert sizes == [(kind, n) for kind in ("metrics", "params") for n in of_each]
    names = [args[0] for name, args, _ in called if name in ("Metric", "Param")]
    assert names == [f"{kind}{i}" for kind in "mp" for i in range(250)]
