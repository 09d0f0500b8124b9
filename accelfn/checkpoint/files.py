# SPDX-License-Identifier: Apache-2.0
"""Read and write safetensors files, and compute their BLAKE3 digests at the same time.

Any safetensors reader can read these files. accelfn has its own writer, because the writer of
the library computes no digests, does not flush, and needs a second copy of all tensors.

The digest of a tensor is the digest of the file up to the end of that tensor. So the first
digest that differs shows which tensor has changed, and the last digest is that of the file.
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
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self, TypeAlias, cast

import attrs
import torch
from blake3 import blake3

from accelfn.base import arguments, system
from accelfn.base.arguments import read_hints
from accelfn.base.codec import DTYPES
from accelfn.errors import CheckpointCorruptError

# Write, rename, remove and lock files. When these functions return, the change is on the disk.
#
# A file's data are on the disk after a flush of the file. The file's name is on the disk after
# a flush of the directory. After a crash, a file system may have kept any subset of the changes
# that were not flushed (Pillai et al. 2014, "All File Systems Are Not Created Equal").


Chunk: TypeAlias = bytes | memoryview
_PIECE = 1 << 23
"""After this number of bytes, the system starts to flush what was written."""
_sync_file_range = getattr(system.libc, "sync_file_range", None)
"""A function of Linux; None on other systems."""
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, *[ctypes.c_int64] * 2, ctypes.c_uint)
_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start to flush without waiting."""


def make(directory: Path) -> None:
    """Create a directory and its missing parents, if necessary, and flush them."""
    if not arguments.is_directory(directory):
        make(directory.parent)
        directory.mkdir(exist_ok=True)
        flush(directory.parent)


def create(directory: Path) -> None:
    """Create a new directory and its missing parents; raise an error if it exists."""
    make(directory.parent)
    directory.mkdir()


def write(path: Path, chunks: Iterable[Chunk]) -> None:
    """Write a new file and flush it; each piece is flushed while the next piece is written.

    A flush that failed is not tried again, because the system may have dropped the data
    (Rebello et al. 2020, "Can Applications Recover from fsync Failures?").
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
    """Start to flush a range of a file's bytes; the final flush reports errors."""
    if _sync_file_range is not None:
        _sync_file_range(handle, begin, end - begin, _WRITE)


def flush(directory: Path) -> None:
    """Flush a directory, so that its file names are on the disk; do nothing on Windows."""
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
    """Rename a directory to an unused name, and flush; after an error it has its old name."""
    if arguments.exists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    path.rename(new)
    try:
        flush(new.parent)
    except Exception:
        new.rename(path)
        raise


def remove(path: Path) -> None:
    """Remove a file, or a directory with its files, if it exists."""
    with suppress(FileNotFoundError):  # another process may remove it at the same time
        if arguments.is_directory(path) and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def claim(path: Path, text: str) -> None:
    """Write a small file atomically; if it exists already, do nothing."""
    draft = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        write(draft, [text.encode()])
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:
            _claim_unlinked(path, text)
    finally:
        with suppress(OSError):  # if this fails, the next save removes the draft
            remove(draft)


def _claim_unlinked(path: Path, text: str) -> None:
    """Write the file of `claim` on a file system without links; a crash may truncate it."""
    try:
        write(path, [text.encode()])
    except FileExistsError:
        pass
    except OSError:
        remove(path)
        raise


def withdraw(path: Path, text: str) -> bool:
    """Remove a file if it has this text; return whether this process removed the file."""
    try:
        with path.open("rb+") as file:
            with suppress(OSError):  # some file systems do not support locks
                system.lock(file.fileno(), wait=True)
            is_same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            if not is_same or file.read() != text.encode():
                return False
            if not system.IS_WINDOWS:  # Windows cannot remove an open file
                path.unlink()
        if system.IS_WINDOWS:
            path.unlink()
    except FileNotFoundError:
        return False
    return True


def tell(path: Path, text: str) -> None:
    """Write a text for other ranks atomically; write an empty file if the disk is full."""
    partial_path = path.with_name(f".{path.name}")
    try:
        partial_path.write_text(text, encoding="utf-8")
        partial_path.rename(path)
    except OSError:
        path.touch()


