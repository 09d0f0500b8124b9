# SPDX-License-Identifier: Apache-2.0
"""Save memory: recompute activations, or step the optimizer in the backward pass."""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import checkpoint

from accelfn.definition.transform import transform
from accelfn.engine.modules import Regions, are_regions, select_modules
from accelfn.engine.optimizer import try_optimizer
from accelfn.errors import OptimizerError
from accelfn.state.state import TrainState


@transform
class checkpoint_activations:
    """Recompute activations of some modules in the backward pass (activation checkpointing).

    This uses torch's non-reentrant checkpointing. The second forward pass of a module uses the
    same random numbers and the same autocast as the first, and does not update running
    statistics again. A selected module includes all modules inside it. Evaluation and
    prediction do not change.

    Acts on: module.

    Args:
        regions: the modules to recompute: a class such as `nn.TransformerEncoderLayer`, a tuple
        of classes, or a function `(name, module) -> bool`. None selects the model's direct
        children, such as the layers of an `nn.Sequential`.

    Law:
        Gradients, buffers and results are bitwise equal to those without checkpointing.

    Cost:
        One more forward pass of the selected modules. Until the backward pass, only their
        inputs are in memory.

    Raises:
        ArgumentError: `regions` is not a module class, a tuple of module classes or a function.
        ModelError: when the engine is built, `regions` selects no module.
        CompositionError: the chain has another checkpoint_activations.

    References:
        Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

    Example:
        >>> checkpoint_activations()
        af.checkpoint_activations()
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True, "recomputes": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "recomputes": "and {other!r} may select the same modules. Keep one of the two, and"
        " pass it all classes as a tuple, or a function."
    }
    regions: Regions | None = attrs.field(default=None, validator=are_regions)

    def module(self, module: nn.Module, state: TrainState) -> nn.Module:
        """Checkpoint the calls of the selected modules of the engine's module."""
        del state
        for select_module in select_modules(module, self.regions, f"{self!r}"):
            # set an instance attribute, so that the model's structure and names do not change
            select_module.forward = partial(
                _checkpoint_call, select_module, select_module.forward
            )
        return module


