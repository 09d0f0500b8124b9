# SPDX-License-Identifier: Apache-2.0
"""Who does what, and who goes first: plain code that runs on some ranks of a world."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from accelfn.collectives import barrier, gather_text
from accelfn.collectives.packed import check_replicas
from accelfn.collectives.trees import check_root
from accelfn.state import TrainState
from accelfn.world import World

P = ParamSpec("P")
R = TypeVar("R")


def on_rank(
    world: World, rank: int = 0
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return a decorator: the function runs on one rank, and gives None on the others.

    Nothing is communicated; for a result that all need, see `af.broadcast_object`.

    Raises:
        ArgumentError: the world has no such rank.

    Example:
        >>> @on_rank(World.single())
        ... def greet():
        ...     return "hello"
        >>> greet()
        'hello'
    """
    check_root("on_rank", rank, world)

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @wraps(function)
        def there(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if world.rank == rank else None

        return there

    return decorate


@contextmanager
def main_first(world: World) -> Generator[None]:
    """Let rank 0 go through a `with` block before the others enter it.

    For work whose result the others find done: a download, a cache. Where rank 0 raises, the
    others are let in all the same, and do it or fail for themselves.

    Law: no other rank enters before rank 0 has left.

    Cost: one barrier.
    """
    if not world.is_main:
        barrier(world)
    try:
        yield
    finally:
        if world.is_main:
            barrier(world)


def print_in_order(world: World, *values: object) -> None:
    """Print a line for each rank on rank 0, in rank order: "rank 1: ...".

    Cost: a gather of the texts.
    """
    mine = " ".join(map(str, values))
    texts = gather_text(mine, world, label="print_in_order")
    if world.is_main:
        for rank, text in enumerate(texts):
            print(f"rank {rank}: {text}", flush=True)  # noqa: T201 - it is what it is for


def assert_replicas_agree(state: TrainState) -> None:
    """Raise, on all ranks, unless they hold the same parameters and buffers.

    Under `local_sgd` they do only after an average, and batch statistics may always differ.

    Cost: a sum over every tensor, and two small gathers.

    Raises:
        ReplicaMismatchError: they do not; the first tensor that differs is named, a row a rank.
    """
    state.lease.check()
    tensors = {**state.params, **state.buffers}
    check_replicas(tensors, state.world, label="replicas agree", values=True)
