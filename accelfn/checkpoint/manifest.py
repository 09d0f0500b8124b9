# SPDX-License-Identifier: Apache-2.0
"""The manifest: the contents of a checkpoint and their files, as JSON with its own digest.

The digest is on the second line, and covers all lines after it.
"""

import json
import math
import re
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import attrs
from blake3 import blake3

from accelfn.base import arguments
from accelfn.base.codec import Table, decode, encode, tensors_in
from accelfn.checkpoint import disk, files, grammar
from accelfn.checkpoint.files import DTYPES, File
from accelfn.checkpoint.slices import of_copies
from accelfn.errors import CheckpointCorruptError, CheckpointError

# Hints for wrong paths: the format of the files there, and the function that reads them.


_SAFE = "It has weights of a model; af.import_model(model, {path}) reads them."
_TORCH = (
    "It has what torch.save wrote; af.import_torch_weights(model, {path}) reads it."
)
_OURS = (
    "It is a checkpoint of accelfn; af.load(state, {path}) reads it, and of it the weights"
    ' alone af.load_part(state, {path}, "params").'
)
_STATE = "It has a training that another library saved; af.import_state(state, {path}) reads it."
_ZERO = (
    "It is a checkpoint of DeepSpeed; af.import_state(state, {path}) reads what ZeRO saves of"
    " plain models, with the folder of a tag in it."
)
_IN_FOLDERS = {
    "manifest.json": _OURS,
    ".metadata": _STATE,
    "optimizer.bin": _STATE,
    "zero_to_fp32.py": _ZERO,
    "model.safetensors": _SAFE,
    "model.safetensors.index.json": _SAFE,
    "pytorch_model.bin": _TORCH,
    "pytorch_model.bin.index.json": _TORCH,
}
_ENDINGS = {
    ".safetensors": _SAFE,
    ".safetensors.index.json": _SAFE,
    ".bin": _TORCH,
    ".bin.index.json": _TORCH,
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".ckpt": _TORCH,
}


def reader_of(path: Path) -> str:
    """Return sentences about functions that read a path, each after a space; or ""."""
    found: list[str] = []
    if arguments.is_directory(path):
        found = [
            text for name, text in _IN_FOLDERS.items() if arguments.exists(path / name)
        ]
    elif arguments.is_file(path):
        found = [t for ending, t in _ENDINGS.items() if path.name.endswith(ending)]
    said = dict.fromkeys(text.format(path=repr(str(path))) for text in found)
    return "".join(f" {text}" for text in said)


def checkpoints_near(path: Path, name: str) -> str:
    """Return a sentence, after a space, that names checkpoints in or next to a path.

    Args:
        path: a path without a checkpoint.
        name: the name of a file that every checkpoint has.
    """
    inside = arguments.is_directory(path)
    folder = path if inside else path.parent
    try:
        found = sorted(
            each.name for each in folder.iterdir() if arguments.is_file(each / name)
        )
    except OSError:  # missing, or not readable
        found = []
    if not found:
        return " af.save(state, directory) writes one."
    shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    return f" {'In' if inside else 'Beside'} it there are {len(found)}: {shown}."


NAME = "manifest.json"
_LARGEST = 1 << 28
"""Maximum bytes of a manifest; a million tensors need fewer."""
_MOST, _SPARSE = 1 << 18, 16
"""A manifest has at most `_MOST` lists and tables, or one per `_SPARSE` bytes.

A real list or table of a tensor takes at least 30 bytes. Parsing lists and tables takes most of
the time and memory.
"""
_DEPTH = 4
"""Depth of nested tables that are written one entry per line."""
_JOINT = re.compile(rb'\{\n "[a-z0-9]+": "[^"\n]*",\n "format": 3,\n')
"""The beginning of a file that names states that were saved together."""
_SEAL = re.compile(rb'\{\n "blake3": "([0-9a-f]{64})",\n')
FORMAT = 2


