# SPDX-License-Identifier: Apache-2.0
"""How two trees of tensors and plain data differ: where, and by how much, in words.

A place is named as code would reach it, such as `params['0.weight']`.
"""

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np
import torch

from accelfn.base.arguments import is_number
from accelfn.base.pending import Pending
from accelfn.base.shards import local
from accelfn.errors import ArgumentError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_LINES = 20
_MANY_STEPS = 100_000
"""So many numbers lie between two that their count says nothing."""


@attrs.frozen
class Difference:
    """One place in which two trees differ.

    Attributes:
        path: where.
        text: what is there in the first and in the second.
    """

    path: str
    text: str

    def __str__(self) -> str:
        """Show it on a line."""
        return f"{self.path}: {self.text}"


def _is_tolerance(_owner: object, field: "attrs.Attribute[float]", value: Any) -> None:
    if not is_number(value) or not 0 <= value < math.inf:
        msg = f"{field.name}={value!r}: expected a finite number, 0 or more."
        raise ArgumentError(msg)


@attrs.frozen(kw_only=True)
class Comparison:
    """What counts as equal, and how the two are called.

    Elements of floating-point tensors may differ by `atol + rtol * largest`, where `largest`
    is the largest finite magnitude in both tensors: the rounding error of a sum is
    relative to its terms, not to what they leave. NaN is equal to NaN.

    Attributes:
        rtol: tolerance relative to a tensor's largest element.
        atol: absolute tolerance.
        bitwise: at no tolerance, compare bits and types. Otherwise 0.0 equals -0.0, 1
            equals 1.0 and a scalar tensor, and a list equals a tuple.
        sides: what the two are called.
    """

    rtol: float = attrs.field(default=0.0, validator=_is_tolerance)
    atol: float = attrs.field(default=0.0, validator=_is_tolerance)
    bitwise: bool = False
    sides: tuple[str, str] = ("the first", "the second")

    @property
    def is_exact(self) -> bool:
        """Whether there is no tolerance."""
        return self.rtol == self.atol == 0

    def by_name(
        self, one: Mapping[str, Any], two: Mapping[str, Any]
    ) -> dict[str, list[Difference]]:
        """Return where named trees differ, under the names that do, in the first's order."""
        found: dict[str, list[Difference]] = {}
        for name, value in {**one, **two}.items():
            if name in one and name in two:
                differences = list(self.differences(name, one[name], value))
            else:
                differences = [self._lone(name, value, in_one=name in one)]
            if differences:
                found[name] = differences
        return found

    def differences(self, path: str, one: Any, two: Any) -> Iterator[Difference]:
        """Yield where two trees differ, in the order of the first."""
        ones, twos = _children(path, one), _children(path, two)
        if ones is None or twos is None or not self._are_of_a_kind(one, two):
            text = self._leaves(one, two)
            if text:
                yield Difference(path, text)
            return
        for key, (place, value) in {**ones, **twos}.items():
            if key in ones and key in twos:
                yield from self.differences(place, ones[key][1], value)
            else:
                yield self._lone(place, value, in_one=key in ones)

    def _lone(self, path: str, value: Any, *, in_one: bool) -> Difference:
        side = self.sides[0 if in_one else 1]
        return Difference(path, f"only in {side}: {described(value)}")

    def _are_of_a_kind(self, one: Any, two: Any) -> bool:
        """Whether two containers are compared inside: both mappings, or both sequences."""
        mappings = [isinstance(each, Mapping) for each in (one, two)]
        if any(mappings):
            return all(mappings)
        return type(one) is type(two) or not self.bitwise

    def _leaves(self, one: Any, two: Any) -> str | None:
        pair = one, two
        if not self.bitwise and not _are_one_dtype(one, two):
            pair = tuple(_number_or_tensor(each) for each in pair)
        if all(isinstance(each, torch.Tensor) for each in pair):
            return self._tensors(*pair)
        kinds = {type(each) for each in pair}
        if len(kinds) == 1 or (not self.bitwise and kinds <= {bool, int, float}):
            if kinds & {float, complex}:
                dtype = torch.complex128 if complex in kinds else torch.float64
                return self._tensors(*(torch.tensor(x, dtype=dtype) for x in pair))
            if _are_equal(*pair):
                return None
        shown = [described(each) for each in pair]
        if shown[0] == shown[1]:
            shown = [
                f"{x} ({type(y).__name__})" for x, y in zip(shown, pair, strict=True)
            ]
        return f"{shown[0]} and {shown[1]}"

    def _tensors(self, one: torch.Tensor, two: torch.Tensor) -> str | None:
        """Say how two tensors differ, wherever they live."""
        one, two = _plain(one), _plain(two)
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return f"{_kind(one)} and {_kind(two)}"
        unequal = self._unequal(one, two)
        places = unequal.nonzero()
        if not len(places):
            return None
        first = tuple(places[0].tolist())
        pair = _pair(one[first], two[first])
        apart = _apart(one[unequal], two[unequal])
        if one.ndim == 0:
            return f"{pair}{apart and f', difference {apart}'}"
        if len(places) == 1:
            at = f"1 of {one.numel()} elements differs, at {list(first)}: {pair}"
            return f"{at}{apart and f', difference {apart}'}"
        at = f"elements differ, the first at {list(first)}: {pair}"
        apart = apart and f", largest difference {apart}"
        return f"{len(places)} of {one.numel()} {at}{apart}"

    def _unequal(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        """Return which elements are not equal, as booleans."""
        if self.bitwise and self.is_exact:
            if one.is_complex():
                parts = torch.view_as_real(one), torch.view_as_real(two)
                return (_bits(parts[0]) != _bits(parts[1])).any(-1)
            return _bits(one) != _bits(two)
        wide = _wide(one), _wide(two)
        unequal = (wide[0] != wide[1]) & ~(wide[0].isnan() & wide[1].isnan())
        if self.is_exact or not (one.is_floating_point() or one.is_complex()):
            return unequal
        allowed = self.atol + self.rtol * largest(one, two)
        return unequal & ~((wide[0] - wide[1]).abs() <= allowed)


def listed(differences: Sequence[Difference]) -> str:
    """Return one line a difference, at most 20, and how many more there are."""
    lines = [f"\n  {each}" for each in differences[:_MOST_LINES]]
    more = len(differences) - len(lines)
    if more > 0:
        lines.append(f"\n  and {more} more")
    return "".join(lines)


def leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a tree with its place."""
    children = _children(path, tree)
    if children is None:
        yield path, tree
        return
    for place, value in children.values():
        yield from leaves(place, value)


def _children(path: str, tree: Any) -> dict[Any, tuple[str, Any]] | None:
    """Return the entries of a container by key, each with its place; None of a leaf."""
    if isinstance(tree, Mapping):
        items = cast("Mapping[Any, Any]", tree).items()
        return {key: (f"{path}[{key!r}]", value) for key, value in items}
    if isinstance(tree, (list, tuple)):
        values = cast("list[Any]", tree)
        fields: Any = getattr(tree, "_fields", None)  # the mark of a namedtuple
        names = [f".{name}" for name in fields or ()] or [
            f"[{i}]" for i in range(len(values))
        ]
        return {i: (path + names[i], value) for i, value in enumerate(values)}
    if isinstance(tree, Pending):
        return {"wait": (f"{path}.wait()", tree.wait())}
    return None


def largest(*tensors: torch.Tensor) -> float:
    """Return the largest finite magnitude in some tensors, or 0."""
    found = [each[each.isfinite()].abs() for each in map(_wide, tensors)]
    return max((float(each.max()) for each in found if each.numel()), default=0.0)


def described(value: Any) -> str:
    """Say what a value is, on part of a line."""
    if isinstance(value, torch.Tensor):
        if value.ndim:
            return f"a {_kind(value)}"
        return f"{_element(_plain(value))} (a {_dtype(value)} tensor)"
    if _children("", value):
        return f"a {type(value).__name__} of {len(value)}"
    return " ".join(reprlib.repr(value).split())


def _are_one_dtype(one: Any, two: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
    return tensors and one.dtype == two.dtype


def _number_or_tensor(value: Any) -> Any:
    """Return what a scalar tensor, a numpy scalar or a numpy array holds."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    return value


def _are_equal(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two)
    return one is two or bool(one == two)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values alone: dense, on the CPU, without a graph; of a part, this rank's."""
    tensor = local(tensor.detach()).cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point values in the widest type, where no difference is lost."""
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
    """Show two numbers that are not the same; NaNs by their bits."""
    shown = [_element(one), _element(two)]
    if shown[0] == shown[1]:
        shown = [f"{shown[0]} of bits {_hex(each)}" for each in (one, two)]
    return " and ".join(shown)


def _element(element: torch.Tensor) -> str:
    """Show one number in as many digits as tell it from its neighbours."""
    value = element.item()
    match element.dtype:
        case torch.float32 | torch.float16:
            return str(element.numpy()[()])
        case torch.bfloat16:
            return f"{value:.4g}"
        case _:
            return repr(value)


def _apart(one: torch.Tensor, two: torch.Tensor) -> str:
    """Say how far the farthest two of some elements are apart, where that is a number."""
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
    """Return how many numbers of their type two elements are apart, if few."""
    if one.is_complex():
        return ""
    places: list[int] = []
    for each in (one, two):
        bits = int(_bits(each))
        lowest = -(2 ** (8 * each.element_size() - 1))
        places.append(bits if bits >= 0 else lowest - bits)
    steps = abs(places[0] - places[1])
    return str(steps) if steps < _MANY_STEPS else ""
