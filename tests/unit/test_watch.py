# SPDX-License-Identifier: Apache-2.0
"""What a launcher sees of its ranks: who failed and when, who goes on, who was stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.internals import Watch, exit_status, script
from tests.waiting import HANGS, wait_until

FAILS, FINISHES, GOES_ON = ["false"], ["true"], ["sleep", "60"]


@contextmanager
def watched(*commands: list[str]) -> Iterator[tuple[Watch, list[subprocess.Popen]]]:
    """Watch processes, which end with the block."""
    ran = [subprocess.Popen(command) for command in commands]
    files = {local: f"no-file-of-{local}" for local in range(len(ran))}
    try:
        yield Watch({local: each.pid for local, each in enumerate(ran)}, files), ran
    finally:
        for each in ran:
            each.kill()
            each.wait(HANGS)


def has_ended(watching: Watch, local: int) -> bool:
    """Whether a process has, be it well or not."""
    return script.returncode(watching.pids[local]) is not None


def test_ranks_may_follow_one_that_failed_for_a_while(monkeypatch):
    """Then the others may be ended; until one has failed nobody is to be."""
    monkeypatch.setattr(script, "_GRACE_SECONDS", 0.3)
    with watched(FAILS, FINISHES, GOES_ON) as (watching, _):
        for local in (0, 1):
            wait_until(partial(has_ended, watching, local))
        assert not watching.may_end()
        first = dict(watching.failed_at)
        assert list(first) == [0]
        for _ in range(40):
            time.sleep(0.02)
            may_end = watching.may_end()
        assert may_end
        assert watching.failed_at == first
    with watched(FINISHES, GOES_ON) as (watching, _):
        wait_until(partial(has_ended, watching, 0))
        assert not watching.may_end()
        assert watching.failed_at == {}
    with watched(FINISHES, FINISHES) as (watching, _):
        for local in (0, 1):
            wait_until(partial(has_ended, watching, local))
        assert watching.may_end()  # that is, torch's agent looks for itself


def test_a_rank_that_was_stopped_is_sent_on_to_its_end(monkeypatch):
    """It would wait for ever with the signal that is to end it."""
    monkeypatch.setattr(script, "_ANSWER_SECONDS", 0.1)
    with watched(FAILS, GOES_ON) as (watching, (_, stopped)):
        stopped.send_signal(signal.SIGSTOP)
        wait_until(partial(has_ended, watching, 0))
        wait_until(lambda: script._is_stopped(stopped.pid))
        watching.may_end()
        watching.question()
        assert watching.stopped == {1}
        with suppress(subprocess.TimeoutExpired):
            stopped.wait(2)
        assert stopped.returncode == -signal.SIGTERM


def test_a_question_kills_nobody(tmp_path):
    """Who has not begun to listen is not asked; who listens no more, as Python ends, lives."""
    asks = (
        "import faulthandler, signal, sys; import worker;"
        "worker.answer_where(); faulthandler.unregister(worker.ASKS_WHERE);"
        "print('heard', flush=True); sys.stdin.read()"
    )
    files = {local: f"{tmp_path}/{local}" for local in range(3)}
    env = {
        **os.environ,
        "TORCHELASTIC_ERROR_FILE": files[2],
        "PYTHONPATH": str(Path(script.__file__).parent),
    }
    listens_no_more = subprocess.Popen(
        [sys.executable, "-c", asks],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with watched(FAILS, GOES_ON) as (_, ran):
        ran.append(listens_no_more)
        assert listens_no_more.stdout is not None
        assert listens_no_more.stdout.readline() == b"heard\n"
        watching = Watch({local: each.pid for local, each in enumerate(ran)}, files)
        wait_until(partial(has_ended, watching, 0))
        watching.may_end()
        watching.question()
        assert watching.failed_at.keys() == {0}
        assert ran[1].poll() is None
        _, _ = listens_no_more.communicate(timeout=HANGS)
    assert listens_no_more.returncode == 0


def test_a_stack_begins_in_the_users_script(tmp_path):
    """What leads to the script is not shown, and half a stack is none."""
    lead = f'  File "{script.LEADS[0]}", line 3 in main'
    mine = '  File "train.py", line 7 in step'
    last = '  File "train.py", line 9 in <module>'
    text = f"Stack (most recent call first):\n{mine}\n{last}\n{lead}\n"
    assert script._users(text) == f"{mine}\n{last}"
    file = tmp_path / "stack"
    for end, is_whole in ((" in <module>\n", True), ("  ...\n", True), ("tra", False)):
        file.write_text(f"{mine}\n{end}")
        assert script._is_whole(script._read_text(file)) == is_whole


@pytest.mark.parametrize(
    ("code", "status"), [(7, 7), (256, 1), (-9, 247), (512 + 3, 3), ("out of luck", 1)]
)
def test_a_rank_that_leaves_with_a_code_has_failed(code, status):
    """The system keeps eight bits of a code; what would be left of none is 1."""
    assert exit_status(SystemExit(code)) == status
