# SPDX-License-Identifier: Apache-2.0
"""Who can reach the ranks of a run: on one machine nobody from outside."""

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.internals import main, open_store
from tests.waiting import HANGS

SCRIPT = Path(__file__).parent / "scripts" / "listens.py"
SOON = timedelta(seconds=30)

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(sys.platform != "linux", reason="the tables are Linux's"),
]


def only_loopback(texts):
    """Return whether each rank listens, and on the loopback alone."""
    return all(
        addresses and all(ip_address(each).is_loopback for each in addresses)
        for addresses in texts
    )


@pytest.mark.slow
def test_a_launch_on_one_machine_listens_on_the_loopback(capfd):
    """C: neither the launcher's store nor a rank can be reached from another machine."""
    assert main(["launch", "--nproc", "2", str(SCRIPT), "launcher"]) == 0
    captured = capfd.readouterr()
    assert only_loopback(json.loads(captured.out))
    assert captured.err == ""  # it is nothing to speak of


@pytest.mark.slow
def test_ranks_that_open_their_own_store():
    """C: without a launcher, rank 0's store is where MASTER_ADDR says, and nowhere else."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    names = {**os.environ, **given, **meet, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SCRIPT)]
    ran = subprocess.run(
        command, check=True, env=names, capture_output=True, text=True, timeout=HANGS
    )
    assert only_loopback(json.loads(ran.stdout))


def test_a_store_is_reached_where_it_was_said_to_be():
    """On any interface but the loopback it listens as torch has it."""
    own = socket.gethostbyname(socket.gethostname())
    for host in ("127.0.0.1", "localhost", own):
        store = open_store(host, 0, SOON)
        with closing(socket.create_connection((host, store.port), timeout=5)):
            store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_port_that_is_taken_is_refused():
    """By another's socket, or by a store of this process that is not to be shared."""
    taken = socket.create_server(("127.0.0.1", 0))
    with closing(taken), pytest.raises(RuntimeError, match=r"in use|EADDRINUSE"):
        open_store("127.0.0.1", taken.getsockname()[1], SOON)
    first = open_store("127.0.0.1", 0, SOON, is_shared=True)
    with pytest.raises(RuntimeError, match=r"in use|EADDRINUSE"):
        open_store("127.0.0.1", first.port, SOON)
    first.set("key", "value")
    again = open_store("127.0.0.1", first.port, SOON, is_shared=True)
    assert again.get("key") == b"value"
