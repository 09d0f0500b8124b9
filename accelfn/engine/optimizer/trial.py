# SPDX-License-Identifier: Apache-2.0
"""An optimizer is tried on small parameters: on what does an update of one depend?"""

from collections.abc import Iterable
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
    """Return small parameters after two updates by the state's optimizer.

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
    metas = dict(state.definition.skeleton.module.named_parameters())
    generator = torch.Generator().manual_seed(0)

    def drawn(meta: torch.Tensor) -> torch.Tensor:
        # enough to be cut, however few there are
        shape = [
            _MOST if at == dim else min(n, _MOST) for at, n in enumerate(meta.shape)
        ]
        whole = torch.randn(shape, generator=generator).to(meta.dtype)
        return whole[(slice(None),) * dim + (within,)] if meta.ndim > dim else whole

    params = {name: nn.Parameter(drawn(meta)) for name, meta in metas.items()}
    memo: dict[int, Any] = {id(metas[name]): param for name, param in params.items()}
    names = {param: name for name, param in params.items()}
    live = LiveOptimizer(rebuilt(optimizer, memo), names)
    trained = {name: params[name] for name in state.definition.skeleton.trainable}
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
