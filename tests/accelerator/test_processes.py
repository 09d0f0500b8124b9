# SPDX-License-Identifier: Apache-2.0
"""A process that joins others by the device's own backend: NCCL, of one device."""

import importlib.util
from typing import Any

import pytest

import accelfn as af
from tests.accelerator.tested_device import near
from tests.ranks import programs_of_devices as programs

NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Return what one rank of NCCL trains."""
    (found,) = af.launch(1, programs.on_the_device, device="cuda")
    return found


@pytest.mark.parametrize("name", [*programs.SETUPS][2:])
def test_one_rank_of_nccl_trains_what_a_plain_state_does(trained, name):
    """Parameters, the loss and an evaluation, but for rounding."""
    assert "nccl" in trained["backends"]
    plain = programs.OF_MICRO_BATCHES[0]
    base = trained[plain if name in programs.OF_MICRO_BATCHES else "plain"]
    found = trained[name]
    if name in programs.OUTER:
        assert found["loss"] < 2 * base["loss"]
    elif name in programs.COARSE:
        assert abs(found["loss"] - base["loss"]) < 0.05 * base["loss"]
    else:
        assert near(base, found, within=1e-4)


def test_a_run_goes_on_from_an_asynchronous_save_bitwise():
    """Under each setup: kernels of one device, on the same batches, round alike."""
    (found,) = af.launch(1, programs.saved_and_gone_on, device="cuda")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.skipif(NO_DEEPSPEED, reason="DeepSpeed is missing")
def test_one_rank_of_deepspeed_trains_what_a_plain_state_does(monkeypatch):
    """At each stage of ZeRO."""
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    (found,) = af.launch(1, programs.of_zero, device="cuda")
    for name in programs.ZERO.keys() - {"plain"}:
        assert near(found["plain"], found[name], within=1e-4), name


def test_a_batch_size_is_found_in_the_memory_that_there_is():
    """What does not fit is given up, and its memory is there for the next try."""
    ((found, tries),) = af.launch(1, programs.searched, 0.02, device="cuda")
    assert tries > 1
    assert found * 256 * 256 * 4 * 2 < 0.02 * 200e9