def _checkpoint_call(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a module's forward under torch's activation checkpointing."""
    if any(True for _ in module.buffers()):
        forward = partial(_run_with_buffers, module, forward, [])
    modes = _get_current_function_mode_stack()
    if modes:  # the backward pass runs outside these modes
        # contexts for the forward pass and its recomputation, which enters the modes again
        kwargs["context_fn"] = lambda: (nullcontext(), _enter_modes(modes))
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def _enter_modes(modes: list[Any]) -> Generator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def _run_with_buffers(
    module: nn.Module,
    forward: Callable[..., Any],
    runs: "list[_Buffers]",
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a module's forward, or its recomputation; both see the same buffers."""
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    is_first = not runs
    if is_first:
        runs.append(_Buffers(module))
    with runs[0].record() if is_first else runs[0].replay():
        return forward(*args, **kwargs)


_LARGE = 65_536  # elements; copying fewer elements costs less than comparing them


class _Buffers:
    """Lets a recomputed forward pass see and change only copies of the module's buffers.

    With activation checkpointing, a module runs forward again during the backward pass. Without
    the copies, it would update its buffers twice. The copies have the values from before the
    first pass. Copies are kept of all small buffers, and of large buffers that the first pass
    changed. Values are compared to detect a change,
    because batch normalization writes without incrementing the version of a tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [submodule._buffers for submodule in module.modules()]  # pyright: ignore[reportPrivateUsage]
        self._before: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    @contextmanager
    def record(self) -> Generator[None]:
        """Record the values of the buffers before the first forward pass."""
        copies = [
            (table, key, buffer.clone())
            for table in self._tables
            for key, buffer in table.items()
            if buffer is not None
        ]
        yield
        self._before = [
            (table, key, copy)
            for table, key, copy in copies
            if copy.numel() <= _LARGE or _differ(copy, table[key])
        ]

    @contextmanager
    def replay(self) -> Generator[None]:
        """In a `with` block, use copies of the recorded values; restore the buffers afterwards."""
        after = [(table, key, table[key]) for table, key, _ in self._before]
        for table, key, copy in self._before:
            table[key] = copy.clone()
        try:
            yield
        finally:
            for table, key, buffer in after:
                table[key] = buffer


def _differ(one: torch.Tensor, two: torch.Tensor | None) -> bool:
    return two is None or one.dtype != two.dtype or not torch.equal(one, two)


# `optimizer_in_backward`: update parameters during the backward pass.


_NEEDS_ALL = {
    "grads": "needs all gradients at the same time",
    "loss_scale": "may skip the update after it has checked all gradients",
    "value_and_grad": "may run several backward passes",
    "reduce": "reduces gradients over ranks only when all of them are complete",
    "stays": "needs the complete gradients to know the weight of an update's samples",
}


@transform
class optimizer_in_backward:
    """Step each parameter as soon as its gradient is complete, and free the gradient.

    Only the gradients of about one layer are in memory at a time. The step takes ownership of
    the state when the first gradient is complete: if the backward pass raises an error after
    that, the state can no longer be used. With `torch.optim.SGD` this is the method LOMO. Any
    optimizer works that updates each parameter from its own gradient only.

    Under `wrap_ddp` a parameter is stepped when its bucket is reduced. The buckets themselves
    stay in memory, so only the memory of gradients outside the buckets is saved.

    Acts on: init (tests the optimizer); the optimizer step.

    Law:
        The result is bitwise equal to that of the plain step. With more than 2 ranks it is
        equal up to rounding, because backends choose the order of sums.

    Cost:
        One call of the optimizer per parameter, instead of one call for all parameters. With
        several ranks, also an all-reduce of one number before the backward pass.

    Raises:
        CompositionError: with a transform that needs all gradients (`clip_grad_norm`, fp16,
        `skip_nonfinite`, `accumulate`, `local_sgd`, `compile`), or if DDP finds unused
        parameters.
        OptimizerError: when the state is created, the optimizer does not update parameters
        independently. accelfn tests this with small parameters.
        GradsError: `value_and_grad` was called, but there are no gradients to return.

    References:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources".

    Example:
        >>> optimizer_in_backward()
        af.optimizer_in_backward()
    """

    tells: ClassVar[Mapping[str, Any]] = {
        "draws_nothing": True,
        "steps_in_backward": True,
    }
    refuses: ClassVar[Mapping[str, str]] = {
        "steps_in_backward": "and {other!r} would both step the optimizer in the backward"
        " pass. Leave out one of the two.",
        **{
            field: "frees each gradient as soon as it is complete, but {other!r} "
            f"{why}. Leave out one of the two."
            for field, why in _NEEDS_ALL.items()
        },
        "finds_unused": "steps parameters during the backward pass, but {other!r} finds out"
        " only after it which parameters are unused. Leave out {told}.",
        "compiles": "steps the optimizer in the middle of the backward pass, which {other!r}"
        " compiles as a whole. Leave out one of the two.",
    }

    def init(self, state: TrainState) -> None:
        """Raise if the optimizer does not update parameters independently."""
        optimizer = state.definition.optimizer
        kind = type(optimizer).__name__
        try:
            joint, _ = try_optimizer(state, optimizer)
            alone, _ = try_optimizer(state, optimizer, alone=True)
        except Exception as error:
            msg = (
                f"{self!r}: accelfn tests with small parameters whether {kind} updates each"
                f" parameter independently, but in this test {kind} raised {error!r}. Leave"
                " this transform out, or use another optimizer."
            )
            raise OptimizerError(msg) from error
        differ = [n for n in joint if not bool((joint[n] == alone[n]).all())]
        if differ:
            msg = (
                f"{self!r}: {kind} does not update each parameter by its own gradient only. In a"
                " test that stepped parameters one by one, these changed differently:"
                f" {', '.join(differ[:5])}. Leave this transform out, or use another optimizer."
            )
            raise OptimizerError(msg)
