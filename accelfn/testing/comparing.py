# SPDX-License-Identifier: Apache-2.0
"""Describe the differences between two trees of tensors and plain data.

The path of a difference is written like code that accesses it: `params['0.weight']`.
"""

import difflib
import math
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import torch

from accelfn import Pending, TrainState
from accelfn.errors import ArgumentError, LawError
from accelfn.plug import arguments, collectives, tree
from accelfn.testing.simulation.calls import Entry
from accelfn.testing.simulation.plan import Run

Child: TypeAlias = tuple[str, Any]
"""The path of a container's entry, and its value."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_LINES = 20
_MANY_STEPS = 100_000
"""The number of ulps between two floats is shown only if it is smaller."""


def _is_tolerance(_owner: object, field: "attrs.Attribute[float]", value: Any) -> None:
    if not arguments.is_number(value) or not 0 <= value < math.inf:
        msg = f"{field.name}={value!r}: expected a finite number, 0 or more."
        raise ArgumentError(msg)


@attrs.frozen(kw_only=True)
class Comparison:
    """The rules of a comparison, and the names of the two sides.

    Elements of floating-point tensors may differ by `atol + rtol * largest`. Here `largest` is
    the largest finite magnitude in both tensors, because the rounding error of a sum is relative
    to its terms, not to its result. NaN is equal to NaN.

    Attributes:
        rtol: the tolerance relative to a tensor's largest element.
        atol: the absolute tolerance.
        bitwise: whether to compare types, and without a tolerance also bits. Otherwise 0.0
            equals -0.0, 1 equals 1.0 and a scalar tensor, and a list equals a tuple.
        sides: the names of the two sides.
    """

    rtol: float = attrs.field(default=0.0, validator=_is_tolerance)
    atol: float = attrs.field(default=0.0, validator=_is_tolerance)
    bitwise: bool = False
    sides: tuple[str, str] = ("the first", "the second")

    @property
    def is_exact(self) -> bool:
        """Whether both tolerances are 0."""
        return self.rtol == self.atol == 0

    def by_name(
        self, one: Mapping[str, Any], two: Mapping[str, Any]
    ) -> dict[str, list[str]]:
        """Return the differences of two dicts of trees, by name, in the order of `one`."""
        ones, twos = ({name: (name, d[name]) for name in d} for d in (one, two))
        diffs = {name: [*self._entry(name, ones, twos)] for name in {**one, **two}}
        return {name: lines for name, lines in diffs.items() if lines}

    def differences(self, path: str, one: Any, two: Any) -> Iterator[str]:
        """Yield the differences of two trees, in the order of `one`: each path and both values."""
        ones, twos = children(path, one), children(path, two)
        if ones is None or twos is None or not self._are_of_a_kind(one, two):
            text = self._leaves(one, two)
            if text:
                yield f"{path}: {text}"
            return
        for key in {**ones, **twos}:
            yield from self._entry(key, ones, twos)

    def _entry(
        self, key: Any, ones: Mapping[Any, Child], twos: Mapping[Any, Child]
    ) -> Iterator[str]:
        """Yield the differences of the entries of two containers with this key."""
        if key in ones and key in twos:
            yield from self.differences(ones[key][0], ones[key][1], twos[key][1])
        else:
            in_one = key in ones
            path, value = (ones if in_one else twos)[key]
            yield f"{path}: only in {self.sides[not in_one]}: {describe_value(value)}"

    def _are_of_a_kind(self, one: Any, two: Any) -> bool:
        """Whether two containers are compared entry by entry: two mappings or two sequences."""
        mappings = [isinstance(value, Mapping) for value in (one, two)]
        if any(mappings):
            return all(mappings)
        return type(one) is type(two) or not self.bitwise

    def _leaves(self, one: Any, two: Any) -> str | None:
        pair = one, two
        if not self.bitwise and not _are_one_dtype(one, two):
            pair = tuple(_number_or_tensor(leaf) for leaf in pair)
        if all(isinstance(leaf, torch.Tensor) for leaf in pair):
            return self._tensors(*pair)
        kinds = {type(leaf) for leaf in pair}
        if len(kinds) == 1 or (not self.bitwise and kinds <= {bool, int, float}):
            if kinds & {float, complex}:
                dtype = torch.complex128 if complex in kinds else torch.float64
                return self._tensors(*(torch.tensor(x, dtype=dtype) for x in pair))
            if _are_equal(*pair):
                return None
        texts = [describe_value(leaf) for leaf in pair]
        if texts[0] == texts[1]:
            texts = [
                f"{x} ({type(y).__name__})" for x, y in zip(texts, pair, strict=True)
            ]
        return f"{texts[0]} and {texts[1]}"

    def _tensors(self, one: torch.Tensor, two: torch.Tensor) -> str | None:
        """Return how two tensors differ, on any device, or None if they are equal."""
        one, two = _plain(one), _plain(two)
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return f"{_kind(one)} and {_kind(two)}"
        unequal = self._unequal(one, two)
        places = unequal.nonzero()
        if not len(places):
            return None
        first = tuple(places[0].tolist())
        pair = _pair(one[first], two[first])
        distance = _format_distance(one[unequal], two[unequal])
        count = f"{len(places)} of {one.numel()} elements"
        if len(places) > 1:
            distance = distance and f", largest difference {distance}"
            return f"{count} differ, the first at {list(first)}: {pair}{distance}"
        at = f"{count} differs, at {list(first)}: " if one.ndim else ""
        return f"{at}{pair}{distance and f', difference {distance}'}"

    def _unequal(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        """Return a tensor of booleans that marks the unequal elements."""
        if self.bitwise and self.is_exact:
            if one.is_complex():
                parts = torch.view_as_real(one), torch.view_as_real(two)
                return (_bits(parts[0]) != _bits(parts[1])).any(-1)
            return _bits(one) != _bits(two)
        wide = _wide(one), _wide(two)
        unequal = (wide[0] != wide[1]) & ~(wide[0].isnan() & wide[1].isnan())
        if self.is_exact or not (one.is_floating_point() or one.is_complex()):
            return unequal
        tolerance = self.atol + self.rtol * largest(one, two)
        return unequal & ~((wide[0] - wide[1]).abs() <= tolerance)


def format_differences(by_name: Mapping[str, Sequence[str]]) -> str:
    """Return one line per difference, at most 20 lines, and the number of other differences."""
    differences = list(chain.from_iterable(by_name.values()))
    more = len(differences) - _MOST_LINES
    rest = [f"and {more} more"] if more > 0 else []
    return "".join(f"\n  {line}" for line in [*differences[:_MOST_LINES], *rest])


def leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a tree with its path."""
    entries = children(path, tree)
    if entries is None:
        yield path, tree
        return
    for place, value in entries.values():
        yield from leaves(place, value)


