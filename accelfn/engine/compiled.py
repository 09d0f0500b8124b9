# SPDX-License-Identifier: Apache-2.0
"""Run losses under torch.compile, and warn about recompilation.

A `Compiler` compiles several functions with the same options. A `Compiled` function raises
torch's errors as `CompileError`. It warns with `RecompilationWarning` when torch compiles the
function again, which takes as long as thousands of steps.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from accelfn.base import tree
from accelfn.base.arguments import qualname
from accelfn.engine.runner import LossFunction, ReadLoss, Samples, like, read_loss
from accelfn.errors import CompileError, RecompilationWarning
from accelfn.state.results import Loss, Number
from accelfn.world import World

Graph: TypeAlias = Callable[..., Any]
"""A compiled loss: a function of (loss function, model, value, tuple of extras)."""
DOUBLE_BACKWARD = "double backward"
"""These words in an error message mean that the loss itself computes gradients."""
_TWICE = (
    "af.compile: {} cannot be compiled: it calls torch.autograd.grad, as a gradient penalty"
    f" does, and torch compiles a {DOUBLE_BACKWARD} only if loss and gradients are one graph."
    " Leave out regions=, fullgraph=False, fp16 and af.checkpoint_activations, and use"
    " another backend than 'eager'. Or leave out af.compile."
)
_MANY = 8
"""If this many loss functions are compiled for one model, a warning is shown."""


class Compiler:
    """Compiles the functions of one engine, with the same options."""

    def __init__(self, options: Mapping[str, Any], world: World) -> None:
        """Initialize with the arguments of torch.compile, and the world."""
        self._options = options
        self.activity = world.connection.activity
        self._losses: dict[LossFunction | None, Compiled] = {}
        self.num_passes = 0
        on_graphs = options["mode"] in {"reduce-overhead", "max-autotune"}
        self.reuses_memory = world.device.type == "cuda" and on_graphs
        """Whether a compiled function overwrites its earlier results (CUDA graphs)."""

    def count_pass(self, loss_fn: LossFunction, _: Samples) -> LossFunction:
        """Count a forward pass, and return its loss function unchanged."""
        self.num_passes += 1
        return loss_fn

    def loss(
        self, loss_fn: LossFunction | None, graph: Callable[..., Any]
    ) -> "Compiled":
        """Return `graph`, compiled for a loss function that is its first argument.

        The cache key is the loss function before transforms wrap it, because transforms wrap
        the function again in each update.
        """
        compiled_fn = self._losses.get(loss_fn)
        if compiled_fn is None:
            compiled_fn = self.compile(graph, qualname(loss_fn))
            self._losses[loss_fn] = compiled_fn
            if len(self._losses) == _MANY:
                msg = (
                    f"{_MANY} loss functions were compiled for one model, the last at update"
                    f" {self.activity.step}: {qualname(loss_fn)}. Call af.make_step once, before"
                    " the loop; pass values that change as extras: step(state, batch, value)."
                )
                warnings.warn(msg, RecompilationWarning, stacklevel=2)
        return compiled_fn

    def compile(self, fn: Callable[..., Any], name: str) -> "Compiled":
        """Compile a function, with a cache that no other function shares."""
        compiler: Any = torch.compile
        under = compiler(fn, **self._options, isolate_recompiles=True)
        return Compiled(under, name, self)


class Compiled:
    """A function compiled by torch.compile, with the same signature."""

    def __init__(self, fn: Callable[..., Any], name: str, compiler: Compiler) -> None:
        """Initialize with the function to compile, its name for messages, and the compiler."""
        # not imported at the top, because the import takes a second
        from torch._dynamo import config, exc, utils  # noqa: PLC0415

        self._fn, self._name, self._compiler = fn, name, compiler
        self._config, self._failures = config, exc.TorchDynamoException
        self._metrics = utils.get_compilation_metrics
        self._stats = utils.counters["stats"]
        self._first_pass = 0
        self._num_again = 0
        self.num_compiled = 0

    def __call__(self, *args: Any) -> Any:
        """Call the function. torch compiles the function if it is new or a guard failed."""
        before = self._stats["unique_graphs"]
        try:
            result = self._first(*args) if self._is_first else self._fn(*args)
        except self._failures as error:
            raise CompileError(self._cannot(error)) from error
        if self._stats["unique_graphs"] != before:
            self._note()
        return result

    @property
    def _is_first(self) -> bool:
        """Whether this is the function's first pass, in which torch compiles the function."""
        return self._first_pass in (0, self._compiler.num_passes)

    def _first(self, *args: Any) -> Any:
        """Call the function in its first pass, and hide torch's own deprecation warnings."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch(\..*)?$")
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            return self._fn(*args)

    def differentiating(self, *args: Any) -> Any:
        """Call a function that calls torch.autograd.grad.

        Dynamo can trace such a call only with the option `trace_autograd_ops`. Setting the
        option takes a fifth of the time of a small step. So the option is set only in the first
        pass, and if a later call fails because torch must compile again.
        """
        if not self._is_first:
            with suppress(CompileError):
                return self(*args)
        with self._config.patch(trace_autograd_ops=True):
            return self(*args)

    def _note(self) -> None:
        """Count a compilation, and warn if it was not the first compilation."""
        self.num_compiled += 1
        now = self._compiler.num_passes
        self._first_pass = self._first_pass or now
        if now == self._first_pass:
            return
        self._num_again += 1
        msg = (
            f"{self._name} was compiled again at update {self._compiler.activity.step} (so far"
            f" {self._num_again} times), because {self._reason()}. Use batches of one shape, or"
            " af.compile(dynamic=True). Pass numbers that change as tensors."
        )
        warnings.warn(msg, RecompilationWarning, stacklevel=2)

    def _reason(self) -> str:
        reasons = [metric.recompile_reason for metric in self._metrics()[-1:]]
        line = next(filter(None, reasons), "a value that it uses changed")
        # torch appends the line of code and the stack; remove both
        return line.strip().splitlines()[0].partition("  #")[0].strip()

    def _cannot(self, error: Exception) -> str:
        text = str(error).strip()
        if "InvalidCxxCompiler" in text or "No working C++ compiler" in text:
            return (
                f'af.compile: {self._name} cannot be compiled: the backend "inductor" needs a'
                " C++ compiler, but none was found. Install g++ or clang++, or set the"
                " environment variable CXX to a compiler."
            )
        if "trace_autograd_ops" in text:
            return _TWICE.format(self._name)
        return (
            f"af.compile: {self._name} cannot be compiled: {text}\nChange that code, or keep it"
            " out of the graph: af.compile(fullgraph=False) runs it between graphs, and"
            " af.compile(regions=...) compiles only some modules."
        )


def split_loss(result: Any) -> tuple[bool, Any]:
    """Return whether a result is an `af.Loss`, and the result as plain data for a graph."""
    if isinstance(result, Loss):
        return True, (result.total, result.weight, dict(result.aux))
    return False, result


def join_loss(is_loss: bool, plain: Any) -> Any:  # noqa: FBT001 - from `split_loss`
    """Rebuild a loss function's result from plain data."""
    if is_loss:
        total, weight, aux = plain
        return Loss(total, weight, **aux)
    return plain


