# SPDX-License-Identifier: Apache-2.0
"""Compile the loss and its gradients with torch.compile."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from accelfn.base.arguments import option, truth
from accelfn.base.system import check_new
from accelfn.definition.transform import transform
from accelfn.engine.compiled import Compiler, OneGraphRunner, TwoGraphs, compile_regions
from accelfn.engine.engine import MakeRunner
from accelfn.engine.modules import Regions, are_regions, select_modules
from accelfn.engine.runner import Delegating, Runner
from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState


def _is_backend(_owner: object, _field: object, value: Any) -> None:
    if callable(value):
        return
    names = torch.compiler.list_backends(exclude_tags=())
    if value not in names:
        msg = (
            f"af.compile(backend={value!r}): expected one of {', '.join(sorted(names))}, or"
            " a function that compiles a graph."
        )
        raise ArgumentError(msg)


def _modes() -> Mapping[str, Any]:
    """Return inductor's modes. The import is not at the top, because it takes a second."""
    from torch._inductor import list_mode_options  # noqa: PLC0415

    return list_mode_options()


@transform
class compile:  # noqa: A001 - what torch calls it
    """Compile the loss and its gradients with torch.compile.

    The compiled loss includes the changes by all transforms of the setup; the position of
    `compile` in the chain does not matter. In one process the loss and its backward pass become
    a single graph. Forward and backward pass are two graphs under `wrap_ddp` (which reduces
    gradients during the backward pass), with fp16, and with `checkpoint_activations`.
    Evaluation, prediction and the optimizer are not compiled: a fused optimizer is already one
    kernel. A loss that calls torch.autograd.grad (a gradient penalty) is a single graph even
    under `wrap_ddp`, which then reduces its gradients after the backward pass.

    Acts on: how the engine runs the loss.

    Args:
        backend: torch.compile's backend: "inductor", another name in
        `torch.compiler.list_backends`, or a function.
        mode: a mode of inductor: "default", "reduce-overhead", "max-autotune" and so on.
        options: options of inductor by name. Pass either a mode or options.
        dynamic: whether sizes are symbolic: True from the first compilation, False never, None
        only sizes that change.
        fullgraph: raise an error for code that torch cannot trace. If False, torch runs such
        code between graphs, and forward and backward pass are two graphs.
        regions: compile only these modules, once per class, and run the rest of the loss
        eagerly: a module class, a tuple of classes, or a function `(name, module) -> bool`. A
        deep model of equal blocks then compiles as fast as a single block.

    Law:
        The results equal those of the eager step, up to rounding. Random numbers are
        reproducible, but differ from torch's. Pass `options={"fallback_random": True}` to use
        torch's random numbers.

    Cost:
        Seconds to minutes at the first step, and at each step with new shapes (there it warns
        with RecompilationWarning). Other steps are faster than eager ones; see
        docs/benchmarks.md.

    Raises:
        ArgumentError: torch does not have an option.
        ModelError: when the engine is built, `regions` selects no module.
        CompileError: at a step, torch cannot trace or compile the loss.

    References:
        Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
        Transformation and Graph Compilation".

    Example:
        >>> compile(dynamic=True)
        af.compile(dynamic=True)
    """

    backend: str | Callable[..., Any] = option("inductor", _is_backend)
    mode: str | None = option(None)
    options: Mapping[str, Any] | None = option(None, hash=False)
    dynamic: bool | None = option(None, attrs.validators.optional(truth()))
    fullgraph: bool = option(default=True, validator=truth())
    regions: Regions | None = option(None, are_regions)

    def __attrs_post_init__(self) -> None:
        """Raise if torch is too old, or if options contradict each other or the backend."""
        check_new(self)
        has_mode, has_options = self.mode is not None, self.options is not None
        if has_mode and has_options:
            msg = f"{self!r}: pass either mode= or options=. torch accepts only one of them."
            raise ArgumentError(msg)
        if (has_mode or has_options) and self.backend != "inductor":
            msg = (
                f'{self!r}: mode= and options= are options of the backend "inductor", and the'
                f" backend {self.backend!r} would ignore them. Leave them out."
            )
            raise ArgumentError(msg)
        if self.mode is not None and self.mode not in _modes():
            msg = f"{self!r}: unknown mode; expected one of {', '.join(_modes())}."
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell other transforms how the loss is compiled, and whether as one graph."""
        one_graph = self.fullgraph and self.regions is None
        return {"compiles": self._compile_runner, "one_graph": one_graph}

    @property
    def refuses(self) -> Mapping[str, str]:
        """Reject a second compiler, and setups that torch would compile wrongly."""
        reasons = {
            "compiles": "and {other!r} would both compile the loss. Leave out one of the two.",
            "small_buckets": "splits the graph at the gradient buckets of DDP, which works"
            " only with buckets of 1 MiB or more. Remove bucket_cap_mb= from {other!r}, or"
            " make it 1 or more.",
        }
        if self._is_eager:
            reasons["recomputes"] = (
                "runs graphs without changes, so it would draw different random numbers when"
                " {other!r} recomputes activations. Use another backend, such as 'aot_eager'."
            )
        return reasons

    def _compile_runner(self, make: MakeRunner, state: TrainState) -> MakeRunner:
        """Return a function that makes a runner, like `make`, whose loss is compiled."""
        facts = {"loss_scale", "recomputes"} & state.setup.facts.keys()
        one_graph = self.fullgraph and not (facts or self._is_eager)

        def compiling(module: nn.Module) -> Runner:
            names = ("backend", "mode", "options", "dynamic", "fullgraph")
            options = {name: getattr(self, name) for name in names}
            options["options"] = self.options and dict(self.options)  # torch changes it
            compiler = Compiler(options, state.world)
            if self.regions is not None:
                modules = select_modules(module, self.regions, f"{self!r}")
                compile_regions(modules, compiler)
                return Delegating(make(module), compiler.count_pass)
            runner = make(module)
            if one_graph and runner.lone_module is not None:
                return OneGraphRunner(runner.lone_module, compiler)
            return Delegating(runner, TwoGraphs(compiler, one_graph=one_graph).compiled)

        return compiling

    @property
    def _is_eager(self) -> bool:
        """Whether the backend runs a traced graph eagerly, without compiling it."""
        return isinstance(self.backend, str) and self.backend.startswith("eager")
