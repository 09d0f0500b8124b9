# SPDX-License-Identifier: Apache-2.0
"""What a launcher of an elastic run does about ranks that are killed, and when."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from accelfn.launching import watch
from accelfn.launching.agent import Agent
from accelfn.launching.crew import Crew

SIZE = 3
GOES_ON = ["sleep", "60"]


def kill(pid: int) -> None:
    """End a process, and return when it has; it stays to be waited for."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@contextmanager
def running(directory: Path) -> Iterator[tuple[Agent, Any, list[str]]]:
    """Run an elastic launcher's agent over processes of which one may be left, and no fewer."""
    said: list[str] = []
    handlers = {
        place: SimpleNamespace(
            proc=subprocess.Popen(GOES_ON), _stdout=None, _stderr=None
        )
        for place in range(SIZE)
    }
    context = SimpleNamespace(
        subprocess_handlers=handlers,
        pids=lambda: {place: each.proc.pid for place, each in handlers.items()},
        entrypoint=GOES_ON[0],
        args=dict.fromkeys(range(SIZE), tuple(GOES_ON[1:])),
        envs={place: dict[str, str]() for place in range(SIZE)},
        stdouts=dict.fromkeys(range(SIZE), ""),
        stderrs=dict.fromkeys(range(SIZE), ""),
        error_files={place: f"{directory}/{place}" for place in range(SIZE)},
        _running_local_ranks=set(range(SIZE)),
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=SIZE,
        entrypoint=sys.executable,
        rdzv_handler=mock.Mock(),
    )
    agent = Agent(spec, DefaultLogsSpecs(), said.append, least=1)
    workers = agent._worker_group.workers
    started: Any = context
    agent._pcontext = started
    agent._crew = Crew(
        started, workers, least=1, store=dist.HashStore(), say=said.append
    )
    try:
        yield agent, context, said
    finally:
        for each in handlers.values():
            each.proc.kill()
            each.proc.wait()


@given(
    kills=st.lists(
        st.tuples(st.integers(1, SIZE - 1), st.booleans()), max_size=2 * SIZE
    )
)
def test_torch_is_not_asked_of_ranks_that_others_do_without(
    kills: list[tuple[int, bool]],
) -> None:
    """Whenever they are killed: it would end all. A newcomer is not started again."""
    deaths = dict.fromkeys(range(SIZE), 0)
    to_kill: list[int] = []
    looked = watch.Watch.may_end

    def looks(watching: watch.Watch) -> bool:
        may_end = looked(watching)
        while to_kill:
            kill(to_kill.pop())
        return may_end

    asked = mock.Mock(return_value=RunResult(state=WorkerState.UNHEALTHY))
    with (
        TemporaryDirectory() as directory,
        running(Path(directory)) as (agent, context, said),
        mock.patch.object(LocalElasticAgent, "_monitor_workers", asked),
        mock.patch.object(watch, "_GRACE_SECONDS", 0.0),
        mock.patch.object(watch.Watch, "may_end", looks),
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