def children(path: str, tree: Any) -> dict[Any, Child] | None:
    """Return the entries of a container by key, each with its path; None for a leaf."""
    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree).items()
        return {key: (f"{path}[{key!r}]", value) for key, value in items}
    if isinstance(tree, (list, tuple)):
        values = cast("list[Any]", tree)
        fields: Any = getattr(tree, "_fields", ())  # the mark of a namedtuple
        names = [f".{f}" for f in fields] or [f"[{i}]" for i in range(len(values))]
        return {i: (path + names[i], value) for i, value in enumerate(values)}
    if isinstance(tree, Pending):
        return {"wait": (f"{path}.wait()", tree.wait())}
    return None


def largest(*tensors: torch.Tensor) -> float:
    """Return the largest finite magnitude in some tensors, or 0."""
    magnitudes = [t[t.isfinite()].abs() for t in map(_wide, tensors)]
    return max((float(m.max()) for m in magnitudes if m.numel()), default=0.0)


def describe_value(value: Any) -> str:
    """Return a short description of a value, such as its type and shape."""
    if isinstance(value, torch.Tensor):
        if value.ndim:
            return f"a {_kind(value)}"
        return f"{_element(_plain(value))} (a {_dtype(value)} tensor)"
    if children("", value):
        return f"a {type(value).__name__} of {len(value)}"
    return " ".join(reprlib.repr(value).split())


