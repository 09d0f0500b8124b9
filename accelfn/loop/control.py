# SPDX-License-Identifier: Apache-2.0
"""Run control: run plain code on some ranks of a world, or on rank 0 first."""

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
from accelfn.state.state import TrainState, check_same_values, shared_slots
from accelfn.world import World

P = ParamSpec("P")
R = TypeVar("R")


def on_rank(
    world: World, rank: int = 0, *, local: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Create a decorator: the function runs on one rank, and returns None on others.

    It does not communicate; to share the result, see `af.broadcast_object`.

    Args:
        world: the ranks that call the function.
        rank: the rank that runs it; -1 is the last rank.
        local: whether `rank` is a local rank, so that it runs once on each machine.

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
    """Create a decorator: the function runs on rank 0, and returns None on others.

    Args:
        world: the ranks that call the function.
        local: whether it runs on the first rank of each machine, for example to write to a
            local disk.

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
        msg = (
            f"{call}(rank={rank!r}): expected {kind} from 0 to {size - 1}, or one counted"
            f" from the last, from -1 to {-size}."
        )
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
"""Whether each thread is in a block of `main_first`: simulated ranks are threads."""


@contextmanager
def main_first(world: World, *, local: bool = False) -> Generator[None]:
    """Let rank 0 leave a `with` block before the other ranks enter it.

    Use it for work that needs to be done once, such as a download or a cache. If rank 0 raises,
    the other ranks still enter, and do the work or fail themselves.

    Args:
        world: the ranks that come to the block.
        local: whether the first rank of each machine goes first, for work on a local disk.

    Law: no other rank enters before rank 0 has left; with `local`, before the first ranks of
    all machines have left.

    Cost: one barrier.

    Raises:
        ArgumentError: the block is inside another such block; the other ranks wait for its end.
    """
    check_world("af.main_first", world)
    if getattr(_went, "in_first", False):
        msg = (
            "af.main_first is within another such block, and other ranks wait for its end: the"
            " inner block would let them in. Make one block, or one after the other."
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
    """Print a line for each rank on rank 0, in rank order: "rank 1: ...".

    Cost: a gather of the texts.
    """
    check_world("af.print_in_order", world)
    line = " ".join(map(str, values))
    texts = gather_text(line, world, label="print_in_order")
    if world.is_main:
        for rank, text in enumerate(texts):
            print(f"rank {rank}: {text}", flush=True)  # noqa: T201 - printing is its purpose


def print_once(world: World, *values: object, local: bool = False) -> None:
    """Print on rank 0 only; with `local`, once on every machine."""
    check_world("af.print_once", world)
    if world.local_rank == 0 if local else world.is_main:
        print(*values, flush=True)  # noqa: T201 - printing is its purpose


def assert_replicas_agree(state: TrainState) -> None:
    """Raise, on all ranks, unless they have the same state.

    It compares the numbers of updates taken and skipped, the seed, the place in the data,
    parameters, optimizer state, slots and buffers, bit by bit and in this order. It leaves out
    entries of slots that differ by rank, as their transforms declare, and the state of a stream.
    Under `local_sgd` replicas agree only after an average, and batch statistics only under
    `sync_batchnorm`.

    Law: it finds a difference of one bit, or of the places of two elements. If a model is split,
    it compares the copies along "dp_replicate", and a single copy with nothing.

    Cost: a few passes over every tensor, and two gathers of a line for each tensor.

    Raises:
        ReplicaMismatchError: ranks differ; the error has the first difference, a row per rank.
    """
    if not isinstance(state, TrainState):
        msg = f"af.assert_replicas_agree: expected a TrainState, got {type(state).__name__}."
        raise ArgumentError(msg)
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
    "Look for values that differ by rank in your transforms and steps, for parameters that are"
    " written outside of a step, and for operations that are not deterministic. Buffers of"
    " batch statistics differ without af.sync_batchnorm(), and all tensors differ between the"
    " averages of af.local_sgd."
)


# `logger`: the standard `logging`, for a program that runs on every rank.


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger of the standard library for some ranks of a world; see `af.logger`."""

    def __init__(self, name: str, world: World, ranks: Collection[int]) -> None:
        """Take the logger of that name, with its handlers and levels."""
        extra = {"rank": world.rank, "world_size": world.size}
        super().__init__(logging.getLogger(name), extra)
        self._world, self._ranks = world, frozenset(ranks)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's name
        """Return whether this rank writes at the level."""
        return self._world.rank in self._ranks and super().isEnabledFor(level)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to the record, and to the text if several ranks write."""
        extra = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        several = len(self._ranks) > 1
        text = f"rank {self._world.rank}: {msg}" if several else msg
        return text, {**kwargs, "extra": extra}

    def in_order(self, level: int, msg: object, *args: object) -> None:
        """Log a message of each rank on rank 0, in rank order; call it on all ranks.

        It logs the messages of all ranks, also of ranks that do not write.

        Cost: a gather of the texts, even if the level is not enabled.
        """
        # formats as all loggers do, also for a mapping
        text = logging.LogRecord("", level, "", 0, msg, args, None).getMessage()
        texts = gather_text(text, self._world, label="log in order")
        if self._world.is_main:
            for i, line in enumerate(texts):
                extra = {"rank": i, "world_size": self._world.size}
                self.logger.log(
                    level, "rank %d: %s", i, line, extra=extra, stacklevel=2
                )


def logger(name: str, world: World, *, ranks: Collection[int] = (0,)) -> RankLogger:
    """Return a logger of the standard library for rank 0 only, or for some ranks.

    It is `logging.getLogger(name)` for one world. You set handlers, levels and formats as
    usual. Records have `rank` and `world_size` for formats. If several ranks write, texts
    begin with "rank 1: ". On the other ranks the level is off, so nothing is formatted.

    Args:
        name: name of the logger, usually `__name__`.
        world: the ranks that log.
        ranks: the ranks that write; `range(world.size)` for all.

    Cost: that of `logging`; `in_order`, which writes the messages of all ranks, gathers the
    texts.

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
