# SPDX-License-Identifier: Apache-2.0
"""What the disk says of a path: a disk that has failed is told from one on which nothing is."""

import ast
import errno
import os
from pathlib import Path
from unittest import mock

import pytest

import accelfn
from tests.internals import arguments

ROOT = Path(accelfn.__file__).parent
ASKED = (arguments.exists, arguments.is_directory, arguments.is_file)
OF_PATHLIB = ("exists", "is_dir", "is_file")


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_does_not_say_is_no_answer(asked, code, tmp_path):
    """On Python 3.14 pathlib takes it for no."""
    broken = OSError(code, os.strerror(code))
    with (
        mock.patch.object(os, "stat", side_effect=broken),
        pytest.raises(OSError, match=os.strerror(code)),
    ):
        asked(tmp_path)


def test_what_is_there_is_told(tmp_path):
    """A directory, a file, a link to one, and what is neither or not there."""
    file, link, loop = tmp_path / "file", tmp_path / "link", tmp_path / "loop"
    file.touch()
    link.symlink_to(file)
    loop.symlink_to(loop)
    pipe, below = tmp_path / "pipe", file / "below"
    os.mkfifo(pipe)
    found = {
        path: tuple(asked(path) for asked in ASKED)
        for path in (tmp_path, file, link, loop, pipe, below, Path("a\0b"))
    }
    assert found == {
        tmp_path: (True, True, False),
        file: (True, False, True),
        link: (True, False, True),
        loop: (False, False, False),
        pipe: (True, False, False),
        below: (False, False, False),
        Path("a\0b"): (False, False, False),
    }


def calls_of_pathlib(file: Path) -> list[int]:
    """Return the lines that ask pathlib."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in OF_PATHLIB
        and ast.unparse(node.func.value) not in ("arguments", "self._files")  # fsspec
    ]


def test_nobody_asks_pathlib():
    """accelfn asks `base.arguments`, which passes on errors of the disk."""
    found = {str(file): calls_of_pathlib(file) for file in ROOT.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}
