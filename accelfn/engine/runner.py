# SPDX-License-Identifier: Apache-2.0
"""How the loss runs and its gradients cross the ranks: the part in which engines differ."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import nn
from torch.autograd import Variable

from accelfn.engine.read_loss import ReadLoss, Samples, read_loss
from accelfn.state.metrics import Number

LossFunction: TypeAlias = Callable[..., Any]


class Runner(Protocol):
    """Runs a loss over a module forward and backward; gradients go to `param.grad`."""

    @property
    def reduces(self) -> bool:
        """Whether a synchronising backward pass averages gradients over ranks."""
        ...

    @property
    def expects_unused(self) -> bool:
        """Whether a parameter may take no part in the loss."""
        ...

    @property
    def lone_module(self) -> nn.Module | None:
        """The module, where nothing but the loss runs in a pass: one graph can hold it."""
        ...

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss."""
        ...

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`, None being 1.

        Returns the mean of `weight` over ranks if gradients were averaged, else None.
        """
        ...


class Delegating(ABC):
    """Lets another runner do the work; it has a say in the loss that this one is given."""

    def __init__(self, inner: Runner) -> None:
        """Take what runs losses."""
        self._inner = inner

    @property
    def reduces(self) -> bool:
        """Whether a synchronising backward pass averages gradients over ranks."""
        return self._inner.reduces

    @property
    def expects_unused(self) -> bool:
        """Whether a parameter may take no part in the loss."""
        return self._inner.expects_unused

    @property
    def lone_module(self) -> None:
        """None: this one acts beside the loss."""
        return

    @abstractmethod
    def before(self, loss_fn: LossFunction, samples: Samples) -> LossFunction:
        """Return the loss function that the other runner is to run, before it does."""

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss."""
        return self._inner.forward(self.before(loss_fn, samples), samples, sync=sync)

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`."""
        return self._inner.backward(scalar, scale, weight)


class LocalRunner:
    """Calls the loss function on the module itself; nothing crosses ranks."""

    reduces = False
    expects_unused = True

    def __init__(self, module: nn.Module) -> None:
        """Take the module."""
        self.lone_module = self._module = module
        self._ones = Ones()

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss."""
        del sync
        returned = loss_fn(self._module, samples.value, *samples.extras)
        return read_loss(returned, loss_fn, samples)

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`."""
        del weight
        seed = self._ones.like(scalar) if scale is None else like(scalar, scale)
        run_backward((scalar,), (seed,))
        return None


class Ones:
    """The gradient 1 to begin a backward pass with, made once."""

    def __init__(self) -> None:
        """Begin without one."""
        self._last: torch.Tensor | None = None

    def like(self, scalar: torch.Tensor) -> torch.Tensor:
        """Return a 1 of the scalar's dtype, on its device."""
        last = self._last
        if last is None or last.dtype is not scalar.dtype:
            last = self._last = torch.ones_like(scalar.detach())
        return last


def run_backward(
    roots: tuple[torch.Tensor, ...], seeds: tuple[torch.Tensor, ...]
) -> None:
    """Run torch's backward engine from scalars with given gradients.

    On the CPU the engine is called directly: `torch.autograd.backward` first checks what
    is known here, and keeps a context for device threads that are not there, at 17 µs a
    call. Elsewhere it is called as usual.
    """
    if all(type(root) is torch.Tensor and root.is_cpu for root in roots):
        engine = cast("Any", Variable)._execution_engine
        keep_graph = create_graph = False
        engine.run_backward(
            *(roots, seeds, keep_graph, create_graph, ()),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    else:
        torch.autograd.backward(roots, seeds)


def like(scalar: torch.Tensor, value: Number) -> torch.Tensor:
    """Return `value` as a tensor of the scalar's dtype, on its device, without a wait."""
    if isinstance(value, torch.Tensor):
        # a copy: a gradient that is given to a leaf becomes the leaf's own
        return value.to(scalar, copy=True)
    return torch.full((), value, dtype=scalar.dtype, device=scalar.device)
