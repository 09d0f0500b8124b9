# SPDX-License-Identifier: Apache-2.0
"""Where a state's tensors live in PyTorch's machinery: the part in which layouts differ.

An engine binds states to a home and steps what is there; it does not know whether a
parameter is one tensor on each rank, or a slice of one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from accelfn.engine.optimizer.live_optimizer import Shows
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.structure.skeleton import Skeleton


class Home(Protocol):
    """Lends tensors of states to a module, and takes gradients out of it."""

    @property
    def module(self) -> nn.Module:
        """What runs the loss; runners wrap it."""
        ...

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer steps, by name."""
        ...

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """Those of them that are trained."""
        ...

    @property
    def shows(self) -> Shows | None:
        """What knows a state's values of the optimizer's; None where they are the same."""
        ...

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Take over a state's parameters, by pointers."""
        ...

    def has_gradients(self) -> bool:
        """Whether some are there, as far as a quick look tells."""
        ...

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that a backward pass left, by name; they stay there."""
        ...

    def put_gradients(self, grads: Grads) -> None:
        """Put gradients to where a backward pass adds, and the optimizer looks.

        Raises:
            GradsError: they do not fit the parameters.
        """
        ...

    def clear_gradients(self) -> None:
        """Leave none."""
        ...

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return what calls `fn(model, ...)`, on a model of these in evaluation mode."""
        ...


class ReplicaHome:
    """Each rank has all of every parameter: a plain module, alone or in a replica."""

    shows = None

    def __init__(self, state: TrainState) -> None:
        """Build a module around the state's tensors."""
        self._skeleton = skeleton = state.definition.skeleton
        self.module = skeleton.build(state.params, state.buffers)
        self.params = dict(self.module.named_parameters())
        self.trained = {name: self.params[name] for name in skeleton.trainable}
        self._pairs = list(self.trained.items())

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Let the module's parameters have the state's memory."""
        for name, param in self.params.items():
            param.data = params[name]

    def has_gradients(self) -> bool:
        """Look at the first and the last parameter, for this is asked at every step."""
        first, last = self._pairs[0][1], self._pairs[-1][1]
        return first.grad is not None or last.grad is not None

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return those of the parameters that have one."""
        return {n: grad for n, param in self._pairs if (grad := param.grad) is not None}

    def put_gradients(self, grads: Grads) -> None:
        """Let each parameter have its gradient, or none."""
        grads.check_fit(self.trained)
        for name, param in self._pairs:
            param.grad = grads.tensors.get(name)

    def clear_gradients(self) -> None:
        """Leave the parameters without one."""
        for _, param in self._pairs:
            param.grad = None

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return what calls functions of a module around these tensors."""
        return lent(self._skeleton, params, buffers)


def lent(
    skeleton: Skeleton,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Callable[..., Any]:
    """Return what calls `fn(model, ...)`, on a model around these tensors."""
    model = skeleton.build(params, buffers).eval()

    def call(fn: Callable[..., Any], *inputs: Any) -> Any:
        return fn(model, *inputs)

    return call
