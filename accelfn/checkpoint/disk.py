# SPDX-License-Identifier: Apache-2.0
"""Disk operations of checkpoints: write, rename, remove, lock. Each is durable on return.

Contents count as written after a flush of the file, and names after a flush of the directory.
After a crash, a file system may have kept any part of unflushed changes (Pillai et al. 2014,
"All File Systems Are Not Created Equal").
"""

import ctypes
import errno
import fcntl
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeAlias

from accelfn.base import arguments

Chunk: TypeAlias = bytes | memoryview
_PIECE = 1 << 23
"""Bytes after which the disk starts to flush a file."""
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""Available on Linux."""
if _sync_file_range is not None:
    _sync_file_range.argtypes = (
        *(ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        ctypes.c_uint,
    )
_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start to flush without waiting."""


def make(directory: Path) -> None:
    """Make a directory and its missing parents, and flush them."""
    if not arguments.is_directory(directory):
        if directory.is_symlink():
            what = f"a link to {directory.readlink()}, which is not a directory"
            raise NotADirectoryError(errno.ENOTDIR, what, str(directory))
        make(directory.parent)
        directory.mkdir(exist_ok=True)
        flush(directory.parent)


def create(directory: Path) -> None:
    """Make a new directory and its missing parents."""
    make(directory.parent)
    directory.mkdir()


def write(path: Path, chunks: Iterable[Chunk]) -> None:
    """Write and flush a new file; the disk flushes a piece while the next is written.

    A failed flush is not repeated: its pages count as clean and are lost (Rebello et al.
    2020, "Can Applications Recover from fsync Failures?").
    """
    try:
        with path.open("xb") as file:
            begun = written = 0
            for chunk in chunks:
                written += file.write(chunk)
                if written - begun >= _PIECE:
                    _begin_flush(file.fileno(), begun, written)
                    begun = written
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        _raise_named(error, path)


def _begin_flush(handle: int, begin: int, end: int) -> None:
    """Start to flush a part of a file; the final flush reports errors."""
    if _sync_file_range is not None:
        _sync_file_range(handle, begin, end - begin, _WRITE)


def flush(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        _raise_named(error, directory)
    finally:
        os.close(handle)


def rename(path: Path, new: Path) -> None:
    """Rename a directory to an unused name and flush, or leave the old name."""
    if arguments.exists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    path.rename(new)
    try:
        flush(new.parent)
    except Exception:
        new.rename(path)
        raise


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it exists."""
    with suppress(FileNotFoundError):  # another process may remove it at the same time
        if arguments.is_directory(path) and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def claim(path: Path, text: str) -> bool:
    """Write a small file atomically; return False if the file exists already."""
    draft = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        write(draft, [text.encode()])
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:
            return _claim_unlinked(path, text)
    finally:
        with suppress(OSError):  # the next save removes it
            remove(draft)
    return True


def _claim_unlinked(path: Path, text: str) -> bool:
    """Write the file on a file system without links; a crash may truncate the text."""
    try:
        write(path, [text.encode()])
    except FileExistsError:
        return False
    except OSError:
        remove(path)
        raise
    return True


def withdraw(path: Path, text: str) -> bool:
    """Remove a file that has this text; return True in exactly one process."""
    try:
        with path.open("rb+") as file:
            with suppress(OSError):  # some file systems have no such locks
                fcntl.flock(file, fcntl.LOCK_EX)
            is_same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            if not is_same or file.read() != text.encode():
                return False
            path.unlink()
    except FileNotFoundError:
        return False
    return True


def tell(path: Path, text: str) -> None:
    """Publish a text to other ranks atomically; an empty file if the disk is full."""
    unfinished = path.with_name(f".{path.name}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.rename(path)
    except OSError:
        path.touch()


def hold(path: Path) -> BinaryIO | None:
    """Make a file and lock it until it is closed or this process ends in any way.

    Returns: the file; None if the file system has no such locks.
    """
    unfinished = path.with_name(f".{path.name}")
    with suppress(OSError):
        file = unfinished.open("xb", buffering=0)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(_mount(file.fileno()))
            unfinished.rename(path)
        except BaseException:
            file.close()
            raise
        return file
    return None


def is_let_go(path: Path) -> bool:
    """Return whether a process of this machine has released its lock of a file."""
    with suppress(OSError), path.open("rb") as file:
        if file.read() == _mount(file.fileno()):
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    return False


def _mount(handle: int) -> bytes:
    """Return an identity of this machine and mount: locks are reliable only within one."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = socket.gethostname()
    return f"{machine.strip()} {os.fstat(handle).st_dev}".encode()


def is_there(path: Path) -> bool:
    """Return whether a path exists; False if the disk cannot tell."""
    with suppress(OSError):
        return arguments.exists(path)
    return False


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: the path is missing, or is a link, a directory or a device.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return os.fdopen(handle, "rb", buffering=0)
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _raise_named(error: OSError, path: Path) -> NoReturn:
    """Raise the error with the path, which a failed write or flush leaves out."""
    if error.filename is not None or error.errno is None:
        raise error
    raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