def _are_one_dtype(one: Any, two: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
    return tensors and one.dtype == two.dtype


def _number_or_tensor(value: Any) -> Any:
    """Convert a scalar tensor or NumPy scalar to a number, and a NumPy array to a tensor."""
    is_scalar = isinstance(value, torch.Tensor) and value.ndim == 0
    if is_scalar or isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    return value


def _are_equal(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two)
    return one is two or bool(one == two)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor with this rank's values, on the CPU and without autograd."""
    tensor = tree.local(tensor.detach()).cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert floating-point values to double precision, so that no difference is lost."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _hex(element: torch.Tensor) -> str:
    if element.is_complex():
        return " ".join(_hex(part) for part in torch.view_as_real(element))
    width = 8 * element.element_size()
    return f"0x{int(_bits(element)) % 2**width:0{width // 4}x}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {_dtype(tensor)} tensor"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _pair(one: torch.Tensor, two: torch.Tensor) -> str:
    """Return the text of two different numbers. If the texts are equal, add the bits."""
    texts = [_element(one), _element(two)]
    if texts[0] == texts[1]:
        texts = [f"{texts[0]} of bits {_hex(number)}" for number in (one, two)]
    return " and ".join(texts)


def _element(element: torch.Tensor) -> str:
    """Return a number with enough digits to distinguish it from its neighbors."""
    if element.dtype in (torch.float32, torch.float16):
        return str(element.numpy()[()])
    is_bfloat16 = element.dtype is torch.bfloat16
    return f"{element.item():.4g}" if is_bfloat16 else repr(element.item())


def _format_distance(one: torch.Tensor, two: torch.Tensor) -> str:
    """Return the largest difference of paired elements, or "" if it is not a finite number."""
    if one.dtype is torch.bool:
        return ""
    if not (one.is_floating_point() or one.is_complex()):
        pairs = zip(one.tolist(), two.tolist(), strict=True)
        return str(max(abs(x - y) for x, y in pairs))
    distances = (_wide(one) - _wide(two)).abs()
    distances[distances.isnan()] = math.inf
    distance, place = distances.max(0)
    if distance in (0, math.inf):
        return ""
    steps = _steps(one[place], two[place])
    return f"{float(distance):.3g}{steps and f' ({steps} ulp)'}"


def _steps(one: torch.Tensor, two: torch.Tensor) -> str:
    """Return the distance of two floats in ulps, or "" if the distance is large."""
    if one.is_complex():
        return ""
    places: list[int] = []
    for element in (one, two):
        bits = int(_bits(element))
        lowest = -(2 ** (8 * element.element_size() - 1))
        places.append(bits if bits >= 0 else lowest - bits)
    steps = abs(places[0] - places[1])
    return str(steps) if steps < _MANY_STEPS else ""


# `assert_states_equal`: compare the saved fields of two states.


SAVED = (
    *("step", "num_skipped", "cursor", "seed"),
    *("params", "buffers", "opt_state", "slots"),
)
"""The saved fields of a state. Plain numbers come first: they may explain later differences."""


def assert_states_equal(
    a: TrainState, b: TrainState, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Assert that two states are equal in all fields that a checkpoint saves.

    The comparison covers `step`, `num_skipped`, `cursor`, `seed`, `params`, `buffers`,
    `opt_state` and `slots`, with dtypes, shapes, and which entries are the same tensor. It
    ignores the definition, devices, memory layouts and the order of names.

    By default the comparison is bitwise: a NaN equals a NaN with the same bits, and -0.0
    differs from 0.0. With a tolerance, elements of a floating-point tensor may differ by
    `atol + rtol * largest`. Here `largest` is the largest magnitude in the two tensors. NaN then
    equals NaN, and numbers that are not floats must be equal.

    Raises:
        LawError: the states differ. The error is an `AssertionError`, with one line for each
            entry that differs, at most 20.
        StateDonatedError: one of the states was passed to a step.

    Law: a state equals itself and its copy. A change of a single bit is found and named.

    Example:
        >>> import accelfn as af
        >>> state = af.TrainState.create(
        ...     model=torch.nn.Linear(2, 1), optimizer=torch.optim.SGD
        ... )
        >>> assert_states_equal(state, state.copy())
        >>> assert_states_equal(state, state.with_slot("best", 0.5))
        Traceback (most recent call last):
        ...
        accelfn.errors.LawError: The states differ in 1 entry (first state and second state):
          slots['best']: only in the second: 0.5
    """
    for state in (a, b):
        if not isinstance(state, TrainState):
            msg = f"assert_states_equal: expected two TrainStates, got {state!r}."
            raise ArgumentError(msg)
    comparison = Comparison(rtol=rtol, atol=atol, bitwise=True)
    diffs = comparison.by_name(_fields(a), _fields(b))
    diffs["ties"] = [*_ties(a, b, comparison)]
    count = sum(map(len, diffs.values()))
    if count:
        entries = "entry" if count == 1 else "entries"
        msg = (
            f"The states differ in {count} {entries} (first state and second state):"
            f"{format_differences(diffs)}"
        )
        raise LawError(msg)


def _fields(state: TrainState) -> dict[str, Any]:
    cursor = state.cursor
    numbers = {"cursor.epoch": cursor.epoch, "cursor.samples": cursor.samples}
    fields = {name: getattr(state, name) for name in SAVED if name != "cursor"}
    return {"step": state.step, **numbers, **fields}


def _ties(a: TrainState, b: TrainState, comparison: Comparison) -> Iterator[str]:
    """Yield entries that are the same tensor as another entry in only one of the states."""
    ties = [_first_places(state) for state in (a, b)]
    for path in ties[0]:
        if path not in ties[1] or ties[0][path] == ties[1][path]:
            continue
        texts = [
            f"one tensor with {first[path]} in {side}"
            for first, side in zip(ties, comparison.sides, strict=True)
            if first[path] != path
        ]
        yield f"{path}: {', '.join(texts)}{' only' * (len(texts) == 1)}"


def _first_places(state: TrainState) -> dict[str, str]:
    """Return, for the path of each tensor, the first path that has the same tensor."""
    first: dict[int, str] = {}
    places = chain.from_iterable(leaves(*field) for field in _fields(state).items())
    tensors = ((p, leaf) for p, leaf in places if isinstance(leaf, torch.Tensor))
    return {path: first.setdefault(id(leaf), path) for path, leaf in tensors}


# The saved fields of a state as a flat dict by path, and the first difference of two dicts.


BITWISE = Comparison(bitwise=True, sides=("one", "the other"))
"""A comparison of types and bits, without a tolerance."""


def entries(state: TrainState, *, gather: bool = False) -> dict[str, Any]:
    """Return copies of all saved tensors and values of a state, by path.

    For a sharded tensor, return this rank's shard. With `gather=True`, which needs a call on
    all ranks, return the full tensor.
    """
    places = (leaves(field, getattr(state, field)) for field in SAVED)
    contents = dict(chain.from_iterable(places))
    if gather:
        parts = {path: leaf for path, leaf in contents.items() if tree.is_shard(leaf)}
        contents |= collectives.gather_full(parts, state.world, label="compare states")
    return {path: copy_leaf(leaf) for path, leaf in contents.items()}


def first_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    """Return the path and values of the first bitwise difference of two dicts, or None."""
    diffs = BITWISE.by_name(one, two)
    return next(iter(diffs.values()))[0] if diffs else None


def copy_leaf(leaf: Any) -> Any:
    """Return a copy of a leaf; for an object without its own `__eq__`, its type."""
    if isinstance(leaf, torch.Tensor):
        return tree.local(leaf).detach().clone()
    opaque = type(leaf).__eq__ is object.__eq__ and leaf is not None
    return type(leaf) if opaque else leaf


# `assert_collectives`: compare the collectives of a run with a text file.
#
# For each update, the file lists the collectives in order: kind, reduction, root, bytes that
# one rank sends, label. The file has no source lines and no aligned columns, so a line of the
# file changes only if its collective changes.


def assert_collectives(
    run: Run[Any], path: str | os.PathLike[str], *, update: bool = False
) -> None:
    """Assert that the collectives of a run are those that a text file lists.

    Write the file with `update=True`, and keep the file next to the test. If a change of your
    code makes an update send more bytes or call another collective, code review shows it as a
    changed line of the file. The file lists the collectives of each update, and lists equal
    updates once. A collective between two steps belongs to the update before it. A `send`
    between two ranks comes after the collectives of its update, sorted by ranks, because the
    order of sends in time depends on the schedule.

    Args:
        run: the result of `simulate`.
        path: the path of the file, such as `Path(__file__).with_name("collectives.txt")`.
        update: whether to write the file instead of comparing.

    Raises:
        LawError: the collectives differ (the message has a unified diff), or the file does not
            exist.

    Law: the text of the file depends only on the program, not on the schedule or the machine.

    Example:
        >>> import accelfn as af
        >>> from accelfn.testing import simulate
        >>> run = simulate(2, af.barrier)
        >>> assert_collectives(run, "collectives.txt", update=True)
        >>> assert_collectives(run, "collectives.txt")
        >>> print(Path("collectives.txt").read_text(), end="")
        2 ranks
        <BLANKLINE>
        before any update: 1 call, 4 bytes
          all_reduce SUM, 4 bytes, 'barrier'
    """
    if not isinstance(run, Run):
        msg = (
            f"assert_collectives({type(run).__name__}, ...): expected the Run that simulate"
            " returned."
        )
        raise ArgumentError(msg)
    file, text = Path(path), _text(run)
    if update:
        file.write_text(text, encoding="utf-8", newline="\n")
        return
    if not arguments.exists(file):
        msg = (
            f"assert_collectives: {file} does not exist. Call assert_collectives(run, path,"
            " update=True) once to write the file, and keep it with the test. Its text would"
            f" be:\n\n{text}"
        )
        raise LawError(msg)
    snapshot = file.read_text(encoding="utf-8")
    if text != snapshot:
        lines = difflib.unified_diff(
            snapshot.splitlines(), text.splitlines(), "expected", "found", lineterm=""
        )
        msg = (
            f"The collectives of the run differ from those in {file}. If the change is intended,"
            " call assert_collectives(run, path, update=True) once.\n"
            + "\n".join(lines)
        )
        raise LawError(msg)


def _text(run: Run[Any]) -> str:
    """Return the text of a run's collectives, as `assert_collectives` writes it."""
    updates: dict[int | None, list[Entry]] = {}
    for entry in run.log:
        updates.setdefault(entry.step, []).append(entry)
    blocks: dict[str, list[int]] = {}
    text = f"{len(run)} rank{'s' * (len(run) != 1)}\n"
    if None in updates:
        text += f"\nbefore any update: {_block(updates.pop(None))}"
    for step in sorted(key for key in updates if key is not None):
        blocks.setdefault(_block(updates[step]), []).append(step)
    for block, steps in blocks.items():
        name = "update" if len(steps) == 1 else "each of updates"
        text += f"\n{name} {_ranges(steps)}: {block}"
    return text


def _block(entries: Sequence[Entry]) -> str:
    """Return the number of calls and bytes, and one line per group of equal calls."""
    sends = sorted(map(_line, (entry for entry in entries if entry.kind == "send")))
    lines = [*(_line(entry) for entry in entries if entry.kind != "send"), *sends]
    size = sum(entry.num_bytes for entry in entries)
    calls = f"{len(lines)} call{'s' * (len(lines) != 1)}"
    text = f"{calls}, {_bytes(size)}\n"
    for line, same in groupby(lines):
        count = len(list(same))
        text += f"  {line}{f', {count} times' * (count > 1)}\n"
    return text


def _line(entry: Entry) -> str:
    call = entry.kind if entry.op is None else f"{entry.kind} {entry.op}"
    if entry.kind == "send":
        call += f" between ranks {' and '.join(map(str, entry.ranks))}"
    elif entry.root is not None:
        call += f" root {entry.root}"
    label = "no label" if entry.label is None else repr(entry.label)
    return f"{call}, {_bytes(entry.num_bytes)}, {label}"


def _bytes(number: int) -> str:
    return f"{number:,} byte{'s' * (number != 1)}"


def _ranges(steps: Sequence[int]) -> str:
    """Return increasing numbers as text with ranges: `0 to 3, 5` or `7 to 31 by 8`."""
    gaps = {after - before for before, after in pairwise(steps)}
    if len(steps) > 2 and len(gaps) == 1 and gaps != {1}:
        return f"{steps[0]} to {steps[-1]} by {gaps.pop()}"
    texts: list[str] = []
    # within consecutive steps, the difference to the index is constant
    for _, group in groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        run = [step for _, step in group]
        is_long = len(run) > 2
        texts.append(f"{run[0]} to {run[-1]}" if is_long else ", ".join(map(str, run)))
    return ", ".join(texts)
