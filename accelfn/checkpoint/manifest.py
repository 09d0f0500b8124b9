# SPDX-License-Identifier: Apache-2.0
"""The manifest: a JSON file that describes a checkpoint and has the digests of its files.

Its second line has the digest of all the lines below.
"""

import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import attrs
import torch
from blake3 import blake3

from accelfn.base import arguments
from accelfn.base.codec import DTYPES, MAX_DEPTH, Table, decode, encode, tensors_in
from accelfn.checkpoint import files
from accelfn.checkpoint.files import File, bytes_in
from accelfn.checkpoint.slices import Slice, cover, of_copies
from accelfn.errors import CheckpointCorruptError, CheckpointError

# The structure of a manifest: which values are valid at each path of its JSON.
#
# Anybody can write a manifest with a correct digest. So accelfn checks each value before it
# uses the value, and no value can make accelfn use much time or memory.


Rule: TypeAlias = Callable[[Any, str], object]
"""A function of a value and its path that raises `ValueError` if the value is not valid."""

MEMBER = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Names of states that are saved together, which are also names of their directories."""
_LARGEST_COUNT = 2**63
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 20


def quote(value: object) -> str:
    """Return a shortened `repr` of a value, because values in a file can have any size."""
    return _SHORT.repr(value)[:200]


def check_structure(plain: Any) -> None:
    """Check that JSON has the structure of a manifest.

    Raises:
        ValueError: a value is not valid. The message has its path and what is expected.
    """
    _MANIFEST(plain, "")


def check_files(world_size: int, files: dict[str, File]) -> None:
    """Check that there is one file for each rank.

    Raises:
        ValueError: there are other files. The message names them.
    """
    names = set(map(rank_file, range(len(files))))
    if len(files) != world_size or files.keys() != names:
        extra = quote(sorted(files.keys() - names))
        msg = f"expected a file for each of {world_size} ranks, got {len(files)} files"
        msg += f", among them {extra}" if files.keys() - names else ""
        raise ValueError(msg)


def check_copies(copies: list[int], world_size: int) -> None:
    """Check that the copies of the model, one number per rank, are 0, 1, ... without gaps.

    Raises:
        ValueError: a number is missing, or a rank has no number.
    """
    numbers = {*copies}
    # do not create a range up to the largest number, which could be huge
    if copies and (len(copies), numbers) != (world_size, {*range(len(numbers))}):
        msg = f"the copies {quote(copies)} are not valid for {world_size} ranks"
        raise ValueError(msg)


def check_sharded(
    shardings: dict[str, Any], files: dict[str, File], copies: list[int]
) -> None:
    """Check that slices are in their files, and that they cover their tensors exactly.

    If copies of the model have their own slices of a tensor, each copy is checked.

    Raises:
        ValueError: a slice is missing or wrong. The message names the tensor.
    """
    for name, spec in shardings.items():
        shape, boxes = tuple(spec["shape"]), dict[str, Slice]()
        for file, box in spec["slices"].items():
            entry = files[file].tensors.get(name) if file in files else None
            boxes[file] = _slice(shape, box)
            kind = (spec["dtype"], boxes[file].size)
            if entry is None or (entry.dtype, entry.shape) != kind:
                msg = f"{quote(file)} does not have the listed slice of {quote(name)}"
                raise ValueError(msg)
        of_each = of_copies(boxes, copies) or {0: boxes}
        is_of_all = len(of_each) in (1, len({*copies}))
        whole_each = all(cover(copy.values(), shape) for copy in of_each.values())
        if not (is_of_all and whole_each):
            msg = f"the slices of {quote(name)} do not cover a tensor of shape {quote(shape)}"
            raise ValueError(msg)
        # also for tensors without elements, which are in no file
        bytes_in(spec["dtype"], shape)


def _slice(shape: tuple[int, ...], plain: Mapping[str, Any]) -> Slice:
    return Slice(shape, tuple(plain["offset"]), tuple(plain["size"]))


def _expect(is_valid: object, kind: str, value: object, place: str) -> None:
    if not is_valid:
        msg = f"{place or 'the content'} is {quote(value)}, expected {kind}"
        raise ValueError(msg)


def _inside(place: str, key: object) -> str:
    return f"{place}.{key}"[:200].removeprefix(".")


def _rule(is_valid: Callable[[Any], object], kind: str) -> Rule:
    """Return a rule for values of this kind, for which `is_valid` returns true."""
    return lambda value, place: _expect(is_valid(value), kind, value, place)


def _one_of(words: Collection[str], kind: str) -> Rule:
    return _rule(lambda value: isinstance(value, str) and value in words, kind)


_TEXT = _rule(lambda value: isinstance(value, str), "a string")
_INTEGER = _rule(lambda value: type(value) is int, "an integer")
_KEY = _rule(lambda value: type(value) in (str, int), "a string or an integer")
_COUNT = _rule(
    lambda value: type(value) is int and 0 <= value < _LARGEST_COUNT,
    "an integer from 0 to 2**63 - 1",
)
_DIGEST = _rule(
    lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value),
    "a digest of 64 hexadecimal digits",
)


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
    kind = f"a table with exactly the keys {', '.join(rules)}"

    def rule_of_record(value: Any, place: str) -> None:
        is_record = isinstance(value, dict) and value.keys() == rules.keys()
        _expect(is_record, kind, value, place)
        for name, rule in rules.items():
            rule(value[name], _inside(place, name))

    return rule_of_record


def _row(*rules: Rule) -> Rule:
    def rule_of_row(value: Any, place: str) -> None:
        is_row = isinstance(value, list) and len(cast("list[Any]", value)) == len(rules)
        _expect(is_row, f"a list of {len(rules)} items", value, place)
        for i, (item, rule) in enumerate(zip(value, rules, strict=True)):
            rule(item, _inside(place, i))

    return rule_of_row


def _tree(
    value: Any, place: str, depth: int = MAX_DEPTH, kinds: Collection[str] = ()
) -> None:
    """Check a tree that `accelfn.base.codec` encoded; `kinds` are the valid ones at the root."""
    if not kinds and (value is None or type(value) in (str, int, float, bool)):
        return
    kinds = kinds or _KINDS
    table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    kind, inside = next(iter(table.items()), ("", None))
    is_tree = len(table) == 1 and kind in kinds and depth >= 0
    _expect(is_tree, f"a table with one key out of {', '.join(kinds)}", value, place)
    _KINDS[kind](inside, _inside(place, kind), depth - 1)


def _subtree(depth: int) -> Rule:
    return lambda value, place: _tree(value, place, depth)


def _pairs(value: Any, place: str, depth: int) -> None:
    _list_of(_row(_KEY, _subtree(depth)))(value, place)
    keys = {(type(key), key) for key, _ in value}
    _expect(len(keys) == len(value), "each key only once", value, place)


_NOT_FINITE = _one_of(("nan", "inf", "-inf"), "nan, inf or -inf")
_KINDS: dict[str, Callable[[Any, str, int], object]] = {
    "tensor": lambda value, place, _: _TEXT(value, place),
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
    _expect(is_small, "a number below 2**63", value, place)
    if type(value) not in (int, float):
        _tree(value, place, kinds=("float",))


def _data(value: Any, place: str, depth: int = MAX_DEPTH) -> None:
    _expect(depth >= 0, "fewer nested levels", value, place)
    if isinstance(value, (dict, list)):
        inside = _table_of if isinstance(value, dict) else _list_of
        inside(lambda item, place: _data(item, place, depth - 1))(value, place)


def _units(value: Any, place: str) -> None:
    _expect(isinstance(value, dict), "a table", value, place)
    for name, tree in value.items():
        is_unit = name in UNITS or name.startswith("slots.")
        _expect(is_unit, "a table of a state's fields", value, place)
        UNITS.get(name, _tree)(tree, _inside(place, name))


def _all_units(value: Any, place: str) -> None:
    _units(value, place)
    has_all = UNITS.keys() <= value.keys()
    _expect(has_all, f"a table of {', '.join(UNITS)}", value, place)


_TENSORS = _record(dict=_table_of(_record(tensor=_TEXT)))
UNITS: dict[str, Rule] = {
    "params": _TENSORS,
    "buffers": _TENSORS,
    "opt_state": _record(
        dict=_table_of(lambda v, place: _tree(v, place, kinds=("dict", "pairs")))
    ),
    "step": _COUNT,
    "cursor": _record(list=_row(_COUNT, _COUNT, _tree)),
    "seed": _INTEGER,
    "num_skipped": _COUNT,
}
_DTYPE = _one_of(DTYPES, "a dtype")
_SHAPE = _list_of(_COUNT)
_MANIFEST = _record(
    blake3=_DIGEST,
    format=_COUNT,
    step=_COUNT,
    world_size=_COUNT,
    optimizer=_TEXT,
    transforms=_list_of(_TEXT),
    data=_optional(_table_of(_data)),
    trees=_all_units,
    trees_by_rank=_list_of(_units),
    per_rank=_list_of(_TEXT),
    copies=_list_of(_COUNT),
    sharded=_table_of(
        _record(
            dtype=_DTYPE,
            shape=_SHAPE,
            slices=_table_of(_record(offset=_SHAPE, size=_SHAPE)),
        )
    ),
    definition=_optional(_table_of(_TEXT)),
    metrics=_table_of(_number),
    kept=_table_of(_DIGEST),
    persistent=_list_of(_TEXT),
    files=_table_of(
        _record(
            size=_COUNT,
            blake3=_DIGEST,
            header_blake3=_DIGEST,
            tensors=_table_of(
                _record(
                    dtype=_DTYPE, shape=_SHAPE, begin=_COUNT, end=_COUNT, blake3=_DIGEST
                )
            ),
        )
    ),
)


_JOINT_MANIFEST = _record(blake3=_DIGEST, format=_COUNT, states=_table_of(_DIGEST))


# The manifest as an object, and reading it.


NAME = "manifest.json"
_LARGEST = 1 << 28
"""The maximum number of bytes of a manifest; a million tensors need fewer."""
_MOST, _SPARSE = 1 << 18, 16
"""A manifest may have `_MOST` lists and tables, or one for every `_SPARSE` bytes if that is more.

