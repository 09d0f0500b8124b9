# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, digested as they are written and as they are read.

The format is safetensors' own, and its readers read these files. They are written here
because its writer gives no digest and no flush, and holds a second copy of all tensors.

A digest is SHA-256 of a file up to the end of each tensor, so the first that differs names
the tensor that has changed, and the last is what `sha256sum` says of the file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, cast

import attrs
import torch

from accelfn.checkpoint import disk
from accelfn.errors import CheckpointCorruptError

_LARGE = 1 << 20
"""Bytes from which on a chunk is hashed beside its writing or reading."""
_BLOCK = 1 << 24

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
_NAMES_OF = {dtype: name for name, dtype in DTYPES.items()}


@attrs.frozen
class Entry:
    """A tensor in a file.

    Attributes:
        dtype: by its name in safetensors.
        shape: of the tensor.
        begin: the byte of the file at which its values begin.
        end: the byte behind them.
        sha256: of the file up to there.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    sha256: str

    def empty(self) -> torch.Tensor:
        """Return a tensor into which it can be read."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype])


@attrs.frozen
class File:
    """A file of tensors.

    Attributes:
        size: in bytes.
        sha256: of the whole file.
        header_sha256: of what stands before the first tensor.
        tensors: by name, in the order in which they lie in the file.
    """

    size: int
    sha256: str
    header_sha256: str
    tensors: Mapping[str, Entry]

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return attrs.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return what `to_plain` was called on.

        Raises:
            ValueError: its tensors are none, or do not fill the file.
        """
        tensors: dict[str, Entry] = {}
        for name, each in plain["tensors"].items():
            entry: dict[str, Any] = {**each, "shape": tuple(each["shape"])}
            tensors[name] = Entry(**entry)
        given: dict[str, Any] = {**plain, "tensors": tensors}
        file = cls(**given)
        at = min((each.begin for each in tensors.values()), default=file.size)
        for name, each in tensors.items():
            if each.begin != at or each.end != at + _bytes_of(each):
                msg = f"{name!r} is said to lie at bytes {each.begin} to {each.end}"
                raise ValueError(msg)
            at = each.end
        if at != file.size:
            msg = f"its tensors end at byte {at} of {file.size}"
            raise ValueError(msg)
        return file


def _bytes_of(entry: Entry) -> int:
    if entry.dtype not in DTYPES or any(
        not isinstance(n, int) or n < 0 for n in entry.shape
    ):
        msg = f"{entry.dtype!r} of shape {entry.shape} is no tensor"
        raise ValueError(msg)
    return torch.Size(entry.shape).numel() * DTYPES[entry.dtype].itemsize


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> File:
    """Write tensors to a new file, flush it, and return what it is.

    One tensor at a time is copied to the host, and none that is there in one piece.
    """
    # the largest items first, so that each tensor lies at a multiple of its item's size
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, places = _header({name: tensors[name] for name in order}, metadata)
    ends: list[str] = []

    def chunks() -> Iterator[disk.Chunk]:
        yield header
        ends.append(digest.so_far())
        for name in order:
            raw = bytes_of(tensors[name])
            for start in range(0, len(raw), _BLOCK):
                yield raw[start : start + _BLOCK]
            ends.append(digest.so_far())

    with _Digest() as digest:
        disk.write(path, chunks(), digest.add)
        whole = digest.so_far()
    entries = {
        name: Entry(*places[name], sha256=end)
        for name, end in zip(order, ends[1:], strict=True)
    }
    size = max((entry.end for entry in entries.values()), default=len(header))
    return File(size, whole, ends[0], entries)


def read(
    path: Path,
    file: File,
    wanted: AbstractSet[str],
    *,
    device: str = "cpu",
    verify: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the wanted tensors of a file that is what it was.

    Args:
        path: of the file.
        file: what was written.
        wanted: the names of those to be returned.
        device: on which.
        verify: whether to read all of it and compare its digests.

    Raises:
        CheckpointCorruptError: it is not there, or not what was written; the first tensor
            that has changed is named.
    """
    found: dict[str, torch.Tensor] = {}
    try:
        with disk.open_plain(path) as stream:
            size = stream.seek(0, 2)
            if size != file.size:
                msg = f"{path}: {size} bytes, the manifest says {file.size}."
                raise CheckpointCorruptError(msg)
            if not verify:
                for name in wanted:
                    entry = file.tensors[name]
                    stream.seek(entry.begin)
                    tensor = entry.empty()
                    _fill(stream, bytes_of(tensor))
                    found[name] = tensor.to(device)
                return found
            stream.seek(0)
            with _Digest() as digest:
                begin = min(
                    (each.begin for each in file.tensors.values()), default=size
                )
                header = memoryview(bytearray(begin))
                _fill(stream, header)
                digest.add(header)
                _compare(digest, path, "its header", file.header_sha256)
                for name, entry in file.tensors.items():
                    tensor = entry.empty()
                    raw = bytes_of(tensor)
                    for start in range(0, len(raw), _BLOCK):
                        block = raw[start : start + _BLOCK]
                        _fill(stream, block)
                        digest.add(block)
                    _compare(digest, path, name, entry.sha256)
                    if name in wanted:
                        found[name] = tensor.to(device)
                _compare(digest, path, "the whole", file.sha256)
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in safetensors."""
    return _NAMES_OF[dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values as bytes: its own memory, if they lie there in one piece."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    flat = dense.reshape(-1).view(torch.uint8)
    return memoryview(cast("Any", flat.numpy()))


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
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    places = {
        name: (dtype, shape, begin + first, end + first)
        for name, (dtype, shape, begin, end) in table.items()
    }
    return len(text).to_bytes(8, "little") + text, places


def _fill(stream: Any, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        got = stream.readinto(buffer[at:])
        if not got:
            raise OSError(None, "it ended while it was read")
        at += got


def _compare(digest: "_Digest", path: Path, what: str, expected: str) -> None:
    if digest.so_far() != expected:
        msg = (
            f"{path} is not what was saved: {what} differs in its SHA-256. Load another"
            " checkpoint."
        )
        raise CheckpointCorruptError(msg)


class _Digest:
    """SHA-256 of chunks, the large ones hashed while the next is written or read."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, "accelfn-sha256")
        self._under_way: Any = None

    def add(self, chunk: disk.Chunk) -> None:
        """Take a chunk, which must not change before the next call."""
        self._wait()
        if len(chunk) < _LARGE:
            self._hash.update(chunk)
        else:
            self._under_way = self._pool.submit(self._hash.update, chunk)

    def so_far(self) -> str:
        """Return the digest of all that was added."""
        self._wait()
        return self._hash.copy().hexdigest()

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
