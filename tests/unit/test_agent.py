# SPDX-License-Identifier: Apache-2.0
"""What a launcher sees of its ranks: who failed, goes on, was stopped; and whom it replaces."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from tests.internals import Agent, Crew, Watch, Words, agent, exit_status, script
from tests.waiting import HANGS, wait_until

SIZE = 3
FAILS, FINISHES, GOES_ON = ["false"], ["true"], ["sleep", "60"]


def kill(pid: int) -> None:
    """End a process, and return when it has; it stays to be waited for."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def context_of(directory: Path, command: list[str], start: Any, proc: Any) -> Any:
    """Return what torch has of processes: `proc` makes one, and `start` another in its place."""
    handlers = {
        place: SimpleNamespace(proc=proc(place), _popen=start) for place in range(SIZE)
    }
    return SimpleNamespace(
        subprocess_handlers=handlers,
        pids=lambda: {place: each.proc.pid for place, each in handlers.items()},
        entrypoint=command[0],
        args=dict.fromkeys(range(SIZE), tuple(command[1:])),
        envs={place: {"RANK": f"{place}"} for place in range(SIZE)},
        error_files={place: f"{directory}/error-{place}" for place in range(SIZE)},
        _running_local_ranks=set(range(SIZE)),
    )


@contextmanager
def running(directory: Path) -> Iterator[tuple[Agent, Any, list[str]]]:
    """Run an elastic launcher's agent over processes of which one may be left, and no fewer."""
    said: list[str] = []
    context = context_of(
        *(directory, GOES_ON),
        start=lambda command, env: subprocess.Popen(command, env={**os.environ, **env}),
        proc=lambda _: subprocess.Popen(GOES_ON),
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=SIZE,
        entrypoint=sys.executable,
        rdzv_handler=mock.Mock(),
    )
    ours = Agent(spec, DefaultLogsSpecs(), least=1)
    ours._pcontext = context
    workers = ours._worker_group.workers
    ours._crew = Crew(context, workers, least=1, store=dist.HashStore())
    try:
        with mock.patch.object(agent, "say", said.append):
            yield ours, context, said
    finally:
        for each in context.subprocess_handlers.values():
            each.proc.kill()
            each.proc.wait()


kill_of_one = st.tuples(st.integers(1, SIZE - 1), st.booleans())


@given(kills=st.lists(kill_of_one, max_size=2 * SIZE))
def test_torch_is_not_asked_of_ranks_that_others_do_without(kills):
    """Whenever they are killed: it would end all. A newcomer is not started again."""
    deaths = dict.fromkeys(range(SIZE), 0)
    to_kill: list[int] = []
    looked = script.Watch.may_end

    def looks(watching: script.Watch) -> bool:
        may_end = looked(watching)
        while to_kill:
            kill(to_kill.pop())
        return may_end

    asked = mock.Mock(return_value=RunResult(state=WorkerState.UNHEALTHY))
    with (
        TemporaryDirectory() as directory,
        running(Path(directory)) as (agent, context, said),
        mock.patch.object(LocalElasticAgent, "_monitor_workers", asked),
        mock.patch.object(script, "_GRACE_SECONDS", 0.0),
        mock.patch.object(script.Watch, "may_end", looks),
    ):
        for place, between_looks in kills:
            if deaths[place] == 2:  # nobody has taken its place
                continue
            deaths[place] += 1
            record = Path(context.error_files[place])
            record.write_text("what the one before had to say")
            if between_looks:
                to_kill.append(context.pids()[place])
            else:
                kill(context.pids()[place])
            for _ in range(3):
                result = agent._monitor_workers(agent._worker_group)
                assert result.state is WorkerState.HEALTHY
            assert record.exists() == (deaths[place] == 2)
        assert not asked.called
        assert len(said) == sum(deaths.values())
        left = {place for place, times in deaths.items() if times < 2}
        assert context._running_local_ranks == left


class Run:
    """Processes of an elastic run that are numbers here, and what their launcher made of it."""

    def __init__(self, directory: Path, least: int) -> None:
        self.ends: dict[int, int] = {}
        self.envs: list[dict[str, str]] = []
        self.said: list[str] = []
        command = ["python", "train.py"]
        proc = lambda place: mock.Mock(pid=100 + place)  # noqa: E731
        context = context_of(directory, command, self.popen, proc)
        self.handlers = context.subprocess_handlers
        self.running = context._running_local_ranks
        self.workers: list[Any] = [SimpleNamespace(id=100 + i) for i in range(SIZE)]
        self.words = Words.at(store := dist.HashStore())
        self.crew = Crew(context, self.workers, least=least, store=store)

    def popen(self, _command: object, env: dict[str, str]) -> Any:
        self.envs.append(env)
        return mock.Mock(pid=200 + len(self.envs))

    def end(self, *places: int, by_signal: int = 0, code: int = 0) -> None:
        """Let processes end, one after the other, and the launcher look."""
        for place in places:
            pid = self.handlers[place].proc.pid
            self.ends[pid] = -by_signal or code
            self.crew.look()

    def come(self, number: int, *names: str) -> None:
        """Let processes wait for a world, and the launcher look."""
        for name in names:
            self.words.come(number, name)
            self.crew.look()


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Run:
    """Return a run of which so many ranks may be left, by default one."""
    made = Run(tmp_path, getattr(request, "param", 1))
    monkeypatch.setattr(agent, "returncode", made.ends.get)
    monkeypatch.setattr(agent, "say", made.said.append)
    return made


