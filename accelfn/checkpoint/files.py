# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, digested as they are written and as they are read.

The format is safetensors' own, and its readers read these files. They are written here
because its writer gives no digest and no flush, and holds a second copy of all tensors.

A digest is that of a file up to the end of each tensor, so the first that differs names the
tensor that has changed, and the last is what `b3sum` says of the file.
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

# Hashing what is read of a file, while more of it is read.


_TOGETHER = 1 << 20
"""Bytes that are handed over to be hashed, at least: a small tensor's hash takes less time."""
_AHEAD = 2
"""As often; what waits to be hashed."""


class Hashing:
    """Hashes what was read of a file in another thread, many small tensors at once."""

    def __init__(self, pool: ThreadPoolExecutor, path: Path) -> None:
        """Take the thread and the file's path."""
        self._pool, self._path, self._digest = pool, path, blake3()
        self._read: list[tuple[memoryview, str, str | None]] = []
        self._num_bytes = 0
        self._pending: deque[Future[str | None]] = deque()

    def add(self, values: memoryview, what: str, expected: str | None) -> None:
        """Take the next bytes, and the digest up to their end if it is known."""
        self._read.append((values, what, expected))
        self._num_bytes += len(values)
        if self._num_bytes >= _TOGETHER:
            self._hand_over()
            while len(self._pending) > _AHEAD:
                self._compare()

    def finish(self) -> None:
        """Return once all is known to be what was saved.

        Raises:
            CheckpointCorruptError: it is not; what differs first is named.
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
"""Bytes that are written at once, and that a thread reads at least. The system keeps a file in
pieces as large as its writes, and who maps it pays for each piece: 8 MiB take a sixth of the page
faults of 256 KiB."""
ALIGNED = 64
"""Bytes at a multiple of which torch begins a tensor; kernels may round otherwise elsewhere."""
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
    """A tensor in a file.

    Attributes:
        dtype: by its name in safetensors.
        shape: of the tensor.
        begin: the byte of the file at which its values begin.
        end: the byte behind them.
        digest: of the file up to there.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    digest: str

    def empty(self) -> torch.Tensor:
        """Return a tensor into which it can be read."""
        return devices.empty(self.shape, DTYPES[self.dtype])


@attrs.frozen
class File:
    """A file of tensors.

    Attributes:
        size: in bytes.
        digest: of the whole file.
        header_digest: of what stands before the first tensor.
        tensors: by name, in the order in which they lie in the file.
    """

    size: int
    digest: str
    header_digest: str
    tensors: Mapping[str, Entry]

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data, with digests under the name of their algorithm."""
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
        """Return what `to_plain` was called on.

        Raises:
            ValueError: its tensors are none, or do not fill the file.
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
            msg = f"its header is said to have {at} bytes"
            raise ValueError(msg)
        for name, each in tensors.items():
            if each.begin != at or each.end != at + bytes_in(each.dtype, each.shape):
                msg = (
                    f"{name[:80]!r} is said to lie at bytes {each.begin} to {each.end}"
                )
                raise ValueError(msg)
            at = each.end
        if at != file.size:
            msg = f"its tensors end at byte {at} of {file.size}"
            raise ValueError(msg)
        return file


def bytes_in(dtype: str, shape: Sequence[int]) -> int:
    """Return how many bytes a tensor has.

    Raises:
        ValueError: no tensor has this dtype and shape.
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
    """Write tensors to a new file, flush it, and return what it is.

    It is hashed in a thread beside. Of tensors that are elsewhere or not in one piece, each
    of the two copies one at a time.
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
    """Return what a file of tensors would be; its digests are none, for it is not written."""
    order = _file_order(tensors)
    header, places = _header({name: tensors[name] for name in order}, {})
    entries = {name: Entry(*places[name], digest=_NONE) for name in order}
    size = max((entry.end for entry in entries.values()), default=len(header))
    return File(size, _NONE, _NONE, entries)


def ignore_progress(_count: int) -> None:
    """Tell nobody."""


def read(
    path: Path,
    file: File,
    wanted: AbstractSet[str],
    *,
    device: str = "cpu",
    verify: bool = True,
    on_read: OnRead = ignore_progress,
) -> dict[str, torch.Tensor]:
    """Return the wanted tensors of a file that is what it was.

    Args:
        path: of the file.
        file: what was written.
        wanted: the names of those to be returned.
        device: on which.
        verify: whether to read all of it and compare its digests.
        on_read: called with how many bytes have been read since it was last called.

    Raises:
        CheckpointCorruptError: it is not there, or not what was written; the first tensor
            that has changed is named.
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
    """Read all of a file, hashing what was read while more is.

    A tensor that nobody wants may have any size, so it is read in pieces.
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
    """Return a tensor's values as bytes: its own memory, if they lie there in one piece."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    flat = dense.reshape(-1)
    if flat.stride() != (1,):  # of one element or none, any stride is in one piece
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
    """Return names in the order in which tensors lie in a file.

    First those that fill whole lines, which then all begin at one; then the largest items, so
    that each tensor lies at a multiple of its item's size.
    """

    def place(name: str) -> tuple[bool, int, str]:
        each = tensors[name]
        size = each.numel() * each.dtype.itemsize
        return size % ALIGNED > 0, -each.dtype.itemsize, name

    return sorted(tensors, key=place)


def _header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[str, tuple[int, ...], int, int]]]:
    """Return a file's first bytes, and each tensor's dtype, shape, begin and end."""
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


def read_into(stream: BinaryIO, buffer: memoryview) -> None:
    """Read what comes next into all of a buffer, by as many threads as torch computes with.

    One thread copies what the system has of a file at a part of the memory's speed, and asks a
    disk for one piece at a time. Each takes a block at least.
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