In real manifests, there are at least 30 bytes for each list or table. The limit bounds the time
and memory of parsing, because lists and tables need most of it.
"""
_DEPTH = 4
"""How many levels of nested tables are written with one entry per line."""
_JOINT = re.compile(rb'\{\n "[a-z0-9]+": "[^"\n]*",\n "format": 3,\n')
"""The first lines of the manifest of several states that were saved together."""
_SEAL = re.compile(rb'\{\n "blake3": "([0-9a-f]{64})",\n')
FORMAT = 2


@attrs.frozen
class Saved:
    """A saved tensor: its dtype, its full shape, and the slice that each file has."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Mapping[str, Slice]


@attrs.frozen(kw_only=True)
class Manifest:
    """The description of a checkpoint and its files.

    Attributes:
        step: the state's step.
        world_size: the number of ranks that saved the state.
        optimizer: the optimizer's class.
        transforms: the names of the setup's transforms.
        data: properties of the data that must be equal on load; None for a state without data.
        trees: the value of each unit (such as `params` or `slots.ema`) on rank 0, as a tree of
            plain data.
        trees_by_rank: for each rank, its trees of the units that differ between ranks.
        per_rank: the names of tensors that differ between ranks. The file of each rank has the
            rank's value, unless the first rank with the same copy of the model has an equal
            value.
        sharded: the dtype and full shape of each sharded tensor, and the slice in each file.
        copies: for each rank, the number of its copy of the model, if copies of several ranks
            trained independently. Then tensors that differ are saved for every copy. Empty if
            copies of the model do not have several ranks.
        metrics: the metrics that were saved with the state.
        kept: the digests of frozen parameters that were not written (`frozen="hash"`).
        persistent: the names of the buffers that belong to an exported model.
        files: the description of each file, by name.
        definition: the names of frozen parameters and the options of transforms, as texts; None
            if an earlier version of accelfn wrote the manifest.
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
            CheckpointError: the JSON is longer than accelfn reads.
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
        data = _with_digest(plain)
        try:
            _check_size(data)
        except ValueError as error:
            msg = f"the manifest would have {error}. Store long lists as a tensor."
            raise CheckpointError(msg) from error
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the manifest from the bytes that `to_bytes` returned.

        Raises:
            CheckpointCorruptError: the data are not a valid manifest.
            CheckpointError: the manifest has another version of the format.
        """
        try:
            plain = _parse(data)
            version = plain.get("format") if isinstance(plain, dict) else None
            _expect(type(version) is int, 'a JSON object with "format"', plain, "")
            if version == FORMAT:
                _compare(data)
                return cls._of(plain)
        except (ValueError, RecursionError) as error:
            msg = f"this is not a valid manifest of a checkpoint: {error}"
            raise CheckpointCorruptError(msg) from error
        msg = (
            f"the checkpoint has format {version}, but this version of accelfn reads format"
            f" {FORMAT}. Install the version that wrote the checkpoint."
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
        """Check that the files have all tensors that the trees refer to.

        Raises:
            ValueError: the number of trees is not the number of ranks, or steps differ.
            CheckpointCorruptError: a tensor is in no file.
        """
        if len(self.trees_by_rank) not in (0, self.world_size):
            msg = f"expected {self.world_size} trees by rank, got {len(self.trees_by_rank)}"
            raise ValueError(msg)
        if self.trees["step"] != self.step:
            msg = (
                f"its step is {self.step}, but the state has step {self.trees['step']}"
            )
            raise ValueError(msg)
        per_rank = set(self.per_rank)
        for unit, tree in self.trees.items():
            names = set(tensors_in(tree))
            self._find(names, 0)
            if unit not in self.own_units:
                # the other ranks of a copy can read the file of the first
                for rank in self.firsts:
                    self._find(names & per_rank, rank)
        for rank, trees in enumerate(self.trees_by_rank):
            for tree in trees.values():
                self._find(tensors_in(tree), rank)

    def _find(self, tensors: Iterable[str], rank: int) -> None:
        for name in tensors:
            if name not in self.sharded:
                self.file_of(name, rank)

    def file_of(self, tensor: str, rank: int) -> str:
        """Return the name of the file with a tensor as this rank saved it.

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
            msg = f"no file has the tensor {tensor[:80]!r}, but the manifest lists it."
            raise CheckpointCorruptError(msg)
        return first

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first rank of each copy of the model; all ranks if each rank has its own copy."""
        copies = self.copies or tuple(range(self.world_size))
        first = {copy: rank for rank, copy in reversed([*enumerate(copies)])}
        return tuple(first[copy] for copy in sorted(first))

    def tensor(self, name: str, rank: int) -> Saved:
        """Return the description of a tensor as this rank saved it.

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
        """The names of floating-point and complex tensors that differ between ranks.

        Such tensors can be averaged.
        """
        dtypes: dict[str, torch.dtype] = {}  # in the first file with the tensor
        for file in self.files.values():
            for name in self.differing & file.tensors.keys():
                dtypes.setdefault(name, DTYPES[file.tensors[name].dtype])
        return frozenset(
            n for n, kind in dtypes.items() if kind.is_floating_point or kind.is_complex
        )

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """The name of the file of each tensor that is equal on all ranks."""
        per_rank = set(self.per_rank)
        return {
            tensor: name
            for name, file in self.files.items()
            for tensor in file.tensors
            if tensor not in per_rank
        }

    def trees_of(self, rank: int) -> dict[str, Any]:
        """Return a rank's trees of plain data, by unit (a field or slot)."""
        trees = dict(self.trees_by_rank[rank]) if self.own_units else {}
        return {u: t for u, t in self.trees.items() if u not in self.own_units} | trees

    @cached_property
    def own_units(self) -> frozenset[str]:
        """The units (fields and slots) that have a different tree on each rank."""
        return frozenset[str]().union(*self.trees_by_rank)

    @property
    def slots(self) -> frozenset[str]:
        """The names of all slots, of transforms and of the user."""
        slots = (unit for unit in self.trees if unit.startswith("slots."))
        return frozenset(unit.removeprefix("slots.") for unit in slots)

    @property
    def differs(self) -> tuple[str, ...]:
        """The units that differ between ranks, in their trees or in their tensors."""
        names = self.differing
        of_tensors = {
            unit for unit, tree in self.trees.items() if names & set(tensors_in(tree))
        }
        return tuple(sorted(self.own_units | of_tensors))

    @cached_property
    def differing(self) -> frozenset[str]:
        """The names of the tensors that differ between ranks."""
        by_copy = {
            name
            for name, spec in self.sharded.items()
            if len(of_copies(spec["slices"], self.copies)) > 1
        }
        return frozenset({*self.per_rank, *by_copy})


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def read_manifest(
    folder: Path, name: str = "", *, names: Collection[str] = ("",)
) -> Manifest:
    """Read the manifest of a checkpoint, and check that its files exist.

    Args:
        folder: the checkpoint's directory.
        name: the state to read, if several were saved together; "" for a single state.
        names: the names of all states that the checkpoint must have.

    Raises:
        CheckpointError: the folder has no checkpoint, or one of another format or other states.
        CheckpointCorruptError: the manifest has changed, or files are missing or unexpected.
    """
    digests = digests_in(folder)
    if digests.keys() != {*names}:
        if "" in digests:
            read_manifest(folder)  # raises an error if the manifest is damaged
        raise _of_others(folder, digests, names)
    folder /= name
    missing_error = CheckpointCorruptError if name else CheckpointError
    data, path = _read_bytes(folder, missing_error), folder / NAME
    if digests[name] not in (None, blake3(data).hexdigest()):
        msg = f"{path} was not saved with the checkpoint's other states. Load another checkpoint."
        raise CheckpointCorruptError(msg)
    try:
        manifest = Manifest.from_bytes(data)
    except CheckpointError as error:
        msg = f"{path}: {error}"
        raise type(error)(msg) from error
    present = {path.name for path in folder.glob("*.safetensors")}
    missing, extra = manifest.files.keys() - present, present - manifest.files.keys()
    if missing or extra:
        lacks = f" Files are missing: {quote(sorted(missing))}." if missing else ""
        more = f" The manifest does not list {quote(sorted(extra))}." if extra else ""
        msg = f"{folder} is damaged.{lacks}{more} Load another checkpoint."
        raise CheckpointCorruptError(msg)
    return manifest


def read_manifests(folder: Path) -> dict[str, Manifest]:
    """Read the manifest of each state in a checkpoint; return them by the state's name.

    Raises: the errors of `read_manifest`.
    """
    names = digests_in(folder)
    return {name: read_manifest(folder, name, names=names) for name in names}


def digests_in(folder: Path) -> dict[str, str | None]:
    """Read the names of states that were saved together, with the digests of their manifests.

    A single state has the name "" and the digest None.

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
        msg = f"{folder / NAME} is not a valid list of states saved together: {error}"
        raise CheckpointCorruptError(msg) from error
    return names


def joint_bytes(digests: Mapping[str, str]) -> bytes:
    """Return the joint manifest of several states, from the digests of their manifests."""
    return _with_digest({"format": 3, "states": dict(digests)})


def check_not_joint(folder: Path) -> None:
    """Check that a directory is not the part of one state in a checkpoint of several states.

    Raises:
        CheckpointError: it is the directory of one of several states. The message shows how to
            load all states.
    """
    parent, name = folder.absolute().parent, folder.absolute().name
    digests = dict[str, str | None]()
    with suppress(CheckpointError):  # mostly, the parent is not a checkpoint
        digests = digests_in(parent)
    if name in digests:
        raise _of_others(parent, digests, [name])


def _of_others(
    folder: Path, states: Collection[str], names: Collection[str]
) -> CheckpointError:
    """Return the error for a checkpoint that has other states than expected."""
    has, wants = (
        f"states named {text}" if (text := ", ".join(sorted(n))) else "a single state"
        for n in (states, names)
    )
    msg = f"{folder}: expected {wants}, but the checkpoint has {has}. Load it with"
    if "" in states:
        return CheckpointError(f"{msg} af.load(state, {str(folder)!r}).")
    table = ", ".join(f'"{name}": ...' for name in sorted(states))
    return CheckpointError(
        f"{msg} af.load({{{table}}}, {str(folder)!r}), or load fields of one state with"
        f" af.load_part(state, {str(folder / min(states))!r}, only)."
    )


def _read_bytes(
    folder: Path, missing_error: type[CheckpointError] = CheckpointError
) -> bytes:
    """Return the bytes of a directory's manifest.

    Raises: the errors of `read_manifest`, and `missing_error` if the file is missing.
    """
    path = folder / NAME
    try:
        with files.open_plain(path) as stream:
            size = stream.seek(0, 2)
            if size > _LARGEST:
                msg = (
                    f"{path} is damaged, or accelfn did not write it: it has {size} bytes, and"
                    f" accelfn never writes more than {_LARGEST}. Load another checkpoint."
                )
                raise CheckpointCorruptError(msg)
            stream.seek(0)
            return stream.read()
    except FileNotFoundError as error:
        lacks = "there is no such directory"
        if arguments.is_directory(folder):
            lacks = f"it has no {NAME}"
        hint = files.reader_of(folder) or files.checkpoints_near(folder, NAME)
        msg = f"{folder} has no checkpoint: {lacks}.{hint}"
        raise missing_error(msg) from error
    except NotADirectoryError as error:
        msg = f"{folder} is a file, not the directory of a checkpoint.{files.reader_of(folder)}"
        raise CheckpointCorruptError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointCorruptError(msg) from error


def _with_digest(plain: Mapping[str, Any]) -> bytes:
    """Return lines of JSON, with a first line that has their digest."""
    body = _lines(plain).encode().removeprefix(b"{\n")
    return f'{{\n "blake3": "{blake3(body).hexdigest()}",\n'.encode() + body


def _lines(value: Any, depth: int = 0) -> str:
    """Return JSON with one line for each tensor."""
    if depth == _DEPTH or not isinstance(value, dict) or not value:
        return json.dumps(value)
    items = cast("dict[str, Any]", value).items()
    space = " " * depth
    lines = (f"{space} {json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in items)
    return "{\n" + ",\n".join(lines) + f"\n{space}}}"


def _parse(data: bytes) -> Any:
    _check_size(data)
    return json.loads(data, object_pairs_hook=files.reject_duplicate_keys)


def _check_size(data: bytes) -> None:
    """Check that JSON does not have more bytes, lists and tables than a save writes.

    Raises:
        ValueError: the JSON has more. The message is a noun, such as "5 bytes".
    """
    count = data.count(b"[") + data.count(b"{")
    if count > max(_MOST, len(data) // _SPARSE):
        msg = f"too many lists and tables: {count} in {len(data)} bytes"
        raise ValueError(msg)
    if len(data) > _LARGEST:
        msg = f"{len(data)} bytes, and at most {_LARGEST} are allowed"
        raise ValueError(msg)


def _compare(data: bytes) -> None:
    """Compare a manifest with its digest.

    Raises:
        CheckpointCorruptError: the digest differs, so the manifest has changed.
    """
    seal = _SEAL.match(data)
    if seal is None or seal[1].decode() != blake3(data[seal.end() :]).hexdigest():
        msg = "the manifest has changed: its BLAKE3 digest differs. Load another checkpoint."
        raise CheckpointCorruptError(msg)


# Find checkpoints in the directory of a store.


_STEP = re.compile(r"step-([0-9]{8,})")


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint; the names sort in the order of the steps."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step from a checkpoint's name; None for other names, such as `step-34`."""
    match = _STEP.fullmatch(folder.name)
    step = int(match[1]) if match else 0
    return step if folder.name == name_of(step) else None


def steps_in(directory: Path) -> tuple[int, ...]:
    """Return the steps of the checkpoints in a directory, in rising order."""
    if not arguments.is_directory(directory):
        return ()
    steps = [
        step
        for path in directory.iterdir()
        if (step := step_of(path)) is not None and arguments.is_file(path / NAME)
    ]
    return tuple(sorted(steps))


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Return the checkpoints in a store's directory by step, in rising order.

    If the directory is itself a checkpoint, return {}.
    """
    if arguments.exists(directory / NAME):
        return {}
    return {step: directory / name_of(step) for step in steps_in(directory)}


def verify(folder: Path) -> None:
    """Read all files of a checkpoint, and compare them with their digests.

    Raises:
        CheckpointCorruptError: a file has changed.
    """
    for state, manifest in read_manifests(folder).items():
        for name, file in manifest.files.items():
            files.read_tensors(folder / state / name, file, frozenset())


def check_no_store(directory: Path) -> None:
    """Check that a directory is not a store of several checkpoints.

    Raises:
        CheckpointError: the directory is a store. The message names the newest checkpoint.
    """
    steps = () if arguments.exists(directory / NAME) else steps_in(directory)
    if steps:
        msg = (
            f"{directory} is a store of {len(steps)} checkpoints. Load the newest,"
            f" {directory / name_of(steps[-1])}, or call"
            f" af.CheckpointStore({str(directory)!r}).restore(state)."
        )
        raise CheckpointError(msg)
