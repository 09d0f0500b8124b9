# SPDX-License-Identifier: Apache-2.0
"""The manifest: what a checkpoint holds, and where, as JSON that carries its own digest.

The digest is on the second line, and that of all lines behind it.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import attrs
from blake3 import blake3

from accelfn.base import paths
from accelfn.base.codec import Table, decode, encode, tensors_in
from accelfn.checkpoint import disk, grammar
from accelfn.checkpoint.files import DTYPES, File
from accelfn.checkpoint.others import checkpoints_near, reader_of
from accelfn.checkpoint.slices import of_copies
from accelfn.errors import CheckpointCorruptError, CheckpointError

NAME = "manifest.json"
_LARGEST = 1 << 28
"""Bytes of a manifest that are read; a million tensors have fewer."""
_MOST, _SPARSE = 1 << 18, 16
"""A manifest has at most `_MOST` lists and tables, or one per `_SPARSE` bytes.

A tensor takes 30 bytes or more for each. Parsing them takes most of the time and memory.
"""
_DEPTH = 4
"""Tables in tables that are broken into lines."""
_JOINT = re.compile(rb'\{\n "[a-z0-9]+": "[^"\n]*",\n "format": 3,\n')
"""How the file begins that names states that were saved together."""
_SEAL = re.compile(rb'\{\n "blake3": "([0-9a-f]{64})",\n')
FORMAT = 2


@attrs.frozen(kw_only=True)
class Manifest:
    """What a checkpoint holds, and where.

    Attributes:
        step: of the state.
        world_size: on how many ranks it was saved.
        optimizer: its class.
        transforms: the names of the setup's.
        data: what must be the same to go on; None without data.
        trees: by unit (`params`, `slots.ema`): its tree as plain data, of rank 0.
        trees_by_rank: the same of every rank, of the units whose trees differ.
        per_rank: the tensors that differ; every rank's file has its own, but where it is that
            of the first rank of its copy.
        sharded: by name: dtype and shape of the whole, and which slice each file has.
        copies: of which copy of the model each rank was, where copies of several ranks each
            were trained apart; of what differed every copy's own is there. Empty where there
            were none.
        metrics: numbers that were given with it.
        kept: digests of the frozen parameters that were not written.
        persistent: the buffers that belong in an exported model.
        files: by name.
        definition: the parameters that are "frozen", and options of transforms as code; None
            if an earlier version wrote it.
    """

    step: int
    world_size: int
    optimizer: str
    transforms: tuple[str, ...]
    data: Mapping[str, Any] | None
    trees: Mapping[str, Any]
    trees_by_rank: tuple[Mapping[str, Any], ...]
    per_rank: tuple[str, ...]
    sharded: Mapping[str, Any]
    metrics: Mapping[str, float]
    kept: Mapping[str, str]
    persistent: tuple[str, ...]
    files: Mapping[str, File]
    copies: tuple[int, ...] = ()
    definition: Mapping[str, str] | None = None

    def to_bytes(self) -> bytes:
        """Return it as JSON, with a digest of it on its second line.

        Raises:
            CheckpointError: it would be longer than what is read.
        """
        fields = attrs.asdict(self, recurse=False)
        for name in ("copies", "definition"):
            if fields[name] in ((), None):
                del fields[name]
        plain = {
            "format": FORMAT,
            **fields,
            "metrics": {n: encode(v, Table()) for n, v in self.metrics.items()},
            "files": {name: file.to_plain() for name, file in self.files.items()},
        }
        said = _lines(plain).encode().removeprefix(b"{\n")
        if len(said) > _LARGEST - 100:
            msg = f"its manifest would have {len(said)} bytes; at most {_LARGEST} are read."
            raise CheckpointError(msg)
        try:
            _check_density(said)
        except ValueError as error:
            msg = f"its manifest could not be read: {error}. Store long lists as a tensor."
            raise CheckpointError(msg) from error
        return _sealed(said)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what `to_bytes` was called on.

        Raises:
            CheckpointCorruptError: it is something else.
            CheckpointError: it is of another format.
        """
        try:
            _check_density(data)
            plain = _table(json.loads(data, object_pairs_hook=_each_once))
            version = plain["format"]
            if type(version) is not int:
                raise ValueError(f"its format is {grammar.quote(version)}")  # noqa: TRY301, TRY003, EM102
            if version == FORMAT:
                _compare(data)
                return cls._of(plain)
        except (ValueError, RecursionError) as error:
            msg = f"it is no manifest of a checkpoint: {error}"
            raise CheckpointCorruptError(msg) from error
        msg = (
            f"it has format {version}; this version of accelfn reads {FORMAT}. Load it with"
            " the version that wrote it, or a newer one."
        )
        raise CheckpointError(msg)

    @classmethod
    def _of(cls, plain: dict[str, Any]) -> Self:
        plain.setdefault("copies", [])
        plain.setdefault("definition", None)
        grammar.check(plain)
        del plain["blake3"], plain["format"]
        files = {n: File.from_plain(each) for n, each in plain.pop("files").items()}
        grammar.check_files(plain["world_size"], files)
        grammar.check_copies(plain["copies"], plain["world_size"])
        grammar.check_sharded(plain["sharded"], files, plain["copies"])
        for name in ("transforms", "trees_by_rank", "per_rank", "persistent", "copies"):
            plain[name] = tuple(plain[name])
        metrics = {n: float(decode(v, {})) for n, v in plain.pop("metrics").items()}
        manifest = cls(**plain, metrics=metrics, files=files)
        manifest._check_tensors()
        return manifest

    def _check_tensors(self) -> None:
        """Refuse trees of tensors that no file has.

        Raises:
            ValueError: another number of ranks has trees.
            CheckpointCorruptError: no file has a tensor.
        """
        if len(self.trees_by_rank) not in (0, self.world_size):
            msg = f"{self.world_size} ranks have {len(self.trees_by_rank)} trees"
            raise ValueError(msg)
        if self.trees["step"] != self.step:
            msg = f"its step is {self.step}, and that of the state {self.trees['step']}"
            raise ValueError(msg)
        own, apart = set(self.per_rank), set[str]().union(*self.trees_by_rank)
        for unit, tree in self.trees.items():
            names = set(tensors_in(tree))
            self._find(names, 0)
            if unit not in apart:
                for rank in self.firsts:  # other ranks of a copy can read its file
                    self._find(names & own, rank)
        for rank, trees in enumerate(self.trees_by_rank):
            for tree in trees.values():
                self._find(tensors_in(tree), rank)

    def _find(self, tensors: Iterable[str], rank: int) -> None:
        for name in tensors:
            if name not in self.sharded:
                self.file_of(name, rank)

    def file_of(self, tensor: str, rank: int) -> str:
        """Return which file has a tensor, for what was this rank.

        Raises:
            CheckpointCorruptError: none has.
        """
        own = rank_file(rank)
        if own in self.files and tensor in self.files[own].tensors:
            return own
        if tensor in self._places:
            return self._places[tensor]
        first = rank_file(self.firsts[self.copies[rank]]) if self.copies else own
        if first not in self.files or tensor not in self.files[first].tensors:
            msg = f"it names a tensor {tensor[:80]!r} that no file has."
            raise CheckpointCorruptError(msg)
        return first

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first rank of each copy; each rank, where it was alone with its own."""
        copies = self.copies or tuple(range(self.world_size))
        first = {copy: rank for rank, copy in reversed([*enumerate(copies)])}
        return tuple(first[copy] for copy in sorted(first))

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor, of a sharded one the whole's."""
        if tensor in self.sharded:
            return tuple(self.sharded[tensor]["shape"])
        return next(
            tuple(file.tensors[tensor].shape)
            for file in self.files.values()
            if tensor in file.tensors
        )

    @cached_property
    def with_mean(self) -> frozenset[str]:
        """The tensors of which ranks had other values, that have a mean."""
        # reversed: the first file that has a tensor says its dtype, as in all else
        dtypes = {
            name: entry.dtype
            for file in reversed(list(self.files.values()))
            for name, entry in file.tensors.items()
        }
        kinds = {
            name: DTYPES[dtypes[name]] for name in self.differing if name in dtypes
        }
        return frozenset(
            n for n, kind in kinds.items() if kind.is_floating_point or kind.is_complex
        )

    def slices_of(self, tensor: str, rank: int) -> Mapping[str, Any]:
        """Return which slice of a sharded tensor each file has, for what was this rank."""
        slices: Mapping[str, Any] = self.sharded[tensor]["slices"]
        own = of_copies(slices, self.copies)
        return own[self.copies[rank]] if len(own) > 1 else slices

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """Which file has each tensor that all ranks had alike."""
        own = set(self.per_rank)
        return {
            tensor: name
            for name, file in self.files.items()
            for tensor in file.tensors
            if tensor not in own
        }

    def trees_of(self, rank: int) -> dict[str, Any]:
        """Return the trees by unit, as plain data, of what was this rank."""
        apart = set[str]().union(*self.trees_by_rank)
        common = {unit: tree for unit, tree in self.trees.items() if unit not in apart}
        return common | dict(self.trees_by_rank[rank] if apart else {})

    @property
    def slots(self) -> frozenset[str]:
        """The names of the slots, of transforms and of the user's own."""
        slots = (unit for unit in self.trees if unit.startswith("slots."))
        return frozenset(unit.removeprefix("slots.") for unit in slots)

    @property
    def differs(self) -> tuple[str, ...]:
        """The units in which ranks differed."""
        trees = {unit for trees in self.trees_by_rank for unit in trees}
        own = self.differing
        of_tensors = {
            unit for unit, tree in self.trees.items() if own & set(tensors_in(tree))
        }
        return tuple(sorted(trees | of_tensors))

    @cached_property
    def differing(self) -> frozenset[str]:
        """The tensors of which ranks had other values."""
        by_copy = {
            name
            for name, whole in self.sharded.items()
            if len(of_copies(whole["slices"], self.copies)) > 1
        }
        return frozenset({*self.per_rank, *by_copy})


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def read_manifest(
    folder: Path, name: str = "", *, names: Collection[str] = ("",)
) -> Manifest:
    """Return the manifest of a checkpoint, and see that its files are there.

    Args:
        folder: of the checkpoint.
        name: of one of the states that were saved together; "" is that of a lone one.
        names: of all that are expected in it.

    Raises:
        CheckpointError: the folder has no checkpoint, or one with another format or other states.
        CheckpointCorruptError: it has changed, or files are missing or too many.
    """
    digests = digests_in(folder)
    if digests.keys() != {*names}:
        if "" in digests:
            read_manifest(folder)  # one that has changed may be of several states
        raise _of_others(folder, digests, names)
    folder /= name
    missing_error = CheckpointCorruptError if name else CheckpointError
    data, path = _read(folder, missing_error), folder / NAME
    if digests[name] not in (None, blake3(data).hexdigest()):
        msg = f"{path} is not the one that was saved with the others. Load another checkpoint."
        raise CheckpointCorruptError(msg)
    try:
        manifest = Manifest.from_bytes(data)
    except CheckpointError as error:
        msg = f"{path}: {error}"
        raise type(error)(msg) from error
    present = {each.name for each in folder.glob("*.safetensors")}
    missing, extra = manifest.files.keys() - present, present - manifest.files.keys()
    if missing or extra:
        msg = (
            f"{folder}: files that the manifest names are missing:"
            f" {grammar.quote(sorted(missing))}; files that it does not name:"
            f" {grammar.quote(sorted(extra))}."
        )
        raise CheckpointCorruptError(msg)
    return manifest


