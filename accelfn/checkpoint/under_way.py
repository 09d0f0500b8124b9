# SPDX-License-Identifier: Apache-2.0
"""The save that a store's thread writes, and how all ranks hear of its end."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from accelfn.checkpoint import disk
from accelfn.checkpoint.background import Writing, close_talk
from accelfn.collectives import gather_text
from accelfn.errors import CheckpointWriteError, PeerFailedError

if TYPE_CHECKING:
    from accelfn.world import World


class UnderWay:
    """A save that was begun and not waited for, if there is one.

    Attributes:
        writing: what its thread does.
        world: of the state that was saved last.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.writing: Writing | None = None
        self.world: World | None = None

    def is_of_others(self, now: "World | None") -> bool:
        """Return whether ranks have met anew since, in the world of the state at hand."""
        if now is None or now.connection.regrouping is None:
            return False
        return self.world is None or self.world.connection is not now.connection

    def ended(self) -> CheckpointWriteError | None:
        """Wait for its end, and return its error, the same on all ranks.

        Of one that failed nothing is left.

        Raises:
            PeerFailedError: a rank is gone.
        """
        writing, world = self.writing, self.world
        if world is not None and world.connection.successor is not None:
            return self.left()
        if writing is None or world is None:
            return None
        step = writing.save.step
        # all have begun theirs: in a simulated world ranks take turns
        gather_text("", world, label=f"store: wait for step {step}")
        error = writing.join()
        if isinstance(error, PeerFailedError):
            self.writing = None
            world.connection.tell("waited in a save", is_waiting=True)
            raise error
        text = "" if error is None else str(error)
        told = _first(gather_text(text, world, label=f"store: outcome of step {step}"))
        self.writing = None  # not before: an interrupt may have ended the waiting
        if world.is_main:
            close_talk(writing.save)
            if told is not None:  # by now nobody writes to it
                with suppress(OSError):  # the next save removes it
                    disk.remove(writing.save.partial)
        if told is not None:
            told.__cause__ = None if error is None else error.__cause__
        return told

    def left(self) -> CheckpointWriteError | None:
        """End a save of ranks of which one is gone, and return another error than that.

        It is there as a whole, or nothing of it: then a line on stderr says so.
        """
        writing, self.writing = self.writing, None
        if writing is None:
            return None
        writing.hurry()
        error = writing.join()
        if isinstance(error, CheckpointWriteError):
            return error
        if error is not None and not disk.is_there(writing.save.final):
            sys.stderr.write(f"accelfn: {error}\n")
        return None

    def goes_on_in(
        self, world: "World", error: CheckpointWriteError | None
    ) -> CheckpointWriteError | None:
        """Begin in another world, and return the error that a rank of it brings along."""
        text = "" if error is None else str(error)
        told = _first(gather_text(text, world, label="store: ranks have met anew"))
        self.world = world
        return told


def _first(texts: list[str]) -> CheckpointWriteError | None:
    """Return the first error of what ranks have said, if there is one."""
    failed = [CheckpointWriteError(text) for text in texts if text]
    return failed[0] if failed else None
