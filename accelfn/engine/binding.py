# SPDX-License-Identifier: Apache-2.0
"""Bind a state's tensors to a module: replicated, or split along "tp".

An engine binds a state to a `ParamBinding` and steps its parameters. Only the binding knows
whether a parameter is a whole tensor on each rank, or a shard.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelfn.base import tree
from accelfn.base.tree import is_shard, local
from accelfn.definition.definition import Definition
from accelfn.engine.optimizer import OptStateView
from accelfn.state.grads import Grads
from accelfn.state.state import OptState, TrainState

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false


class ParamBinding(Protocol):
    """Points a module at a state's tensors, and collects the module's gradients."""

    @property
    def module(self) -> nn.Module:
        """The module that computes the loss; runners wrap it."""
        ...

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the optimizer steps, by name."""
        ...

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters, by name."""
        ...

    @property
    def opt_state_view(self) -> OptStateView | None:
        """Converts optimizer state between shards and a state's values; None: they are the same."""
        ...

    @property
    def holder(self) -> Any:
        """The object that hides gradients until the update (DeepSpeed); None: they are visible.

        It has `hidden()`, a placeholder for the gradients, `reports()`, metrics of the last
        update, and `bound`, the parameters of the state after an update.
        """
        ...

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Point the module at a state's parameters, without a copy."""
        ...

    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient, by a quick check."""
        ...

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the last backward pass, by name, without clearing `.grad`."""
        ...

    def put_gradients(self, grads: Grads) -> None:
        """Set gradients as `.grad`, for the next backward pass and the optimizer.

        Raises:
            GradsError: the gradients do not fit the parameters.
        """
        ...

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        ...

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return a callable that runs `fn(model, ...)` in evaluation mode on these tensors."""
        ...


class ReplicaBinding:
    """Binds whole parameters on each rank: one process, or a replica of DDP."""

    opt_state_view: OptStateView | None = None
    holder = None

    def __init__(self, state: TrainState) -> None:
        """Build a module around the state's tensors."""
        self._definition = definition = state.definition
        self.module = build_module(definition, state.params, state.buffers)
        self.params = dict(self.module.named_parameters())
        self.trained = {n: self.params[n] for n in definition.skeleton.trainable}
        self._pairs = list(self.trained.items())

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Point the module's parameters at the state's memory."""
        for name, param in self.params.items():
            param.data = params[name]

    def has_gradients(self) -> bool:
        """Check the first and the last parameter only: every step calls this."""
        first, last = self._pairs[0][1], self._pairs[-1][1]
        return first.grad is not None or last.grad is not None

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the existing gradients by parameter name."""
        gradients: dict[str, torch.Tensor] = {}
        for name, param in self._pairs:
            if param.grad is not None:
                gradients[name] = param.grad
        return gradients

    def put_gradients(self, grads: Grads) -> None:
        """Set each parameter's gradient, or None."""
        grads.check_fit(self.trained)
        for name, param in self._pairs:
            param.grad = grads.as_taken.get(name)

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        for _, param in self._pairs:
            param.grad = None

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return a callable that runs functions of a module on these tensors."""
        return lend_module(self._definition, params, buffers)


class LayerBinding(ReplicaBinding):
    """Binds this rank's shards of layers split along "tp", and the rest whole."""

    def __init__(self, state: TrainState) -> None:
        """Build a module around this rank's shards."""
        super().__init__(state)

        assert state.definition.layout is not None  # noqa: S101 - of `binding_of`
        self._layout = state.definition.layout
        self.opt_state_view = self._parts = ShardedParams(
            self._layout.cuts, self.params, state.params
        )

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Point the module's parameters at the memory of the state's shards."""
        super().bind({name: local(param) for name, param in params.items()})
        self._parts.state = params

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients in the layout of their parameters."""
        found = super().take_gradients()
        return {n: self._layout.laid(n, grad) for n, grad in found.items()}

    def put_gradients(self, grads: Grads) -> None:
        """Set each parameter's shard of its gradient, or None."""
        grads.check_fit(self._parts.state)
        for name, param in self._pairs:
            grad = grads.as_taken.get(name)
            if grad is not None and not is_shard(grad):
                grad = self._layout.cut(name, grad)
            param.grad = None if grad is None else local(grad)


def binding_of(state: TrainState) -> ParamBinding:
    """Return the binding of a state whose ranks compute with their own tensors."""
    return (
        ReplicaBinding(state)
        if state.definition.layout is None
        else LayerBinding(state)
    )


def build_module(
    definition: Definition,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> nn.Module:
    """Return the model around this rank's tensors, with split layers set up."""
    params = {name: local(param) for name, param in params.items()}
    module = definition.skeleton.build(params, buffers)
    for split in definition.setup.facts.get("splits_layers", ()):
        split(module, definition.world)
    return module


def lend_module(
    definition: Definition,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Callable[..., Any]:
    """Return a callable that runs `fn(model, ...)` on a model around these tensors."""
    from accelfn.engine.vocabulary import gather_scores  # noqa: PLC0415 - of split layers

    model = build_module(definition, params, buffers).eval()

    def call(fn: Callable[..., Any], *inputs: Any) -> Any:
        return gather_scores(fn(model, *inputs))

    return call


# Optimizer state of sharded parameters.


# torch has no public constructor of a DTensor from local shards that runs no operator


class ShardedParams:
    """Converts optimizer state between local shards, as stepped, and a state's DTensors."""

    def __init__(
        self,
        split: Collection[str],
        params: Mapping[str, torch.nn.Parameter],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        """Take the names of split parameters, the stepped parameters and the state's values."""
        self._split, self._params, self.state = split, params, state

    def to_state(self, opt_state: OptState) -> OptState:
        """Return the optimizer's state with shards as DTensors."""
        return {n: self._entry(n, e) for n, e in opt_state.items()}

    def _entry(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        if name not in self._split:
            return entry
        value, param = self.state[name], self._params[name]
        return {
            key: part_like(value, part) if _fits(part, param) else part
            for key, part in entry.items()
        }

    def from_state(self, opt_state: OptState) -> OptState:
        """Return the optimizer's state with local shards."""
        return {
            name: {key: _local(value) for key, value in entry.items()}
            for name, entry in opt_state.items()
        }


def local_parameter(
    value: torch.Tensor, like: torch.nn.Parameter
) -> torch.nn.Parameter:
    """Return a parameter over a value's local shard, sharing its memory."""
    return torch.nn.Parameter(tree.local(value), requires_grad=like.requires_grad)


def part_like(value: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor of `part` in the layout of `value`, with the dtype of `part`."""
    spec = value._spec
    meta = spec.tensor_meta._replace(dtype=part.dtype)
    spec = dataclasses.replace(spec, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def _fits(part: Any, param: torch.Tensor) -> bool:
    return (
        isinstance(part, torch.Tensor) and part.ndim > 0 and part.shape == param.shape
    )


def _local(value: Any) -> Any:
    return tree.local(value) if isinstance(value, torch.Tensor) else value
