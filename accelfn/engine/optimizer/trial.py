# SPDX-License-Identifier: Apache-2.0
"""An optimizer is tried on small parameters: on what does an update of one depend?"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.engine.optimizer.live_optimizer import LiveOptimizer, State
from accelfn.errors import OptimizerError
from accelfn.state.state import TrainState
from accelfn.structure.prototype import group_key, rebuilt

_MOST = 4
"""Rows, and columns, of a small parameter."""
_OF_A_KIND = 2
"""How many are tried of the parameters of a group that become alike as they become small.

One could depend on another, and a third one on no more than that."""
_ON_HOST = {"train_mode": True, "capturable": False}
"""What groups of parameters are tried with, wherever the state's own lie."""
_HALVES = slice(None, 2), slice(2, None)
"""The parts in which they are tried."""


def check_elements(
    state: TrainState,
    shown: str,
    *,
    dims: Iterable[int],
    optimizer: Optimizer | None = None,
) -> None:
    """Refuse an optimizer that updates an element by more than its own gradient.

    Args:
        state: whose optimizer it is, unless another is given.
        shown: who asks.
        dims: at which parameters are cut.
        optimizer: a prototype of another.

    Raises:
        OptimizerError: it does; or it cannot be tried.
    """
    optimizer = optimizer or state.definition.optimizer
    kind = type(optimizer).__name__
    try:
        differ = [name for dim in dims for name in _differing(state, dim, optimizer)]
    except Exception as error:
        msg = (
            f"{shown}: {kind} cannot be tried on small parameters, to see whether it"
            f" updates each element for itself: {error!r}."
        )
        raise OptimizerError(msg) from error
    if differ:
        msg = (
            f"{shown}: {kind} updates an element by more than its own gradient, and a"
            f" rank has only a part of them: {', '.join(dict.fromkeys(differ[:5]))} came out"
            " otherwise in parts. Take an optimizer that goes element by element, such as"
            " AdamW, or af.wrap_ddp."
        )
        raise OptimizerError(msg)


def _differing(state: TrainState, dim: int, optimizer: Optimizer) -> list[str]:
    """Return the parameters that come out otherwise where they are cut at a dim."""
    whole, _ = _tried(state, optimizer, part=(dim, slice(None)))
    parts = [_tried(state, optimizer, part=(dim, half))[0] for half in _HALVES]
    return [
        name
        for name, param in whole.items()
        if param.ndim > dim
        and not _close(param, torch.cat([part[name] for part in parts], dim))
    ]


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether numbers are equal up to the rounding of a few operations."""
    few = 16 * torch.finfo(one.dtype).eps
    return bool(((one - other).abs() <= few * (1 + one.abs())).all())


def tried(
    state: TrainState,
    *,
    alone: bool = False,
    part: tuple[int, slice] = (0, slice(None)),
) -> dict[str, torch.Tensor]:
    """Return small parameters after two updates by the state's optimizer, two of each kind.

    Args:
        state: it stays as it is.
        alone: whether parameters are updated one by one, the last one first.
        part: of each parameter and its gradients, what the optimizer sees: a slice of a dim.
    """
    return _tried(state, state.definition.optimizer, alone=alone, part=part)[0]


def counts_by_group(state: TrainState, *, optimizer: Optimizer | None = None) -> bool:
    """Whether an update changes numbers of the optimizer's parameter groups.

    It is the state's, unless a prototype of another is given.
    """
    optimizer = optimizer or state.definition.optimizer
    _, kept = _tried(state, optimizer)
    groups = optimizer.param_groups
    return any(
        not isinstance(value, torch.Tensor)
        for i in range(len(groups))
        for value in kept.get(group_key(i), {}).values()
    )


def _tried(
    state: TrainState,
    optimizer: Optimizer,
    *,
    alone: bool = False,
    part: tuple[int, slice] = (0, slice(None)),
) -> tuple[dict[str, torch.Tensor], State]:
    """Return small parameters, and what the optimizer keeps, after two updates."""
    dim, within = part
    skeleton = state.definition.skeleton
    metas = _two_of_a_kind(
        optimizer, dict(skeleton.module.named_parameters()), skeleton.trainable, dim
    )
    generator = torch.Generator().manual_seed(0)

    def drawn(meta: torch.Tensor) -> torch.Tensor:
        whole = torch.randn(_small(meta, dim), generator=generator).to(meta.dtype)
        return whole[(slice(None),) * dim + (within,)] if meta.ndim > dim else whole

    params = {name: nn.Parameter(drawn(meta)) for name, meta in metas.items()}
    live = LiveOptimizer(
        _over(optimizer, {id(metas[name]): param for name, param in params.items()}),
        {param: name for name, param in params.items()},
    )
    trained = {name: params[name] for name in skeleton.trainable if name in params}
    hyper = {
        (i, name): value
        for i, group in enumerate(optimizer.param_groups)
        for name, value in _ON_HOST.items()
        if name in group
    }
    kept: State = {}
    for _ in range(2):
        gradients = {name: drawn(metas[name]) for name in trained}
        if alone:
            live.begin(hyper)
            for name, param in reversed(trained.items()):
                param.grad = gradients[name]
                live.step_alone(param)
                param.grad = None
            kept = live.end()
        else:
            for name, param in trained.items():
                param.grad = gradients[name]
            kept = live.update(hyper)
    return {name: param.detach() for name, param in params.items()}, kept


def _small(meta: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Return the shape that a parameter is tried in: enough to be cut, however few there are."""
    return tuple(
        _MOST if at == dim else min(n, _MOST) for at, n in enumerate(meta.shape)
    )


def _two_of_a_kind(
    optimizer: Optimizer,
    metas: Mapping[str, torch.Tensor],
    trainable: Iterable[str],
    dim: int,
) -> dict[str, torch.Tensor]:
    """Return the parameters that are tried: a model's layers are often alike, and many."""
    trainable = frozenset(trainable)
    groups = {
        id(param): i
        for i, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    seen = Counter[object]()
    chosen: dict[str, torch.Tensor] = {}
    for name, meta in metas.items():
        if id(meta) not in groups:
            continue
        kind = groups[id(meta)], _small(meta, dim), meta.dtype, name in trainable
        seen[kind] += 1
        if seen[kind] <= _OF_A_KIND:
            chosen[name] = meta
    return chosen


def _over(optimizer: Optimizer, params: dict[int, Any]) -> Optimizer:
    """Return an optimizer over some parameters only, which are given by id of its own."""
    chosen = set(map(id, params.values()))
    made = rebuilt(optimizer, params)
    for group in made.param_groups:
        group["params"][:] = [p for p in group["params"] if id(p) in chosen]
    return made
