# SPDX-License-Identifier: Apache-2.0
"""The manifest: what a checkpoint holds, and where, as JSON that carries its own digest."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from accelfn.checkpoint import disk
from accelfn.checkpoint.files import File
from accelfn.codec import tensors_in
from accelfn.errors import CheckpointCorruptError, CheckpointError

FORMAT = 1
NAME = "manifest.json"
_LARGEST = 1 << 28
"""Bytes of a manifest that are read; a million tensors have fewer."""
_FILE = re.compile(r"rank-\d{5}\.safetensors")


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
        per_rank: the tensors that differ; every rank's file has its own.
        sharded: by name: dtype and shape of the whole, and which slice each file has.
        metrics: numbers that were given with it.
        kept: SHA-256 of the frozen parameters that were not written.
        files: by name.
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
    files: Mapping[str, File]

    def to_bytes(self) -> bytes:
        """Return it as JSON, with a digest of its own canonical form."""
        plain = {
            "format": FORMAT,
            **attrs.asdict(self, recurse=False),
            "files": {name: file.to_plain() for name, file in self.files.items()},
        }
        return json.dumps({"sha256": _digest(plain), **plain}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what `to_bytes` was called on.

        Raises:
            CheckpointCorruptError: it is something else.
            CheckpointError: it is of another format.
        """
        try:
            plain = json.loads(data, object_pairs_hook=_each_once)
            version, seal = plain.pop("format"), plain.pop("sha256", None)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            msg = f"it is no manifest of a checkpoint: {e}"
            raise CheckpointCorruptError(msg) from e
        if version != FORMAT:
            msg = f"it has format {version!r}; this version of accelfn reads {FORMAT}."
            raise CheckpointError(msg)
        if seal != _digest({"format": version, **plain}):
            msg = "it is not what was saved: its SHA-256 differs. Load another checkpoint."
            raise CheckpointCorruptError(msg)
        try:
            return cls._of(plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"it is no manifest of a checkpoint: {error}"
            raise CheckpointCorruptError(msg) from error

    @classmethod
    def _of(cls, plain: dict[str, Any]) -> Self:
        files = {}
        for name, each in plain.pop("files").items():
            if not _FILE.fullmatch(name):
                msg = f"{name!r} is not the name of one of a checkpoint's files"
                raise ValueError(msg)
            files[name] = File.from_plain(each)
        for name in ("transforms", "trees_by_rank", "per_rank"):
            plain[name] = tuple(plain[name])
        return cls(**plain, files=files)

    def file_of(self, tensor: str, rank: int) -> str:
        """Return which file has a tensor, for what was this rank.

        Raises:
            CheckpointCorruptError: none has.
        """
        own = rank_file(rank)
        if own in self.files and tensor in self.files[own].tensors:
            return own
        for name, file in self.files.items():
            if tensor in file.tensors and tensor not in self.per_rank:
                return name
        msg = f"the manifest names a tensor {tensor!r} that no file has."
        raise CheckpointCorruptError(msg)

    def tree_of(self, unit: str, rank: int) -> Any:
        """Return the tree of a unit, as plain data, of what was this rank."""
        if self.trees_by_rank and unit in self.trees_by_rank[rank]:
            return self.trees_by_rank[rank][unit]
        return self.trees[unit]

    @property
    def differs(self) -> tuple[str, ...]:
        """The units in which ranks differed."""
        trees = {unit for trees in self.trees_by_rank for unit in trees}
        own = set(self.per_rank)
        of_tensors = {
            unit for unit, tree in self.trees.items() if own & set(tensors_in(tree))
        }
        return tuple(sorted(trees | of_tensors))


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, and see that its files are there.

    Raises:
        CheckpointError: there is none, or one of another format.
        CheckpointCorruptError: it has changed, or files are missing or too many.
    """
    path = folder / NAME
    try:
        with disk.open_plain(path) as stream:
            size = stream.seek(0, 2)
            if size > _LARGEST:
                msg = f"{path}: {size} bytes; a manifest has at most {_LARGEST}."
                raise CheckpointCorruptError(msg)
            stream.seek(0)
            data = stream.read()
    except FileNotFoundError as error:
        msg = f"There is no checkpoint at {folder}: it has no {NAME}."
        raise CheckpointError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error
    try:
        manifest = Manifest.from_bytes(data)
    except CheckpointError as error:
        msg = f"{path}: {error}"
        raise type(error)(msg) from error
    present = {each.name for each in folder.glob("*.safetensors")}
    missing, extra = manifest.files.keys() - present, present - manifest.files.keys()
    if missing or extra:
        msg = (
            f"{folder}: files that the manifest names are missing: {sorted(missing)};"
            f" files that it does not name: {sorted(extra)}."
        )
        raise CheckpointCorruptError(msg)
    return manifest


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        msg = "a name comes twice"
        raise ValueError(msg)
    return found