@pytest.mark.parametrize("run", range(1, SIZE + 1), indirect=True)
def test_where_too_few_would_be_left_torch_ends_the_run(run):
    """So many may be killed that the least is left; of the next one nothing is said or done."""
    least = run.crew._least
    run.end(*range(SIZE), by_signal=signal.SIGKILL)
    assert len(run.said) == len(run.envs) == SIZE - least
    gone = [run.words.is_gone(f"{place}.0") for place in range(SIZE)]
    assert gone == [True] * (SIZE - least) + [False] * least
    assert not run.crew.gone


def test_who_takes_a_place_is_told_who_it_is(run):
    """It has its rank's variables and how often one was started."""
    for pid, times in ((201, "1"), (202, "2")):
        run.end(1, by_signal=signal.SIGKILL)
        if times == "1":
            assert "pid 101) was killed by SIGKILL; 2 continue, and" in run.said[0]
            assert run.said[0].endswith(f"replaces it (pid {pid}).")
            assert (run.workers[1].id, run.handlers[1].proc.pid) == (pid, pid)
            assert (run.envs[0]["RANK"], run.envs[0]["ACCELFN_ELASTIC"]) == ("1", times)
            run.words.ask_in("1.1")
            run.come(1, "0.0", "2.0")
        else:  # it had been let in, so another one may follow
            assert (run.workers[1].id, run.envs[1]["ACCELFN_ELASTIC"]) == (pid, times)


@pytest.mark.parametrize("waits", [True, False])
def test_a_world_is_made_when_all_have_come_who_can(run, waits):
    """Members by their places, and newcomers that wait; one that does not is in a later one."""
    run.end(1, by_signal=signal.SIGKILL)
    if waits:
        run.words.ask_in("1.1")
    run.come(1, "2.0")
    assert run.words.called(1) is None
    run.come(1, "0.0")
    assert run.words.called(1) == ["0.0", *(["1.1"] if waits else []), "2.0"]
    assert run.words.taken("1.1") == (1 if waits else None)
    if not waits:
        run.words.ask_in("1.1")
        run.come(2, "0.0", "2.0")
        assert run.words.called(2) == ["0.0", "1.1", "2.0"]
        assert run.words.taken("1.1") == 2
    assert run.words.num_waiting() == 0
    number = 2 if waits else 3
    run.come(number, "0.0", "2.0")
    assert run.words.called(number) is None  # one that was let in is waited for
    run.come(number, "1.1")
    assert run.words.called(number) == ["0.0", "1.1", "2.0"]
    assert run.words.num_waiting() == 0


def test_who_is_done_is_waited_for_no_longer(run):
    """A rank that has returned is gone, without a word, and the others may meet anew."""
    run.end(1)
    assert run.words.is_gone("1.0")
    run.come(1, "0.0", "2.0")
    assert run.words.called(1) == ["0.0", "2.0"]
    assert (run.said, run.envs, run.crew.gone) == ([], [], set())


def test_who_failed_by_itself_is_left_to_torch(run):
    """An error is no killing: nobody takes its place, and nobody goes on without it."""
    run.end(1, code=1)
    run.come(1, "0.0", "2.0")
    assert not run.words.is_gone("1.0")
    assert run.words.called(1) is None
    assert (run.said, run.envs, run.running) == ([], [], set(range(SIZE)))


@pytest.mark.parametrize("waits", [True, False])
def test_a_newcomer_that_is_killed_is_not_awaited(run, waits):
    """It counts no more among those that wait, nor among those that torch waits for."""
    run.end(1, by_signal=signal.SIGKILL)
    if waits:
        run.words.ask_in("1.1")
    run.end(1, by_signal=signal.SIGTERM)
    assert run.words.num_waiting() == 0
    assert run.words.taken("1.1") is None
    assert "killed by SIGTERM before it joined the run; it is not" in run.said[-1]
    assert (run.crew.gone, run.running) == ({1}, {0, 2})
    run.come(1, "0.0", "2.0")
    assert run.words.called(1) == ["0.0", "2.0"]


def test_who_comes_too_late_is_ended(run):
    """When all members are done, those that had not come in are named, and torch ends them."""
    run.end(1, 2, by_signal=signal.SIGKILL)
    assert len(run.said) == 2
    run.end(0)
    assert [each.partition(" had")[0] for each in run.said[2:]] == [
        f"process {place} (pid {200 + place})" for place in (1, 2)
    ]
    assert all("not joined the run when the others" in s for s in run.said[2:])
    assert (run.crew.gone, run.running) == ({1, 2}, {0})


@contextmanager
def watched(*commands: list[str]) -> Iterator[tuple[Watch, list[subprocess.Popen]]]:
    ran = [subprocess.Popen(command) for command in commands]
    files = {local: f"no-file-of-{local}" for local in range(len(ran))}
    try:
        yield Watch({local: each.pid for local, each in enumerate(ran)}, files), ran
    finally:
        for each in ran:
            each.kill()
            each.wait(HANGS)


def has_ended(watching: Watch, local: int) -> bool:
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
