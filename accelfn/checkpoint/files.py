# SPDX-License-Identifier: Apache-2.0
"""Safetensors files with BLAKE3 digests, which are computed while writing and reading.

Any safetensors reader can read these files. accelfn has its own writer because the library's
computes no digest, does not flush, and holds a second copy of all tensors.

The digest of a tensor covers the file up to the end of the tensor. So the first digest that
differs names the changed tensor, and the last digest is the output of `b3sum`.
"""

import ctypes
import errno
import json
import math
import mmap
import os
import shutil
import socket
import stat
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self, TypeAlias, cast

import attrs
import torch
from blake3 import blake3

from accelfn.base import arguments, system
from accelfn.base.arguments import read_hints
from accelfn.errors import CheckpointCorruptError

# Disk operations: write, rename, remove, lock. Changes are durable on return.
#
# Contents count as written after a flush of the file, and names after a flush of the directory.
# After a crash, a file system may have kept any part of unflushed changes (Pillai et al. 2014,
# "All File Systems Are Not Created Equal").


Chunk: TypeAlias = bytes | memoryview
_PIECE = 1 << 23
"""Bytes after which the disk starts to flush a file."""
_sync_file_range = getattr(system.libc, "sync_file_range", None)
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
            begin = end = 0
            for chunk in chunks:
                end += file.write(chunk)
                if end - begin >= _PIECE:
                    _begin_flush(file.fileno(), begin, end)
                    begin = end
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        _raise_named(error, path)


def _begin_flush(handle: int, begin: int, end: int) -> None:
    """Start to flush a part of a file; the final flush reports errors."""
    if _sync_file_range is not None:
        _sync_file_range(handle, begin, end - begin, _WRITE)


def flush(directory: Path) -> None:
    """Flush the names in a directory to the disk; Windows does so by itself."""
    if system.IS_WINDOWS:
        return
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
                system.lock(file.fileno(), wait=True)
            is_same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            if not is_same or file.read() != text.encode():
                return False
            if not system.IS_WINDOWS:  # which removes no open file
                path.unlink()
        if system.IS_WINDOWS:
            path.unlink()
    except FileNotFoundError:
        return False
    return True


def tell(path: Path, text: str) -> None:
    """Publish a text to other ranks atomically; an empty file if the disk is full."""
    partial_path = path.with_name(f".{path.name}")
    try:
        partial_path.write_text(text, encoding="utf-8")
        partial_path.rename(path)
    except OSError:
        path.touch()


def hold(path: Path) -> BinaryIO | None:
    """Make a file and lock it until it is closed or this process ends in any way.

    Returns: the file; None if the file system has no such locks.
    """
    partial_path = path.with_name(f".{path.name}")
    with suppress(OSError):
        file = partial_path.open("xb", buffering=0)
        try:
            system.lock(file.fileno())
            file.write(_mount(file.fileno()))
            partial_path.rename(path)
        except BaseException:
            file.close()
            raise
        return file
    return None


def is_let_go(path: Path) -> bool:
    """Return whether a process of this machine has released its lock of a file."""
    with suppress(OSError), path.open("rb") as file:
        if file.read() == _mount(file.fileno()):
            system.lock(file.fileno(), shared=True)
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
    handle = os.open(path, system.READ_PLAIN)
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


# Hashing in a thread, while the file is read.


_TOGETHER = 1 << 20
"""Minimum bytes of a task for the hashing thread: a small tensor alone costs more to submit."""
_AHEAD = 2
"""Number of tasks that may wait to be hashed."""


class Hashing:
    """Hashes the bytes of a file in another thread, many small tensors at once."""

    def __init__(self, pool: ThreadPoolExecutor, path: Path) -> None:
        """Take the thread and the file's path."""
        self._pool, self._path, self._digest = pool, path, blake3()
        self._read: list[tuple[memoryview, str, str | None]] = []
        self._num_bytes = 0
        self._pending: deque[Future[str | None]] = deque()

    def add(self, values: memoryview, label: str, digest: str | None) -> None:
        """Add the next bytes, and the expected digest up to their end if it is known."""
        self._read.append((values, label, digest))
        self._num_bytes += len(values)
        if self._num_bytes >= _TOGETHER:
            self._hand_over()
            while len(self._pending) > _AHEAD:
                self._compare()

    def finish(self) -> None:
        """Wait until all bytes are verified.

        Raises:
            CheckpointCorruptError: a digest differs; the error names the first difference.
        """
        self._hand_over()
        while self._pending:
            self._compare()

    def _hand_over(self) -> None:
        self._pending.append(self._pool.submit(self._differing, self._read))
        self._read, self._num_bytes = [], 0

    def _differing(self, read: list[tuple[memoryview, str, str | None]]) -> str | None:
        for values, label, digest in read:
            self._digest.update(values)
            if digest is not None and self._digest.hexdigest() != digest:
                return label
        return None

    def _compare(self) -> None:
        label = self._pending.popleft().result()
        if label is not None:
            msg = (
                f"{self._path} is not what was saved: {label} differs in its BLAKE3."
                " Load another checkpoint."
            )
            raise CheckpointCorruptError(msg)


