# SPDX-License-Identifier: Apache-2.0
"""The grammar of a manifest: the values that are valid at each place of its JSON.

Anyone can write a manifest with a correct digest. So accelfn checks every value before using
it, and no value can cost much time or memory.
"""

import re
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, cast

from accelfn.base.codec import MAX_DEPTH
from accelfn.checkpoint.files import DTYPES, File, bytes_in
from accelfn.checkpoint.slices import Slice, cover, of_copies

Rule: TypeAlias = Callable[[Any], None]
"""Raises `_UnexpectedError` for an invalid value."""

MEMBER = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""The name of a state that is saved together with others, and of its directory."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**63
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 20


class _UnexpectedError(ValueError):
    """An invalid value, the expected kind, and the place, from the innermost key outwards."""

    def __init__(self, expected: str, found: object) -> None:
        self.text = f"{quote(found)} where {expected} is expected"
        self.place: list[str] = []
        super().__init__(self.text)


def quote(value: object) -> str:
    """Return a value's shortened `repr`: a value from a file can have any size."""
    return _SHORT.repr(value)[:200]


def _refuse(expected: str, found: object) -> NoReturn:
    raise _UnexpectedError(expected, found)


def check(plain: Any) -> None:
    """Reject JSON that no save has written.

    Raises:
        ValueError: names the place, the value and the expected kind.
    """
    try:
        _manifest(plain)
    except _UnexpectedError as error:
        place = ".".join(reversed(error.place))
        msg = f"{place[:200] or 'it'} is {error.text}"
        raise ValueError(msg) from None


def check_files(world_size: int, files: dict[str, File]) -> None:
    """Reject a list of files that is not one file per rank.

    Raises:
        ValueError: names the unexpected files.
    """
    expected = {f"rank-{rank:05d}.safetensors" for rank in range(len(files))}
    if len(files) != world_size or files.keys() != expected:
        others = quote(sorted(files.keys() - expected))
        msg = f"{len(files)} files are not those of {world_size} ranks; others are {others}"
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
    sharded: dict[str, Any], files: dict[str, File], copies: list[int]
) -> None:
    """Reject slices that do not cover their tensor, or that are missing in their files.

    If the copies of a model have different slices, each copy is checked separately.

    Raises:
        ValueError: names the tensor.
    """
    for name, whole in sharded.items():
        shape, boxes = tuple(whole["shape"]), dict[str, Slice]()
        for file, box in whole["slices"].items():
            entry = files[file].tensors.get(name) if file in files else None
            size, offset = tuple(box["size"]), tuple(box["offset"])
            if entry is None or (entry.dtype, entry.shape) != (whole["dtype"], size):
                msg = f"{quote(file)} does not have the slice of {quote(name)} that is said"
                raise ValueError(msg)
            boxes[file] = Slice(shape, offset, size)
        of_each = of_copies(boxes, copies) or {0: boxes}
        is_of_all = len(of_each) in (1, len({*copies}))
        whole_each = all(cover(each.values(), shape) for each in of_each.values())
        if not (is_of_all and whole_each):
            msg = (
                f"the slices of {quote(name)} are not the whole of a tensor of shape"
                f" {quote(shape)}"
            )
            raise ValueError(msg)
        bytes_in(whole["dtype"], shape)  # no file lists a tensor without elements


def _is(kind: type, expected: str) -> Rule:
    def rule(value: Any) -> None:
        if type(value) is not kind:
            _refuse(expected, value)

    return rule


_TEXT = _is(str, "text")
_WHOLE = _is(int, "a whole number")


def _count(value: Any) -> None:
    if type(value) is not int or not 0 <= value < _LARGEST:
        _refuse("a count of less than 2**63", value)


def _one_of(words: Any, expected: str) -> Rule:
    def rule(value: Any) -> None:
        if not isinstance(value, str) or value not in words:
            _refuse(expected, value)

    return rule


def _digest(value: Any) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        _refuse("a digest of 64 digits", value)


def _inside(rule: Rule, place: object, value: Any) -> None:
    try:
        rule(value)
    except _UnexpectedError as error:
        error.place.append(str(place))
        raise


def _list_of(rule: Rule) -> Rule:
    def rule_of_list(value: Any) -> None:
        if not isinstance(value, list):
            _refuse("a list", value)
        for i, item in enumerate(cast("list[Any]", value)):
            _inside(rule, i, item)

    return rule_of_list


def _table(rule: Rule) -> Rule:
    def rule_of_table(value: Any) -> None:
        if not isinstance(value, dict):
            _refuse("a table", value)
        for name, item in cast("dict[str, Any]", value).items():
            _inside(rule, name, item)

    return rule_of_table


def _record(**rules: Rule) -> Rule:
    def rule_of_record(value: Any) -> None:
        if not isinstance(value, dict):
            _refuse("a record", value)
        record = cast("dict[str, Any]", value)
        if record.keys() != rules.keys():
            _refuse(f"a record of {', '.join(rules)}", sorted(record))
        for name, rule in rules.items():
            _inside(rule, name, record[name])

    return rule_of_record


