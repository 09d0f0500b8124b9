# SPDX-License-Identifier: Apache-2.0
"""A step of an outer optimizer: a torch optimizer over the anchor, with its state as a value."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

from accelfn.base.shards import is_shard, local, with_local
from accelfn.engine.optimizer.live_optimizer import LiveOptimizer, State

Tensors = Mapping[str, torch.Tensor]

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""What DiLoCo has for an outer optimizer."""


def as_value(factory: Any) -> Any:
    """Return what two factories are compared by: of partials, function and arguments."""
    if not isinstance(factory, partial):
        return factory
    made: partial[Any] = factory
    return made.func, made.args, tuple(sorted(made.keywords.items()))


@attrs.frozen(eq=False)
class Outer:
    """An outer optimizer, and the anchor that it steps.

    Attributes:
        factory: makes it of a list of (name, parameter).
        anchor: what it steps in place, by name; parts, where the model is split.
    """

    factory: Any
    anchor: Tensors

    def stepped(self, state: State, gradients: Tensors) -> State:
        """Step the parameters that have a gradient; return the optimizer's next state.

        Args:
            state: of the optimizer, by name; its tensors are written.
            gradients: of this rank's parts, of any floating-point dtype.
        """
        params = {name: nn.Parameter(local(each)) for name, each in self.anchor.items()}
        for name, gradient in gradients.items():
            params[name].grad = gradient.to(params[name].dtype)
        named = list(params.items())
        optimizer = self.factory(named)
        live = LiveOptimizer(optimizer, {p: n for n, p in named}, self)
        live.load(state)
        return {name: dict(entry) for name, entry in live.update({}).items()}

    def shown(self, opt_state: State) -> State:
        """Return values that lie over the ranks as the anchor does."""
        return _mapped(opt_state, self._laid)

    def raw(self, opt_state: State) -> State:
        """Return what the optimizer has of them: parts."""
        return _mapped(opt_state, _part)

    def _laid(self, name: str, each: torch.Tensor) -> torch.Tensor:
        anchor = self.anchor.get(name)
        if anchor is None or not is_shard(anchor) or each.shape != local(anchor).shape:
            return each
        return with_local(anchor, each)


def _part(_name: str, each: torch.Tensor) -> torch.Tensor:
    return local(each)


def _mapped(state: State, fn: Callable[[str, torch.Tensor], torch.Tensor]) -> State:
    return {
        name: {
            key: fn(name, each) if isinstance(each, torch.Tensor) else each
            for key, each in entry.items()
        }
        for name, entry in state.items()
    }
