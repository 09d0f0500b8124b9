# SPDX-License-Identifier: Apache-2.0
"""Losses under torch.compile, and word of each time that one is compiled again.

A `Compiler` compiles one function after another with the same options. It turns what torch
says of a function that cannot be compiled into a `CompileError`, and compiling again, which
takes as long as thousands of steps, into a `RecompilationWarning`.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from accelfn.base.signatures import qualname
from accelfn.errors import CompileError, RecompilationWarning
from accelfn.state.metrics import Loss
from accelfn.world import World

DOUBLE_BACKWARD = "double backward"
"""In the text of an error about a loss that itself takes gradients."""
_TWICE = (
    "af.compile: {} cannot be compiled: it calls torch.autograd.grad, as a gradient penalty"
    f" does, and torch compiles a {DOUBLE_BACKWARD} only where loss and gradients are one"
    " graph. Leave out regions=, fullgraph=False, fp16 and checkpointed activations, and"
    " take another backend than 'eager'; or leave out af.compile."
)
_MANY = 8
"""Loss functions that an engine compiles before it says that these are many."""


@attrs.frozen(eq=False, kw_only=True)
class Options:
    """What torch.compile is told.

    Attributes:
        backend: the name of one of torch's, or a function that compiles a graph.
        mode: of inductor, as "max-autotune".
        options: of inductor, by name.
        dynamic: whether sizes are symbols from the start; None: those that changed.
        fullgraph: whether code that would break a graph in two is refused.
    """

    backend: str | Callable[..., Any]
    mode: str | None
    options: Mapping[str, Any] | None
    dynamic: bool | None
    fullgraph: bool


class Compiler:
    """Compiles the functions of one engine."""

    def __init__(self, options: Options, world: World) -> None:
        """Take torch.compile's options, and the world that knows the update."""
        self._options = options
        self._activity = world.connection.activity
        self._losses: dict[Callable[..., Any], Compiled] = {}
        self.num_passes = 0
        on_graphs = options.mode in {"reduce-overhead", "max-autotune"}
        self.reuses_memory = world.device.type == "cuda" and on_graphs
        """Whether a later call writes where an earlier one's results are."""

    @property
    def step(self) -> int | None:
        """The update that is being taken."""
        return self._activity.step

    def loss(
        self, loss_fn: Callable[..., Any], make: Callable[[], Callable[..., Any]]
    ) -> "Compiled":
        """Return what was made of a loss function, compiled; made at first use."""
        known = self._losses.get(loss_fn)
        if known is None:
            known = self.compiled(make(), qualname(loss_fn))
            self._losses[loss_fn] = known
            if len(self._losses) == _MANY:
                msg = (
                    f"{_MANY} loss functions were compiled for one model, the last of them"
                    f" {qualname(loss_fn)} at update {self.step}. Call af.make_step once,"
                    " before the loop, and give it what changes as an extra."
                )
                warnings.warn(msg, RecompilationWarning, stacklevel=2)
        return known

    def compiled(self, fn: Callable[..., Any], name: str) -> "Compiled":
        """Return a function under torch.compile, with caches of its own."""
        given = self._options
        options = None if given.options is None else dict(given.options)
        compiler: Any = torch.compile
        under = compiler(
            fn,
            backend=given.backend,
            mode=given.mode,
            options=options,
            dynamic=given.dynamic,
            fullgraph=given.fullgraph,
            isolate_recompiles=True,
        )
        return Compiled(under, name, self)