def read_manifests(folder: Path) -> dict[str, Manifest]:
    """Return the manifests of all states in a checkpoint, by name.

    Raises: as `read_manifest`.
    """
    names = digests_in(folder)
    return {name: read_manifest(folder, name, names=names) for name in names}


def digests_in(folder: Path) -> dict[str, str | None]:
    """Return the digests of the manifests of states that were saved together, by name.

    A lone state has the name "" and no digest here.

    Raises:
        CheckpointError: the folder has no checkpoint.
        CheckpointCorruptError: it has changed.
    """
    data = _read(folder)
    if not _JOINT.match(data):
        return {"": None}
    try:
        _check_density(data)
        _compare(data)
        plain = _table(json.loads(data, object_pairs_hook=_each_once))
        grammar.check_joint(plain)
    except (ValueError, RecursionError, CheckpointCorruptError) as error:
        msg = f"{folder / NAME}: it names no states that were saved together: {error}"
        raise CheckpointCorruptError(msg) from error
    return plain["states"]


def joint_bytes(digests: Mapping[str, str]) -> bytes:
    """Return what says that states were saved together, given their manifests' digests."""
    plain = {"format": 3, "states": dict(digests)}
    return _sealed(_lines(plain).encode().removeprefix(b"{\n"))


def check_not_joint(folder: Path) -> None:
    """Refuse the directory of one of several states that were saved together.

    Raises:
        CheckpointError: it is one; the error says how all are loaded.
    """
    parent, name = folder.absolute().parent, folder.absolute().name
    digests = dict[str, str | None]()
    with suppress(CheckpointError):  # most folders have other neighbors
        digests = digests_in(parent)
    if name in digests:
        raise _of_others(parent, digests, [name])


