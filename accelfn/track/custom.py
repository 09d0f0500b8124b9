# SPDX-License-Identifier: Apache-2.0
"""`custom`: a tracker of one's own, with the rules of all."""

from collections.abc import Callable

from accelfn.base.calling import called
from accelfn.track.tracker import Sink, Tracker, open_tracker
from accelfn.world import World


@called
def custom(
    open_sink: Callable[[], Sink],
    *,
    name: str,
    world: World,
    accepts: tuple[str, ...] = (),
) -> Tracker:
    """Return a tracker for a backend of your own.

    Args:
        open_sink: called on rank 0; gives an object with the methods of `af.track.Sink`.
        name: what warnings call it.
        world: that of the run.
        accepts: `("images",)` if it takes images too.

    Raises:
        TrackingError: it could not be opened.
    """
    return open_tracker(name, open_sink, world=world, accepts=accepts)