_BLOCK = 1 << 23
"""Bytes per write, and the minimum per reading thread. The system caches a file in pieces as
large as its writes, and mapping costs a page fault per piece: writes of 8 MiB take a sixth of the
faults of 256 KiB."""
ALIGNED = 64
"""Alignment of tensors in bytes, as in torch; kernels may round differently without it."""
_LARGEST_HEADER = 1 << 28
_MOST_DIMS = 64
_NONE = "0" * 64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
OnRead: TypeAlias = Callable[[int], object]
_NAMES_OF = {dtype: name for name, dtype in DTYPES.items()}


@attrs.frozen
class Entry:
    """A tensor's entry in a file.

    Attributes:
        dtype: the dtype's name in safetensors.
        shape: the tensor's shape.
        begin: the offset of the first byte in the file.
        end: the offset after the last byte.
        blake3: the digest of the file up to `end`.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    blake3: str

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the entry that `attrs.asdict` described."""
        return cls(**dict[str, Any](plain, shape=tuple(plain["shape"])))

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this dtype and shape."""
        return empty(self.shape, DTYPES[self.dtype])


@attrs.frozen
class File:
    """A file of tensors.

    Attributes:
        size: the file's size in bytes.
        blake3: the digest of the whole file.
        header_blake3: the digest of the bytes before the first tensor.
        tensors: entries by name, in the file's order.
    """

    size: int
    blake3: str
    header_blake3: str
    tensors: Mapping[str, Entry]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the file that `attrs.asdict` described.

        Raises:
            ValueError: an entry is not a valid tensor, or the tensors do not fill the file.
        """
        tensors = {n: Entry.from_plain(row) for n, row in plain["tensors"].items()}
        file = cls(plain["size"], plain["blake3"], plain["header_blake3"], tensors)
        at = min((tensor.begin for tensor in tensors.values()), default=file.size)
        if at > _LARGEST_HEADER:
            msg = f"its header has {at} bytes according to the entries"
            raise ValueError(msg)
        for name, tensor in tensors.items():
            if tensor.begin != at or tensor.end != at + bytes_in(
                tensor.dtype, tensor.shape
            ):
                msg = f"{name[:80]!r} has a wrong range of bytes, {tensor.begin} to {tensor.end}"
                raise ValueError(msg)
            at = tensor.end
        if at != file.size:
            msg = f"its tensors end at byte {at} of {file.size}"
            raise ValueError(msg)
        return file


def bytes_in(dtype: str, shape: Sequence[int]) -> int:
    """Return the number of bytes of a tensor.

    Raises:
        ValueError: no tensor can have this dtype and shape.
    """
    if (
        dtype not in DTYPES
        or len(shape) > _MOST_DIMS
        or any(type(n) is not int or n < 0 for n in shape)
        # torch multiplies the lengths, but those that are 0, in 64 bits
        or math.prod(n for n in shape if n) * 16 >= 2**63
    ):
        msg = f"{dtype!r} of shape {shape[:_MOST_DIMS]} cannot be a tensor"
        raise ValueError(msg)
    return math.prod(shape) * DTYPES[dtype].itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> File:
    """Write tensors to a new file, flush it, and return its description.

    A second thread hashes the file. Both threads copy tensors that are on a device or not
    contiguous, one tensor at a time.
    """
    header, entries = _header(tensors, metadata)
    with ThreadPoolExecutor(1, "accelfn-digest") as pool:
        future = pool.submit(_ends, header, (bytes_of(tensors[n]) for n in entries))
        values = (bytes_of(tensors[name]) for name in entries)
        write(path, chain([header], chain.from_iterable(map(_blocks, values))))
        return _describe(entries, len(header), future.result())


