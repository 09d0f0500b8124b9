# SPDX-License-Identifier: Apache-2.0
"""A call in a process in which nothing ran before."""

import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

from accelfn.testing.processes.rank import packed
from accelfn.testing.processes.run import Pool
from accelfn.world import World

_SECONDS = 600.0


def freeze(function: Callable[..., Any]) -> bytes:
    """Return a function as it is now, for a new process.

    The process imports functions and classes of modules that it finds. Others travel with
    what they refer to.
    """
    return cloudpickle.dumps(function)


def call_anew(frozen: bytes, *given: Any) -> Any:
    """Return what a frozen function returns in a new process.

    Raises:
        RankError: it raised, or cannot be imported there.
    """
    pool = Pool(1)
    try:
        (found,) = pool.run(packed((_call, (frozen, *given), {})), _SECONDS)
    finally:
        pool.close()
    return pickle.loads(found)  # noqa: S301 - of our own process


def _call(world: World, frozen: bytes, *given: Any) -> bytes:
    del world
    return cloudpickle.dumps(pickle.loads(frozen)(*given))  # noqa: S301 - the caller's own
