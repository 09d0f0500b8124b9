# SPDX-License-Identifier: Apache-2.0
"""Each example of Accelerate's `examples/by_feature` and its counterpart have the same losses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import accelfn as af
from accelfn.testing import simulate
from tests.compare.features import by_accelfn
from tests.processes import run_ranks
from tests.waiting import HANGS

pytestmark = pytest.mark.slow(together=True)  # what ran once

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/accelerate-features.md"
MODULE = "tests.compare.features.by_accelerate"
EXACT = {"rel": 1e-12, "abs": 1e-12}
"""Float64, of which sums are taken in another order on several ranks."""
ON_ONE = [
    *("gradient_accumulation", "gradient_accumulation_for_autoregressive_models"),
    *("automatic_gradient_accumulation", "memory", "checkpointing", "profiler"),
    *("cross_validation", "schedule_free", "tracking"),
]
ON_TWO = [
    *("gradient_accumulation", "gradient_accumulation_for_autoregressive_models"),
    *("early_stopping", "local_sgd", "multi_process_metrics", "ddp_comm_hook"),
    "fsdp_with_peak_mem_tracking",
]


def by_accelerate(folder: Path, size: int) -> dict[str, list[float]]:
    """Return the losses of Accelerate's loops on so many processes."""
    launch = ["-m", "accelfn", "launch", "--nproc", str(size)] if size > 1 else []
    file = folder / f"{size}.json"
    done = subprocess.run(
        [sys.executable, *launch, "-m", MODULE, str(file)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return what Accelerate's loops see on one process."""
    return by_accelerate(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return what Accelerate's loops see on two processes."""
    return by_accelerate(tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("feature", ON_ONE)
def test_on_one_process(one, feature):
    """The losses of all updates are Accelerate's, and whatever else the example prints."""
    world = af.World.single(device="cpu")
    found = getattr(by_accelfn, feature)(world)
    assert found == pytest.approx(one[feature], **EXACT)


@pytest.mark.parametrize("feature", ON_TWO)
def test_on_two_processes(two, feature):
    """So they are on two ranks, each of which sees half of every update."""
    for found in simulate(2, getattr(by_accelfn, feature)):
        assert found == pytest.approx(two[feature], **EXACT)


def test_a_hook_that_compresses_does_something(two):
    """Gradients in 16 bits, and averages every second update, are others than those of all."""
    plain = two["fsdp_with_peak_mem_tracking"]
    for feature in ("ddp_comm_hook", "local_sgd"):
        assert two[feature] != pytest.approx(plain, rel=1e-7)
        assert two[feature] == pytest.approx(plain, rel=5e-2)


def test_a_short_window(one):
    """Where an epoch ends in half an update, Accelerate's rate there is half of what was set."""
    world, expected = af.World.single(device="cpu"), one["short_window"]
    halved = by_accelfn.short_window(world, as_accelerate=True)
    right = by_accelfn.short_window(world, as_accelerate=False)
    assert halved == pytest.approx(expected, **EXACT)
    assert right[:5] == pytest.approx(expected[:5], **EXACT)
    assert right[5:] != pytest.approx(expected[5:], rel=1e-3)


def test_layers_of_megatron(one):
    """Layers that two ranks split train what Accelerate trains with torch's own."""
    feature = "megatron_lm_gpt_pretraining"
    run = getattr(by_accelfn, feature)
    for found in simulate(2, run, axes={"tp": 2}):
        assert found == pytest.approx(one[feature], **EXACT)


@pytest.mark.ranks(2)
def test_deepspeed(two):
    """ZeRO on two processes trains what Accelerate's does that is given halves by hand."""
    feature = "deepspeed_with_config_support"
    for found in run_ranks(2, getattr(by_accelfn, feature)):
        assert found == pytest.approx(two[feature], rel=1e-5)


def test_the_table_names_each_example_and_what_was_found(one, two):
    """A row for each, with a counterpart and what the comparison of losses found."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## Accelerate's examples by feature")[2].partition("\n## ")[
        0
    ]
    rows = re.findall(r"^\| (`.*?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    compared = {*one, *two} - {"short_window"}
    assert sorted(named) == sorted(compared)
