# SPDX-License-Identifier: Apache-2.0
"""The roll call: ranks that fail tell each other what became of them.

A backend says that some connection broke. Which rank raised what, and which are silent, they
tell each other through the store that they met at. It costs nothing until a rank fails.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from attrs import asdict, frozen

from accelfn.errors import PeerFailedError
from accelfn.world.activity import Activity

_LEFT = "left"
"""What becomes of a rank whose world is closed, and nothing was wrong."""
_NAME = "accelfn roll call"
_JOINED, _KNOWS = "joined", "knows that all are joined"
_LOOKS_EVERY = 0.01
_ANSWERS_WITHIN = 0.5
"""Seconds: a store at which nobody is at home may keep its caller for ever."""
_LINGERS = 2.0
"""Seconds: other ranks come to their timeouts later, on a busy machine much later."""


@frozen(kw_only=True)
class Standing:
    """What became of a rank.

    Attributes:
        how: `raised ValueError: boom`, `left`, `waited in 'mean'`.
        step: the update that it was at, if any was.
        when: "at" that update, or "after" it.
        is_waiting: whether it waited for others, and is not what they waited for.
    """

    how: str
    step: int | None = None
    when: str = "at"
    is_waiting: bool = False

    def __str__(self) -> str:
        """Say it in words."""
        if self.step is None:
            return self.how
        return f"{self.how} {self.when} update {self.step}"


def name_error(kind: str, text: str) -> str:
    """Return an error's kind and its first line; of what torch wraps, those of the cause.

    torch raises what a data worker has raised anew, with a text that begins "Caught ValueError
    in DataLoader worker process 0." and has the worker's traceback.
    """
    first, _, rest = text.partition("\n")
    if first.startswith("Caught ") and rest.startswith("Original "):
        last = rest.rpartition("Traceback (most recent call last):\n")[2]
        causes = [line for line in last.splitlines() if not line.startswith(" ")]
        if causes:
            return f"{causes[0]} (in {first.rstrip('.').partition(' in ')[2]})"
    return f"{kind}: {first}" if first else kind


def list_unjoined(store: dist.Store, size: int) -> list[int]:
    """Return the ranks that are not joined, as far as the store of their world tells."""
    said = dist.PrefixStore(_NAME, store)
    return [rank for rank in range(size) if not said.check([f"{_JOINED} {rank}"])]


class RollCall:
    """What one rank tells the others of a world at its end, and hears from them.

    Attributes:
        rank_0_keeps_it: whether the store ends with rank 0, and not with a launcher.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, rank_0_keeps_it: bool
    ) -> None:
        """Take the store at which they met."""
        self._met, self._store = store, dist.PrefixStore(_NAME, store)
        self._rank, self._size = rank, size
        with suppress(
            RuntimeError
        ):  # what it told as an earlier world of the same group
            self._store.delete_key(str(rank))
        self.rank_0_keeps_it = rank_0_keeps_it
        self._told: Standing | None = None

    def begin(self, timeout: float) -> None:
        """Wait until all ranks are joined: one that went before would break what joins others.

        Whoever keeps the store goes on last, so that nobody waits at a store that is gone.

        Raises:
            PeerFailedError: a rank was not joined within so many seconds, or ended before.
        """
        until = time.monotonic() + timeout
        try:
            self._say(_JOINED)
            self._await_all(_JOINED, timeout)
            self._say(_KNOWS)
            if self._rank == 0:
                self._await_all(_KNOWS, max(until - time.monotonic(), 0.1))
        except RuntimeError as error:
            msg = (
                f"Rank {self._rank} of {self._size} opened its world, but {self._absent()} did"
                f" not within {round(timeout, 1):g} s, or ended meanwhile. Look at its output"
                " for the cause."
            )
            raise PeerFailedError(msg) from error

    def _say(self, word: str) -> None:
        self._store.set(f"{word} {self._rank}", "")

    def _await_all(self, word: str, timeout: float) -> None:
        """Wait until all have said a word."""
        words = [f"{word} {rank}" for rank in range(self._size)]
        self._store.wait(words, timedelta(seconds=timeout))

    def _absent(self) -> str:
        """Return in words who is not joined, as far as the store tells."""
        try:
            late = list_unjoined(self._met, self._size)
        except RuntimeError:
            late = [0] if self.rank_0_keeps_it else []
        named = " and ".join(map(str, late))
        return f"rank {named}" if named else "another rank"

    def leave(self, activity: Activity) -> None:
        """Tell the others that this rank's world is closed, and nothing was wrong."""
        self.tell(_LEFT, activity, is_waiting=False)

    def tell(self, how: str, activity: Activity, *, is_waiting: bool) -> None:
        """Tell the others, if the store can still be reached; the first time counts."""
        if self._told is not None:
            return
        when = "after" if activity.is_between and not is_waiting else "at"
        self._told = standing = Standing(
            how=how, step=activity.step, when=when, is_waiting=is_waiting
        )
        with suppress(RuntimeError):  # its host has gone
            self._store.set(str(self._rank), json.dumps(asdict(standing)))

    def hear(self) -> dict[int, Standing] | None:
        """Return what others tell, by rank; None where the store does not answer, or goes.

        It returns once all have spoken, or one whose fault it is, and after half a second
        without those that are silent.
        """
        # of two, the one that this rank waited for is the one that speaks, or not
        return self._heard(
            lambda heard: (
                self._size == 2 or any(not h.is_waiting for h in heard.values())
            ),
            within=_ANSWERS_WITHIN,
        )

    def linger(self) -> None:
        """Keep the store, where this rank has failed that does, until others have spoken."""
        failed = self._told is not None and self._told.how != _LEFT
        if failed and self._rank == 0 and self.rank_0_keeps_it:
            self._heard(lambda _: False, within=_LINGERS)

    def _heard(
        self, is_enough: Callable[[dict[int, Standing]], bool], *, within: float
    ) -> dict[int, Standing] | None:
        heard: dict[int, Standing] = {}
        has_answered, has_gone = threading.Event(), threading.Event()
        until = time.monotonic() + within

        def listen() -> None:
            try:
                while True:
                    heard.update(self._spoken(heard))
                    has_answered.set()
                    is_whole = len(heard) == self._size - 1
                    if is_whole or is_enough(heard) or time.monotonic() > until:
                        return
                    time.sleep(_LOOKS_EVERY)
            except RuntimeError:  # the others may have spoken to nobody
                has_gone.set()

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        # a store whose host was stopped, or cut off, never answers
        listening.join(within + _ANSWERS_WITHIN)
        is_known = has_answered.is_set() and not has_gone.is_set()
        return dict(heard) if is_known else None

    def _spoken(self, heard: dict[int, Standing]) -> dict[int, Standing]:
        """Return what those have told that were not heard yet."""
        others = [r for r in range(self._size) if r != self._rank and r not in heard]
        told = [rank for rank in others if self._store.check([str(rank)])]
        return {
            rank: Standing(**json.loads(self._store.get(str(rank)))) for rank in told
        }
