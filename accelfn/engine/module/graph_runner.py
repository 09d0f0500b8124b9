# SPDX-License-Identifier: Apache-2.0
"""Runners of compiled losses: forward and backward as one graph, as two, or region by region.

One graph is what a compiler can do most with, and nothing of autograd's is left at run
time. It needs the gradients' seed to be 1, and no collective between the two passes; where
that is not so, forward and backward are compiled apart, inside whatever runs them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from accelfn.base import lists, tree
from accelfn.base.signatures import qualname
from accelfn.engine.module.compiled import (
    DOUBLE_BACKWARD,
    Compiled,
    Compiler,
    closed,
    detached,
    opened,
)
from accelfn.engine.read_loss import ReadLoss, Samples, read_loss
from accelfn.engine.runner import Delegating, LossFunction, Runner, like
from accelfn.errors import CompileError
from accelfn.state.metrics import Number


class OneGraphRunner:
    """Runs a loss and its backward pass as one graph; nothing crosses ranks."""

    reduces = False
    lone_module = None
    expects_unused = True

    def __init__(self, module: nn.Module, compiler: Compiler) -> None:
        """Take the module and what compiles."""
        self._module, self._compiler = module, compiler
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._grads: Sequence[torch.Tensor | None] = ()
        self._num_compiled = 0
        self._shared: set[int] = set()

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss; its gradients are there already."""
        del sync
        compiler, module = self._compiler, self._module
        value, extras = samples.value, samples.extras
        compiler.num_passes += 1
        compiled = compiler.loss(loss_fn, lambda: _one_graph(loss_fn, self._trained))
        try:
            is_loss, plain, grads = compiled.differentiating(module, value, extras)
        except CompileError:
            # what is wrong without compiling too says so itself
            loss_fn(module, value, *extras)
            raise
        returned = closed(is_loss, plain)
        if grads is None:
            return read_loss(returned, loss_fn, samples)  # which says why
        if compiler.reuses_memory:
            returned, grads = tree.clone((returned, list(grads)))
        else:
            grads = self._own(compiled, grads, (plain, value, extras))
        self._grads = grads
        total: torch.Tensor = returned.total if is_loss else returned
        total.requires_grad_()  # it had a gradient, as is looked at
        return read_loss(returned, loss_fn, samples)

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`."""
        del weight
        grads, self._grads = self._grads, ()
        if scale is not None:
            factor = like(scalar, scale) if isinstance(scale, torch.Tensor) else scale
            lists.mul_((grad for grad in grads if grad is not None), factor)
        sums: list[torch.Tensor] = []
        addends: list[torch.Tensor] = []
        for param, grad in zip(self._trained, grads, strict=True):
            if grad is None:
                continue
            if param.grad is None:
                param.grad = grad
            else:
                sums.append(param.grad)
                addends.append(grad)
        lists.add_(sums, addends, alpha=1)
        return None

    def _own(
        self, compiled: Compiled, grads: Sequence[torch.Tensor | None], others: Any
    ) -> Sequence[torch.Tensor | None]:
        """Return gradients of which none shares memory with another, or anything else.

        A compiler returns one tensor for two results that are equal, and an input for a
        result that is equal to it; gradients are scaled in place. Which share memory is the
        graph's, so it is looked at when there is a new one.
        """
        if compiled.num_compiled != self._num_compiled:
            self._num_compiled = compiled.num_compiled
            held = [*self._module.parameters(), *self._module.buffers()]
            self._shared |= _sharing(grads, [*held, *tree.tensor_leaves(others)])
        if not self._shared:
            return grads
        return [
            grad.clone() if i in self._shared and grad is not None else grad
            for i, grad in enumerate(grads)
        ]


class TwoGraphsRunner(Delegating):
    """Runs a compiled loss in another runner; its backward pass is compiled too.

    Of a loss that itself takes gradients torch makes no two graphs, but one, whose gradients
    are all there before any is reduced.
    """

    def __init__(self, inner: Runner, compiler: Compiler, *, whole: bool) -> None:
        """Take what runs losses, what compiles them, and whether one graph can be for all."""
        super().__init__(inner)
        self._compiler, self._whole = compiler, whole
        self._made: dict[LossFunction, LossFunction] = {}

    def before(self, loss_fn: LossFunction, samples: Samples) -> LossFunction:
        """Return the loss, compiled."""
        self._compiler.num_passes += 1
        made = self._made.get(loss_fn)
        if made is None:
            made = self._made[loss_fn] = self._compiled(loss_fn)
        return made

    def _compiled(self, loss_fn: LossFunction) -> LossFunction:
        compiled = self._compiler.loss(loss_fn, lambda: _forward_graph(loss_fn))

        def compiled_loss(model: nn.Module, value: Any, *extras: Any) -> Any:
            try:
                return closed(*compiled(model, value, extras))
            except CompileError as error:
                if not (self._whole and DOUBLE_BACKWARD in str(error)):
                    loss_fn(model, value, *extras)
                    raise
            made = self._made[loss_fn] = self._in_one_graph(loss_fn, model)
            return made(model, value, *extras)

        compiled_loss.__qualname__ = qualname(loss_fn)
        return compiled_loss

    def _in_one_graph(self, loss_fn: LossFunction, model: nn.Module) -> LossFunction:
        """Return a loss that differentiates twice, compiled with all of its gradients."""
        trained = [p for p in model.parameters() if p.requires_grad]
        graph, name = _one_graph(loss_fn, trained), qualname(loss_fn)
        compiled = self._compiler.compiled(graph, name)

        def compiled_loss(model: nn.Module, value: Any, *extras: Any) -> Any:
            is_loss, plain, grads = compiled.differentiating(model, value, extras)
            if grads is None:
                return closed(is_loss, plain)
            total, *others = plain if is_loss else (plain,)
            used = [i for i, grad in enumerate(grads) if grad is not None]
            params = (trained[i] for i in used)
            total = _WithGrads.apply(total, [grads[i] for i in used], *params)
            return closed(is_loss, (total, *others) if is_loss else total)

        compiled_loss.__qualname__ = name
        return compiled_loss


class _WithGrads(torch.autograd.Function):
    """A total that has its gradients with it: a backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, total: Any, grads: Any, *_params: Any) -> torch.Tensor:
        """Return the total."""
        ctx.grads = grads
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *seeds: torch.Tensor) -> Any:
        """Return the gradients times that of the total."""
        return None, None, *(grad * seeds[0] for grad in ctx.grads)


class RegionsRunner(Delegating):
    """Runs a loss as it is, over a model of which some modules are compiled."""

    def __init__(self, inner: Runner, compiler: Compiler) -> None:
        """Take what runs losses, and what compiles the modules."""
        super().__init__(inner)
        self._compiler = compiler

    def before(self, loss_fn: LossFunction, samples: Samples) -> LossFunction:
        """Return the loss; its modules begin a pass."""
        self._compiler.num_passes += 1
        return loss_fn


def compile_regions(regions: Iterable[nn.Module], compiler: Compiler) -> None:
    """Let what modules compute be compiled, once for all of a class that are alike.

    It is compiled inside the hooks of a call: in them torch's FSDP gathers a unit.
    """
    by_class: dict[tuple[type, bool], Compiled] = {}
    for region in regions:
        kind, is_wrapped = type(region), "forward" in vars(region)
        if (kind, is_wrapped) not in by_class:
            graph = _wrapped_graph() if is_wrapped else _class_graph(kind)
            by_class[kind, is_wrapped] = compiler.compiled(graph, kind.__qualname__)
        if is_wrapped:  # by a transform, as af.checkpoint_activations does
            vars(region)["_uncompiled"] = region.forward
        region.forward = partial(_called, by_class[kind, is_wrapped], region)


def _called(compiled: Compiled, region: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return compiled(region, args, kwargs)


def _class_graph(kind: type[nn.Module]) -> Callable[..., Any]:
    forward = kind.forward

    def region(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return region


def _wrapped_graph() -> Callable[..., Any]:
    def region(module: Any, args: Any, kwargs: Any) -> Any:
        return module._uncompiled(*args, **kwargs)

    return region


def _one_graph(
    loss_fn: LossFunction, trained: list[nn.Parameter]
) -> Callable[..., Any]:
    """Return the function whose graph is a loss and its gradients, for the compiler."""

    def loss_and_grads(module: nn.Module, value: Any, extras: Any) -> Any:
        is_loss, plain = opened(loss_fn(module, value, *extras))
        total = plain[0] if is_loss else plain
        if not _has_gradient(total):
            return is_loss, detached(plain), None
        grads = torch.autograd.grad(total, trained, allow_unused=True)
        laid_out = [_as_parameter(p, g) for p, g in zip(trained, grads, strict=True)]
        return is_loss, detached(plain), laid_out

    return loss_and_grads


def _forward_graph(loss_fn: LossFunction) -> Callable[..., Any]:
    """Return the function whose graph is a loss, for the compiler."""

    def loss(module: nn.Module, value: Any, extras: Any) -> Any:
        return opened(loss_fn(module, value, *extras))

    return loss


def _has_gradient(total: Any) -> bool:
    if not isinstance(total, torch.Tensor):
        return False
    return total.ndim == 0 and not total.is_complex() and total.requires_grad


def _as_parameter(
    param: torch.Tensor, grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a gradient that lies in memory as its parameter does."""
    if grad is None or grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)


def _sharing(
    grads: Sequence[torch.Tensor | None], others: Iterable[torch.Tensor]
) -> set[int]:
    """Return which gradients lie in memory that something else lies in, too."""
    seen = {each.untyped_storage().data_ptr() for each in others}
    found: set[int] = set()
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            where = grad.untyped_storage().data_ptr()
            if where in seen:
                found.add(i)
            seen.add(where)
    return found
