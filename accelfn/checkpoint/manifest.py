# SPDX-License-Identifier: Apache-2.0
"""The manifest: the contents of a checkpoint and their files, as JSON with its own digest.

The digest is on the second line, and covers all lines after it.
"""

import json
import re
import reprlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import attrs
import torch
from blake3 import blake3

from accelfn.base import arguments
from accelfn.base.codec import MAX_DEPTH, Table, decode, encode, tensors_in
from accelfn.checkpoint import files
from accelfn.checkpoint.files import DTYPES, File, bytes_in
from accelfn.checkpoint.slices import Slice, cover, of_copies
from accelfn.errors import CheckpointCorruptError, CheckpointError

# The structure of a manifest: the values that are valid at each place of its JSON.
#
# Anyone can write a manifest with a correct digest. So accelfn checks every value before using
# it, and no value can cost much time or memory.


Rule: TypeAlias = Callable[[Any, str], object]
"""Takes a value and its place, and raises `ValueError` if the value is not valid there."""

MEMBER = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""The name of a state that is saved together with others, and of its directory."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_COUNT = 2**63
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 20


def quote(value: object) -> str:
    """Return a value's shortened `repr`: a value from a file can have any size."""
    return _SHORT.repr(value)[:200]


def check_structure(plain: Any) -> None:
    """Reject JSON that no save has written.

    Raises:
        ValueError: names the place, the value and the expected kind.
    """
    _MANIFEST(plain, "")


def check_files(world_size: int, files: dict[str, File]) -> None:
    """Reject a list of files that is not one file per rank.

    Raises:
        ValueError: names the unexpected files.
    """
    names = set(map(rank_file, range(len(files))))
    if len(files) != world_size or files.keys() != names:
        extra = quote(sorted(files.keys() - names))
        msg = f"{len(files)} files are not those of {world_size} ranks; others are {extra}"
        raise ValueError(msg)


def check_copies(copies: list[int], world_size: int) -> None:
    """Reject copies of the model that do not cover all ranks.

    Raises:
        ValueError: states the number of ranks.
    """
    numbers = {*copies}
    # compare with their count: a range up to the largest number could fill all memory
    if copies and (len(copies), numbers) != (world_size, {*range(len(numbers))}):
        msg = f"{quote(copies)} are not the copies of {world_size} ranks"
        raise ValueError(msg)


def check_sharded(
    shardings: dict[str, Any], files: dict[str, File], copies: list[int]
) -> None:
    """Reject slices that do not cover their tensor, or that are missing in their files.

    If the copies of a model have different slices, each copy is checked separately.

    Raises:
        ValueError: names the tensor.
    """
    for name, spec in shardings.items():
        shape, boxes = tuple(spec["shape"]), dict[str, Slice]()
        for file, box in spec["slices"].items():
            entry = files[file].tensors.get(name) if file in files else None
            boxes[file] = _slice(shape, box)
            kind = (spec["dtype"], boxes[file].size)
            if entry is None or (entry.dtype, entry.shape) != kind:
                msg = f"{quote(file)} does not have the slice of {quote(name)} that is said"
                raise ValueError(msg)
        of_each = of_copies(boxes, copies) or {0: boxes}
        is_of_all = len(of_each) in (1, len({*copies}))
        whole_each = all(cover(copy.values(), shape) for copy in of_each.values())
        if not (is_of_all and whole_each):
            msg = (
                f"the slices of {quote(name)} are not the whole of a tensor of shape"
                f" {quote(shape)}"
            )
            raise ValueError(msg)
        bytes_in(spec["dtype"], shape)  # no file lists a tensor without elements


def _slice(shape: tuple[int, ...], plain: Mapping[str, Any]) -> Slice:
    return Slice(shape, tuple(plain["offset"]), tuple(plain["size"]))


def _expect(is_valid: object, kind: str, value: object, place: str) -> None:
    if not is_valid:
        msg = f"{place or 'it'} is {quote(value)} where {kind} is expected"
        raise ValueError(msg)


