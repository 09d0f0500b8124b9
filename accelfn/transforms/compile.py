# SPDX-License-Identifier: Apache-2.0
"""Compile the loss and its gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from accelfn.base.arguments import option, truth
from accelfn.definition.transform import transform
from accelfn.engine.compiled import (
    Compiler,
    OneGraphRunner,
    Options,
    RegionsRunner,
    TwoGraphsRunner,
    compile_regions,
)
from accelfn.engine.engine import MakeRunner
from accelfn.engine.loss import Runner
from accelfn.engine.modules import Regions, are_regions, select_modules
from accelfn.errors import ArgumentError
from accelfn.state.state import TrainState


def _is_backend(_owner: object, _field: object, value: Any) -> None:
    if callable(value):
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if value not in known:
        msg = (
            f"af.compile(backend={value!r}): expected one of {', '.join(sorted(known))}, or"
            " a function that compiles a graph."
        )
        raise ArgumentError(msg)


def _are_regions(_owner: object, _field: object, value: object) -> None:
    are_regions(f"af.compile(regions={value!r})", value)


def _modes() -> Mapping[str, Any]:
    """Return inductor's modes; importing it takes a second."""
    from torch._inductor import list_mode_options  # noqa: PLC0415

    return list_mode_options()


@transform
class compile:  # noqa: A001 - what torch calls it
    """Compile the loss and its gradients by torch.compile.

    The whole loss is compiled, as all transforms of the chain wrap it, wherever this one
    stands. On one process it becomes a single graph with its backward pass. Under
    `wrap_ddp`, which reduces gradients while the backward pass runs, under fp16 and beside
    `checkpoint_activations`, forward and backward are compiled apart. Evaluation and
    prediction are not compiled, and neither is the optimizer: a fused one is one kernel
    already. A loss that calls torch.autograd.grad, as a gradient penalty does, is a single graph
    under `wrap_ddp` too, and gradients are reduced after it.

    Acts on: runner.

    Args:
        backend: torch.compile's: "inductor", another that `torch.compiler.list_backends`
            names, or a function.
        mode: inductor's: "default", "reduce-overhead", "max-autotune" and so on.
        options: inductor's by name, in place of a mode.
        dynamic: True makes sizes symbols from the start, False never; None those that were
            seen to change.
        fullgraph: whether code that cannot be traced is an error. False lets torch run it
            between graphs; forward and backward are then compiled apart.
        regions: compile only these modules, once for all that are alike, and run the rest of
            the loss as it is: a module class, several, or a function `(name, module) ->
            bool`. A deep model of equal blocks then compiles in the time of one.

    Law:
        The results are those of the plain step, up to rounding. Random draws are
        reproducible, but inductor's own; `options={"fallback_random": True}` takes torch's.

    Cost:
        Seconds to minutes at the first step, and at each that has other shapes, of which a
        RecompilationWarning tells. Then less than the plain step: docs/benchmarks.md.

    Raises:
        ArgumentError: an option that torch does not have.
        ModelError: when built, no module is one of `regions`.
        CompileError: at a step, the loss cannot be traced or compiled.

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
    regions: Regions | None = option(None, _are_regions)

    def __attrs_post_init__(self) -> None:
        """Refuse options that no compiler would read, or of which torch takes one."""
        if self.mode is not None and self.options is not None:
            msg = f"{self!r}: torch takes a mode or options. Give one of the two."
            raise ArgumentError(msg)
        given = self.mode is not None or self.options is not None
        if given and self.backend != "inductor":
            msg = (
                f"{self!r}: mode and options are inductor's, and {self.backend!r} would not"
                " read them. Leave them out."
            )
            raise ArgumentError(msg)
        modes = {} if self.mode is None else _modes()
        if self.mode is not None and self.mode not in modes:
            msg = f"{self!r}: unknown mode; expected one of {', '.join(modes)}."
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """What becomes of the loss."""
        whole = self.fullgraph and self.regions is None
        return {"compiles": True, "one_graph": whole}

    @property
    def refuses(self) -> Mapping[str, str]:
        """What is compiled already, and what torch compiles wrongly."""
        refused = {
            "compiles": "and {other!r} would both compile the loss. Leave out one.",
            "small_buckets": "splits its graphs at DistributedDataParallel's buckets, and torch"
            " needs these to be of 1 MiB or more; {other!r} asks for smaller ones. Leave out"
            " bucket_cap_mb=.",
        }
        if self._is_eager:
            refused["recomputes"] = (
                "would draw other random numbers in what {other!r} recomputes, for it"
                " runs graphs as they stand. Take another backend, as 'aot_eager'."
            )
        return refused

    def runner(self, make: MakeRunner, state: TrainState) -> MakeRunner:
        """Let what runs the loss run it compiled."""
        setup = state.setup
        recomputes = "recomputes" in setup.facts
        apart = bool(setup.owners["loss_scale"]) or recomputes or self._is_eager
        whole = self.fullgraph and not apart

        def compiling(module: nn.Module) -> Runner:
            compiler = Compiler(self._compile_options(), state.world)
            if self.regions is not None:
                found = select_modules(module, self.regions, f"{self!r}")
                compile_regions(found, compiler)
                return RegionsRunner(make(module), compiler)
            runner = make(module)
            if whole and runner.lone_module is not None:
                return OneGraphRunner(runner.lone_module, compiler)
            return TwoGraphsRunner(runner, compiler, whole=whole)

        return compiling

    def _compile_options(self) -> Options:
        return Options(
            backend=self.backend,
            mode=self.mode,
            options=self.options,
            dynamic=self.dynamic,
            fullgraph=self.fullgraph,
        )

    @property
    def _is_eager(self) -> bool:
        """Whether the backend runs a graph as it stands, and compiles nothing."""
        return isinstance(self.backend, str) and self.backend.startswith("eager")
