# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C comes at any instant of a loop, in its own thread, and is not swallowed."""

import gc
import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from tests.waiting import HANGS, wait_until

X = torch.arange(12.0).reshape(4, 3)


def create(setup):
    torch.manual_seed(0)
    return af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        setup=setup,
        world=af.World.single(device="cpu"),
    )


def loss_fn(net, batch):
    return (net(batch)[:, 0] * batch[:, 1]).mean()


SETUPS = {
    "plain": None,
    "parts": af.accumulate(num_micro_batches=2),
    "in backward": af.optimizer_in_backward(),
    "skipping": af.skip_nonfinite(),
}


@pytest.mark.slow
def test_ctrl_c_at_random_instants_loses_no_state():
    """B3: interrupts of real loops leave a state that is right, and goes on bitwise.

    `python -m tests.laws.interrupting 100` tries 600.
    """
    run = subprocess.run(
        [sys.executable, "-m", "tests.laws.interrupting", "10"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    assert run.returncode == 0, run.stderr
    for told in json.loads(run.stdout.splitlines()[-1]).values():
        assert told.pop("interrupts") > 0
        assert told == {"lost": 0, "wrong": 0, "salvaged": 0}


@af.transform
class Interrupts:
    """Presses Ctrl-C behind the optimizer, where it is held back."""

    def after_update(self, state, slot, update):
        os.kill(os.getpid(), signal.SIGINT)
        return state, slot


def test_no_thread_looks_at_frames_that_another_runs(monkeypatch):
    """CPython 3.11 clears a frame that is said to run still; who reads it reads freed memory."""
    monkeypatch.setattr(sys, "_current_frames", None)
    state, came, held = create(Interrupts()), [], []
    step, before = af.make_step(loss_fn), signal.getsignal(signal.SIGINT)

    def handler(number, frame):
        came.append(number)
        held.append(any("after_update" in each for each in callers(frame)))

    try:
        signal.signal(signal.SIGINT, handler)
        for number in range(1, 20):
            state, _ = step(state, X)
            wait_until(lambda number=number: len(came) == number)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(held)
    assert state.step == 19


def callers(frame):
    """Return the names of the functions that run."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


OTHERS = "torch/_dynamo", "hypothesis", "torch/utils/data"
"""Whose callbacks hear of what is let go of, or of processes, if another test has used them."""


@pytest.mark.parametrize("setup", SETUPS)
def test_no_python_runs_when_a_training_is_let_go_of(setup):
    """CPython swallows a Ctrl-C that it takes in a callback of its garbage collector."""
    batch = [X[:2], X[2:]] if setup == "parts" else X
    state = create(SETUPS[setup])
    step, kept = af.make_step(loss_fn), af.make_step(loss_fn)
    state, _ = step(state, batch)
    state, _ = kept(state, batch)
    gc.collect()
    ran = []

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and not any(name in file for name in OTHERS):
            ran.append(frame.f_code)

    sys.setprofile(note)
    del step  # as a notebook's cell does that is run again
    gc.collect()
    del state, kept
    gc.collect()
    sys.setprofile(None)
    assert not ran
