# SPDX-License-Identifier: Apache-2.0
"""Print at which addresses this rank and its launcher listen."""

import json
import os
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import accelfn as af

LISTENING = "0A"


def sockets_of(pid):
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder was open, to be read
            found.add(str(each.readlink()))
    return {each[8:-1] for each in found if each.startswith("socket:")}


def address_of(text):
    """Return an address as the system's tables write it: words of four bytes, turned around."""
    data = bytes.fromhex(text.partition(":")[0])
    words = [data[i : i + 4][::-1] for i in range(0, len(data), 4)]
    return str(ip_address(b"".join(words)))


def listening(pid):
    own = sockets_of(pid)
    tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
    rows = [row.split() for each in tables for row in each.read_text().splitlines()[1:]]
    return sorted(
        address_of(row[1]) for row in rows if row[3] == LISTENING and row[9] in own
    )


with af.World.from_env() as world:
    af.barrier(world)
    pids = [os.getpid(), os.getppid()] if "launcher" in sys.argv else [os.getpid()]
    found = [address for pid in pids for address in listening(pid)]
    texts = af.all_gather_objects(found, world)
    if world.is_main:
        sys.stdout.write(json.dumps(texts))