@attrs.frozen(kw_only=True)
class Manifest:
    """The contents of a checkpoint, and their files.

    Attributes:
        step: the state's step.
        world_size: the number of ranks that saved.
        optimizer: the optimizer's class.
        transforms: the names of the setup's transforms.
        data: facts of the data that must match on load; None without data.
        trees: rank 0's tree of each unit (`params`, `slots.ema`), as plain data.
        trees_by_rank: every rank's trees of the units that differ between ranks.
        per_rank: tensors that differ between ranks. Every rank's file has its value, unless
            the value equals that of the first rank of its copy.
        sharded: dtype and full shape of each sharded tensor, and the slice in each file.
        copies: the copy of the model that each rank had a part of, if copies of several ranks
            trained independently; values that differed are saved for every copy. Else empty.
        metrics: metrics that were saved with the state.
        kept: digests of frozen parameters that were not written.
        persistent: the buffers that belong in an exported model.
        files: the files, by name.
        definition: the parameters that are "frozen", and options of transforms as code; None
            if an earlier version wrote the manifest.
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
        """Return the manifest as JSON, with its digest on the second line.

        Raises:
            CheckpointError: the JSON would be too long to read.
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
        return _with_digest(said)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the manifest that `to_bytes` wrote.

        Raises:
            CheckpointCorruptError: the data are not a valid manifest.
            CheckpointError: the manifest has another format version.
        """
        try:
            _check_density(data)
            plain = _table(json.loads(data, object_pairs_hook=_reject_duplicate_keys))
            version = plain["format"]
            if type(version) is not int:
                raise ValueError(f"its format is {grammar.quote(version)}")  # noqa: TRY301, TRY003, EM102
            if version == FORMAT:
                _compare(data)
                return cls._of(plain)
        except (ValueError, RecursionError) as error:
            msg = f"it is not a manifest of a checkpoint: {error}"
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
        """Reject trees with tensors that are in no file.

        Raises:
            ValueError: the number of trees is not the number of ranks, or steps differ.
            CheckpointCorruptError: a tensor is in no file.
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
        """Return the file of a tensor as a rank saved it.

        Raises:
            CheckpointCorruptError: no file has the tensor.
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
        """The first rank of each copy; all ranks if there are no copies of several ranks."""
        copies = self.copies or tuple(range(self.world_size))
        first = {copy: rank for rank, copy in reversed([*enumerate(copies)])}
        return tuple(first[copy] for copy in sorted(first))

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        if tensor in self.sharded:
            return tuple(self.sharded[tensor]["shape"])
        return next(
            tuple(file.tensors[tensor].shape)
            for file in self.files.values()
            if tensor in file.tensors
        )

    @cached_property
    def with_mean(self) -> frozenset[str]:
        """The tensors that differ between ranks and have a mean."""
        # reversed: the first file that has a tensor decides its dtype
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
        """Return the slice of a sharded tensor in each file, for the copy of a rank."""
        slices: Mapping[str, Any] = self.sharded[tensor]["slices"]
        own = of_copies(slices, self.copies)
        return own[self.copies[rank]] if len(own) > 1 else slices

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """The file of each tensor that is equal on all ranks."""
        own = set(self.per_rank)
        return {
            tensor: name
            for name, file in self.files.items()
            for tensor in file.tensors
            if tensor not in own
        }

    def trees_of(self, rank: int) -> dict[str, Any]:
        """Return a rank's trees by unit, as plain data."""
        apart = set[str]().union(*self.trees_by_rank)
        common = {unit: tree for unit, tree in self.trees.items() if unit not in apart}
        return common | dict(self.trees_by_rank[rank] if apart else {})

    @property
    def slots(self) -> frozenset[str]:
        """The names of all slots, those of transforms and those of the user."""
        slots = (unit for unit in self.trees if unit.startswith("slots."))
        return frozenset(unit.removeprefix("slots.") for unit in slots)

    @property
    def differs(self) -> tuple[str, ...]:
        """The units that differ between ranks."""
        trees = {unit for trees in self.trees_by_rank for unit in trees}
        own = self.differing
        of_tensors = {
            unit for unit, tree in self.trees.items() if own & set(tensors_in(tree))
        }
        return tuple(sorted(trees | of_tensors))

    @cached_property
    def differing(self) -> frozenset[str]:
        """The tensors that differ between ranks."""
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
    """Read the manifest of a checkpoint, and check that its files exist.

    Args:
        folder: the checkpoint's directory.
        name: the state to read, if several were saved together; "" for a lone state.
        names: the names of all expected states.

    Raises:
        CheckpointError: the folder has no checkpoint, or has another format or other states.
        CheckpointCorruptError: the manifest has changed, or files are missing or unknown.
    """
    digests = digests_in(folder)
    if digests.keys() != {*names}:
        if "" in digests:
            read_manifest(
                folder
            )  # raises if a damaged file only looks like a lone state
        raise _of_others(folder, digests, names)
    folder /= name
    missing_error = CheckpointCorruptError if name else CheckpointError
    data, path = _read_bytes(folder, missing_error), folder / NAME
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
    """Read the manifests of all states in a checkpoint, by name.

    Raises: as `read_manifest`.
    """
    names = digests_in(folder)
    return {name: read_manifest(folder, name, names=names) for name in names}


