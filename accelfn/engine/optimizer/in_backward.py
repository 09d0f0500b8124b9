# SPDX-License-Identifier: Apache-2.0
"""An update that is taken parameter by parameter, while the backward pass runs.

As soon as a parameter's gradient is complete the optimizer steps this parameter alone, and
the gradient is freed. Nothing that needs the gradients of several can stand between.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from accelfn.engine.optimizer.live_optimizer import LiveOptimizer, State
from accelfn.state.grads import divide_
from accelfn.state.metrics import Number
from accelfn.structure.prototype import Assignments


class LiveUpdate:
    """The update that a backward pass takes; between passes there is none.

    Attributes:
        is_planned: whether the next pass takes one.
        by_buckets: whether gradients are complete only when they crossed the ranks.
    """

    def __init__(
        self, optimizer: LiveOptimizer, named: Mapping[str, nn.Parameter]
    ) -> None:
        """Take the optimizer, and the parameters that it trains."""
        self.is_planned = self.by_buckets = False
        self._optimizer = optimizer
        self._named = dict(named)
        self._names = {id(param): name for name, param in named.items()}
        self._hold: Callable[[], None] = _nothing
        self._begin: Callable[[], None] | None = None
        self._hyper: Assignments = {}
        self._divisor: Number | None = None
        self._done: list[str] = []

    def hook(self) -> None:
        """Have each parameter stepped when the backward pass has added up its gradient."""
        for param in self._named.values():
            param.register_post_accumulate_grad_hook(self.take)

    def plan(
        self, hyper: Assignments, hold: Callable[[], None], begin: Callable[[], None]
    ) -> None:
        """Have the next backward pass take an update; `begin` is called before it does.

        That may be in a thread of autograd's; `hold` is called in the step's, before.

        Raises:
            OptimizerError: nobody set a schedule-free optimizer's mode.
        """
        self._optimizer.expect(hyper)
        self._hyper, self._hold, self._begin = hyper, hold, begin
        self._done = []
        self.is_planned = True

    def forget(self) -> None:
        """Let the next backward pass take no update."""
        self.is_planned, self._hold, self._begin = False, _nothing, None

    def divide_by(self, divisor: Number | None) -> None:
        """Take what gradients are divided by, which is known before they are; None is 1."""
        self._divisor = divisor

    def hold(self) -> None:
        """Let nothing come between the backward pass and the end of the update."""
        self._hold()

    def take(self, param: torch.Tensor) -> None:
        """Step a parameter whose gradient is complete, and free that."""
        if self.is_planned and param.grad is not None:
            with torch.no_grad():
                self._take(param, param.grad)

    def _take(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
            self._optimizer.begin(self._hyper)
        divisor = self._divisor
        if divisor is not None and not self._optimizer.divides(divisor):
            divide_([grad], divisor)
            divisor = None
        self._optimizer.step_alone(param, divisor)
        param.grad = None
        self._done.append(self._names[id(param)])

    def end(self) -> State:
        """End an update; return the optimizer's state by name."""
        self.forget()
        return self._optimizer.end()

    def done(self) -> dict[str, torch.Tensor]:
        """Return the parameters that were stepped, by name."""
        return {name: self._named[name] for name in self._done}


def _nothing() -> None: ...
