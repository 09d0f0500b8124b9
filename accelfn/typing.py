# SPDX-License-Identifier: Apache-2.0
"""Types of return values, for annotations; programs rarely create these objects."""

import typing as _typing

from accelfn.base.arguments import import_later as _import_later
from accelfn.base.arguments import names_for_later as _names_for_later

if _typing.TYPE_CHECKING:
    from accelfn.checkpoint.load import Loaded as Loaded
    from accelfn.data.plan import Cursor as Cursor
    from accelfn.data.plan import Plan as Plan
    from accelfn.loop.batches import Batches as Batches
    from accelfn.loop.control import RankLogger as RankLogger
    from accelfn.state.results import WeightedSum as WeightedSum
    from accelfn.weights.device_map import DeviceMap as DeviceMap
else:

    def __getattr__(name: str) -> object:
        """Import a type when a program first uses it."""
        if name not in _names_for_later(__name__):
            msg = f"module {__name__!r} has no attribute {name!r}."
            raise AttributeError(msg)
        return _import_later(__name__, name)


def __dir__() -> list[str]:
    """Return all names, including those that are not imported yet."""
    return sorted(_names_for_later(__name__))
