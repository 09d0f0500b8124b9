# SPDX-License-Identifier: Apache-2.0
"""Scores of the words of a vocabulary, of which each rank along "tp" has some.

Cross entropy is computed from parts: ranks exchange three numbers a token, and no rank has
the scores of all words. So are the functions that stand between a head and its loss, as casts,
views and numbers to multiply by. Every other function is given the whole, which is gathered:
it is right, and has the cost of a head that is gathered.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

from accelfn.base.tree import tree_map
from accelfn.engine.module import crossing
from accelfn.engine.module.cross_entropy import cross_entropy
from accelfn.errors import LossError
from accelfn.world import World

# a subclass has no public way around itself
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false


class Scores(torch.Tensor):
    """A tensor of all words' scores, in shape and in value; this rank has a part of it."""

    _ranks: World
    _dim: int

    @classmethod
    def of(cls, part: torch.Tensor, ranks: World, dim: int = -1) -> "Scores":
        """Return the scores of which this rank has a part along a dim."""
        made = part.as_subclass(cls)
        made._ranks, made._dim = ranks, dim % part.ndim
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function, on parts where that will do."""
        del types
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Scores):
            found = _by_parts(func, first, args[1:], kwargs)
            if found is not NotImplemented:
                return found
        if func in _EITHER and len(args) == 2 and isinstance(args[1], Scores):
            return func(args[1], args[0])
        if func.__name__.endswith("_") and not func.__name__.endswith("__"):
            msg = (
                f"af.tensor_parallel: {func.__name__} would change scores in place of which a"
                " rank has those of some words. Call what returns others, as"
                " scores.masked_fill(...), or make the head gathered."
            )
            raise LossError(msg)
        return func(*whole(args), **whole(kwargs))

    def __format__(self, form: str) -> str:
        """Show the part."""
        del form
        return repr(self)

    def __repr__(self, **_: Any) -> str:  # no collective, for one rank alone may print
        """Show the part."""
        with torch._C.DisableTorchFunctionSubclass():
            return f"Scores of this rank's words: {_part(self)!r}"


def whole(tree: Any) -> Any:
    """Return a tree in which scores are those of all words; a collective if there are any."""
    return tree_map(_whole, tree)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, Scores):
        return leaf
    return crossing.gathered(_part(leaf), leaf._dim, leaf._ranks)


def _part(scores: Scores) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return scores.as_subclass(torch.Tensor)


def _shape(scores: Scores) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        shape = list(scores.shape)
    shape[scores._dim] *= scores._ranks.size
    return shape


Ways = Mapping[Any, Callable[..., Any]]


def _by_parts(func: Any, scores: Scores, args: tuple[Any, ...], options: Any) -> Any:
    """Return what a function gives, computed from parts; NotImplemented where it cannot be."""
    if func in _TOLD:
        with torch._C.DisableTorchFunctionSubclass():
            return func(scores, *args, **options)
    way = _WAYS.get(func)
    if way is not None:
        return way(scores, *args, **options)
    if func in _EACH:
        return _each(func, scores, args, options)
    return NotImplemented


def _each(func: Any, scores: Scores, args: Any, options: Any) -> Any:
    """Change each score alike; a number that is trained has the sum of ranks' gradients."""
    part, ranks = _part(scores), scores._ranks
    given = []
    for each in args:
        if isinstance(each, torch.Tensor):
            if each.ndim or isinstance(each, Scores):
                return NotImplemented
            given.append(crossing.handed(each, ranks) if each.requires_grad else each)
        else:
            given.append(each)
    if any(isinstance(each, torch.Tensor) for each in options.values()):
        return NotImplemented
    return Scores.of(func(part, *given, **options), ranks, scores._dim)


def _size(scores: Scores, dim: int | None = None) -> Any:
    shape = torch.Size(_shape(scores))
    return shape if dim is None else shape[dim]


def _transposed(scores: Scores, a: int = -2, b: int = -1) -> Scores:
    part = _part(scores)
    a, b, dim = a % part.ndim, b % part.ndim, scores._dim
    moved = {a: b, b: a}.get(dim, dim)
    return Scores.of(part.transpose(a, b), scores._ranks, moved)


def _permuted(scores: Scores, *dims: Any) -> Scores:
    part = _part(scores)
    order = dims[0] if isinstance(dims[0], (tuple, list)) else dims
    order = [int(each) % part.ndim for each in order]
    return Scores.of(part.permute(order), scores._ranks, order.index(scores._dim))


