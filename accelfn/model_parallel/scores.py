# SPDX-License-Identifier: Apache-2.0
"""Scores (logits) that are split over the ranks along "tp".

Each rank has the scores of some words (tokens) of the vocabulary. Cross entropy is computed from
split scores: ranks exchange three numbers per token, and no rank has the scores of all words.
Common functions between an output head and its loss, such as casts, views and scaling, also work
on split scores. Every other function gets the gathered scores. Its result is correct, but it
needs memory for the scores of all words.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

from accelfn import World
from accelfn.errors import LossError
from accelfn.model_parallel.differentiable import (
    LABEL,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
)
from accelfn.plug import collectives, tree

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

# Cross entropy of split scores.
#
# As in Megatron-LM, ranks exchange three numbers per token: the largest score, the sum of
# exponentials, and the score of the target word.


def _cross_entropy(
    scores: "Scores",
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> Any:
    """Compute `F.cross_entropy` from parts, except for probabilities and deprecated options."""
    part, ranks = _part(scores), scores._ranks
    is_by_word = scores._dim == min(1, part.ndim - 1)
    says_how = size_average is not None or reduce is not None
    if not is_by_word or says_how or target.is_floating_point():
        return NotImplemented
    dtype, counts = part.dtype, target != ignore_index
    word = target.masked_fill(~counts, 0)
    part = tree.wide(part.movedim(scores._dim, -1))  # torch widens internally, too
    number = part.shape[-1] * ranks.size
    largest = part.detach().amax(-1)
    with collectives.naming(LABEL, ranks):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ranks.group)
    part = part - largest.unsqueeze(-1)
    sums = [part.exp().sum(-1), _target_scores(part, word, ranks)]
    if label_smoothing:
        scale = None if weight is None else weight.chunk(ranks.size)[ranks.rank]
        sums.append(part.sum(-1) if scale is None else part @ scale.to(part.dtype))
    total, due, *spread = reduce_from_ranks(torch.stack(sums), ranks)
    log, weights = total.log(), counts.to(part.dtype)
    if weight is not None:
        weights = weight[word].to(part.dtype) * weights
    loss = (log - due) * weights
    for score_sum in spread:
        of_words = number if weight is None else weight.sum()
        smooth = (of_words * log - score_sum) / number
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    loss = loss.masked_fill(~counts, 0)
    if reduction == "mean":
        loss = loss.sum() / weights.sum()
    elif reduction == "sum":
        loss = loss.sum()
    casts = not part.is_meta and torch.is_autocast_enabled(part.device.type)
    return loss if casts else loss.to(dtype)


def _target_scores(
    part: torch.Tensor, word: torch.Tensor, ranks: World
) -> torch.Tensor:
    """Return the target words' scores on the rank that has them, and 0 on other ranks."""
    count = part.shape[-1]
    local_word = word - ranks.rank * count
    is_own = (local_word >= 0) & (local_word < count)
    is_word = (word >= 0) & (word < count * ranks.size)
    # an invalid index stays out of bounds, so that torch rejects it
    index = local_word.masked_fill(is_word & ~is_own, 0).unsqueeze(-1)
    return part.gather(-1, index).squeeze(-1).masked_fill(~is_own, 0)


# torch has no public way to disable a subclass


class Scores(torch.Tensor):
    """A tensor that acts like the scores of all words, but holds only this rank's part."""

    _ranks: World
    _dim: int

    @classmethod
    def of(cls, part: torch.Tensor, ranks: World, dim: int = -1) -> "Scores":
        """Return scores, given this rank's part along a dim."""
        scores = part.as_subclass(cls)
        scores._ranks, scores._dim = ranks, dim % part.ndim
        return scores

    def full_scores(self) -> torch.Tensor:
        """Return the scores of all words; a collective."""
        return gather_from_ranks(_part(self), self._dim, self._ranks)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function on the parts if possible, otherwise on the gathered scores."""
        del types
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], Scores):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _COMMUTATIVE and len(args) == 2 and isinstance(args[1], Scores):
            return func(args[1], args[0])
        if func.__name__.endswith("_") and not func.__name__.endswith("__"):
            msg = (
                f"af.tensor_parallel: {func.__name__} cannot change scores in place: each rank has"
                " only some words. Call a function that returns a new tensor, such as"
                ' scores.masked_fill(...), or make the head "gathered" in the plan.'
            )
            raise LossError(msg)
        return func(*gather_scores(args), **gather_scores(kwargs))

    def __format__(self, form: str) -> str:
        """Return a text with this rank's part."""
        del form
        return repr(self)

    def __repr__(self, **_: Any) -> str:
        """Return a text with this rank's part: a single rank may print, so no collective."""
        return f"Scores of this rank's words: {_part(self)!r}"


def gather_scores(results: Any) -> Any:
    """Gather all split scores in a tree of results; a collective if there are any."""
    return tree.tree_map(
        lambda leaf: leaf.full_scores() if isinstance(leaf, Scores) else leaf, results
    )


def _part(scores: Scores) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return scores.as_subclass(torch.Tensor)