def detach_tree(leaf: Any) -> Any:
    """Detach a leaf of a loss in plain data, if the leaf is a tensor."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if isinstance(leaf, dict):
        return {name: detach_tree(child) for name, child in leaf.items()}
    if isinstance(leaf, tuple):
        return tuple([detach_tree(child) for child in leaf])
    return leaf


# Runners of compiled losses: forward and backward pass as one graph or as two graphs, or only
# selected modules (regions) are compiled.
#
# One graph gives the compiler the most freedom, and does not use autograd when it runs. One
# graph is possible only if the initial gradient is 1 and no collective runs between the passes.
# Otherwise forward and backward pass are two graphs, and another runner calls them.


class OneGraphRunner:
    """Runs a loss and its backward pass as one graph, without collectives."""

    reduces = False
    lone_module = None
    expects_unused = True

    def __init__(self, module: nn.Module, compiler: Compiler) -> None:
        """Initialize with the module and the compiler."""
        self._module, self._compiler = module, compiler
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._graph = _one_graph(self._trained)
        self._grads: Sequence[torch.Tensor | None] = ()
        self._num_compiled = 0
        self._shared: set[int] = set()

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss; the same graph also computes its gradients."""
        del sync
        compiler, module = self._compiler, self._module
        value, extras = samples.value, samples.extras
        compiler.count_pass(loss_fn, samples)
        compiled_fn = compiler.loss(samples.origin, self._graph)
        inputs = loss_fn, module, value, extras
        try:
            is_loss, plain, grads = compiled_fn.differentiating(*inputs)
        except CompileError:
            # call the loss without the compiler: an error of the loss itself is raised here
            loss_fn(module, value, *extras)
            raise
        result = join_loss(is_loss, plain)
        if grads is None:
            # raises an error with the reason
            return read_loss(result, loss_fn, samples)
        if compiler.reuses_memory:
            result, grads = tree.clone((result, list(grads)))
        else:
            grads = self._unshare(compiled_fn, grads, (plain, value, extras))
        self._grads = grads
        total: torch.Tensor = result.total if is_loss else result
        total.requires_grad_()  # the graph has checked that the total has a gradient
        return read_loss(result, loss_fn, samples)

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale` to the parameters' `.grad`."""
        del weight
        grads, self._grads = self._grads, ()
        if scale is not None:
            factor = like(scalar, scale) if isinstance(scale, torch.Tensor) else scale
            tree.mul_((grad for grad in grads if grad is not None), factor)
        sums: list[torch.Tensor] = []
        addends: list[torch.Tensor] = []
        for param, grad in zip(self._trained, grads, strict=True):
            if param.grad is None:
                param.grad = grad
            elif grad is not None:
                sums.append(param.grad)
                addends.append(grad)
        tree.add_(sums, addends, alpha=1)
        return None

    def _unshare(
        self, compiled_fn: Compiled, grads: Sequence[torch.Tensor | None], values: Any
    ) -> Sequence[torch.Tensor | None]:
        """Copy gradients that share memory with another tensor.

        Gradients are scaled in place, but a compiler may return one tensor for two equal
        results, or an input as a result. Whether tensors share memory depends only on the
        graph, so the check runs once per graph.
        """
        if compiled_fn.num_compiled != self._num_compiled:
            self._num_compiled = compiled_fn.num_compiled
            leaves = [*self._module.parameters(), *self._module.buffers()]
            self._shared |= _find_shared(grads, [*leaves, *tree.tensor_leaves(values)])
        if not self._shared:
            return grads
        return [
            grad.clone() if i in self._shared and grad is not None else grad
            for i, grad in enumerate(grads)
        ]


class TwoGraphs:
    """Compiles losses to a forward and a backward graph, for a runner that calls them.

    A loss that itself computes gradients can only be compiled as one graph. Then all gradients
    are complete before the first gradient is reduced.
    """

    def __init__(self, compiler: Compiler, *, one_graph: bool) -> None:
        """Initialize with the compiler, and whether a loss may be compiled as one graph."""
        self._compiler, self._whole = compiler, one_graph
        self._made: dict[LossFunction | None, Graph] = {}

    def compiled(self, loss_fn: LossFunction, samples: Samples) -> LossFunction:
        """Return the compiled loss function."""
        self._compiler.count_pass(loss_fn, samples)
        origin = samples.origin
        if origin not in self._made:
            self._made[origin] = self._compile_loss(origin)
        run = self._made[origin]

        def compiled_loss(model: nn.Module, value: Any, *extras: Any) -> Any:
            return run(loss_fn, model, value, extras)

        compiled_loss.__qualname__ = qualname(loss_fn)
        return compiled_loss

    def _compile_loss(self, origin: LossFunction | None) -> Graph:
        compiled_fn = self._compiler.loss(origin, _forward_graph)

        def run(loss_fn: LossFunction, model: nn.Module, *args: Any) -> Any:
            try:
                return join_loss(*compiled_fn(loss_fn, model, *args))
            except CompileError as error:
                if not (self._whole and DOUBLE_BACKWARD in str(error)):
                    value, extras = args
                    loss_fn(model, value, *extras)
                    raise
            again = self._made[origin] = self._in_one_graph(origin, model)
            return again(loss_fn, model, *args)

        return run

    def _in_one_graph(self, origin: LossFunction | None, model: nn.Module) -> Graph:
        """Return one graph of a loss that computes gradients, and of the loss's own gradients."""
        params = [p for p in model.parameters() if p.requires_grad]
        compiled_fn = self._compiler.compile(_one_graph(params), qualname(origin))

        def run(*inputs: Any) -> Any:
            is_loss, plain, grads = compiled_fn.differentiating(*inputs)
            if grads is None:
                return join_loss(is_loss, plain)
            total, *rest = plain if is_loss else (plain,)
            pairs = zip(params, grads, strict=True)
            grad_of = {param: grad for param, grad in pairs if grad is not None}
            total = _WithGrads.apply(total, [*grad_of.values()], *grad_of)
            return join_loss(is_loss, (total, *rest) if is_loss else total)

        return run


class _WithGrads(torch.autograd.Function):
    """A total with gradients that are already computed: the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, total: Any, grads: Any, *_params: Any) -> torch.Tensor:
        """Return the total."""
        ctx.grads = grads
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *seeds: torch.Tensor) -> Any:
        """Return the gradients, multiplied by the gradient of the total."""
        return None, None, *(grad * seeds[0] for grad in ctx.grads)


def compile_regions(regions: Iterable[nn.Module], compiler: Compiler) -> None:
    """Compile the forward of modules, once per class.

    Only the forward itself is compiled. The hooks around it run outside of the graph: torch's
    FSDP uses hooks to gather a unit.
    """
    by_class: dict[tuple[type, bool], Compiled] = {}
    for region in regions:
        kind, is_wrapped = key = type(region), "forward" in vars(region)
        if key not in by_class:
            graph = _call_uncompiled if is_wrapped else _class_graph(kind)
            by_class[key] = compiler.compile(graph, kind.__qualname__)
        if is_wrapped:  # by a transform, such as af.checkpoint_activations
            vars(region)["_uncompiled"] = region.forward
        region.forward = partial(_call_region, by_class[key], region)


def _call_region(
    compiled_fn: Compiled, region: nn.Module, *args: Any, **how: Any
) -> Any:
    return compiled_fn(region, args, how)


def _class_graph(kind: type[nn.Module]) -> Callable[..., Any]:
    forward = kind.forward

    def region(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return region


def _call_uncompiled(module: Any, args: Any, kwargs: Any) -> Any:
    return module._uncompiled(*args, **kwargs)


def _one_graph(params: list[nn.Parameter]) -> Callable[..., Any]:
    """Return a function for the compiler that computes a loss and its gradients."""

    def loss_and_grads(
        loss_fn: LossFunction, module: nn.Module, value: Any, extras: Any
    ) -> Any:
        is_loss, plain = split_loss(loss_fn(module, value, *extras))
        total = plain[0] if is_loss else plain
        if not _has_gradient(total):
            return is_loss, detach_tree(plain), None
        grads = torch.autograd.grad(total, params, allow_unused=True)
        laid_out = [_as_parameter(p, g) for p, g in zip(params, grads, strict=True)]
        return is_loss, detach_tree(plain), laid_out

    return loss_and_grads


def _forward_graph(
    loss_fn: LossFunction, module: nn.Module, value: Any, extras: Any
) -> Any:
    """Call a loss function, and return its result as plain data for the compiler."""
    return split_loss(loss_fn(module, value, *extras))


def _has_gradient(total: Any) -> bool:
    if not isinstance(total, torch.Tensor):
        return False
    return total.ndim == 0 and not total.is_complex() and total.requires_grad


def _as_parameter(
    param: torch.Tensor, grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a gradient with the strides of its parameter."""
    if grad is None or grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)


def _find_shared(
    grads: Sequence[torch.Tensor | None], tensors: Iterable[torch.Tensor]
) -> set[int]:
    """Return the indices of gradients that share memory with another tensor."""
    pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    indices: set[int] = set()
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            pointer = grad.untyped_storage().data_ptr()
            if pointer in pointers:
                indices.add(i)
            pointers.add(pointer)
    return indices
