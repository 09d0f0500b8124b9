# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C comes between any two lines, and the next step is what it would have been."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import accelfn as af
from tests.internals import engine
from tests.waiting import HANGS, wait_until

PACKAGE = str(Path(engine.__file__).parents[1])
X = torch.arange(12.0).reshape(4, 3)


class Interrupting:
    """Raises at the line of accelfn that has a number."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        sys.settrace(self.calls)

    def __exit__(self, *_):
        sys.settrace(None)

    def calls(self, frame, event, _):
        del event
        return self.lines if frame.f_code.co_filename.startswith(PACKAGE) else None

    def lines(self, _frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.lines


def wait_for_what_was_held():
    """Let an interrupt come that the step held back to its end."""
    while any(each.name == "accelfn Ctrl-C" for each in threading.enumerate()):
        time.sleep(1e-3)


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


@pytest.mark.parametrize("setup", SETUPS)
def test_a_step_that_was_interrupted_can_be_taken_again(setup):
    """Or the state after it is salvaged, or it says that it is lost."""
    step = af.make_step(loss_fn)
    batch = [X[:2], X[2:]] if setup == "parts" else X
    first, _ = step(create(SETUPS[setup]), batch)
    expected, _ = step(first.copy(), batch)
    again, found, at = 0, 0, 0
    while True:
        state = first.copy()
        assert state.params  # a step after a look at them is longer, so all are
        try:
            with Interrupting(at):
                step(state, batch)
            wait_for_what_was_held()
            break
        except KeyboardInterrupt:
            at += 1
            # a block that is left just before its end is, in Python, not left at all
            torch.set_grad_enabled(mode=True)
        try:
            if state.lease.is_over:
                after, found = af.salvage(state), found + 1
            else:
                (after, _), again = step(state, batch), again + 1
        except af.errors.StateDonatedError:
            continue
        for name, param in expected.params.items():
            assert torch.equal(after.params[name], param), at
        for name, buffer in expected.buffers.items():
            assert torch.equal(after.buffers[name], buffer), at
    assert again > 100
    assert found > 5


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