def _property(func: Any, scores: Scores, *args: Any, **options: Any) -> Any:
    """Return a property that is equal for a part and for all scores."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(scores, *args, **options)


def _elementwise(func: Any, scores: Scores, *args: Any, **options: Any) -> Any:
    """Apply an elementwise function; gradients of scalar arguments are summed over ranks."""
    part, ranks = _part(scores), scores._ranks
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    has_tensor = any(isinstance(option, torch.Tensor) for option in options.values())
    if has_tensor or any(arg.ndim or isinstance(arg, Scores) for arg in tensors):
        return NotImplemented
    inputs = [
        copy_to_ranks(arg, ranks) if getattr(arg, "requires_grad", False) else arg
        for arg in args
    ]
    return Scores.of(func(part, *inputs, **options), ranks, scores._dim)


def _size(scores: Scores, dim: int | None = None) -> Any:
    shape = list(_part(scores).shape)
    shape[scores._dim] *= scores._ranks.size
    return torch.Size(shape) if dim is None else shape[dim]


def _move_dims(func: Any, scores: Scores, *args: Any, **options: Any) -> Scores:
    """Apply a function that changes only the order of dims."""
    part = _part(scores)
    example = torch.empty([2] * part.ndim, device="meta")  # each dim has its own stride
    strides = func(example, *args, **options).stride()
    dim = strides.index(example.stride(scores._dim))
    return Scores.of(func(part, *args, **options), scores._ranks, dim)


def _flatten(scores: Scores, start_dim: int = 0, end_dim: int = -1) -> Any:
    part, dim = _part(scores), scores._dim
    start, end = start_dim % part.ndim, end_dim % part.ndim
    if not end < dim:
        return NotImplemented
    return Scores.of(part.flatten(start, end), scores._ranks, dim - (end - start))


def _view(func: Any, scores: Scores, *args: Any, **options: Any) -> Any:
    """Apply `view` or `reshape`, if the dim of words stays the last one."""
    part, shape = _part(scores), _size(scores)
    new = func(torch.empty(shape, dtype=part.dtype, device="meta"), *args, **options)
    is_last = scores._dim == part.ndim - 1 and new.shape[-1:] == shape[-1:]
    if not is_last or new.dtype != part.dtype:
        return NotImplemented
    return Scores.of(part.reshape(*new.shape[:-1], part.shape[-1]), scores._ranks)


def _index(scores: Scores, index: Any) -> Any:
    """Index the dims before the last one, which is the dim of words."""
    part = _part(scores)
    index = index if isinstance(index, tuple) else (index,)
    if scores._dim != part.ndim - 1 or not all(map(_is_index, index)):
        return NotImplemented
    *before, last = index or (...,)
    has_all = isinstance(last, slice) and last == slice(None)
    is_short = not any(item is ... for item in before)
    if not has_all and (not is_short or _num_taken(index) >= part.ndim):
        return NotImplemented
    return Scores.of(part[index], scores._ranks)


def _is_index(item: Any) -> bool:
    kinds = (int, slice, torch.Tensor, type(None), type(Ellipsis))
    return isinstance(item, kinds) and not isinstance(item, (bool, Scores))


def _num_taken(index: tuple[Any, ...]) -> int:
    """Return the number of dims that an index uses."""
    return sum(
        item.ndim if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1
        for item in index
        if item is not None and item is not ...
    )


_T = torch.Tensor
_ELEMENTWISE = (
    *(_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type, _T.contiguous),
    *(_T.clone, _T.detach, torch.clone, torch.detach, _T.tanh, torch.tanh),
    *(_T.mul, torch.mul, _T.__mul__, _T.__rmul__, _T.div, torch.div, _T.__truediv__),
    *(_T.add, torch.add, _T.__add__, _T.__radd__, _T.sub, torch.sub, _T.__sub__),
    *(_T.neg, torch.neg, _T.__neg__, _T.clamp, torch.clamp),
    *(_T.mul_, _T.div_, _T.add_, _T.sub_, _T.tanh_),
)
_MOVES_OF_DIMS = (
    *(_T.transpose, torch.transpose, _T.swapaxes, _T.permute, torch.permute),
    *(_T.movedim, torch.movedim, _T.t, torch.t, cast("Any", _T.mT).__get__),
)
_COMMUTATIVE = {_T.mul, torch.mul, _T.add, torch.add}
"""Functions whose two arguments may be swapped."""
_PROPERTIES = (
    *("dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "layout"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized"),
)
_PART_PROPERTIES = (
    *(_T.dim, _T.is_floating_point, _T.is_complex, _T.element_size, _T.register_hook),
    *(_T.retain_grad, _T.get_device),
    *(getattr(_T, name).__get__ for name in _PROPERTIES),
)
_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    _T.size: _size,
    cast("Any", _T.shape).__get__: _size,
    **dict.fromkeys((_T.flatten, torch.flatten), _flatten),
    _T.__getitem__: _index,
    **{func: partial(_move_dims, func) for func in _MOVES_OF_DIMS},
    **{func: partial(_view, func) for func in (_T.view, _T.reshape, torch.reshape)},
    **{func: partial(_elementwise, func) for func in _ELEMENTWISE},
    **{func: partial(_property, func) for func in _PART_PROPERTIES},
}
"""Functions that work on parts, by torch's function."""