def _tree(value: Any, depth: int = MAX_DEPTH, kinds: tuple[str, ...] = ()) -> None:
    """Check a tree encoded by `accelfn.base.codec`; `kinds` are those allowed at the root."""
    if not kinds and (value is None or type(value) in (str, int, float, bool)):
        return
    kinds = kinds or tuple(_KINDS)
    coded = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    kind, inside = next(iter(coded.items()), ("", None))
    if len(coded) != 1 or kind not in kinds or depth < 0:
        _refuse(f"one of {', '.join(kinds)}", value)
    _inside(lambda inside: _KINDS[kind](inside, depth - 1), kind, inside)


def _pairs(value: Any, depth: int) -> None:
    def pair(item: Any) -> None:
        if not isinstance(item, list) or len(cast("list[Any]", item)) != 2:
            _refuse("a key and a value", item)
        key, inside = cast("list[Any]", item)
        if type(key) not in (str, int):
            _refuse("a key", key)
        _inside(lambda v: _tree(v, depth), key, inside)

    _list_of(pair)(value)
    if len({(type(key), key) for key, _ in value}) != len(value):
        _refuse("each key once", value)


_KINDS: dict[str, Callable[[Any, int], None]] = {
    "tensor": lambda value, _: _TEXT(value),
    "float": lambda value, _: _one_of(("nan", "inf", "-inf"), "a float's name")(value),
    "dict": lambda value, depth: _table(lambda v: _tree(v, depth))(value),
    "pairs": _pairs,
    "object": _tree,
    "pending": _tree,
    "list": lambda value, depth: _list_of(lambda v: _tree(v, depth))(value),
    "tuple": lambda value, depth: _list_of(lambda v: _tree(v, depth))(value),
}


def _number(value: Any) -> None:
    if type(value) is int and abs(value) >= _LARGEST:
        _refuse("a number of less than 2**63", value)
    if type(value) not in (int, float):
        _tree(value, kinds=("float",))


def _data(value: Any, depth: int = MAX_DEPTH) -> None:
    if depth < 0:
        _refuse("something less deep", value)
    if isinstance(value, (dict, list)):
        inside = _table if isinstance(value, dict) else _list_of
        inside(lambda item: _data(item, depth - 1))(value)


def _facts(value: Any) -> None:
    if value is not None:
        _table(_data)(value)


def _definition(value: Any) -> None:
    if value is not None:
        _table(_TEXT)(value)


def _units(value: Any) -> None:
    _table(lambda _: None)(value)
    for name, coded in cast("dict[str, Any]", value).items():
        if name not in _UNITS and not name.startswith("slots."):
            _refuse("a table of a state's fields", sorted(value))
        _inside(_UNITS.get(name, _tree), name, coded)


def _all_units(value: Any) -> None:
    _units(value)
    if _UNITS.keys() - cast("dict[str, Any]", value).keys():
        _refuse(f"a table of {', '.join(_UNITS)}", sorted(value))


def _cursor(value: Any) -> None:
    _record(list=_list_of(_tree))(value)
    if len(value["list"]) != 3:
        _refuse("a position of 3 parts", value)
    _inside(_count, "epoch", value["list"][0])
    _inside(_count, "samples", value["list"][1])


_TENSORS = _record(dict=_table(_record(tensor=_TEXT)))
_UNITS: dict[str, Rule] = {
    "params": _TENSORS,
    "buffers": _TENSORS,
    "opt_state": _record(dict=_table(lambda v: _tree(v, kinds=("dict", "pairs")))),
    "step": _count,
    "cursor": _cursor,
    "seed": _WHOLE,
    "num_skipped": _count,
}
_DTYPE = _one_of(DTYPES, "a dtype")
_SHAPE = _list_of(_count)
_manifest = _record(
    blake3=_digest,
    format=_count,
    step=_count,
    world_size=_count,
    optimizer=_TEXT,
    transforms=_list_of(_TEXT),
    data=_facts,
    trees=_all_units,
    trees_by_rank=_list_of(_units),
    per_rank=_list_of(_TEXT),
    copies=_list_of(_count),
    sharded=_table(
        _record(
            dtype=_DTYPE,
            shape=_SHAPE,
            slices=_table(_record(offset=_SHAPE, size=_SHAPE)),
        )
    ),
    definition=_definition,
    metrics=_table(_number),
    kept=_table(_digest),
    persistent=_list_of(_TEXT),
    files=_table(
        _record(
            size=_count,
            blake3=_digest,
            header_blake3=_digest,
            tensors=_table(
                _record(
                    dtype=_DTYPE, shape=_SHAPE, begin=_count, end=_count, blake3=_digest
                )
            ),
        )
    ),
)


def check_joint(plain: Any) -> None:
    """Reject JSON that does not name states that were saved together.

    Raises:
        ValueError: quotes the invalid value.
    """
    _record(blake3=_digest, format=_count, states=_table(_digest))(plain)
    for name in plain["states"] or [""]:
        if not MEMBER.fullmatch(name):
            _refuse("a state's name", name)