def _inside(place: str, key: object) -> str:
    return f"{place}.{key}"[:200].removeprefix(".")


def _text(value: Any, place: str) -> None:
    _expect(isinstance(value, str), "text", value, place)


def _check_integer(value: Any, place: str) -> None:
    _expect(type(value) is int, "a whole number", value, place)


def _count(value: Any, place: str) -> None:
    is_count = type(value) is int and 0 <= value < _LARGEST_COUNT
    _expect(is_count, "a count of less than 2**63", value, place)


def _digest(value: Any, place: str) -> None:
    is_digest = isinstance(value, str) and _DIGEST.fullmatch(value)
    _expect(is_digest, "a digest of 64 digits", value, place)


def _one_of(words: Collection[str], kind: str) -> Rule:
    def rule(value: Any, place: str) -> None:
        _expect(isinstance(value, str) and value in words, kind, value, place)

    return rule


def _optional(rule: Rule) -> Rule:
    return lambda value, place: value is None or rule(value, place)


def _list_of(rule: Rule) -> Rule:
    def rule_of_list(value: Any, place: str) -> None:
        _expect(isinstance(value, list), "a list", value, place)
        for i, item in enumerate(value):
            rule(item, _inside(place, i))

    return rule_of_list


def _table_of(rule: Rule) -> Rule:
    def rule_of_table(value: Any, place: str) -> None:
        _expect(isinstance(value, dict), "a table", value, place)
        for name, item in value.items():
            rule(item, _inside(place, name))

    return rule_of_table


def _record(**rules: Rule) -> Rule:
    kind = f"a record of {', '.join(rules)}"

    def rule_of_record(value: Any, place: str) -> None:
        is_record = isinstance(value, dict) and value.keys() == rules.keys()
        _expect(is_record, kind, value, place)
        for name, rule in rules.items():
            rule(value[name], _inside(place, name))

    return rule_of_record


def _row(*rules: Rule) -> Rule:
    def rule_of_row(value: Any, place: str) -> None:
        is_row = isinstance(value, list) and len(cast("list[Any]", value)) == len(rules)
        _expect(is_row, f"a list of {len(rules)}", value, place)
        for i, (item, rule) in enumerate(zip(value, rules, strict=True)):
            rule(item, _inside(place, i))

    return rule_of_row


def _tree(
    value: Any, place: str, depth: int = MAX_DEPTH, kinds: Collection[str] = ()
) -> None:
    """Check a tree encoded by `accelfn.base.codec`; `kinds` are those allowed at the root."""
    if not kinds and (value is None or type(value) in (str, int, float, bool)):
        return
    kinds = kinds or _KINDS
    table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    kind, inside = next(iter(table.items()), ("", None))
    is_tree = len(table) == 1 and kind in kinds and depth >= 0
    _expect(is_tree, f"one of {', '.join(kinds)}", value, place)
    _KINDS[kind](inside, _inside(place, kind), depth - 1)


def _subtree(depth: int) -> Rule:
    return lambda value, place: _tree(value, place, depth)


def _key(value: Any, place: str) -> None:
    _expect(type(value) in (str, int), "a key", value, place)


def _pairs(value: Any, place: str, depth: int) -> None:
    _list_of(_row(_key, _subtree(depth)))(value, place)
    keys = {(type(key), key) for key, _ in value}
    _expect(len(keys) == len(value), "each key once", value, place)


_NOT_FINITE = _one_of(("nan", "inf", "-inf"), "a float's name")
_KINDS: dict[str, Callable[[Any, str, int], object]] = {
    "tensor": lambda value, place, _: _text(value, place),
    "float": lambda value, place, _: _NOT_FINITE(value, place),
    "dict": lambda value, place, depth: _table_of(_subtree(depth))(value, place),
    "pairs": _pairs,
    "object": _tree,
    "pending": _tree,
    "list": lambda value, place, depth: _list_of(_subtree(depth))(value, place),
    "tuple": lambda value, place, depth: _list_of(_subtree(depth))(value, place),
}