def _of_others(
    folder: Path, there: Collection[str], asked: Collection[str]
) -> CheckpointError:
    """Return the error of a checkpoint that has other states than those asked for."""
    has, wants = (", ".join(sorted(n)) or "one state" for n in (there, asked))
    msg = f"{folder}: expected {wants}, and it has {has}. Load it with"
    if "" in there:
        return CheckpointError(f"{msg} af.load(state, {str(folder)!r}).")
    table = ", ".join(f'"{name}": ...' for name in sorted(there))
    return CheckpointError(
        f"{msg} af.load({{{table}}}, {str(folder)!r}), or fields of one of them with"
        f" af.load_part(state, {str(folder / min(there))!r}, only)."
    )


def _read(
    folder: Path, missing_error: type[CheckpointError] = CheckpointError
) -> bytes:
    """Return what is in the manifest's file of a directory.

    Raises: as `read_manifest`; `missing_error` if the file is missing.
    """
    path = folder / NAME
    try:
        with disk.open_plain(path) as stream:
            size = stream.seek(0, 2)
            if size > _LARGEST:
                msg = f"{path}: {size} bytes; a manifest has at most {_LARGEST}."
                raise CheckpointCorruptError(msg)
            stream.seek(0)
            return stream.read()
    except FileNotFoundError as error:
        lacks = (
            f"it has no {NAME}"
            if paths.is_directory(folder)
            else "there is no such directory"
        )
        way = reader_of(folder) or checkpoints_near(folder, NAME)
        msg = f"There is no checkpoint at {folder}: {lacks}.{way}"
        raise missing_error(msg) from error
    except NotADirectoryError as error:
        msg = f"{folder} is a file, and no checkpoint's directory.{reader_of(folder)}"
        raise CheckpointCorruptError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error


