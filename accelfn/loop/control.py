# SPDX-License-Identifier: Apache-2.0
"""Run control: run plain code on some ranks of a world, or on rank 0 first."""

import logging
import threading
from collections.abc import Callable, Collection, Generator, MutableMapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from accelfn.base.arguments import is_integer
from accelfn.collectives import barrier, gather_text
from accelfn.collectives.failures import check_world
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

    There is no communication; to share the result, see `af.broadcast_object`.

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
    mine, size = world.rank, world.size
    if local:
        mine, size = world.local_rank, world.local_size
    if not is_integer(rank) or not -size <= rank < size:
        where = "a local rank" if local else "a rank"
        msg = (
            f"{call}(rank={rank!r}): expected {where} from 0 to {size - 1}, or one counted"
            f" from the last, from -1 to {-size}."
        )
        raise ArgumentError(msg)
    runs = mine == rank % size

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        if not callable(function):
            msg = f"{call}(...)({function!r}): expected a function."
            raise ArgumentError(msg)

        @wraps(function)
        def there(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if runs else None

        return there

    return decorate


_went = threading.local()
"""Whether each thread is in a block of `main_first`: simulated ranks are threads."""


@contextmanager
def main_first(world: World, *, local: bool = False) -> Generator[None]:
    """Let rank 0 go through a `with` block before the others enter it.

    For work whose result the others find done: a download, a cache. Where rank 0 raises, the
    others are let in all the same, and do it or fail for themselves.

    Args:
        world: whose ranks come to the block.
        local: whether the first rank of each machine goes first, all of these at a time: for
            work on a disk that each machine has for itself.

    Law: no other rank enters before rank 0 has left; with `local`, before the first ranks of
    all machines have.

    Cost: one barrier.

    Raises:
        ArgumentError: it is within another such block, for whose end the others wait.
    """
    check_world("af.main_first", world)
    if getattr(_went, "in_first", False):
        msg = (
            "af.main_first is within another such block, for whose end other ranks wait: the"
            " inner one would let them in. Make one block of them, or one after the other."
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
    mine = " ".join(map(str, values))
    texts = gather_text(mine, world, label="print_in_order")
    if world.is_main:
        for rank, text in enumerate(texts):
            print(f"rank {rank}: {text}", flush=True)  # noqa: T201 - it is what it is for


def print_once(world: World, *values: object, local: bool = False) -> None:
    """Print on rank 0 only; with `local`, once on every machine."""
    check_world("af.print_once", world)
    if world.local_rank == 0 if local else world.is_main:
        print(*values, flush=True)  # noqa: T201 - printing is what it is for


def assert_replicas_agree(state: TrainState) -> None:
    """Raise, on all ranks, unless they hold the same state.

    Compared are, in this order, the numbers of updates taken and skipped, the seed, the place
    in the data, parameters, optimizer state, slots and buffers, bit by bit. Entries
    of slots of which transforms tell that they differ by rank are not, nor is the memory of a
    stream of data. Under `local_sgd` replicas agree only after an average, and batch
    statistics only under `sync_batchnorm`.

    Law: ranks that differ in one bit, or in the places of two elements, are told. Where a model
    is split, its copies along "dp_replicate" are; one copy has nothing to be compared with.

    Cost: a few passes over every tensor, and two gathers, of a line for each.

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    if not isinstance(state, TrainState):
        msg = f"af.assert_replicas_agree: expected a TrainState, got {type(state).__name__}."
        raise ArgumentError(msg)
    state.lease.check()
    compared = {
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
    check_same_values(compared, state.world, is_split=is_split, advice=_DRIFTED)


_DRIFTED = (
    "Look for what differs by rank in transforms and steps of your own, for parameters that are"
    " written outside of a step, and for operations that are not deterministic. Buffers of"
    " batch statistics are each rank's own without af.sync_batchnorm(), and all is so between"
    " the averages of af.local_sgd."
)


# `logger`: the standard `logging`, for a program that runs on every rank.


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger of the standard library that some ranks of a world write to; see `af.logger`."""

    def __init__(self, name: str, world: World, ranks: Collection[int]) -> None:
        """Take the logger of that name, which handlers and levels are set on as ever."""
        where = {"rank": world.rank, "world_size": world.size}
        super().__init__(logging.getLogger(name), where)
        self._world, self._ranks = world, frozenset(ranks)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's name
        """Return whether this rank writes at the level."""
        return self._world.rank in self._ranks and super().isEnabledFor(level)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank: to the record, and to the text where several write."""
        extra = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        several = len(self._ranks) > 1
        text = f"rank {self._world.rank}: {msg}" if several else msg
        return text, {**kwargs, "extra": extra}

    def in_order(self, level: int, msg: object, *args: object) -> None:
        """Log a message of each rank on rank 0, in rank order; call it on all ranks.

        Whoever the logger's ranks are, all are heard.

        Cost: a gather of the texts, whether the level is enabled or not.
        """
        # what makes the texts of all loggers makes these: of a mapping, too
        text = logging.LogRecord("", level, "", 0, msg, args, None).getMessage()
        texts = gather_text(text, self._world, label="log in order")
        if self._world.is_main:
            for rank, each in enumerate(texts):
                where = {"rank": rank, "world_size": self._world.size}
                self.logger.log(
                    level, "rank %d: %s", rank, each, extra=where, stacklevel=2
                )


def logger(name: str, world: World, *, ranks: Collection[int] = (0,)) -> RankLogger:
    """Return a logger of the standard library that rank 0 alone writes to, or some ranks.

    It is `logging.getLogger(name)` for one world: handlers, levels and formats are set as
    ever, by whoever runs the program. Records have `rank` and `world_size`, for formats; where
    several ranks write, texts begin with "rank 1: ". On the others it is as if the level were
    off, so nothing is formatted.

    Args:
        name: of the logger, `__name__` as a rule.
        world: whose ranks log.
        ranks: those that write; `range(world.size)` for all.

    Cost: none beside `logging`'s; `in_order`, which writes what all ranks say in their order,
    gathers the texts.

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
