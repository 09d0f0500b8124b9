# SPDX-License-Identifier: Apache-2.0
"""Limit gradients before the optimizer step."""

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import attrgetter
from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist

from accelfn.base import tree
from accelfn.base.arguments import number, option, truth
from accelfn.base.tree import computes_on, is_shard, local
from accelfn.definition.transform import transform
from accelfn.errors import GradsError, OptimizerError
from accelfn.state.results import Grads
from accelfn.state.state import TrainState
from accelfn.state.update import Update

_FEW = 256
"""The number of tensors whose norms are computed together."""


_IS_SPARSE = attrgetter("is_sparse")
_is_positive = number(lambda size: size > 0, "a number above 0")


@transform
class clip_grad_norm:
    """Scale the gradients down so that their global norm is at most `max_norm`.

    This applies to the gradients of the mean loss over the whole update, after reduction over
    ranks. `metrics["grad_norm"]` is the norm before clipping. Gradients whose norm is within
    the bound stay bitwise unchanged. Gradients whose norm is infinite or NaN are not changed
    either, because scaling would make all of them NaN or 0. The norm of sharded gradients
    (DTensors) includes all shards.

    Acts on: grads; with `per_group` also init (checks the groups' names).

    Args:
        max_norm: the bound, above 0; `math.inf` reports the norm without clipping.
        norm_type: p of the p-norm over all elements of all gradients; `math.inf` is allowed.
        per_group: clip the gradients of each parameter group of the optimizer independently.
        The norms are `metrics["grad_norm.0"]` and so on; a group's "name" replaces its index.

    Law:
        The norm after clipping is at most `max_norm`, up to rounding. The direction of the
        gradients does not change. Clipping twice equals clipping once.

    Cost:
        One pass over the gradients for the norm, and one to scale them. The host does not wait
        for the device. Sharded gradients need an all-reduce of one number.

    Raises:
        OptimizerError: with `per_group`, two parameter groups have the same name, or the name
        of one is the index of another.

    References:
        Pascanu et al. 2013, "On the difficulty of training recurrent neural networks".

    Example:
        >>> clip_grad_norm(1.0)
        af.clip_grad_norm(1.0)
    """

    max_norm: float = attrs.field(validator=_is_positive)
    norm_type: float = option(2.0, _is_positive)
    per_group: bool = option(default=False, validator=truth())

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell the bound to an engine that hides gradients and clips them (DeepSpeed)."""
        is_plain = self.norm_type == 2 and not self.per_group
        return {"draws_nothing": True, "clips": self.max_norm if is_plain else None}

    @property
    def without(self) -> tuple[str, ...]:
        """Leave out `init` unless groups are clipped independently."""
        return () if self.per_group else ("init",)

    def init(self, state: TrainState) -> None:
        """Raise if the norms of two groups would have the same metric name."""
        groups = state.definition.optimizer.param_groups
        index_of: dict[str, int] = {}
        for i, group in enumerate(groups):
            label = _label(i, group)
            if index_of.setdefault(label, i) != i:
                msg = (
                    f"{self!r}: the optimizer's parameter groups {index_of[label]} and {i} are"
                    f" both named {label!r}, so both norms would be"
                    f' metrics["grad_norm.{label}"]. Set a different "name" in each group. A'
                    ' group without a "name" is named by its index.'
                )
                raise OptimizerError(msg)

    def grads(self, grads: Grads, slot: None, update: Update) -> tuple[Grads, None]:
        """Clip the gradients in place, and report their norm."""
        tensors = list(grads.as_taken.values())
        if any(map(_IS_SPARSE, tensors)):
            _refuse_sparse(grads, self)
        if not tensors:
            return grads, slot
        if not self.per_group:
            return grads.with_metrics(grad_norm=self._clip_(tensors)), slot
        norms = {
            f"grad_norm.{group}": self._clip_([grads.as_taken[name] for name in names])
            for group, names in _by_group(grads, update.state).items()
        }
        total = _total_norm(list(norms.values()), self.norm_type)
        return grads.with_metrics(grad_norm=total, **norms), slot

    def _clip_(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Scale tensors down to the bound, in place, and return their norm before."""
        norm = _total_norm(tensors, self.norm_type)
        if not math.isinf(self.max_norm):
            scale = self.max_norm / norm
            # the scale is 1 if the norm is within the bound, infinite or NaN
            scale = torch.where((norm > self.max_norm) & norm.isfinite(), scale, 1.0)
            tree.mul_(tensors, scale)
        return norm


def _refuse_sparse(grads: Grads, owner: object) -> None:
    for name, grad in grads.as_taken.items():
        if grad.is_sparse:
            msg = (
                f"{owner!r}: the gradient of {name!r} is sparse, and torch cannot clip it."
                " Create that layer with sparse=False, or leave this transform out."
            )
            raise GradsError(msg)


def _refuse_complex(grads: Grads, owner: object) -> None:
    for name, grad in grads.as_taken.items():
        if grad.is_complex():
            msg = (
                f"{owner!r}: the gradient of {name!r} is complex, and complex numbers cannot be"
                " clamped. Use af.clip_grad_norm, which limits the norm of the gradients."
            )
            raise GradsError(msg)