def _sealed(said: bytes) -> bytes:
    """Return lines of JSON with their digest before them."""
    return f'{{\n "blake3": "{blake3(said).hexdigest()}",\n'.encode() + said


def _lines(value: Any, depth: int = 0) -> str:
    """Return JSON with a tensor a line."""
    if depth == _DEPTH or not isinstance(value, dict) or not value:
        return json.dumps(value)
    items = cast("dict[str, Any]", value).items()
    space = " " * depth
    lines = (f"{space} {json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in items)
    return "{\n" + ",\n".join(lines) + f"\n{space}}}"


def _table(plain: Any) -> dict[str, Any]:
    """Return JSON that is an object with a format, as a manifest is."""
    if not isinstance(plain, dict) or "format" not in plain:
        is_object = isinstance(plain, dict)
        lacks = "an object without one" if is_object else grammar.quote(plain)
        msg = f'expected a JSON object with "format", and found {lacks}'
        raise ValueError(msg)
    return cast("dict[str, Any]", plain)


def _check_density(data: bytes) -> None:
    """Reject JSON with more lists and tables than a save writes.

    Raises:
        ValueError: there are more.
    """
    count = data.count(b"[") + data.count(b"{")
    if count > max(_MOST, len(data) // _SPARSE):
        msg = f"it has {count} lists and tables in {len(data)} bytes"
        raise ValueError(msg)


def _compare(data: bytes) -> None:
    """Refuse a manifest that is not what its digest says.

    Raises:
        CheckpointCorruptError: it is not.
    """
    seal = _SEAL.match(data)
    if seal is None or seal[1].decode() != blake3(data[seal.end() :]).hexdigest():
        msg = "it is not what was saved: its BLAKE3 differs. Load another checkpoint."
        raise CheckpointCorruptError(msg)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        msg = "a name comes twice"
        raise ValueError(msg)
    return found
