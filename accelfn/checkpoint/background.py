# SPDX-License-Identifier: Apache-2.0
"""Saving behind the training's back: a copy in host memory, and a thread that writes it.

Collectives belong to the training's thread. So ranks agree by small files in a directory
beside the checkpoint, which they all see, for they write the checkpoint itself to it.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch

from accelfn.checkpoint import commit, disk
from accelfn.checkpoint.commit import Contents, Save
from accelfn.errors import CheckpointWriteError

_PATIENCE = 600.0
"""Seconds after which a rank that has not said anything is given up."""


class Buffers:
    """Host memory into which tensors are copied, the same at each save."""

    def __init__(self) -> None:
        """Begin without any."""
        self._held: dict[str, torch.Tensor] = {}

    def copies_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors' values in host memory, which the next call overwrites."""
        copies: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor in tensors.items():
            held = self._held.get(name)
            if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                held = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            copies[name] = held.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        self._held = copies
        return copies


@attrs.define
class Talk:
    """How ranks agree by files in a directory that all see.

    Attributes:
        directory: of the files.
        rank: of the world.
        size: of the world.
        turn: how many times they have.
    """

    directory: Path
    rank: int
    size: int
    turn: int = 0

    def __call__(self, what: str, text: str) -> list[str]:
        """Say this rank's text, and return that of all ranks, when all have said theirs.

        Raises:
            CheckpointWriteError: a rank said nothing for minutes.
        """
        self.turn += 1
        said = self.directory / f"{self.turn}-{self.rank}"
        disk.tell(said, text)
        wanted = [self.directory / f"{self.turn}-{rank}" for rank in range(self.size)]
        pause, end = 0.001, time.monotonic() + _PATIENCE
        while absent := [path for path in wanted if not path.exists()]:
            if time.monotonic() > end:
                ranks = ", ".join(path.name.partition("-")[2] for path in absent)
                msg = f"rank {ranks} did not {what} within {_PATIENCE:.0f} s."
                raise CheckpointWriteError(msg)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return [path.read_text() for path in wanted]


def talk_directory(final: Path) -> Path:
    """Return where ranks agree about a checkpoint."""
    return final.parent / f".tmp-{final.name}.talk"


class Writing:
    """A save that is under way in a thread."""

    def __init__(
        self, save: Save, contents: Contents, then: Callable[[], object]
    ) -> None:
        """Begin to write; the contents' tensors must not change before `join`."""
        self.save = save
        self._error: BaseException | None = None
        talk = Talk(talk_directory(save.final), save.rank, save.size)
        self._thread = threading.Thread(
            target=self._run, args=(contents, talk, then), name="accelfn-save"
        )
        self._thread.start()

    def _run(self, contents: Contents, talk: Talk, then: Callable[[], object]) -> None:
        try:
            commit.write(self.save, contents, talk)
            then()
        except BaseException as error:  # noqa: BLE001 - raised in the training's thread
            self._error = error

    def join(self) -> BaseException | None:
        """Wait for the end, and return the error with which it ended."""
        self._thread.join()
        return self._error