def hold(path: Path) -> BinaryIO | None:
    """Create a file, and lock it until it is closed or until this process ends in any way.

    Returns: the open file; None if the file system does not support such locks.
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
    """Return whether a process of this machine has released the lock that `hold` made."""
    with suppress(OSError), path.open("rb") as file:
        if file.read() == _mount(file.fileno()):
            system.lock(file.fileno(), shared=True)
            return True
    return False


def _mount(handle: int) -> bytes:
    """Return bytes that identify this machine and file system.

    Locks are reliable only between processes of one machine, on one file system.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = socket.gethostname()
    return f"{machine.strip()} {os.fstat(handle).st_dev}".encode()


def is_there(path: Path) -> bool:
    """Return whether a path exists; False if the disk raises an error."""
    with suppress(OSError):
        return arguments.exists(path)
    return False


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file to read.

    Raises:
        OSError: the path does not exist, or is a symbolic link, a directory or a device.
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
    """Raise the error again with the path, because errors of writes and flushes have no path."""
    if error.filename is not None or error.errno is None:
        raise error
    raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


# Compute digests in another thread, while the file is read.


_TOGETHER = 1 << 20
"""The minimum number of bytes of a task for the hashing thread, because each task has a cost."""
_AHEAD = 2
"""How many tasks may wait to be hashed before reading pauses."""


class Hashing:
    """Hashes the bytes of a file in another thread, and compares the digests.

    Small tensors are hashed together, in one task.
    """

    def __init__(self, pool: ThreadPoolExecutor, path: Path) -> None:
        """Initialize with a pool of one thread, and with the file's path for errors."""
        self._pool, self._path, self._digest = pool, path, blake3()
        self._read: list[tuple[memoryview, str, str | None]] = []
        self._num_bytes = 0
        self._pending: deque[Future[str | None]] = deque()

    def add(self, values: memoryview, label: str, digest: str | None) -> None:
        """Add the next bytes of the file to hash.

        Args:
            values: the bytes.
            label: the name of these bytes in errors, such as a tensor's name.
            digest: the expected digest of the file up to the end of these bytes; None: unknown.
        """
        self._read.append((values, label, digest))
        self._num_bytes += len(values)
        if self._num_bytes >= _TOGETHER:
            self._hand_over(_AHEAD)

    def finish(self) -> None:
        """Wait until all bytes are hashed and compared.

        Raises:
            CheckpointCorruptError: a digest differs. The message names the first difference.
        """
        self._hand_over(0)

    def _hand_over(self, most: int) -> None:
        """Hash what was read in the other thread; wait until at most `most` tasks wait there."""
        self._pending.append(self._pool.submit(self._differing, self._read))
        self._read, self._num_bytes = [], 0
        while len(self._pending) > most:
            label = self._pending.popleft().result()
            if label is not None:
                msg = (
                    f"{self._path} has changed since it was saved: the BLAKE3 digest of {label}"
                    " differs. Load another checkpoint."
                )
                raise CheckpointCorruptError(msg)

    def _differing(self, read: list[tuple[memoryview, str, str | None]]) -> str | None:
        for values, label, digest in read:
            self._digest.update(values)
            if digest is not None and self._digest.hexdigest() != digest:
                return label
        return None


_BLOCK = 1 << 23
"""The number of bytes of a write, and the least number of bytes for a reading thread.

The system caches a file in pieces of the size of its writes, and each piece causes one page
fault when the file is mapped. With 8 MiB there are a sixth of the faults of 256 KiB.
"""
ALIGNED = 64
"""The alignment of tensors in bytes, as in torch. Without it, kernels may round differently."""
_LARGEST_HEADER = 1 << 28
_MOST_DIMS = 64
_NONE = "0" * 64
OnRead: TypeAlias = Callable[[int], object]
NAMES_OF = {dtype: name for name, dtype in DTYPES.items()}
"""The name of each dtype in safetensors."""