def describe_file(tensors: Mapping[str, torch.Tensor]) -> File:
    """Return the description of a file that is not written; its digests are zeros."""
    header, entries = _header(tensors, {})
    return _describe(entries, len(header), [_NONE] * (1 + len(entries)))


def _describe(entries: Mapping[str, Entry], begin: int, digests: Sequence[str]) -> File:
    """Return a file's description from the digests up to its header and each tensor."""
    tensors = {
        name: attrs.evolve(entry, blake3=digest)
        for (name, entry), digest in zip(entries.items(), digests[1:], strict=True)
    }
    size = max((entry.end for entry in entries.values()), default=begin)
    return File(size, digests[-1], digests[0], tensors)


def ignore_progress(_count: int) -> None:
    """Ignore the number of bytes that were read."""


def read_tensors(
    path: Path,
    file: File,
    wanted: AbstractSet[str],
    *,
    device: str = "cpu",
    verify: bool = True,
    on_read: OnRead = ignore_progress,
) -> dict[str, torch.Tensor]:
    """Return the wanted tensors of a file after comparing the file with its description.

    Args:
        path: the path of the file.
        file: the description of the file.
        wanted: the names of the tensors to return.
        device: the device of the returned tensors.
        verify: whether to read the whole file and compare its digests.
        on_read: called with the number of bytes read since the last call.

    Raises:
        CheckpointCorruptError: the file is missing or has changed; the error names the first
            changed tensor.
    """
    try:
        with open_plain(path) as stream:
            size = stream.seek(0, 2)
            if size != file.size:
                msg = f"{path}: {size} bytes, the manifest says {file.size}."
                raise CheckpointCorruptError(msg)
            reader = _read_verified if verify else _read_some
            tensors = reader(stream, path, file, wanted, on_read)
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _read_some(
    stream: BinaryIO, _path: Path, file: File, names: AbstractSet[str], on_read: OnRead
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        entry = file.tensors[name]
        stream.seek(entry.begin)
        tensors[name] = entry.empty()
        for block in _blocks(bytes_of(tensors[name]), _BLOCK * torch.get_num_threads()):
            read_into(stream, block)
            on_read(len(block))
    return tensors


def _read_verified(
    stream: BinaryIO, path: Path, file: File, names: AbstractSet[str], on_read: OnRead
) -> dict[str, torch.Tensor]:
    """Read a whole file, and hash it in another thread.

    Tensors that are not wanted can have any size, so they are read in pieces.
    """
    most = _BLOCK * torch.get_num_threads()
    tensors: dict[str, torch.Tensor] = {}
    stream.seek(0)
    begin = min((tensor.begin for tensor in file.tensors.values()), default=file.size)
    with ThreadPoolExecutor(1, "accelfn-digest") as pool:
        hashing = Hashing(pool, path)

        def fill(values: memoryview, label: str, digest: str | None) -> None:
            read_into(stream, values)
            on_read(len(values))
            hashing.add(values, label, digest)

        fill(memoryview(bytearray(begin)), "its header", file.header_blake3)
        for name, entry in file.tensors.items():
            if name in names:
                tensors[name] = entry.empty()
                fill(bytes_of(tensors[name]), name, entry.blake3)
                continue
            size = entry.end - entry.begin
            for at in range(0, max(size, 1), most):
                piece = empty((min(most, size - at),), torch.uint8)
                is_last = at + most >= size
                fill(bytes_of(piece), name, entry.blake3 if is_last else None)
        fill(memoryview(b""), "the whole", file.blake3)
        hashing.finish()
    return tensors


def _ends(header: bytes, values: Iterable[memoryview]) -> list[str]:
    """Return the digest of a file up to the end of its header, and of each tensor."""
    digest = blake3(header)
    hexdigests = [digest.hexdigest()]
    for value in values:
        digest.update(value)
        hexdigests.append(digest.hexdigest())
    return hexdigests


def _blocks(raw: memoryview, size: int = _BLOCK) -> Iterator[memoryview]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; `object_pairs_hook` of `json.loads`.

    Raises:
        ValueError: a name appears twice.
    """
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        msg = f"the name {twice[:80]!r} comes twice"
        raise ValueError(msg)
    return table


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in safetensors."""
    return _NAMES_OF[dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values as bytes, in its own memory if it is contiguous."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    flat = dense.reshape(-1)
    if flat.stride() != (1,):  # any stride is contiguous for at most one element
        flat = torch.empty_strided(flat.shape, (1,), dtype=flat.dtype).copy_(flat)
    return memoryview(cast("Any", flat.view(torch.uint8).numpy()))


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digest of each tensor's dtype, shape and values."""
    hashes: dict[str, str] = {}
    for name, tensor in tensors.items():
        digest = blake3(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
        hashes[name] = digest.hexdigest()
    return hashes


def _header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """Return a file's header, and its entries in order; their digests are zeros.

    Tensors that fill whole lines of 64 bytes come first, so that all of them are aligned. The
    rest is sorted by item size, largest first, so that offsets are multiples of the item size.
    """

    def place(name: str) -> tuple[bool, int, str]:
        t = tensors[name]
        return t.nbytes % ALIGNED > 0, -t.dtype.itemsize, name

    at = 0
    places: dict[str, Entry] = {}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name in sorted(tensors, key=place):
        t = tensors[name]
        dtype, shape, end = name_of(t.dtype), tuple(t.shape), at + t.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        places[name] = Entry(dtype, shape, at, end, _NONE)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    first = 8 + len(text)
    entries = {
        name: attrs.evolve(entry, begin=entry.begin + first, end=entry.end + first)
        for name, entry in places.items()
    }
    return len(text).to_bytes(8, "little") + text, entries


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has torch's alignment; else kernels may round differently."""
    return tensor.data_ptr() % ALIGNED == 0


def read_into(stream: BinaryIO, buffer: memoryview) -> None:
    """Fill a buffer from a stream's position, with as many threads as torch computes with.

    One thread copies cached data below the memory's bandwidth, and requests one piece at a time
    from a disk. Each thread reads at least one block.
    """
    handle, begin = stream.fileno(), stream.tell()
    threads = min(torch.get_num_threads(), len(buffer) // _BLOCK)
    if threads > 1:
        size = -(-len(buffer) // threads)
        with ThreadPoolExecutor(threads, "accelfn-read") as pool:
            reading = [
                pool.submit(_read_at, handle, begin + at, buffer[at : at + size])
                for at in range(0, len(buffer), size)
            ]
            for task in reading:
                task.result()
    else:
        _read_at(handle, begin, buffer)
    stream.seek(begin + len(buffer))


def _read_at(handle: int, begin: int, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        got = system.read_at(handle, begin + at, buffer[at:])
        if not got:
            raise OSError(None, "it ended while it was read")
        at += got


# Hints for wrong paths: the format of the files there, and the function that reads them.


def reader_of(path: Path) -> str:
    """Return sentences about functions that read a path, each after a space; or ""."""
    hints: list[str] = []
    if arguments.is_directory(path):
        table = read_hints()["folders with a file"]
        hints = [hint for name, hint in table.items() if arguments.exists(path / name)]
    elif arguments.is_file(path):
        table = read_hints()["files by their ending"]
        hints = [hint for ending, hint in table.items() if path.name.endswith(ending)]
    text = repr(str(path))
    return "".join(f" {hint.format(path=text)}" for hint in dict.fromkeys(hints))


def checkpoints_near(path: Path, name: str) -> str:
    """Return a sentence, after a space, that names checkpoints in or next to a path.

    Args:
        path: a path without a checkpoint.
        name: the name of a file that every checkpoint has.
    """
    inside = arguments.is_directory(path)
    folder = path if inside else path.parent
    try:
        names = sorted(
            path.name for path in folder.iterdir() if arguments.is_file(path / name)
        )
    except OSError:  # missing, or not readable
        names = []
    if not names:
        return " af.save(state, directory) writes one."
    text = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f" {'In' if inside else 'Beside'} it there are {len(names)}: {text}."


# Host memory in huge pages, if the system has them.
#
# The system provides memory at the first write, one page at a time. A model of 500 MB takes
# 130,000 pages of 4 KiB, and providing them takes longer than reading its file. It takes 260
# pages of 2 MiB.


_HUGE_PAGE = 1 << 21
"""Bytes of a huge page on most machines."""
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""The `madvise` value of Linux; other systems have no huge-page advice."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a host tensor to fill from a file.

    Cost: `torch.empty`, and one system call for a large tensor. No huge page exceeds the
    tensor, so memory use does not grow.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if _ADVICE is not None and tensor.nbytes >= 2 * _HUGE_PAGE:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        # a system without huge pages ignores this and uses small pages
        system.libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE
        )
    return tensor
