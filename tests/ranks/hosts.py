# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces, each with its own interfaces, and a cable."""

import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

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
        subprocess.run(self.command(*words), check=True, capture_output=True, text=True)

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
        can = subprocess.run([*_ALONE, "ip", "link"], check=False, capture_output=True)
    except OSError as error:
        pytest.skip(f"no network namespaces: {error}")
    if can.returncode:
        pytest.skip(f"no network namespaces: {can.stderr.decode().strip()}")
    kept: list[subprocess.Popen[bytes]] = []
    try:
        hosts: list[Host] = []
        waits = "sleep", "infinity"
        kept.append(subprocess.Popen([*_ALONE, *waits]))
        hosts.append(Host(kept[0].pid, "10.71.0.1", "cable0"))
        _wait_until_apart(kept[0].pid, "self")
        kept.append(
            subprocess.Popen([*_inside(kept[0].pid), "unshare", "--net", *waits])
        )
        _wait_until_apart(kept[1].pid, str(kept[0].pid))
        hosts.append(Host(kept[1].pid, "10.71.0.2", "cable1"))
        first, second = hosts
        first.run(
            *("ip", "link", "add", first.cable, "type", "veth"),
            *("peer", "name", second.cable, "netns", str(second.pid)),
        )
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.cable)
            host.run("ip", "link", "set", "lo", "up")
            host.mend()
        yield first, second
    finally:
        for each in kept:
            each.kill()
            each.wait()


def _inside(pid: int) -> list[str]:
    return [
        "nsenter",
        "--target",
        str(pid),
        "--user",
        "--net",
        "--preserve-credentials",
    ]


def _wait_until_apart(pid: int, other: str) -> None:
    """Wait until a process has a network of its own."""
    for _ in range(200):
        if (
            Path(f"/proc/{pid}/ns/net").readlink()
            != Path(f"/proc/{other}/ns/net").readlink()
        ):
            return
        time.sleep(0.02)
    raise TimeoutError
