# SPDX-License-Identifier: Apache-2.0
"""Safetensors files with BLAKE3 digests, which are computed while writing and reading.

Any safetensors reader can read these files. accelfn has its own writer because the library's
computes no digest, does not flush, and holds a second copy of all tensors.

The digest of a tensor covers the file up to the end of the tensor. So the first digest that
differs names the changed tensor, and the last digest is the output of `b3sum`.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeAlias, cast

import attrs
import torch
from blake3 import blake3

from accelfn.base import devices
from accelfn.checkpoint import disk
from accelfn.errors import CheckpointCorruptError

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

    def add(self, values: memoryview, what: str, expected: str | None) -> None:
        """Add the next bytes, and the expected digest up to their end if it is known."""
        self._read.append((values, what, expected))
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
        for values, what, expected in read:
            self._digest.update(values)
            if expected is not None and self._digest.hexdigest() != expected:
                return what
        return None

    def _compare(self) -> None:
        what = self._pending.popleft().result()
        if what is not None:
            msg = (
                f"{self._path} is not what was saved: {what} differs in its BLAKE3."
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
        digest: the digest of the file up to `end`.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    digest: str

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this dtype and shape."""
        return devices.empty(self.shape, DTYPES[self.dtype])


@attrs.frozen
class File:
    """A file of tensors.

    Attributes:
        size: the file's size in bytes.
        digest: the digest of the whole file.
        header_digest: the digest of the bytes before the first tensor.
        tensors: entries by name, in the file's order.
    """

    size: int
    digest: str
    header_digest: str
    tensors: Mapping[str, Entry]

    def to_plain(self) -> dict[str, Any]:
        """Return plain data, with digests under the name of their algorithm."""
        return {
            "size": self.size,
            "blake3": self.digest,
            "header_blake3": self.header_digest,
            "tensors": {
                name: {
                    "dtype": each.dtype,
                    "shape": each.shape,
                    "begin": each.begin,
                    "end": each.end,
                    "blake3": each.digest,
                }
                for name, each in self.tensors.items()
            },
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the file that `to_plain` described.

        Raises:
            ValueError: an entry is not a valid tensor, or the tensors do not fill the file.
        """
        tensors = {
            name: Entry(
                each["dtype"],
                tuple(each["shape"]),
                each["begin"],
                each["end"],
                each["blake3"],
            )
            for name, each in plain["tensors"].items()
        }
        file = cls(plain["size"], plain["blake3"], plain["header_blake3"], tensors)
        at = min((each.begin for each in tensors.values()), default=file.size)
        if at > _LARGEST_HEADER:
            msg = f"its header has {at} bytes according to the entries"
            raise ValueError(msg)
        for name, each in tensors.items():
            if each.begin != at or each.end != at + bytes_in(each.dtype, each.shape):
                msg = f"{name[:80]!r} has a wrong range of bytes, {each.begin} to {each.end}"
                raise ValueError(msg)
            at = each.end
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


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> File:
    """Write tensors to a new file, flush it, and return its description.

    A second thread hashes the file. Both threads copy tensors that are on a device or not
    contiguous, one tensor at a time.
    """
    order = _file_order(tensors)
    header, places = _header({name: tensors[name] for name in order}, metadata)
    with ThreadPoolExecutor(1, "accelfn-digest") as pool:
        hashed = pool.submit(_ends, header, (bytes_of(tensors[n]) for n in order))
        values = (bytes_of(tensors[name]) for name in order)
        disk.write(path, chain([header], chain.from_iterable(map(_blocks, values))))
        first, *ends = hashed.result()
    entries = {
        name: Entry(*places[name], digest=end)
        for name, end in zip(order, ends, strict=True)
    }
    size = max((entry.end for entry in entries.values()), default=len(header))
    return File(size, ends[-1] if ends else first, first, entries)


def describe_file(tensors: Mapping[str, torch.Tensor]) -> File:
    """Return the description of a file that is not written; its digests are zeros."""
    order = _file_order(tensors)
    header, places = _header({name: tensors[name] for name in order}, {})
    entries = {name: Entry(*places[name], digest=_NONE) for name in order}
    size = max((entry.end for entry in entries.values()), default=len(header))
    return File(size, _NONE, _NONE, entries)


def ignore_progress(_count: int) -> None:
    """Ignore the number of bytes that were read."""


def read(
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
        with disk.open_plain(path) as stream:
            size = stream.seek(0, 2)
            if size != file.size:
                msg = f"{path}: {size} bytes, the manifest says {file.size}."
                raise CheckpointCorruptError(msg)
            reader = _read_verified if verify else _read_some
            found = reader(stream, path, file, wanted, on_read)
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error
    return {name: tensor.to(device) for name, tensor in found.items()}


def _read_some(
    stream: BinaryIO, _path: Path, file: File, wanted: AbstractSet[str], on_read: OnRead
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in wanted:
        entry = file.tensors[name]
        stream.seek(entry.begin)
        found[name] = entry.empty()
        for block in _blocks(bytes_of(found[name]), _BLOCK * torch.get_num_threads()):
            read_into(stream, block)
            on_read(len(block))
    return found


def _read_verified(
    stream: BinaryIO, path: Path, file: File, wanted: AbstractSet[str], on_read: OnRead
) -> dict[str, torch.Tensor]:
    """Read a whole file, and hash it in another thread.

    Tensors that are not wanted can have any size, so they are read in pieces.
    """
    most = _BLOCK * torch.get_num_threads()
    found: dict[str, torch.Tensor] = {}
    stream.seek(0)
    begin = min((each.begin for each in file.tensors.values()), default=file.size)
    with ThreadPoolExecutor(1, "accelfn-digest") as pool:
        hashing = Hashing(pool, path)

        def fill(values: memoryview, what: str, expected: str | None) -> None:
            read_into(stream, values)
            on_read(len(values))
            hashing.add(values, what, expected)

        fill(memoryview(bytearray(begin)), "its header", file.header_digest)
        for name, entry in file.tensors.items():
            if name in wanted:
                found[name] = entry.empty()
                fill(bytes_of(found[name]), name, entry.digest)
                continue
            size = entry.end - entry.begin
            for at in range(0, max(size, 1), most):
                piece = devices.empty((min(most, size - at),), torch.uint8)
                is_last = at + most >= size
                fill(bytes_of(piece), name, entry.digest if is_last else None)
        fill(memoryview(b""), "the whole", file.digest)
        hashing.finish()
    return found


def _ends(header: bytes, values: Iterable[memoryview]) -> list[str]:
    """Return the digest of a file up to the end of its header, and of each tensor."""
    digest = blake3(header)
    found = [digest.hexdigest()]
    for each in values:
        digest.update(each)
        found.append(digest.hexdigest())
    return found


def _blocks(raw: memoryview, size: int = _BLOCK) -> Iterator[memoryview]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


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
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        digest = blake3(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
        found[name] = digest.hexdigest()
    return found


def _file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names in the order of their tensors in a file.

    Tensors that fill whole lines of 64 bytes come first, so that all of them are aligned. The
    rest is sorted by item size, largest first, so that offsets are multiples of the item size.
    """

    def place(name: str) -> tuple[bool, int, str]:
        each = tensors[name]
        size = each.numel() * each.dtype.itemsize
        return size % ALIGNED > 0, -each.dtype.itemsize, name

    return sorted(tensors, key=place)


def _header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[str, tuple[int, ...], int, int]]]:
    """Return a file's header, and each tensor's dtype, shape, begin and end."""
    at, table = 0, {}
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.dtype.itemsize
        table[name] = (name_of(tensor.dtype), tuple(tensor.shape), at, end)
        at = end
    listed: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, (dtype, shape, begin, end) in table.items():
        listed[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    first = 8 + len(text)
    places = {
        name: (dtype, shape, begin + first, end + first)
        for name, (dtype, shape, begin, end) in table.items()
    }
    return len(text).to_bytes(8, "little") + text, places


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
        _read_by(threads, handle, begin, buffer)
    else:
        _read_at(handle, begin, buffer)
    stream.seek(begin + len(buffer))


def _read_by(threads: int, handle: int, begin: int, buffer: memoryview) -> None:
    size = -(-len(buffer) // threads)
    with ThreadPoolExecutor(threads, "accelfn-read") as pool:
        reading = [
            pool.submit(_read_at, handle, begin + at, buffer[at : at + size])
            for at in range(0, len(buffer), size)
        ]
        for each in reading:
            each.result()


def _read_at(handle: int, begin: int, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        got = os.preadv(handle, [buffer[at:]], begin + at)
        if not got:
            raise OSError(None, "it ended while it was read")
        at += got
