# SPDX-License-Identifier: Apache-2.0
"""An optimizer is tried on small parameters: on what does an update of one depend?"""

import torch
from torch import nn

from accelfn.engine.optimizer.live_optimizer import LiveOptimizer
from accelfn.state.state import TrainState

_MOST = 4
"""Rows, and columns, of a small parameter."""


def tried(
    state: TrainState, *, alone: bool = False, rows: slice = slice(None)
) -> dict[str, torch.Tensor]:
    """Return small parameters after two updates by the state's optimizer.

    Args:
        state: it stays as it is.
        alone: whether parameters are updated one by one, the last one first.
        rows: of each parameter and its gradients, those that the optimizer sees.
    """
    metas = dict(state.definition.skeleton.module.named_parameters())
    generator = torch.Generator().manual_seed(0)

    def drawn(meta: torch.Tensor) -> torch.Tensor:
        # rows enough to be cut, however few there are
        shape = [_MOST, *(min(length, _MOST) for length in meta.shape[1:])]
        shape = shape[: meta.ndim]
        whole = torch.randn(shape, generator=generator).to(meta.dtype)
        return whole[rows] if shape else whole

    params = {name: nn.Parameter(drawn(meta)) for name, meta in metas.items()}
    live = LiveOptimizer(
        state.definition.optimizer,
        {metas[name]: param for name, param in params.items()},
        {param: name for name, param in params.items()},
    )
    trained = {name: params[name] for name in state.definition.skeleton.trainable}
    hyper = {
        (i, "train_mode"): True
        for i, group in enumerate(state.definition.optimizer.param_groups)
        if "train_mode" in group
    }
    for _ in range(2):
        gradients = {name: drawn(metas[name]) for name in trained}
        if alone:
            live.begin(hyper)
            for name, param in reversed(trained.items()):
                param.grad = gradients[name]
                live.step_alone(param)
                param.grad = None
            live.end()
        else:
            for name, param in trained.items():
                param.grad = gradients[name]
            live.update(hyper)
    return {name: param.detach() for name, param in params.items()}