def _number(value: Any, place: str) -> None:
    is_small = type(value) is not int or abs(value) < _LARGEST_COUNT
    _expect(is_small, "a number of less than 2**63", value, place)
    if type(value) not in (int, float):
        _tree(value, place, kinds=("float",))


def _data(value: Any, place: str, depth: int = MAX_DEPTH) -> None:
    _expect(depth >= 0, "something less deep", value, place)
    if isinstance(value, (dict, list)):
        inside = _table_of if isinstance(value, dict) else _list_of
        inside(lambda item, place: _data(item, place, depth - 1))(value, place)


def _units(value: Any, place: str) -> None:
    _expect(isinstance(value, dict), "a table", value, place)
    for name, tree in value.items():
        is_unit = name in _UNITS or name.startswith("slots.")
        _expect(is_unit, "a table of a state's fields", value, place)
        _UNITS.get(name, _tree)(tree, _inside(place, name))


def _all_units(value: Any, place: str) -> None:
    _units(value, place)
    has_all = _UNITS.keys() <= value.keys()
    _expect(has_all, f"a table of {', '.join(_UNITS)}", value, place)


_TENSORS = _record(dict=_table_of(_record(tensor=_text)))
_UNITS: dict[str, Rule] = {
    "params": _TENSORS,
    "buffers": _TENSORS,
    "opt_state": _record(
        dict=_table_of(lambda v, place: _tree(v, place, kinds=("dict", "pairs")))
    ),
    "step": _count,
    "cursor": _record(list=_row(_count, _count, _tree)),
    "seed": _check_integer,
    "num_skipped": _count,
}
_DTYPE = _one_of(DTYPES, "a dtype")
_SHAPE = _list_of(_count)
_MANIFEST = _record(
    blake3=_digest,
    format=_count,
    step=_count,
    world_size=_count,
    optimizer=_text,
    transforms=_list_of(_text),
    data=_optional(_table_of(_data)),
    trees=_all_units,
    trees_by_rank=_list_of(_units),
    per_rank=_list_of(_text),
    copies=_list_of(_count),
    sharded=_table_of(
        _record(
            dtype=_DTYPE,
            shape=_SHAPE,
            slices=_table_of(_record(offset=_SHAPE, size=_SHAPE)),
        )
    ),
    definition=_optional(_table_of(_text)),
    metrics=_table_of(_number),
    kept=_table_of(_digest),
    persistent=_list_of(_text),
    files=_table_of(
        _record(
            size=_count,
            blake3=_digest,
            header_blake3=_digest,
            tensors=_table_of(
                _record(
                    dtype=_DTYPE, shape=_SHAPE, begin=_count, end=_count, blake3=_digest
                )
            ),
        )
    ),
)


_JOINT_MANIFEST = _record(blake3=_digest, format=_count, states=_table_of(_digest))


# The contents of a manifest.


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