def _flattened(scores: Scores, start_dim: int = 0, end_dim: int = -1) -> Any:
    part, dim = _part(scores), scores._dim
    start, end = start_dim % part.ndim, end_dim % part.ndim
    if not end < dim:
        return NotImplemented
    return Scores.of(part.flatten(start, end), scores._ranks, dim - (end - start))


def _viewed(scores: Scores, *sizes: Any) -> Any:
    part, shape = _part(scores), _shape(scores)
    given = sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes
    if scores._dim != part.ndim - 1 or not all(isinstance(n, int) for n in given):
        return NotImplemented
    given = [int(n) for n in given]
    rest = math.prod(given[:-1])
    last = given[-1]
    if last == -1 and rest > 0:
        last = math.prod(shape) // rest
    if last != shape[-1] or (rest > 0 and rest * last != math.prod(shape)):
        return NotImplemented
    return Scores.of(part.reshape(*given[:-1], part.shape[-1]), scores._ranks)


def _chosen(scores: Scores, index: Any) -> Any:
    """Take from the dims before that of the words, which is the last."""
    part = _part(scores)
    index = index if isinstance(index, tuple) else (index,)
    if scores._dim != part.ndim - 1 or not all(map(_is_index, index)):
        return NotImplemented
    places = [i for i, each in enumerate(index) if each is Ellipsis]
    for i in places[:1]:
        before, behind = index[:i], index[i + 1 :]
        left = part.ndim - _num_taken(before + behind)
        index = (*before, *[slice(None)] * left, *behind)
    is_full = _num_taken(index) == part.ndim and isinstance(index[-1], slice)
    if is_full and index[-1] == slice(None):
        index = index[:-1]
    if _num_taken(index) >= part.ndim:
        return NotImplemented
    return Scores.of(part[index], scores._ranks)


def _is_index(each: Any) -> bool:
    kinds = (int, slice, torch.Tensor, type(None), type(Ellipsis))
    return isinstance(each, kinds) and not isinstance(each, (bool, Scores))


def _num_taken(index: tuple[Any, ...]) -> int:
    """Return how many dims an index is about."""
    return sum(
        each.ndim if isinstance(each, torch.Tensor) and each.dtype == torch.bool else 1
        for each in index
        if each is not None
    )


def _cross_entropy(
    scores: Scores,
    target: torch.Tensor,
    *,
    size_average: bool | None,
    reduce: bool | None,
    **options: Any,
) -> Any:
    """Return `F.cross_entropy`, from parts; not of probabilities, nor by words of old."""
    part = _part(scores)
    is_by_word = scores._dim == (1 if part.ndim > 1 else 0)
    says_how = size_average is not None or reduce is not None
    if not is_by_word or says_how or target.is_floating_point():
        return NotImplemented
    part = part.movedim(scores._dim, -1)
    return cross_entropy(part, target, scores._ranks, **options)


_T = torch.Tensor
_WAYS: Ways = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((_T.size,), _size),
    cast("Any", _T.shape).__get__: _size,
    **dict.fromkeys((_T.transpose, torch.transpose, _T.swapaxes), _transposed),
    cast("Any", _T.mT).__get__: _transposed,
    **dict.fromkeys((_T.permute, torch.permute), _permuted),
    **dict.fromkeys((_T.flatten, torch.flatten), _flattened),
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _viewed),
    _T.__getitem__: _chosen,
}
"""What is computed from parts in a way of its own."""
_EACH = {
    *(_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type, _T.contiguous),
    *(_T.clone, _T.detach, torch.clone, torch.detach, _T.tanh, torch.tanh),
    *(_T.mul, torch.mul, _T.__mul__, _T.__rmul__, _T.div, torch.div, _T.__truediv__),
    *(_T.add, torch.add, _T.__add__, _T.__radd__, _T.sub, torch.sub, _T.__sub__),
    *(_T.neg, torch.neg, _T.__neg__, _T.clamp, torch.clamp),
    *(_T.mul_, _T.div_, _T.add_, _T.sub_, _T.tanh_),
}
"""What goes score by score."""
_EITHER = {_T.mul, torch.mul, _T.add, torch.add}
"""What may be written either way."""
_PROPERTIES = (
    *("dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "layout"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized"),
)
_TOLD = {
    *(_T.dim, _T.is_floating_point, _T.is_complex, _T.element_size, _T.register_hook),
    *(_T.retain_grad, _T.get_device),
    *(getattr(_T, name).__get__ for name in _PROPERTIES),
}
"""What of the whole is so of a part."""
