# SPDX-License-Identifier: Apache-2.0
"""Parts of a world: neighbours, or the ranks of a machine, and those at one place in each part."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from accelfn.base.arguments import is_integer
from accelfn.errors import ArgumentError, WorldError
from accelfn.world.connection import Connection

Rows: TypeAlias = list[tuple[int, ...]]
"""All parts of a world, each the ranks that it has, in ascending order."""


def check_given(call: str, size: int | None, by: str | None, num_ranks: int) -> str:
    """Return a call as it was written, once it says in one way how to divide so many ranks.

    Raises:
        ArgumentError: it says so in two ways or in none, or the size is none or does not divide
            them.
    """
    if (size is None) is (by is None):
        msg = f'{call}: expected either size=, a number of ranks, or by="node".'
        raise ArgumentError(msg)
    written = f"{call}(by={by!r})" if size is None else f"{call}(size={size!r})"
    if size is None and by != "node":
        msg = f'{written}: expected by="node", the ranks of one machine.'
        raise ArgumentError(msg)
    if size is not None and not is_integer(size, 1):
        msg = f"{written}: expected a number of ranks, 1 or more."
        raise ArgumentError(msg)
    if size is not None and num_ranks % size:
        divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        msg = (
            f"{written}: a world of {num_ranks} ranks has no equal parts of {size}. Take"
            f" {', '.join(map(str, divisors[:-1]))} or {divisors[-1]}."
        ).replace("Take  or", "Take")
        raise ArgumentError(msg)
    return written


def of_size(size: int, num_ranks: int) -> Rows:
    """Return parts of so many neighbours."""
    return [tuple(range(at, at + size)) for at in range(0, num_ranks, size)]


def of_nodes(nodes: Sequence[int]) -> Rows:
    """Return the ranks of each machine, of which each rank names its own."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def across(written: str, rows: Rows) -> Rows:
    """Return the ranks that stand at one place in each part.

    Raises:
        WorldError: parts have not as many ranks.
    """
    sizes = [len(row) for row in rows]
    if len(set(sizes)) > 1:
        msg = (
            f"{written}: machines have {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks,"
            " so that not each rank has one at its place on every other. Start as many on each."
        )
        raise WorldError(msg)
    return [tuple(sorted(each)) for each in zip(*rows, strict=True)]


def nodes_of(
    node: int, connection: Connection, device: torch.device, *, size: int
) -> list[int]:
    """Return the machine of each rank; a collective of 8 bytes a rank."""
    if size == 1:
        return [node]
    mine = torch.tensor([node], device=device)
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=connection.group)
    return [int(each) for each in found]


def open_part(
    written: str, rows: Rows, rank: int, connection: Connection, device: torch.device
) -> Connection:
    """Return what joins the ranks of a rank's part; all ranks open all parts, once."""
    name = written.removeprefix("World.")
    (mine,) = (row for row in rows if rank in row)
    if len(rows) == 1:
        return connection
    if (name,) not in connection.parts:
        if connection.simulated is None:
            group, simulated = _opened(name, rows, mine, connection, device), None
        elif len(mine) > 1:
            group, simulated = connection.simulated.part(name, mine)
        else:
            group = simulated = None
        connection.add_part((name,), group, simulated)
        connection.parts[name,].parts = {}
    return connection.parts[name,]


def _opened(
    name: str,
    rows: Rows,
    mine: tuple[int, ...],
    connection: Connection,
    device: torch.device,
) -> Any:
    """Open the groups of all parts of several ranks, in one order, and return this rank's."""
    everyone = dist.get_process_group_ranks(connection.group)
    seconds = connection.timeout(device)
    timeout = None if seconds is None else timedelta(seconds=seconds)
    opened: dict[tuple[int, ...], Any] = {
        row: dist.new_group([everyone[i] for i in row], timeout, group_desc=name)
        for row in rows
        if len(row) > 1
    }
    return opened.get(mine)
