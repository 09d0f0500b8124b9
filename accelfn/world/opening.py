# SPDX-License-Identifier: Apache-2.0
"""Opening the world that a launcher describes: a place, a device, axes, and what joins ranks."""

from collections.abc import Mapping

import torch

from accelfn.base.arguments import check_seconds
from accelfn.errors import PeerFailedError
from accelfn.world import axes as arithmetic
from accelfn.world.connection import Connection
from accelfn.world.device import chosen_device
from accelfn.world.environment import read_place
from accelfn.world.meeting import (
    Meeting,
    check_backend,
    explain_opening,
    join,
    refuse_open_group,
)
from accelfn.world.place import Environment, Place
from accelfn.world.regrouping import regrouping_of

_CALL = "World.from_env"
_ALONE = Place(launcher="none", rank=0, size=1, local_rank=0, local_size=1, node_rank=0)


def open_world(
    env: Environment,
    *,
    timeout: float,
    backend: str | None,
    device: str | torch.device | None,
    axes: Mapping[str, int] | None,
) -> tuple[Place, torch.device, Mapping[str, int], Connection]:
    """Join the ranks that the environment describes; the arguments are those of `from_env`.

    Returns:
        This process's place, which is that of one process where no launcher has started it,
        or where the others have yet to let it in; the device for its tensors; the sizes of
        the world's axes by name; and what joins the ranks.

    Raises:
        ArgumentError, WorldError, PeerFailedError: as `from_env`.
    """
    check_seconds(_CALL, "timeout", timeout)
    check_backend(backend)
    place = read_place(env)
    size = 1 if place is None else place.size
    sizes = arithmetic.chosen(_CALL, axes, env.get(arithmetic.VARIABLE), size)
    if place is None or place.is_alone:
        refuse_open_group()
        chosen = chosen_device(device, local_rank=0)
        return _ALONE, chosen, sizes, Connection(None)
    chosen = chosen_device(device, local_rank=place.local_rank)
    regrouping = regrouping_of(
        env, place, backend=backend, device=chosen, timeout=timeout
    )
    if regrouping is not None and regrouping.is_newcomer:
        alone = Connection(None, regrouping=regrouping)
        return _ALONE, chosen, {}, alone
    with Meeting(place, timeout) as meeting:
        connection, is_ours = join(meeting, backend=backend, device=chosen)
        if is_ours:
            connection.own()
            connection.regrouping = regrouping
        if sizes:
            from accelfn.world.mesh import open_groups  # noqa: PLC0415 - torch's DTensors are large

            with explain_opening(place.rank, place.size, backend):
                groups = open_groups(sizes, place.rank, meeting.seconds_to_open)
            for names, group in groups.items():
                connection.add_part(names, group)
        if is_ours:
            _begin(connection, meeting.seconds_left)
    if meeting.opens_in_time:
        connection.set_timeout(timeout)
    return place, chosen, sizes, connection


def _begin(connection: Connection, timeout: float) -> None:
    """Wait for the ranks that are still being joined; close the group if one never is."""
    roll_call = connection.roll_call
    assert roll_call is not None  # noqa: S101 - what is opened here has met at a store
    try:
        roll_call.begin(timeout)
    except PeerFailedError as error:
        connection.fail(error)
        connection.end()
        raise
