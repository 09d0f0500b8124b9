# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces, each with its own interfaces, and a cable."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager

import attrs
import pytest

from tests.waiting import HANGS

_ALONE = "unshare", "--map-root-user", "--user", "--net"


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


@contextmanager
def two_hosts() -> Generator[tuple[Host, Host]]:
    """Make two hosts that are joined by a cable; skip where the system makes none."""
    try:
        can = subprocess.run(
            [*_ALONE, "ip", "link"], check=False, capture_output=True, timeout=HANGS
        )
    except OSError as error:
        pytest.skip(f"no network namespaces: {error}")
    if can.returncode:
        pytest.skip(f"no network namespaces: {can.stderr.decode().strip()}")
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
        yield first, second
    finally:
        for each in kept:
            each.kill()
            each.wait()


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
    return [
        "nsenter",
        "--target",
        str(pid),
        "--user",
        "--net",
        "--preserve-credentials",
    ]