@attrs.frozen
class Entry:
    """The description of a tensor in a file.

    Attributes:
        dtype: the dtype's name in safetensors.
        shape: the tensor's shape.
        begin: the offset of the tensor's first byte in the file.
        end: the offset after the tensor's last byte.
        blake3: the digest of the file up to `end`.
    """

    dtype: str
    shape: tuple[int, ...] = attrs.field(converter=tuple)
    begin: int
    end: int
    blake3: str

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this dtype and shape."""
        return empty(self.shape, DTYPES[self.dtype])


@attrs.frozen
class File:
    """The description of a file of tensors.

    Attributes:
        size: the file's size in bytes.
        blake3: the digest of the whole file.
        header_blake3: the digest of the bytes before the first tensor.
        tensors: the description of each tensor by name, in the order of the file.
    """

    size: int
    blake3: str
    header_blake3: str
    tensors: Mapping[str, Entry]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Create the description from the dict that `attrs.asdict` returns for it.

        Raises:
            ValueError: an entry is not a valid tensor, or the tensors do not fill the file.
        """
        tensors = {n: Entry(**row) for n, row in plain["tensors"].items()}
        file = cls(plain["size"], plain["blake3"], plain["header_blake3"], tensors)
        at = min((tensor.begin for tensor in tensors.values()), default=file.size)
        if at > _LARGEST_HEADER:
            msg = f"the entries leave {at} bytes for the header, which is too much"
            raise ValueError(msg)
        for name, tensor in tensors.items():
            size = bytes_in(tensor.dtype, tensor.shape)
            if (tensor.begin, tensor.end) != (at, at + size):
                msg = f"{name[:80]!r} has a wrong range of bytes, {tensor.begin} to {tensor.end}"
                raise ValueError(msg)
            at = tensor.end
        if at != file.size:
            msg = f"the tensors of a file end at byte {at}, but the file has {file.size} bytes"
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
        # torch computes the product of all lengths except 0 in 64 bits
        or math.prod(n for n in shape if n) * 16 >= 2**63
    ):
        msg = f"no tensor has dtype {dtype!r} and shape {shape[:_MOST_DIMS]}"
        raise ValueError(msg)
    return math.prod(shape) * DTYPES[dtype].itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> File:
    """Write tensors to a new file, flush it, and return its description.

    A second thread computes the digests. If a tensor is on a GPU or is not contiguous, each of
    the threads copies the tensor, one tensor at a time.
    """
    header, rows = _header(tensors, metadata)
    with ThreadPoolExecutor(1, "accelfn-digest") as pool:
        future = pool.submit(_ends, header, (bytes_of(tensors[n]) for n in rows))
        values = (bytes_of(tensors[name]) for name in rows)
        write(path, chain([header], chain.from_iterable(map(_blocks, values))))
        return _describe(rows, len(header), future.result())


def describe_file(tensors: Mapping[str, torch.Tensor]) -> File:
    """Return the description of a file without writing it; its digests are zeros."""
    header, rows = _header(tensors, {})
    return _describe(rows, len(header), [_NONE] * (1 + len(rows)))


def _describe(
    rows: Mapping[str, Mapping[str, Any]], first: int, digests: Sequence[str]
) -> File:
    """Return a file's description.

    Args:
        rows: the row of each tensor in the header.
        first: the number of bytes before the first tensor.
        digests: the digests of the file up to its header, and up to each tensor.
    """
    size, tensors = first, dict[str, Entry]()
    for (name, row), digest in zip(rows.items(), digests[1:], strict=True):
        begin, size = (first + at for at in row["data_offsets"])
        tensors[name] = Entry(row["dtype"], row["shape"], begin, size, digest)
    return File(size, digests[-1], digests[0], tensors)


def ignore_progress(_count: int) -> None:
    """Do nothing; the default for `on_read`."""


