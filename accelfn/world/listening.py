# SPDX-License-Identifier: Apache-2.0
"""The store at which the processes of a run meet, and who can reach it.

torch's store asks nobody who they are, and listens on all interfaces of its machine, whatever
address it is given. Where the ranks meet on the loopback it listens there alone.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from datetime import timedelta


def open_store(
    host: str,
    port: int,
    timeout: timedelta,
    *,
    size: int | None = None,
    is_local: bool = True,
    is_shared: bool = False,
) -> dist.TCPStore:
    """Return a store of this process, at a free port where `port` is 0.

    On an address of the loopback no other machine reaches it.

    Args:
        host: the address of this machine for the others.
        port: where it listens.
        timeout: of the store.
        size: how many processes to wait for; default none.
        is_local: whether all who meet there are on this machine. Elsewhere a name that is
            an address of the loopback here may be another address.
        is_shared: whether the store may be one that this process has at that port already.
    """
    # what is the loopback on every machine, and no name that it has on this one
    is_loopback = host == "localhost" or host.startswith(("127.", "::1", "[::1]"))
    bound = _bound_to_loopback(host, port) if is_local or is_loopback else None
    if bound is not None:
        port = bound.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=size is not None,
        multi_tenant=is_shared,
        # a number from here on, which the store closes
        master_listen_fd=None if bound is None else bound.detach(),
    )


def _bound_to_loopback(host: str, port: int) -> socket.socket | None:
    """Return a socket for the store; None off the loopback, or where one listens there."""
    with suppress(socket.gaierror):  # torch has the words for it
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        if ip_address(where[0]).is_loopback:
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(where)
            except OSError as error:
                bound.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                return None
            return bound
    return None
