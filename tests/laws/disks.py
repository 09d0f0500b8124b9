# SPDX-License-Identifier: Apache-2.0
"""A disk that forgets: what was done to a folder, and what a crash may leave of it.

While a `Disk` is watched, all that Python does to its folder is done there and noted: each
opening of a file, write, flush, link, name and removal is an act, with a number. At an act
something may happen: an error, the process's end, the machine's.

A crash keeps what was flushed. Of a file that was not, it keeps the first bytes, as many as
it likes; of the names in a directory that was not, any of the changes.
"""

import errno
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeAlias
from unittest import mock

import attrs

Tree: TypeAlias = Mapping[str, Any]
"""Names, and under each the bytes of a file or another tree."""
Choose: TypeAlias = Callable[[int], int]
"""Returns one of so many, from 0."""


class PowerCut(BaseException):
    """The machine is off, and does nothing more."""


@attrs.define(eq=False)
class File:
    """A file: what is in it, and how much of that was flushed."""

    data: bytearray = attrs.field(factory=bytearray)
    lasting: int = 0


@attrs.define(eq=False)
class Folder:
    """A directory: what is in it, what was when it was flushed, and the changes since."""

    now: dict[str, "Node"] = attrs.field(factory=dict)
    lasting: dict[str, "Node"] = attrs.field(factory=dict)
    changes: list[dict[str, "Node | None"]] = attrs.field(factory=list)

    def change(self, names: dict[str, "Node | None"]) -> None:
        """Give and take names, all at once."""
        self.changes.append(names)
        _apply(self.now, names)


Node: TypeAlias = File | Folder


