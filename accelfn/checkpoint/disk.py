# SPDX-License-Identifier: Apache-2.0
"""All that is done to a disk: few acts, each of which is done or is not, in order.

Nothing counts as written before it was flushed, and nothing as named before its directory
was: what a file system keeps of the rest after a crash is any part of it (Pillai et al.
2014, "All File Systems Are Not Created Equal").
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeAlias

Chunk: TypeAlias = bytes | memoryview


def create(directory: Path) -> None:
    """Make a directory, and its parents; it must not exist."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir()


def write(
    path: Path, chunks: Iterable[Chunk], seen: Callable[[Chunk], object] | None = None
) -> None:
    """Write a new file and flush it; `seen` is called with each chunk that was written.

    A flush that failed is not tried again: its pages count as clean, and are lost
    (Rebello et al. 2020, "Can Applications Recover from fsync Failures?").
    """
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            if seen is not None:
                seen(chunk)
        file.flush()
        os.fsync(file.fileno())


def flush(directory: Path) -> None:
    """Make the names in a directory last."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(path: Path, new: Path) -> None:
    """Give a directory a name that nothing has, and make it last."""
    if new.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    path.rename(new)
    flush(new.parent)


def remove(directory: Path) -> None:
    """Remove a directory and all in it, if it is there."""
    if directory.exists():
        shutil.rmtree(directory)


def open_plain(path: Path) -> BinaryIO:
    """Open a file to be read.

    Raises:
        OSError: it is not there, or is a link, a directory or a device.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb", buffering=0)
