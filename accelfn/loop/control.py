# SPDX-License-Identifier: Apache-2.0
"""Run control: run Python code only on some ranks of a world, or on rank 0 first."""

import logging
import threading
from collections.abc import Callable, Collection, Generator, MutableMapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from accelfn.base.arguments import is_integer
from accelfn.collectives.failures import check_world
from accelfn.collectives.packed import barrier, gather_text
from accelfn.definition.transform import by_rank
from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState, check_same_values, check_state, shared_slots
from accelfn.world import World

P = ParamSpec("P")
R = TypeVar("R")


def on_rank(
    world: World, rank: int = 0, *, local: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Create a decorator for a function that runs on one rank and returns None on others.

    The ranks do not communicate. To send the result to all ranks, use `af.broadcast_object`.

    Args:
        world: the ranks that call the function.
        rank: the rank that runs the function; -1 is the last rank.
        local: whether `rank` is a local rank. The function then runs once on each machine.

    Raises:
        ArgumentError: the rank does not exist, or the argument is not a function.

    Example:
        >>> @on_rank(World.single())
        ... def greet():
        ...     return "hello"
        >>> greet()
        'hello'
    """
    return _on("af.on_rank", world, rank, local=local)


def on_main(
    world: World, *, local: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Create a decorator for a function that runs on rank 0 and returns None on others.

    Args:
        world: the ranks that call the function.
        local: whether the function runs on the first rank of each machine, for example to write
            to a local disk.

    Raises:
        ArgumentError: the argument is not a function.

    Example:
        >>> on_main(World.single())(max)(1, 2)
        2
    """
    return _on("af.on_main", world, 0, local=local)


def _on(
    call: str, world: World, rank: int, *, local: bool
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    check_world(call, world)
    index, size = world.rank, world.size
    if local:
        index, size = world.local_rank, world.local_size
    if not is_integer(rank) or not -size <= rank < size:
        kind = "a local rank" if local else "a rank"
        usage = f"{call}(rank={rank!r})"
        msg = f"{usage}: expected {kind} from 0 to {size - 1}, or -1 (the last) to {-size}."
        raise ArgumentError(msg)
    runs = index == rank % size

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        if not callable(function):
            msg = f"{call}(...)({function!r}): expected a function."
            raise ArgumentError(msg)

        @wraps(function)
        def call_here(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if runs else None

        return call_here

    return decorate


_went = threading.local()
"""Per thread: whether the thread is in a `main_first` block. Simulated ranks are threads."""


@contextmanager
def main_first(world: World, *, local: bool = False) -> Generator[None]:
    """Run a `with` block on rank 0 first; the other ranks enter after rank 0 has left it.

    Use this for work that has to be done only once, such as a download or a cache. If rank 0
    raises an error in the block, the other ranks still enter it.

    Args:
        world: the ranks that run the block.
        local: whether the first rank of each machine runs first, for work on a local disk.

    Law: no other rank enters the block before rank 0 has left it. With `local`, no other rank
    enters before the first ranks of all machines have left.

    Cost: one barrier.

    Raises:
        ArgumentError: the block is inside another `main_first` block.
    """
    check_world("af.main_first", world)
    if getattr(_went, "in_first", False):
        msg = (
            "This af.main_first block is inside another af.main_first block. The other ranks"
            " wait until the outer block ends, and the end of the inner block would let them"
            " continue too early. Merge the two blocks, or put the second after the first."
        )
        raise ArgumentError(msg)
    first = world.local_rank == 0 if local else world.is_main
    if not first:
        barrier(world, label="main_first")
    _went.in_first = True
    try:
        yield
    finally:
        _went.in_first = False
        if first:
            barrier(world, label="main_first")


def print_in_order(world: World, *values: object) -> None:
    """Print the values of all ranks on rank 0, a line for each rank: "rank 1: ...".

    Cost: a gather of the printed texts.
    """
    check_world("af.print_in_order", world)
    line = " ".join(map(str, values))
    texts = gather_text(line, world, label="print_in_order")
    if world.is_main:
        for rank, text in enumerate(texts):
            print(f"rank {rank}: {text}", flush=True)  # noqa: T201 - on purpose


def print_once(world: World, *values: object, local: bool = False) -> None:
    """Print values on rank 0 only; with `local`, once on every machine."""
    check_world("af.print_once", world)
    if world.local_rank == 0 if local else world.is_main:
        print(*values, flush=True)  # noqa: T201 - on purpose


def assert_replicas_agree(state: TrainState) -> None:
    """Raise an error on all ranks if their states differ in any bit.

    This compares the numbers of updates and of skipped updates, the seed, the cursor,
    parameters, optimizer state, slots and buffers, in this order. It ignores the state of a
    stream, and slot entries that differ by rank according to their transform. Under `local_sgd`
    the ranks' states are equal only after an average, and BatchNorm statistics are equal only
    under `sync_batchnorm`.

    Law: a difference of one bit is found, and so is the swap of two elements. If a model is
    sharded, its copies along "dp_replicate" are compared; a single copy is not compared.

    Cost: a few passes over every tensor, and two gathers of one line of text for each tensor.

    Raises:
        ReplicaMismatchError: ranks differ. The message shows the first difference, with one row
            for each rank.
    """
    check_state("af.assert_replicas_agree", state)
    state.lease.check()
    tensors = {
        "step": state.step,
        "num_skipped": state.num_skipped,
        "seed": state.seed,
        "cursor": {"epoch": state.cursor.epoch, "samples": state.cursor.samples},
        "params": state.params,
        "opt_state": state.opt_state,
        "slots": shared_slots(state.slots, by_rank(state.setup)),
        "buffers": state.buffers,
    }
    is_split = state.definition.layout is not None
    check_same_values(tensors, state.world, is_split=is_split, advice=_DRIFTED)


_DRIFTED = (
    "Possible causes: a transform or a step uses values that differ by rank, parameters were"
    " changed outside of a step, or an operation is not deterministic. Without"
    " af.sync_batchnorm(), BatchNorm buffers differ by rank. Under af.local_sgd, all tensors"
    " differ until the next average."
)


# `logger`: Python's `logging`, for a program that runs on every rank.


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A `logging` logger that writes on some ranks of a world; see `af.logger`."""

    def __init__(self, name: str, world: World, ranks: Collection[int]) -> None:
        """Wrap `logging.getLogger(name)`, with its handlers and levels."""
        extra = {"rank": world.rank, "world_size": world.size}
        super().__init__(logging.getLogger(name), extra)
        self._world, self._ranks = world, frozenset(ranks)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's name
        """Return whether this rank writes records of this level."""
        return self._world.rank in self._ranks and super().isEnabledFor(level)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to a record, and to its text if several ranks write."""
        extra = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        several = len(self._ranks) > 1
        text = f"rank {self._world.rank}: {msg}" if several else msg
        return text, {**kwargs, "extra": extra}

    def in_order(self, level: int, msg: object, *args: object) -> None:
        """Log the messages of all ranks on rank 0, in rank order; call this on all ranks.

        This also logs the messages of ranks that otherwise do not write.

        Cost: a gather of the texts, even if the level is not enabled.
        """
        # a LogRecord formats `args` like every logger, including a single mapping
        text = logging.LogRecord("", level, "", 0, msg, args, None).getMessage()
        texts = gather_text(text, self._world, label="log in order")
        if self._world.is_main:
            for i, line in enumerate(texts):
                extra = {"rank": i, "world_size": self._world.size}
                self.logger.log(
                    level, "rank %d: %s", i, line, extra=extra, stacklevel=2
                )


def logger(name: str, world: World, *, ranks: Collection[int] = (0,)) -> RankLogger:
    """Return a `logging` logger that writes on rank 0 only, or on the ranks that you choose.

    The logger wraps `logging.getLogger(name)`. Set handlers, levels and formats as usual.
    Formats can use `rank` and `world_size`. If several ranks write, each text begins with its
    rank, such as "rank 1: ". Ranks that do not write also format no text.

    Args:
        name: the name of the logger, usually `__name__`.
        world: the ranks that call the logger.
        ranks: the ranks that write; pass `range(world.size)` for all ranks.

    Cost: that of `logging`. Only `in_order`, which logs the messages of all ranks on rank 0,
    communicates: it gathers the texts.

    Raises:
        ArgumentError: the world has no such rank.

    Example:
        >>> log = logger("train", World.single())
        >>> log.info("update %d", 100)
        >>> log.in_order(logging.INFO, "loss %.1f", 0.5)
    """
    check_world("af.logger", world)
    several = isinstance(ranks, Collection) and not isinstance(ranks, str) and ranks
    if not several or not all(is_integer(r, 0) and r < world.size for r in ranks):
        msg = f"af.logger(ranks={ranks!r}): expected ranks from 0 to {world.size - 1}."
        raise ArgumentError(msg)
    return RankLogger(name, world, ranks)
