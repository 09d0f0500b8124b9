# SPDX-License-Identifier: Apache-2.0
"""Where a state's tensors live in PyTorch's machinery: the part in which layouts differ.

An engine binds states to a home and steps what is there; it does not know whether a
parameter is one tensor on each rank, or a slice of one.
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
from accelfn.state.metrics import Number
from accelfn.state.state import OptState, TrainState

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false


class ParamBinding(Protocol):
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
    def opt_state_view(self) -> OptStateView | None:
        """What knows a state's values of the optimizer's; None where they are the same."""
        ...

    @property
    def holder(self) -> "Holder | None":
        """Who holds gradients so that nobody sees them; None where a home shows them."""
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


class Holder(Protocol):
    """Holds gradients from the backward pass to the update."""

    @property
    def bound(self) -> Mapping[str, torch.Tensor]:
        """The parameters of the state after an update."""
        ...

    def hidden(self) -> Mapping[str, torch.Tensor]:
        """Return what stands for the gradients that it holds now."""
        ...

    def reports(self) -> Mapping[str, Number]:
        """Return what is told of the last update."""
        ...


class ReplicaBinding:
    """Each rank computes with all of every parameter: a module, alone or in a replica."""

    opt_state_view: OptStateView | None = None
    holder: Holder | None = None

    def __init__(self, state: TrainState) -> None:
        """Build a module around the state's tensors."""
        self._definition = definition = state.definition
        self.module = build_module(definition, state.params, state.buffers)
        self.params = dict(self.module.named_parameters())
        self.trained = {n: self.params[n] for n in definition.skeleton.trainable}
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
            param.grad = grads.as_taken.get(name)

    def clear_gradients(self) -> None:
        """Leave the parameters without one."""
        for _, param in self._pairs:
            param.grad = None

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return what calls functions of a module around these tensors."""
        return lend_module(self._definition, params, buffers)


class LayerBinding(ReplicaBinding):
    """Each rank computes with its part of some layers, and with all of the rest."""

    def __init__(self, state: TrainState) -> None:
        """Build a module around the parts that this rank has."""
        super().__init__(state)

        assert state.definition.layout is not None  # noqa: S101 - of `binding_of`
        self._layout = state.definition.layout
        self.opt_state_view = self._parts = ShardedParams(
            self._layout.cuts, self.params, state.params
        )

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Let the module's parameters have the memory of the state's parts."""
        super().bind({name: local(param) for name, param in params.items()})
        self._parts.state = params

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients that lie as their parameters do."""
        found = super().take_gradients()
        return {n: self._layout.laid(n, grad) for n, grad in found.items()}

    def put_gradients(self, grads: Grads) -> None:
        """Let each parameter have its part of a gradient, or none."""
        grads.check_fit(self._parts.state)
        for name, param in self._pairs:
            grad = grads.as_taken.get(name)
            if grad is not None and not is_shard(grad):
                grad = self._layout.cut(name, grad)
            param.grad = None if grad is None else local(grad)


def binding_of(state: TrainState) -> ParamBinding:
    """Return a home of a state of which each rank computes with what it has."""
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
    """Return the model around what this rank has, whose layers compute with that."""
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
    """Return what calls `fn(model, ...)`, on a model around these tensors."""
    from accelfn.engine.vocabulary import gather_scores  # noqa: PLC0415 - of split layers

    model = build_module(definition, params, buffers).eval()

    def call(fn: Callable[..., Any], *inputs: Any) -> Any:
        return gather_scores(fn(model, *inputs))

    return call


# The optimizer's state of parameters of which a rank has parts, as a state's values.


# torch's DTensors have no public way to be made of parts without an operator


class ShardedParams:
    """Knows the values of a state, which are DTensors, of the parts that are stepped."""

    def __init__(
        self,
        split: Collection[str],
        params: Mapping[str, torch.nn.Parameter],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        """Take the names of those that are split, what is stepped, and a state's values."""
        self._split, self._params, self.state = split, params, state

    def to_state(self, opt_state: OptState) -> OptState:
        """Return the optimizer's state as a state's values: what is a part, as a DTensor."""
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
        """Return the parts of a state's values."""
        return {
            name: {key: _local(value) for key, value in entry.items()}
            for name, entry in opt_state.items()
        }


def local_parameter(
    value: torch.Tensor, like: torch.nn.Parameter
) -> torch.nn.Parameter:
    """Return what is stepped in the place of a state's value: the part, in its memory."""
    return torch.nn.Parameter(tree.local(value), requires_grad=like.requires_grad)


def part_like(value: Any, part: torch.Tensor) -> torch.Tensor:
    """Return what has a parameter's shape as it lies; of its own dtype."""
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
