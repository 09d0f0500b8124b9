# SPDX-License-Identifier: Apache-2.0
"""Names and files on a disk: what is there once a call is over, and what is left open."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.internals import files

FULL = OSError(errno.ENOSPC, "no room")


def failing(*_: Any) -> NoReturn:
    """Fail as a disk that is full."""
    raise FULL


def held(folder: Path) -> None:
    """Hold a file, and let it go."""
    file = files.hold(folder / "held")
    assert file is not None
    file.close()


def refused(folder: Path) -> None:
    """Open what is no file."""
    with pytest.raises(OSError, match="not a regular file"):
        files.open_plain(folder)


CALLS: dict[str, Callable[[Path], object]] = {
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

    def lowest() -> int:
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
        error = OSError(errno.EPERM, "no links here")

        def link(*_: Any) -> NoReturn:
            raise error

        monkeypatch.setattr(os, "link", link)
    path = tmp_path / "lock"
    files.claim(path, "mine")
    files.claim(path, "yours")
    assert path.read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["lock"]
    assert not files.withdraw(path, "yours")
    assert files.withdraw(path, "mine")
    assert not files.withdraw(path, "mine")
    files.claim(path, "yours")
    assert path.read_text() == "yours"


def test_a_claim_that_is_not_written_whole_is_none(tmp_path, monkeypatch):
    """Where a disk without links is full, the error is told, and the name is free."""
    write = files.write

    def begun(path: Path, chunks: Any) -> None:
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

            def missing(*_: Any, **__: Any) -> NoReturn:
                raise FileNotFoundError(errno.ENOENT, "none")

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