@attrs.frozen
class Saved:
    """A saved tensor: dtype, full shape, and its slice in each file that has a part of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Mapping[str, Slice]


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
            "files": {name: attrs.asdict(file) for name, file in self.files.items()},
        }
        body = _lines(plain).encode().removeprefix(b"{\n")
        if len(body) > _LARGEST - 100:
            msg = f"its manifest would have {len(body)} bytes; at most {_LARGEST} are read."
            raise CheckpointError(msg)
        try:
            _check_density(body)
        except ValueError as error:
            msg = f"its manifest could not be read: {error}. Store long lists as a tensor."
            raise CheckpointError(msg) from error
        return _with_digest(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the manifest that `to_bytes` wrote.

        Raises:
            CheckpointCorruptError: the data are not a valid manifest.
            CheckpointError: the manifest has another format version.
        """
        try:
            plain = _parse(data)
            version = plain.get("format") if isinstance(plain, dict) else None
            _expect(type(version) is int, 'a JSON object with "format"', plain, "")
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
        check_structure(plain)
        del plain["blake3"], plain["format"]
        by_name = {n: File.from_plain(file) for n, file in plain.pop("files").items()}
        check_files(plain["world_size"], by_name)
        check_copies(plain["copies"], plain["world_size"])
        check_sharded(plain["sharded"], by_name, plain["copies"])
        for name in ("transforms", "trees_by_rank", "per_rank", "persistent", "copies"):
            plain[name] = tuple(plain[name])
        metrics = {n: float(decode(v, {})) for n, v in plain.pop("metrics").items()}
        manifest = cls(**plain, metrics=metrics, files=by_name)
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
        per_rank = set(self.per_rank)
        for unit, tree in self.trees.items():
            names = set(tensors_in(tree))
            self._find(names, 0)
            if unit not in self.own_units:
                for rank in self.firsts:  # other ranks of a copy can read its file
                    self._find(names & per_rank, rank)
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
        file = rank_file(rank)
        if file in self.files and tensor in self.files[file].tensors:
            return file
        if tensor in self._places:
            return self._places[tensor]
        first = rank_file(self.firsts[self.copies[rank]]) if self.copies else file
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

    def tensor(self, name: str, rank: int) -> Saved:
        """Return the tensor of a name as a rank saved it.

        Raises:
            CheckpointCorruptError: no file has the tensor.
        """
        spec = self.sharded.get(name)
        if spec is None:
            file = self.file_of(name, rank)
            entry = self.files[file].tensors[name]
            return Saved(
                DTYPES[entry.dtype], entry.shape, {file: Slice.whole(entry.shape)}
            )
        shape, by_copy = tuple(spec["shape"]), of_copies(spec["slices"], self.copies)
        slices = by_copy[self.copies[rank]] if len(by_copy) > 1 else spec["slices"]
        parts = {file: _slice(shape, box) for file, box in slices.items()}
        return Saved(DTYPES[spec["dtype"]], shape, parts)

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

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """The file of each tensor that is equal on all ranks."""
        per_rank = set(self.per_rank)
        return {
            tensor: name
            for name, file in self.files.items()
            for tensor in file.tensors
            if tensor not in per_rank
        }

    def trees_of(self, rank: int) -> dict[str, Any]:
        """Return a rank's trees by unit, as plain data."""
        trees = dict(self.trees_by_rank[rank]) if self.own_units else {}
        return {u: t for u, t in self.trees.items() if u not in self.own_units} | trees

    @cached_property
    def own_units(self) -> frozenset[str]:
        """The units that have a tree of their own on each rank."""
        return frozenset[str]().union(*self.trees_by_rank)

    @property
    def slots(self) -> frozenset[str]:
        """The names of all slots, those of transforms and those of the user."""
        slots = (unit for unit in self.trees if unit.startswith("slots."))
        return frozenset(unit.removeprefix("slots.") for unit in slots)

    @property
    def differs(self) -> tuple[str, ...]:
        """The units that differ between ranks."""
        names = self.differing
        of_tensors = {
            unit for unit, tree in self.trees.items() if names & set(tensors_in(tree))
        }
        return tuple(sorted(self.own_units | of_tensors))

    @cached_property
    def differing(self) -> frozenset[str]:
        """The tensors that differ between ranks."""
        by_copy = {
            name
            for name, spec in self.sharded.items()
            if len(of_copies(spec["slices"], self.copies)) > 1
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
    present = {path.name for path in folder.glob("*.safetensors")}
    missing, extra = manifest.files.keys() - present, present - manifest.files.keys()
    if missing or extra:
        msg = (
            f"{folder}: files that the manifest names are missing:"
            f" {quote(sorted(missing))}; files that it does not name:"
            f" {quote(sorted(extra))}."
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
        _compare(data)
        plain = _parse(data)
        _JOINT_MANIFEST(plain, "")
        names = plain["states"]
        are_names = names and all(map(MEMBER.fullmatch, names))
        _expect(are_names, "a table of states by name", names, "states")
    except (ValueError, RecursionError, CheckpointCorruptError) as error:
        msg = f"{folder / NAME}: it names no states that were saved together: {error}"
        raise CheckpointCorruptError(msg) from error
    return names


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
    folder: Path, states: Collection[str], names: Collection[str]
) -> CheckpointError:
    """Return the error for a checkpoint that has other states than expected."""
    has, wants = (", ".join(sorted(n)) or "one state" for n in (states, names))
    msg = f"{folder}: expected {wants}, and it has {has}. Load it with"
    if "" in states:
        return CheckpointError(f"{msg} af.load(state, {str(folder)!r}).")
    table = ", ".join(f'"{name}": ...' for name in sorted(states))
    return CheckpointError(
        f"{msg} af.load({{{table}}}, {str(folder)!r}), or fields of one of them with"
        f" af.load_part(state, {str(folder / min(states))!r}, only)."
    )


def _read_bytes(
    folder: Path, missing_error: type[CheckpointError] = CheckpointError
) -> bytes:
    """Return the bytes of a directory's manifest.

    Raises: as `read_manifest`; `missing_error` if the file is missing.
    """
    path = folder / NAME
    try:
        with files.open_plain(path) as stream:
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
        hint = files.reader_of(folder) or files.checkpoints_near(folder, NAME)
        msg = f"{folder} has no checkpoint: {lacks}.{hint}"
        raise missing_error(msg) from error
    except NotADirectoryError as error:
        msg = f"{folder} is a file, not the directory of a checkpoint.{files.reader_of(folder)}"
        raise CheckpointCorruptError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error


def _with_digest(body: bytes) -> bytes:
    """Return lines of JSON with their digest inserted first."""
    return f'{{\n "blake3": "{blake3(body).hexdigest()}",\n'.encode() + body


def _lines(value: Any, depth: int = 0) -> str:
    """Return JSON with one tensor per line."""
    if depth == _DEPTH or not isinstance(value, dict) or not value:
        return json.dumps(value)
    items = cast("dict[str, Any]", value).items()
    space = " " * depth
    lines = (f"{space} {json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in items)
    return "{\n" + ",\n".join(lines) + f"\n{space}}}"


def _parse(data: bytes) -> Any:
    _check_density(data)
    return json.loads(data, object_pairs_hook=files.reject_duplicate_keys)


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


# The checkpoints in the directory of a store.


_STEP = re.compile(r"step-([0-9]{8,})")


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint; names sort like steps."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint from its name; None for another name, as `step-34`."""
    match = _STEP.fullmatch(folder.name)
    step = int(match[1]) if match else 0
    return step if folder.name == name_of(step) else None


def steps_in(directory: Path) -> tuple[int, ...]:
    """Return the steps of a directory's checkpoints, in rising order."""
    if not arguments.is_directory(directory):
        return ()
    steps = [
        step
        for path in directory.iterdir()
        if (step := step_of(path)) is not None and arguments.is_file(path / NAME)
    ]
    return tuple(sorted(steps))


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Return the checkpoints of a store by step, in rising order; {} for a checkpoint."""
    if arguments.exists(directory / NAME):
        return {}
    return {step: directory / name_of(step) for step in steps_in(directory)}


@contextmanager
def explain_removal(folder: Path) -> Generator[None]:
    """Explain errors of a checkpoint that was removed while being read.

    Raises:
        CheckpointError: the checkpoint was removed.
    """
    try:
        yield
    except (CheckpointCorruptError, FileNotFoundError) as error:
        if files.is_there(folder):
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
            files.read_tensors(folder / state / name, file, frozenset())


def check_no_store(directory: Path) -> None:
    """Reject the directory of a store where a single checkpoint is expected.

    Raises:
        CheckpointError: the directory is a store; the error names the newest checkpoint.
    """
    steps = () if arguments.exists(directory / NAME) else steps_in(directory)
    if steps:
        msg = (
            f"{directory} is a store of {len(steps)} checkpoints. Load the newest,"
            f" {directory / name_of(steps[-1])}, or call"
            f" af.CheckpointStore({str(directory)!r}).restore(state)."
        )
        raise CheckpointError(msg)
