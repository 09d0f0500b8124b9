# SPDX-License-Identifier: Apache-2.0
"""Names and files on a disk: what is there once a call is over, and what is left open.

A disk that has failed is told from one on which nothing is.
"""

import ast
import errno
import fcntl
import os
from pathlib import Path
from unittest import mock

import pytest

import accelfn
from tests.internals import arguments, files

FULL = OSError(errno.ENOSPC, "no room")


def failing(*_):
    """Fail as a disk that is full."""
    raise FULL


def held(folder):
    """Hold a file, and let it go."""
    file = files.hold(folder / "held")
    assert file is not None
    file.close()


def refused(folder):
    """Open what is no file."""
    with pytest.raises(OSError, match="not a regular file"):
        files.open_plain(folder)


CALLS = {
    "flush": files.flush,
    "write": lambda folder: files.write(folder / "new", [b"text"]),
    "claim": lambda folder: files.claim(folder / "new", "text"),
    "claim again": lambda folder: files.claim(folder / "old", "text"),
    "withdraw": lambda folder: files.withdraw(folder / "old", "text"),
    "withdraw another's": lambda folder: files.withdraw(folder / "old", "other"),
    "tell": lambda folder: files.tell(folder / "new", "text"),
    "hold": held,
    "is let go": lambda folder: files.is_let_go(folder / "old"),
    "open": lambda folder: files.open_plain(folder / "old").close(),
    "open a directory": refused,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_open(call, fails, tmp_path, monkeypatch):
    """A run that saves for weeks has no more files open than it began with."""
    (tmp_path / "old").write_text("text")
    if fails:
        for module, name in ((os, "fsync"), (fcntl, "flock"), (os, "write")):
            monkeypatch.setattr(module, name, failing)

    def lowest():
        handle = os.open(tmp_path, os.O_RDONLY)
        os.close(handle)
        return handle

    before = lowest()
    try:
        CALLS[call](tmp_path)
    except (OSError, AssertionError):
        assert fails
    assert lowest() == before


@pytest.mark.parametrize("has_links", [True, False])
def test_the_first_claim_counts(has_links, tmp_path, monkeypatch):
    """Of two that claim a name one has it, with its text, whatever the file system can do."""
    if not has_links:
        no_links = OSError(errno.EPERM, "no links here")
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=no_links))
    path = tmp_path / "lock"
    files.claim(path, "mine")
    files.claim(path, "yours")
    assert path.read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["lock"]
    withdrawn = [files.withdraw(path, whose) for whose in ("yours", "mine", "mine")]
    assert withdrawn == [False, True, False]
    files.claim(path, "yours")
    assert path.read_text() == "yours"


def test_a_claim_that_is_not_written_whole_is_none(tmp_path, monkeypatch):
    """Where a disk without links is full, the error is told, and the name is free."""
    write = files.write

    def begun(path, chunks):
        write(path, chunks)
        if not path.name.startswith("."):
            failing()

    monkeypatch.setattr(os, "link", failing)
    monkeypatch.setattr(files, "write", begun)
    with pytest.raises(OSError, match="no room"):
        files.claim(tmp_path / "lock", "mine")
    assert [*tmp_path.iterdir()] == []


def test_a_name_that_is_taken_is_not_given_again(tmp_path):
    """An empty directory that has the name is not replaced, as the system would do."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "file").touch()
    with pytest.raises(FileExistsError, match="two"):
        files.rename(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "file").exists()
    assert [*(tmp_path / "two").iterdir()] == []


def test_what_is_let_go_was_held_on_this_machine(tmp_path, monkeypatch):
    """Of a file that another machine held, or that is not there, nothing is known."""
    path = tmp_path / "held"
    for machine in (True, False):
        if not machine:  # a system that has no number of its start goes by its name
            missing = mock.Mock(side_effect=FileNotFoundError(errno.ENOENT, "none"))
            monkeypatch.setattr(Path, "read_text", missing)
        assert not files.is_let_go(path)
        file = files.hold(path)
        assert file is not None
        assert not files.is_let_go(path)
        file.close()
        assert files.is_let_go(path)
        path.write_bytes(b"elsewhere " + path.read_bytes())
        assert not files.is_let_go(path)
        path.unlink()


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