class Compiled:
    """A function under torch.compile, called as itself."""

    def __init__(self, fn: Callable[..., Any], name: str, compiler: Compiler) -> None:
        """Take it, and what users call it."""
        # imported with the first function that is compiled, for it takes a second
        from torch._dynamo import config, exc, utils  # noqa: PLC0415

        self._fn, self._name, self._compiler = fn, name, compiler
        self._config, self._failures = config, exc.TorchDynamoException
        self._metrics = utils.get_compilation_metrics
        self._stats = utils.counters["stats"]
        self._first_pass = 0
        self._num_again = 0
        self.num_compiled = 0

    def __call__(self, *args: Any) -> Any:
        """Call the function, compiling it where what it depends on has changed."""
        before = self._stats["unique_graphs"]
        try:
            returned = self._first(*args) if self._is_first else self._fn(*args)
        except self._failures as error:
            raise CompileError(self._cannot(error)) from error
        if self._stats["unique_graphs"] != before:
            self._note()
        return returned

    @property
    def _is_first(self) -> bool:
        """Whether this is the pass in which it is expected to be compiled."""
        return self._first_pass in (0, self._compiler.num_passes)

    def _first(self, *args: Any) -> Any:
        """Call it in its first pass; torch's compilers warn of their own old ways."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch(\..*)?$")
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            return self._fn(*args)

    def differentiating(self, *args: Any) -> Any:
        """Call a function that calls torch.autograd.grad.

        Dynamo traces that only if its configuration says so. To say so at every call takes
        as long as a fifth of a small step, and it is asked only where something is to be
        compiled, which without it fails.
        """
        if not self._is_first:
            before = self._stats["unique_graphs"]
            try:
                returned = self._fn(*args)
            except self._failures:
                pass
            else:
                if self._stats["unique_graphs"] != before:
                    self._note()
                return returned
        with self._config.patch(trace_autograd_ops=True):
            return self(*args)

    def _note(self) -> None:
        """Tell of a compilation that is not the first."""
        self.num_compiled += 1
        now = self._compiler.num_passes
        self._first_pass = self._first_pass or now
        if now == self._first_pass:
            return
        self._num_again += 1
        msg = (
            f"{self._name} was compiled again at update {self._compiler.step} (so far"
            f" {self._num_again} times), because {self._reason()}. Give it batches of one"
            " shape, or say af.compile(dynamic=True); give numbers that change as tensors."
        )
        warnings.warn(msg, RecompilationWarning, stacklevel=2)

    def _reason(self) -> str:
        told = [each.recompile_reason for each in self._metrics()[-1:]]
        line = (told[0] if told else None) or "something that it uses changed"
        # behind it, torch shows the line of code and the stack
        return line.strip().splitlines()[0].partition("  #")[0].strip()

    def _cannot(self, error: Exception) -> str:
        text = str(error).strip()
        if "InvalidCxxCompiler" in text or "No working C++ compiler" in text:
            return (
                f"af.compile: {self._name} cannot be compiled: the backend 'inductor' needs"
                " a C++ compiler, and there is none. Install g++ or clang++, or name one in"
                " the environment variable CXX."
            )
        if "trace_autograd_ops" in text:
            return _TWICE.format(self._name)
        return (
            f"af.compile: {self._name} cannot be compiled: {text}\nChange that part, or"
            " leave it out of the graph: af.compile(fullgraph=False) breaks it there, and"
            " af.compile(regions=...) compiles parts of the model alone."
        )


def opened(returned: Any) -> tuple[bool, Any]:
    """Return whether this is an `af.Loss`, and it as plain data: those leave a graph."""
    if isinstance(returned, Loss):
        return True, (returned.total, returned.weight, dict(returned.aux))
    return False, returned


def closed(is_loss: bool, returned: Any) -> Any:  # noqa: FBT001 - what `opened` gave
    """Return what a loss function returned, of its plain data."""
    if is_loss:
        total, weight, aux = returned
        return Loss(total, weight, **aux)
    return returned


def detached(leaf: Any) -> Any:
    """Return numbers, or totals with their weights, without their graph."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if isinstance(leaf, dict):
        return {name: detached(each) for name, each in leaf.items()}
    if isinstance(leaf, tuple):
        return tuple([detached(each) for each in leaf])
    return leaf