def digests_in(folder: Path) -> dict[str, str | None]:
    """Read the digests of the manifests of states that were saved together, by name.

    A lone state has the name "" and the digest None.

    Raises:
        CheckpointError: the folder has no checkpoint.
        CheckpointCorruptError: the file has changed.
    """
    data = _read_bytes(folder)
    if not _JOINT.match(data):
        return {"": None}
    try:
        _check_density(data)
        _compare(data)
        plain = _table(json.loads(data, object_pairs_hook=_reject_duplicate_keys))
        grammar.check_joint(plain)
    except (ValueError, RecursionError, CheckpointCorruptError) as error:
        msg = f"{folder / NAME}: it names no states that were saved together: {error}"
        raise CheckpointCorruptError(msg) from error
    return plain["states"]


def joint_bytes(digests: Mapping[str, str]) -> bytes:
    """Return the manifest of states that are saved together, from their digests."""
    plain = {"format": 3, "states": dict(digests)}
    return _with_digest(_lines(plain).encode().removeprefix(b"{\n"))


def check_not_joint(folder: Path) -> None:
    """Reject the directory of a state that was saved together with other states.

    Raises:
        CheckpointError: the directory is such a state's; the error shows how to load all.
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
    """Return the error for a checkpoint that has other states than expected."""
    has, wants = (", ".join(sorted(n)) or "one state" for n in (there, asked))
    msg = f"{folder}: expected {wants}, and it has {has}. Load it with"
    if "" in there:
        return CheckpointError(f"{msg} af.load(state, {str(folder)!r}).")
    table = ", ".join(f'"{name}": ...' for name in sorted(there))
    return CheckpointError(
        f"{msg} af.load({{{table}}}, {str(folder)!r}), or fields of one of them with"
        f" af.load_part(state, {str(folder / min(there))!r}, only)."
    )


def _read_bytes(
    folder: Path, missing_error: type[CheckpointError] = CheckpointError
) -> bytes:
    """Return the bytes of a directory's manifest.

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
            if arguments.is_directory(folder)
            else "there is no such directory"
        )
        way = reader_of(folder) or checkpoints_near(folder, NAME)
        msg = f"There is no checkpoint at {folder}: {lacks}.{way}"
        raise missing_error(msg) from error
    except NotADirectoryError as error:
        msg = (
            f"{folder} is a file, not the directory of a checkpoint.{reader_of(folder)}"
        )
        raise CheckpointCorruptError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error


def _with_digest(said: bytes) -> bytes:
    """Return lines of JSON with their digest inserted first."""
    return f'{{\n "blake3": "{blake3(said).hexdigest()}",\n'.encode() + said


