# SPDX-License-Identifier: Apache-2.0
"""`logger`: the standard `logging`, for a program that runs on every rank."""

import logging
from collections.abc import Collection, MutableMapping
from typing import Any

from accelfn.base.arguments import is_integer
from accelfn.base.calling import called
from accelfn.collectives import gather_text
from accelfn.collectives.agreed import check_world
from accelfn.errors import ArgumentError
from accelfn.world import World


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


@called
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