def _by_group(grads: Grads, state: TrainState) -> dict[str, list[str]]:
    """Return the names of the gradients in each of the optimizer's parameter groups."""
    metas = state.definition.skeleton.module.named_parameters()
    names = {id(meta): name for name, meta in metas}
    groups: dict[str, list[str]] = {}
    for i, group in enumerate(state.definition.optimizer.param_groups):
        members = (names[id(param)] for param in group["params"])
        present = [name for name in members if name in grads.as_taken]
        if present:
            groups[_label(i, group)] = present
    return groups


def _label(index: int, group: Mapping[str, Any]) -> str:
    """Return a parameter group's name in the metrics: its "name", or its index."""
    return str(group.get("name", index))


def _total_norm(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all elements, including the elements on other ranks."""
    # some are DTensors or of another subclass
    if {*map(type, tensors)} - {torch.Tensor}:
        shards = [tensor for tensor in tensors if is_shard(tensor)]
        full = [tensor for tensor in tensors if not is_shard(tensor)]
        norms = [_norm_of_shards(rank, norm_type) for rank in _by_ranks(shards)]
        tensors = [*full, *norms]
    first = tensors[0]
    wide, narrow = list[torch.Tensor](), list[torch.Tensor]()
    for tensor in tensors:
        if tensor.numel():
            (wide if tensor.dtype.itemsize >= 4 else narrow).append(tensor)
    if narrow:  # the total could overflow in 16 bits
        wide += tree.norms(narrow, norm_type, dtype=torch.float32)
    if not wide:  # torch cannot compute a maximum of no elements
        nothing = first.abs().sum()  # has the dtype of other ranks' norms
        return nothing if nothing.dtype.itemsize >= 4 else nothing.float()
    if len(wide) <= _FEW or len({(t.device, t.dtype) for t in wide}) > 1:
        return torch.nn.utils.get_total_norm(wide, norm_type=norm_type)
    return _norm_of_many(wide, norm_type)


def _norm_of_many(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of tensors of one device and dtype, bitwise equal to `get_total_norm`.

    The norms of few tensors at a time are computed and freed. Otherwise Python's garbage
    collector would run after 700 new objects, and take as long as the norms themselves.
    """
    with torch.no_grad():
        norms = [
            torch.stack(tree.norms(tensors[i : i + _FEW], norm_type))
            for i in range(0, len(tensors), _FEW)
        ]
        return torch.linalg.vector_norm(torch.cat(norms), norm_type)


def _by_ranks(shards: list[Any]) -> Iterable[list[Any]]:
    """Group shards by the mesh axes that they are split over."""
    groups: dict[Any, list[Any]] = {}
    for shard in shards:
        splits = tuple(not placement.is_replicate() for placement in shard.placements)
        groups.setdefault((shard.device_mesh, splits), []).append(shard)
    return groups.values()


def _norm_of_shards(shards: list[Any], norm_type: float) -> torch.Tensor:
    """Return the norm of DTensors over all of their shards.

    The all-reduced number is in float64. In float32 the power of a large norm overflows. A
    fixed dtype is needed, because a rank may have no shard of a dtype that another rank has.
    """
    norm = _total_norm([local(shard) for shard in shards], norm_type).double()
    norm = norm.to(computes_on(shards[0]))  # offloaded shards are on the host
    finite = not math.isinf(norm_type)
    # Gloo's maximum of a number and NaN may be either of the two
    crossing = norm**norm_type if finite else norm.nan_to_num(math.inf, math.inf)
    crossing = crossing.reshape(1)
    operation = dist.ReduceOp.SUM if finite else dist.ReduceOp.MAX
    mesh, placements = shards[0].device_mesh, shards[0].placements
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            dist.all_reduce(crossing, operation, group=mesh.get_group(axis))
    total = crossing[0]
    dtypes = (shard.dtype.to_real() for shard in shards)
    widest = reduce(torch.promote_types, dtypes, torch.float32)
    return (total ** (1 / norm_type) if finite else total).to(widest)


@transform
class clip_grad_value:
    """Clamp every element of the gradients to `-max_value .. max_value`.

    This applies to the gradients of the mean loss over the whole update, after reduction over
    ranks.

    Acts on: grads.

    Args:
        max_value: the bound, above 0.

    Law:
        Every element is within the bound. Clamping twice equals clamping once.

    Cost:
        One pass over the gradients.

    Raises:
        GradsError: a gradient is sparse or complex; torch cannot clamp it.

    Example:
        >>> clip_grad_value(0.5)
        af.clip_grad_value(0.5)
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}
    max_value: float = attrs.field(validator=_is_positive)

    def grads(self, grads: Grads, slot: None, update: Update) -> tuple[Grads, None]:
        """Clamp the gradients, in place."""
        _refuse_sparse(grads, self)
        _refuse_complex(grads, self)
        tree.clamp_(grads.as_taken.values(), -self.max_value, self.max_value)
        return grads, slot