def _apply(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


@attrs.define(eq=False)
class Disk:
    """A folder whose acts are noted.

    Attributes:
        root: of the folder, on a real disk.
        happens: what is called at an act, before it is done, by the act's number.
        after: what is called behind it.
        acts: what was done, as words.
        off: whether the machine is.
        full: what every write raises, if any does.
        broken: whether every act fails, and every look at what is there.
    """

    root: Path
    happens: dict[int, Callable[[str], None]] = attrs.field(factory=dict)
    after: dict[int, Callable[[str], None]] = attrs.field(factory=dict)
    acts: list[str] = attrs.field(factory=list)
    off: bool = False
    full: Callable[[], OSError] | None = None
    broken: bool = False
    _top: Folder = attrs.field(factory=Folder)
    _nodes: dict[int, Node] = attrs.field(factory=dict)
    _turn: Any = attrs.field(factory=threading.RLock)

    def __attrs_post_init__(self) -> None:
        """Take what is there for lasting."""
        self._top = self._read(self.root)

    def _read(self, path: Path) -> Folder:
        folder = Folder()
        self._nodes[path.stat().st_ino] = folder
        for each in path.iterdir():
            if each.is_dir():
                node: Node = self._read(each)
            else:
                data = bytearray(each.read_bytes())
                node = File(data, len(data))
                self._nodes[each.stat().st_ino] = node
            folder.now[each.name] = folder.lasting[each.name] = node
        return folder

    @contextmanager
    def act(self, name: str, path: Path) -> Iterator[None]:
        """Note an act; what happens there, happens."""
        with self._turn:
            if self.off:
                raise PowerCut
            number = len(self.acts)
            self.acts.append(f"{name} {path.relative_to(self.root)}")
            self.happens.get(number, str)(self.acts[-1])
            self.check(path)
            if self.full is not None and name == "write":
                raise self.full()
            yield
            self.after.get(number, str)(self.acts[-1])

    def check(self, path: Path) -> None:
        """Fail if the disk is broken."""
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def cut(self, _: str = "") -> None:
        """Turn the machine off."""
        self.off = True
        raise PowerCut

    def has(self, path: object) -> bool:
        """Return whether a path is in the folder."""
        return isinstance(path, Path) and path.is_relative_to(self.root)

    def folder(self, path: Path) -> Folder:
        """Return a directory."""
        node: Any = self._top
        for name in path.relative_to(self.root).parts:
            node = node.now[name]
        return node

    def put(self, path: Path, node: Node) -> None:
        """Note a new file or directory."""
        self._nodes[path.stat().st_ino] = node
        self.folder(path.parent).change({path.name: node})

    def flushed(self, handle: int) -> bool:
        """Note that what has a handle lasts; return whether it is in the folder."""
        node = self._nodes.get(os.fstat(handle).st_ino)
        if node is None:
            return False
        path = Path(f"/proc/self/fd/{handle}").readlink()
        with self.act("flush", path):
            if isinstance(node, File):
                node.lasting = len(node.data)
            else:
                node.lasting, node.changes = dict(node.now), []
        return True

    def rot(self, path: Path, at: int) -> None:
        """Change a bit of a file, for good."""
        node: Any = self.folder(path.parent).now[path.name]
        node.data[at] ^= 1
        with open(path, "wb") as file:  # noqa: PTH123 - it is no act
            file.write(node.data)

    def left(self, choose: Choose) -> Tree:
        """Return what a crash leaves now."""
        return _left(self._top, choose)


def _left(node: Node, choose: Choose) -> Any:
    if isinstance(node, File):
        more = len(node.data) - node.lasting
        lengths = sorted({0, more // 2, max(more - 1, 0), more})
        return bytes(node.data[: node.lasting + lengths[choose(len(lengths))]])
    names = dict(node.lasting)
    for change in node.changes:
        if choose(2):
            _apply(names, change)
    return {name: _left(each, choose) for name, each in names.items()}


def every_left(disk: Disk) -> Iterator[Tree]:
    """Yield all that a crash may leave now."""
    path: list[list[int]] = []  # of each choice: which was made, of how many
    while True:
        at = itertools.count()

        def choose(count: int, at: Iterator[int] = at) -> int:
            place = next(at)
            if place == len(path):
                path.append([0, count])
            return path[place][0]

        yield disk.left(choose)
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1][0] += 1


def laid_out(tree: Tree, at: Path) -> None:
    """Write a tree to a real disk."""
    at.mkdir(exist_ok=True)
    for name, inside in tree.items():
        if isinstance(inside, bytes):
            (at / name).write_bytes(inside)
        else:
            laid_out(inside, at / name)


def after_restart(tree: Tree, lock: str = ".lock") -> Tree:
    """Return a tree with its locks as another process's, which has ended with the machine."""
    found = {}
    for name, inside in tree.items():
        if isinstance(inside, Mapping):
            found[name] = after_restart(inside, lock)
        elif name == lock:
            found[name] = json.dumps(json.loads(inside) | {"begun": "0"}).encode()
        else:
            found[name] = inside
    return found


@contextmanager
def lent() -> Iterator[Path]:
    """Lend an empty folder, in memory where there is such a disk."""
    memory = Path("/dev/shm")  # noqa: S108 - only where to put a folder with a new name
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name).resolve()


@contextmanager
def watched(disk: Disk) -> Iterator[Disk]:
    """Note what is done to a disk's folder, inside a `with` block."""
    changed = [*_of_paths(disk), *_of_files(disk), *_of_os(disk), *_of_looks(disk)]
    with ExitStack() as stack:
        for owner, name, new in changed:
            stack.enter_context(mock.patch.object(owner, name, new))
        yield disk


class _Writer:
    """An open file, whose writes are acts."""

    def __init__(self, disk: Disk, path: Path, node: File, file: Any) -> None:
        self._disk, self._path, self._node, self._file = disk, path, node, file

    def write(self, chunk: Any) -> int:
        raw = chunk.encode() if isinstance(chunk, str) else bytes(chunk)
        with self._disk.act("write", self._path):
            self._node.data += raw
            self._file.write(chunk)
            self._file.flush()
        return len(chunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _of_paths(disk: Disk) -> list[tuple[Any, str, Any]]:
    mkdir, rename, unlink, rmdir = Path.mkdir, Path.rename, Path.unlink, Path.rmdir

    def make(path: Path, *args: Any, **kwargs: Any) -> None:
        if not disk.has(path) or path.exists():
            mkdir(path, *args, **kwargs)
            return
        with disk.act("mkdir", path):
            mkdir(path)
            disk.put(path, Folder())

    def move(path: Path, new: Path) -> Path:
        if not disk.has(path):
            return rename(path, new)
        with disk.act("rename", path):
            assert path.parent == new.parent
            rename(path, new)
            folder = disk.folder(path.parent)
            folder.change({path.name: None, new.name: folder.now[path.name]})
        return new

    def removing(act: Any, name: str) -> Any:
        def remove(path: Path, *args: Any, **kwargs: Any) -> None:
            if not disk.has(path) or not path.exists():
                act(path, *args, **kwargs)
                return
            with disk.act(name, path):
                act(path)
                disk.folder(path.parent).change({path.name: None})

        return remove

    return [
        (Path, "mkdir", make),
        (Path, "rename", move),
        (Path, "unlink", removing(unlink, "unlink")),
        (Path, "rmdir", removing(rmdir, "rmdir")),
    ]


def _of_files(disk: Disk) -> list[tuple[Any, str, Any]]:
    opened, touch = Path.open, Path.touch

    def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not disk.has(path) or not set(mode) & set("wxa"):
            if disk.has(path):
                disk.check(path)
            return opened(path, mode, *args, **kwargs)
        with disk.act("create", path):
            assert not path.exists() or "x" in mode  # nothing is written over
            file = opened(path, mode, *args, **kwargs)
            node = File()
            disk.put(path, node)
        return _Writer(disk, path, node, file)

    def touched(path: Path, *args: Any, **kwargs: Any) -> None:
        if not disk.has(path):
            touch(path, *args, **kwargs)
            return
        open_(path, "xb").close()

    return [(Path, "open", open_), (Path, "touch", touched)]


def _of_os(disk: Disk) -> list[tuple[Any, str, Any]]:
    fsync, link, rmtree = os.fsync, os.link, shutil.rmtree

    def flush(handle: int) -> None:
        if not disk.flushed(handle):  # the disk is a model: nothing need be waited for
            fsync(handle)

    def linked(path: Path, new: Path) -> None:
        if not disk.has(new):
            link(path, new)
            return
        with disk.act("link", new):
            link(path, new)
            folder = disk.folder(new.parent)
            folder.change({new.name: folder.now[path.name]})

    def remove(path: Path, *args: Any, **kwargs: Any) -> None:
        if not disk.has(path):
            rmtree(path, *args, **kwargs)
            return
        for each in path.iterdir():
            if each.is_dir():
                remove(each)
            else:
                each.unlink()
        path.rmdir()

    return [(os, "fsync", flush), (os, "link", linked), (shutil, "rmtree", remove)]


def _of_looks(disk: Disk) -> list[tuple[Any, str, Any]]:
    def checked(look: Any) -> Any:
        def looks(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if disk.has(path):
                disk.check(path)
            return look(path, *args, **kwargs)

        return looks

    of_paths = [(Path, name) for name in ("stat", "lstat", "iterdir")]
    named = [*of_paths, (os, "scandir"), (os, "open"), (os, "listdir")]
    return [(owner, name, checked(getattr(owner, name))) for owner, name in named]
