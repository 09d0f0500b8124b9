# SPDX-License-Identifier: Apache-2.0
"""What the disk says of a path, or that it says nothing.

From Python 3.14 on pathlib's `exists`, `is_dir` and `is_file` take any error of the disk for
no: checkpoints on a disk that has failed would be none.
"""

import errno
import stat
from pathlib import Path

_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""What the disk says where nothing is."""


def exists(path: Path) -> bool:
    """Return whether something is there.

    Raises:
        OSError: the disk does not say.
    """
    return _mode(path) is not None


def is_directory(path: Path) -> bool:
    """Return whether a directory is there.

    Raises:
        OSError: the disk does not say.
    """
    return stat.S_ISDIR(_mode(path) or 0)


def is_file(path: Path) -> bool:
    """Return whether a file is there, and no directory or device.

    Raises:
        OSError: the disk does not say.
    """
    return stat.S_ISREG(_mode(path) or 0)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except ValueError:  # no name of a file has a zero byte
        return None
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        raise
