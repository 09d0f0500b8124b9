# SPDX-License-Identifier: Apache-2.0
"""Two hosts, a launcher and two ranks on each: a run, a cable that is cut, and the end."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import accelfn as af
from tests.ranks.hosts import Host, two_hosts
from tests.waiting import HANGS

SCRIPT = Path(__file__).parent / "scripts" / "digits.py"
UPDATES, TIMEOUT = 12, 3

pytestmark = [pytest.mark.ranks(4), pytest.mark.slow]


def launched(
    host: Host, meets: dict[str, object], *words: object
) -> subprocess.Popen[str]:
    """Start the launcher of one host."""
    options = {"--nproc": 2, "--num-machines": 2, "--join-timeout": 60, **meets}
    flat = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "accelfn", "launch", *flat, str(SCRIPT)]
    return subprocess.Popen(
        host.command(*command, *map(str, words)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def numbered(rank: int) -> dict[str, object]:
    return {"--machine-rank": rank, "--main-address": "10.71.0.1"}


def test_a_cable_is_cut(tmp_path):
    """All ranks end in time with an error that says where; started again, they end bitwise.

    That is as a run ends in which nothing has happened.
    """
    store, go = af.CheckpointStore(tmp_path / "run"), tmp_path / "go"
    with two_hosts() as hosts:
        runs = [
            launched(host, numbered(rank), store.directory, UPDATES, TIMEOUT, go)
            for rank, host in enumerate(hosts)
        ]
        said = [
            line for run in runs for line in (run.stdout.readline() for _ in "1234")
        ]
        assert sum("waits" in line for line in said) == 4, [r.poll() for r in runs]
        hosts[1].cut()
        go.touch()
        errors = [run.communicate(timeout=HANGS)[1] for run in runs]
        assert [run.returncode for run in runs] == [1, 1]
        for rank, error in enumerate(errors):
            assert f"GLOO_SOCKET_IFNAME=cable{rank}" in error
            report = error.rpartition("accelfn launch: ")[2]
            own = f"[{2 * rank}{2 * rank + 1}]"
            named = f"PeerFailedError: Rank {own} of 4 waited in '.*' at update 6"
            assert re.search(named, report)
            assert "The cause is on another machine" in report
        assert store.steps == (5,)

        hosts[1].mend()
        runs = [
            launched(host, numbered(rank), store.directory, UPDATES, 60)
            for rank, host in enumerate(hosts)
        ]
        said = ended(runs)
        assert sum(line.endswith("of 4 from 5") for line in said) == 4

        # without a cut, and met as torchrun's machines do, which have no numbers
        meets: dict[str, object] = {
            "--rdzv-endpoint": "10.71.0.1:29400",
            "--rdzv-id": "whole",
        }
        runs = [
            launched(host, meets, tmp_path / "whole", UPDATES, 60) for host in hosts
        ]
        done = [each.partition("done ")[2] for each in [*said, *ended(runs)]]
        (digest,) = {each for each in done if each}
        assert sum(map(bool, done)) == 8
        assert digest.startswith(f"{UPDATES} ")


def ended(runs: list[subprocess.Popen[str]]) -> list[str]:
    """Return the lines that the ranks of launchers say before they end well."""
    said = [
        line for run in runs for line in run.communicate(timeout=HANGS)[0].split("\n")
    ]
    assert [run.returncode for run in runs] == [0, 0]
    return said
