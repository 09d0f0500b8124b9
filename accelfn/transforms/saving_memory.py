# SPDX-License-Identifier: Apache-2.0
"""Save memory: recompute activations, and step the optimizer in the backward pass."""

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

    It uses torch's non-reentrant checkpointing. The second run uses the same random numbers and
    the same autocast, and does not update running statistics. Modules inside a chosen module
    belong to it. Evaluation and prediction do not change.

    Acts on: module.

    Args:
        regions: a class of modules, such as `nn.TransformerEncoderLayer`, a tuple of classes,
        or a function `(name, module) -> bool`. None: the model's direct children, such as the
        layers of an `nn.Sequential`.

    Law:
        Gradients, buffers and results are bitwise those without checkpointing.

    Cost:
        One more forward pass of these modules; they keep only their inputs in memory.

    Raises:
        ArgumentError: `regions` is neither a class of modules, nor a tuple of classes, nor a
        function.
        ModelError: when built, the model has no such module.
        CompositionError: another checkpoint_activations in the chain.

    References:
        Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

    Example:
        >>> checkpoint_activations()
        af.checkpoint_activations()
    """

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True, "recomputes": True}
    refuses: ClassVar[Mapping[str, str]] = {
        "recomputes": "and {other!r} may mean the same modules. Leave out one, and give the"
        " other a tuple of classes, or a function."
    }
    regions: Regions | None = attrs.field(default=None, validator=are_regions)

    def module(self, module: nn.Module, state: TrainState) -> nn.Module:
        """Checkpoint the calls of some modules of the engine's module."""
        del state
        for select_module in select_modules(module, self.regions, f"{self!r}"):
            # an instance attribute: the model's structure and names do not change
            select_module.forward = partial(
                _checkpoint_call, select_module, select_module.forward
            )
        return module


def _checkpoint_call(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a module's forward under torch's checkpointing."""
    if any(True for _ in module.buffers()):
        forward = partial(_run_with_buffers, module, forward, [])
    modes = _get_current_function_mode_stack()
    if modes:  # the backward pass runs outside these modes
        # contexts of both runs; the second restores the first run's modes
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
    """Run a forward the first or second time, and keep buffers of the first run."""
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    is_first = not runs
    if is_first:
        runs.append(_Buffers(module))
    with runs[0].record() if is_first else runs[0].replay():
        return forward(*args, **kwargs)


_LARGE = 65_536  # elements; below that a copy costs less than a comparison of values


class _Buffers:
    """The buffers of a module: the second run sees the values of the first, and changes none.

    Large buffers that the first run does not change are not copied. Values are compared,
    because batch normalization writes without incrementing the version. Small buffers are
    always copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [submodule._buffers for submodule in module.modules()]  # pyright: ignore[reportPrivateUsage]
        self._before: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    @contextmanager
    def record(self) -> Generator[None]:
        """Record the buffers' values of the first run."""
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
        """Run again on copies of the recorded values."""
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
    "grads": "looks at all gradients",
    "loss_scale": "may skip the update after it has seen all gradients",
    "value_and_grad": "runs several backward passes, or other ones",
    "reduce": "moves gradients over the ranks when all are there",
    "stays": "weighs all of an update's samples when its gradients are there",
}


@transform
class optimizer_in_backward:
    """Step each parameter as soon as its gradient is complete, and free the gradient.

    Only the gradients of about one layer are in memory at a time. The step takes ownership of
    the state when the first gradient is complete, so if the backward pass raises after that,
    the state can no longer be used. With `torch.optim.SGD` this is LOMO; any optimizer works
    that updates each parameter from its own gradient only.

    Under `wrap_ddp` a parameter is stepped when its bucket is reduced. DDP's buckets keep
    memory for all gradients, so only gradients outside the buckets are saved.

    Acts on: init (tries the optimizer); the optimizer step.

    Law:
        The result is bitwise that of the plain step; with more than 2 ranks up to rounding,
        because backends choose the order of sums.

    Cost:
        One call of the optimizer per parameter, instead of one for all. With several ranks, an
        all-reduce of one number before the backward pass.

    Raises:
        CompositionError: with a transform that needs all gradients (`clip_grad_norm`, fp16,
        `skip_nonfinite`, `accumulate`, `local_sgd`, `compile`), or when DDP finds unused
        parameters.
        OptimizerError: when the state is created, the optimizer does not update parameters
        independently; accelfn tries it on small parameters.
        GradsError: at `value_and_grad`, because there are no gradients to return.

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
        "steps_in_backward": "and {other!r} are one too many. Leave out one of the two.",
        **{
            field: "frees each gradient as soon as it is complete, but {other!r} "
            f"{why}. Leave out one of the two."
            for field, why in _NEEDS_ALL.items()
        },
        "finds_unused": "would step parameters that {other!r} finds unused only when the"
        " backward pass is over. Leave out {told}.",
        "compiles": "steps in the midst of the backward pass, which {other!r} makes one"
        " piece. Leave out one of the two.",
    }

    def init(self, state: TrainState) -> None:
        """Reject an optimizer that couples parameters."""
        optimizer = state.definition.optimizer
        kind = type(optimizer).__name__
        try:
            joint, _ = try_optimizer(state, optimizer)
            alone, _ = try_optimizer(state, optimizer, alone=True)
        except Exception as error:
            msg = (
                f"{self!r}: {kind} cannot be tried on small parameters, to see whether it"
                f" updates each for itself: {error!r}."
            )
            raise OptimizerError(msg) from error
        differ = [n for n in joint if not bool((joint[n] == alone[n]).all())]
        if differ:
            msg = (
                f"{self!r}: {kind} updates parameters by more than their own gradients:"
                f" stepped one by one, {', '.join(differ[:5])} came out otherwise. Leave"
                " this transform out, or take another optimizer."
            )
            raise OptimizerError(msg)