def _lines(value: Any, depth: int = 0) -> str:
    """Return JSON with one tensor per line."""
    if depth == _DEPTH or not isinstance(value, dict) or not value:
        return json.dumps(value)
    items = cast("dict[str, Any]", value).items()
    space = " " * depth
    lines = (f"{space} {json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in items)
    return "{\n" + ",\n".join(lines) + f"\n{space}}}"


def _table(plain: Any) -> dict[str, Any]:
    """Check that JSON is an object with a format, as a manifest is."""
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
    """Compare a manifest with its digest.

    Raises:
        CheckpointCorruptError: the digest differs.
    """
    seal = _SEAL.match(data)
    if seal is None or seal[1].decode() != blake3(data[seal.end() :]).hexdigest():
        msg = "it is not what was saved: its BLAKE3 differs. Load another checkpoint."
        raise CheckpointCorruptError(msg)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        msg = "a name comes twice"
        raise ValueError(msg)
    return found


# The checkpoints in the directory of a store.


_STEP = re.compile(r"step-([0-9]{8,})")


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint; names sort like steps."""
    return f"step-{step:08d}"


def steps_in(directory: Path) -> tuple[int, ...]:
    """Return the steps of a directory's checkpoints, in rising order.

    Ignores names that a store does not give, such as `step-34`.
    """
    if not arguments.is_directory(directory):
        return ()
    found = [
        int(match[1])
        for path in directory.iterdir()
        if (match := _STEP.fullmatch(path.name))
        and path.name == name_of(int(match[1]))
        and arguments.is_file(path / NAME)
    ]
    return tuple(sorted(found))


def broken_after(directory: Path, step: int) -> Path | None:
    """Return the newest broken link named like a checkpoint after a step."""
    found = [
        (int(match[1]), path)
        for path in directory.iterdir()
        if (match := _STEP.fullmatch(path.name))
        and path.is_symlink()
        and not arguments.exists(path)
    ]
    newest, path = max(found, default=(step, None))
    return path if newest > step else None


def newest_whole(directory: Path, steps: Sequence[int]) -> int | None:
    """Return the newest of some steps with an undamaged checkpoint.

    Cost: reads this checkpoint and all newer, damaged ones.
    """
    for step in sorted(steps, reverse=True):
        with suppress(CheckpointError):
            verify(directory / name_of(step))
            return step
    return None


@contextmanager
def explain_removal(folder: Path) -> Generator[None]:
    """Explain errors of a checkpoint that was removed while being read.

    Raises:
        CheckpointError: the checkpoint was removed.
    """
    try:
        yield
    except (CheckpointCorruptError, FileNotFoundError) as error:
        if disk.is_there(folder):
            raise
        msg = (
            f"{folder} was removed while it was read, as a run removes the older checkpoints of"
            f" its store. Load the newest: af.CheckpointStore({str(folder.parent)!r})"
            ".restore(state)."
        )
        raise CheckpointError(msg) from error


def verify(folder: Path) -> None:
    """Read a whole checkpoint and compare its digests.

    Raises:
        CheckpointCorruptError: a file has changed.
    """
    for state, manifest in read_manifests(folder).items():
        for name, file in manifest.files.items():
            files.read(folder / state / name, file, frozenset())


def metrics_of(folder: Path) -> Mapping[str, float]:
    """Return the metrics of a checkpoint; states saved together share them."""
    return next(iter(read_manifests(folder).values())).metrics


def best_of(directory: Path, metric: str, mode: str) -> list[int]:
    """Return the steps of checkpoints that have a metric, the best first."""
    found: list[tuple[float, int]] = []
    for step in steps_in(directory):
        try:
            value = metrics_of(directory / name_of(step)).get(metric)
        except CheckpointError:  # damaged: loading it raises the error
            continue
        if value is not None and not math.isnan(value):
            found.append((-value if mode == "max" else value, step))
    return [step for _, step in sorted(found)]


def metrics_in(directory: Path) -> set[str]:
    """Return the names of all metrics in a directory's checkpoints."""
    names = set[str]()
    for step in steps_in(directory):
        with suppress(CheckpointError):  # as above
            names |= metrics_of(directory / name_of(step)).keys()
    return names


def check_no_store(directory: Path) -> None:
    """Reject the directory of a store where a single checkpoint is expected.

    Raises:
        CheckpointError: the directory is a store; the error names the newest checkpoint.
    """
    steps = () if arguments.exists(directory / NAME) else steps_in(directory)
    if steps:
        msg = (
            f"{directory} is a store of {len(steps)} checkpoints, and not one of them."
            f" Load the newest, {directory / name_of(steps[-1])}, or call"
            f" af.CheckpointStore({str(directory)!r}).restore(state)."
        )
        raise CheckpointError(msg)


def discard(directory: Path, step: int) -> None:
    """Remove a checkpoint: rename it first, then delete its files.

    A crash in between leaves a temporary directory, not a damaged checkpoint.
    """
    gone = directory / f".tmp-{name_of(step)}.gone"
    disk.remove(gone)
    disk.rename(directory / name_of(step), gone)
    # it is not a checkpoint any more, and the next save removes it
    with suppress(OSError):
        disk.remove(gone)
