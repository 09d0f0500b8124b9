# SPDX-License-Identifier: Apache-2.0
"""Simulate two hosts on one machine: two network namespaces, connected by a virtual cable.

The hosts need only the rights that `unshare --user` gives. Benchmarks also use this module, so it
does not import pytest.
"""

import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import attrs

from tests.waiting import HANGS

_ALONE = "unshare", "--map-root-user", "--user", "--net"


AT_ONCE = 1600
"""Bytes that a slowed cable lets pass at once: a frame."""
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
"""What decides how fast a sender sends. BBR, some systems' default, measures the cable as it goes,
and sends more slowly than that at times: the same takes 0 to 30 % longer. Reno is always there."""


class NoHostsError(Exception):
    """The system makes no network namespaces, or does not slow down a cable; it says why."""


@attrs.frozen
class Host:
    """A network namespace; a process of it, which does nothing, keeps it."""

    pid: int
    address: str
    cable: str

    def command(self, *words: str) -> list[str]:
        """Return what runs a command there, with the rights of its root."""
        return [*_inside(self.pid), *words]

    def run(self, *words: str) -> None:
        """Run a command there to its end."""
        subprocess.run(
            self.command(*words),
            check=True,
            capture_output=True,
            text=True,
            timeout=HANGS,
        )

    def cut(self) -> None:
        """Pull out the cable."""
        self.run("ip", "link", "set", self.cable, "down")

    def mend(self) -> None:
        """Put it in again."""
        self.run("ip", "link", "set", self.cable, "up")

    def slow_down(self, megabits: float) -> None:
        """Let the cable carry so many megabits a second from here, a frame at once at most.

        Raises:
            NoHostsError: the system does not.
        """
        bucket = "rate", f"{megabits}mbit", "burst", f"{AT_ONCE}b", "latency", "10s"
        replaced = "tc", "qdisc", "replace", "dev", self.cable, "root", "tbf", *bucket
        try:
            self.run("sh", "-c", f"echo reno > {_CONGESTION}")
            self.run(*replaced)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            msg = f"no slow cable: {said.strip()}"
            raise NoHostsError(msg) from error


def sent_by(cable: str) -> int:
    """Return the bytes that this process's host has sent over a cable, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == cable:
            return int(counts.split()[8])
    msg = f"there is no {cable} in /proc/net/dev"
    raise NoHostsError(msg)


def settled(cable: str) -> None:
    """Wait until nothing more is sent: acknowledgements come behind what they acknowledge."""
    before = -1
    while before != (now := sent_by(cable)):
        before = now
        time.sleep(0.2)


@contextmanager
def two_hosts(megabits: float | None = None) -> Generator[tuple[Host, Host]]:
    """Make two hosts that are joined by a cable, of so many megabits a second if it is told.

    Raises:
        NoHostsError: the system makes none, or its cables carry what they can.
    """
    try:
        can = subprocess.run(
            [*_ALONE, "ip", "link"], check=False, capture_output=True, timeout=HANGS
        )
    except OSError as error:
        msg = f"no network namespaces: {error}"
        raise NoHostsError(msg) from error
    if can.returncode:
        msg = f"no network namespaces: {can.stderr.decode().strip()}"
        raise NoHostsError(msg)
    kept: list[subprocess.Popen[bytes]] = []
    try:
        kept.append(_keeps(*_ALONE))
        first = Host(kept[0].pid, "10.71.0.1", "cable0")
        kept.append(_keeps(*first.command("unshare", "--net")))
        second = Host(kept[1].pid, "10.71.0.2", "cable1")
        first.run(
            *("ip", "link", "add", first.cable, "type", "veth"),
            *("peer", "name", second.cable, "netns", str(second.pid)),
        )
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.cable)
            host.run("ip", "link", "set", "lo", "up")
            host.mend()
            if megabits is not None:
                host.slow_down(megabits)
        yield first, second
    finally:
        for each in kept:
            each.kill()
            each.wait()


def rank_there(host: Host, rank: int, ranks: int = 2) -> dict[str, str]:
    """Return the environment of one of the ranks that meet at the first host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.71.0.1",
        "MASTER_PORT": "29500",  # its network is its own, so it is free
        "GLOO_SOCKET_IFNAME": host.cable,
    }


def _keeps(*apart: str) -> subprocess.Popen[bytes]:
    """Start a process that keeps a namespace, and wait until it is in there.

    It says so itself: seen from outside, a process on its way into a namespace is in another
    than the one that it comes from before it is where it goes.
    """
    process = subprocess.Popen(
        [*apart, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
    )
    assert process.stdout
    with process.stdout as said:
        assert said.readline(), "it ended before it was in its namespace"
    return process


def _inside(pid: int) -> list[str]:
    spaces = ("--user", "--net", "--preserve-credentials")
    return ["nsenter", "--target", str(pid), *spaces]
