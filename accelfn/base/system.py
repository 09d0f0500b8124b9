# SPDX-License-Identifier: Apache-2.0
"""Calls that macOS, Windows or older versions of torch lack."""

import ctypes
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelfn.errors import CompositionError

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

IS_WINDOWS = sys.platform == "win32"

AS_BYTES: int = getattr(os, "O_BINARY", 0)
"""The flag to open a file as bytes on Windows."""
_PLAIN = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK"))
READ_PLAIN: int = os.O_RDONLY | AS_BYTES | sum(_PLAIN)
"""Flags to open a file for reading as bytes, without following a link or waiting for a pipe."""

libc: Any = None if IS_WINDOWS else ctypes.CDLL(None)
"""The C library of this process; None on Windows."""


def lock(handle: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed.

    Raises:
        BlockingIOError: another process has the lock, and `wait` is false.
        OSError: the system or the file system has no such locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)


def call_after_fork(function: Callable[[], None]) -> None:
    """Call a function in each child process that is forked from this process."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        # of the whole process: in a simulation, each thread is limited to one core
        return len(os.sched_getaffinity(os.getpid()))
    return os.cpu_count() or 1


def peak_resident_bytes() -> int | None:
    """Return the largest memory of this process so far; None on Windows."""
    if resource is None:
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def interrupt(main_thread: int) -> None:
    """Send SIGINT to the main thread, and end its system call if the system can."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main_thread, signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)


def read_at(handle: int, begin: int, buffer: memoryview) -> int:
    """Read bytes from a position of an open file into a buffer; return their number."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [buffer], begin)
    with _moving:  # threads share the file's position
        os.lseek(handle, begin, os.SEEK_SET)
        data = os.read(handle, len(buffer))
    buffer[: len(data)] = data
    return len(data)


_moving = threading.Lock()


# Versions of torch.


_LEAST = (2, 11)
VERSION = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])

IS_OLD = VERSION < (2, 13)
"""Whether some names of torch 2.13 are missing; see docs/compatibility.md."""

reduce_scatter_single: Any = vars(dist)[
    "reduce_scatter_tensor" if IS_OLD else "reduce_scatter_single"
]


def check_floor() -> None:
    """Raise if torch is too old for accelfn.

    Raises:
        ImportError: torch is older than 2.11.
    """
    if VERSION < _LEAST:
        msg = (
            f"accelfn needs torch 2.11 or later, but this is torch {torch.__version__}. Install a"
            " newer torch: python -m pip install -U torch."
        )
        raise ImportError(msg)


def check_new(owner: object) -> None:
    """Raise if a transform needs torch 2.13.

    Raises:
        CompositionError: torch is older.
    """
    if IS_OLD:
        msg = f"{owner!r} needs torch 2.13 or later, but this is torch {torch.__version__}."
        raise CompositionError(msg)


def ddp_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return DDP's options, with the names that this version of torch has for them."""
    if not IS_OLD:
        return options
    sync = options.pop("forward_sync_buffers", True)
    return {**options, "broadcast_buffers": sync}