def read_tensors(
    path: Path,
    file: File,
    wanted: AbstractSet[str],
    *,
    verify: bool = True,
    on_read: OnRead = ignore_progress,
) -> dict[str, torch.Tensor]:
    """Check that a file fits its description, and return some of its tensors in host memory.

    Args:
        path: the path of the file.
        file: the description of the file.
        wanted: the names of the tensors to return.
        verify: whether to read the whole file and compare its digests.
        on_read: called with the number of bytes that were read since the last call.

    Raises:
        CheckpointCorruptError: the file is missing or has changed. The message names the first
            tensor that has changed.
    """
    try:
        with open_plain(path) as stream:
            size = stream.seek(0, 2)
            if size != file.size:
                msg = f"{path} is damaged: it has {size} bytes, but had {file.size} when saved."
                raise CheckpointCorruptError(msg)
            reader = _read_verified if verify else _read_some
            return reader(stream, path, file, wanted, on_read)
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error


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
    """Read a whole file while another thread computes its digests.

    Tensors that are not wanted are read in pieces, so they need little memory.
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
        fill(memoryview(b""), "the whole file", file.blake3)
        hashing.finish()
    return tensors


def _ends(header: bytes, values: Iterable[memoryview]) -> list[str]:
    """Return the digests of a file up to the end of its header, and up to each tensor's end."""
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
    """Return a JSON object as a dict; pass this to `json.loads` as `object_pairs_hook`.

    Raises:
        ValueError: a key appears twice.
    """
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        msg = f"the name {twice[:80]!r} appears twice"
        raise ValueError(msg)
    return table


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values as bytes, without a copy if it is contiguous and on the CPU."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    flat = dense.reshape(-1)
    # with at most one element, a tensor may have another stride
    if flat.stride() != (1,):
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
) -> tuple[bytes, dict[str, dict[str, Any]]]:
    """Return a file's header, and its row for each tensor.

    Tensors with a multiple of 64 bytes come first, so that all of them are aligned to 64 bytes.
    The others are sorted by item size, largest first, so that their offsets are multiples of
    their item size.
    """

    def place(name: str) -> tuple[bool, int, str]:
        t = tensors[name]
        return t.nbytes % ALIGNED > 0, -t.dtype.itemsize, name

    at = 0
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted(tensors, key=place):
        t = tensors[name]
        offsets, at = [at, at + t.nbytes], at + t.nbytes
        dtype, shape = NAMES_OF[t.dtype], tuple(t.shape)
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    header = {"__metadata__": dict(metadata), **rows}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return len(text).to_bytes(8, "little") + text, rows


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has torch's alignment; without it, kernels may round differently."""
    return tensor.data_ptr() % ALIGNED == 0


def read_into(stream: BinaryIO, buffer: memoryview) -> None:
    """Read bytes from a file's current position into a buffer, with torch's number of threads.

    One thread alone uses only a part of the bandwidth of the memory or the disk. Each thread
    reads at least `_BLOCK` bytes.
    """
    handle, begin = stream.fileno(), stream.tell()
    threads = min(torch.get_num_threads(), len(buffer) // _BLOCK)
    if threads > 1:
        size = -(-len(buffer) // threads)
        with ThreadPoolExecutor(threads, "accelfn-read") as pool:
            begins = range(begin, begin + len(buffer), size)
            pieces = _blocks(buffer, size)
            # a list, because `map` raises an error of a thread only when its result is read
            list(pool.map(_read_at, repeat(handle), begins, pieces))
    else:
        _read_at(handle, begin, buffer)
    stream.seek(begin + len(buffer))


def _read_at(handle: int, begin: int, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        got = system.read_at(handle, begin + at, buffer[at:])
        if not got:
            raise OSError(None, "the file is shorter than expected")
        at += got


# Hints for errors about a wrong path: which function reads the files at that path.


def reader_of(path: Path) -> str:
    """Return sentences about the functions that read the files at a path; "" without files.

    A space precedes each sentence.
    """
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
    """Return a sentence, after a space, that names the checkpoints in or next to a path.

    Args:
        path: a path that is not a checkpoint.
        name: the name of a file that every checkpoint has.
    """
    inside = arguments.is_directory(path)
    folder = path if inside else path.parent
    try:
        names = sorted(p.name for p in folder.iterdir() if arguments.is_file(p / name))
    except OSError:  # missing, or not readable
        names = []
    if not names:
        return " af.save(state, directory) writes a checkpoint."
    text = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f" Checkpoints {'in' if inside else 'next to'} it: {text}."


# Allocate host memory in huge pages, if the system has them.
#
# The system provides memory at the first write, one page at a time. A model of 500 MB needs
# about 122,000 pages of 4 KiB, and providing them takes longer than reading its file. With huge
# pages of 2 MiB, the same model needs only about 240 pages.


_HUGE_PAGE = 1 << 21
"""The number of bytes of a huge page on most machines."""
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""The argument of `madvise` that requests huge pages on Linux; None on other systems."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor in host memory, to read a file into.

    Cost: `torch.empty`, and one system call for a large tensor. Huge pages are used only inside
    of the tensor's memory, so it needs no more memory.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if _ADVICE is not None and tensor.nbytes >= 2 * _HUGE_PAGE:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        # if this fails, the system uses small pages
        system.libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE
        )
    return tensor
