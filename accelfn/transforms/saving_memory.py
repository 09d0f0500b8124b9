# SPDX-License-Identifier: Apache-2.0
"""Compute activations again in the backward pass, instead of keeping them."""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import nn
from torch.overrides import (
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.checkpoint import checkpoint

from accelfn.definition.transform import transform
from accelfn.engine.modules import Regions, are_regions, select_modules
from accelfn.engine.optimizer import try_optimizer
from accelfn.errors import OptimizerError
from accelfn.state.state import TrainState


def _are_regions(_owner: object, _field: object, value: object) -> None:
    are_regions(f"af.checkpoint_activations({value!r})", value)


@transform
class checkpoint_activations:
    """Keep of some modules only what they are given, and run them again when gradients are due.

    It is torch's checkpointing without re-entrance. The second run draws the same random
    numbers under the same autocast, and leaves running statistics alone. Modules inside
    one that is meant are part of it. Evaluation and prediction keep nothing anyway.

    Acts on: module.

    Args:
        regions: a class of modules, such as `nn.TransformerEncoderLayer`, several, or a
            function `(name, module) -> bool` of a module's name in the model. None: the
            model's own children, such as the layers of an `nn.Sequential`.

    Law:
        Gradients, buffers and results are bitwise those without it.

    Cost:
        One more forward pass of these modules, for the memory of all that they kept but their
        inputs.

    Raises:
        ArgumentError: it is no class of modules, and no function.
        ModelError: when built, the model has no such module.
        CompositionError: another one in the chain.

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
    regions: Regions | None = attrs.field(default=None, validator=_are_regions)

    def module(self, module: nn.Module, state: TrainState) -> nn.Module:
        """Let the engine's own module checkpoint the calls of some of its modules."""
        del state
        for each in select_modules(module, self.regions, f"{self!r}"):
            # its own attribute: the model's structure and names stay as they are
            each.forward = partial(_checkpoint_call, each, each.forward)
        return module


def _checkpoint_call(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a module's forward under torch's checkpointing."""
    if any(True for _ in module.buffers()):
        forward = partial(_run_with_buffers, module, forward, [])
    modes = _get_current_function_mode_stack()
    if modes:  # the backward pass runs outside of them
        kwargs["context_fn"] = partial(_rerun_contexts, modes)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _rerun_contexts(modes: list[Any]) -> tuple[Any, Any]:
    """Return what is around a first run, and around a second: torch's modes of the first."""
    return nullcontext(), _enter_modes(modes)


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
    """Run a forward for the first time, or again; a compiler's graph writes buffers once."""
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    is_first = not runs
    if is_first:
        runs.append(_Buffers(module))
    with runs[0].record() if is_first else runs[0].replay():
        return forward(*args, **kwargs)


_LARGE = 65_536  # elements; below that a copy costs less than a look at the values


class _Buffers:
    """The buffers of a module, which a second run finds, and leaves, as the first did.

    Large ones that the first run does not write are not kept, as a look at their values
    says: batch normalisation writes its own without counting it as a version. Of small ones
    that is not asked.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [each._buffers for each in module.modules()]  # pyright: ignore[reportPrivateUsage]
        self._before: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    @contextmanager
    def record(self) -> Generator[None]:
        """Run the first time."""
        found = [
            (table, key, buffer.clone())
            for table in self._tables
            for key, buffer in table.items()
            if buffer is not None
        ]
        yield
        self._before = [
            (table, key, copy)
            for table, key, copy in found
            if copy.numel() <= _LARGE or _differ(copy, table[key])
        ]

    @contextmanager
    def replay(self) -> Generator[None]:
        """Run again, on copies."""
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


# Update parameters while gradients are computed, so that these are never all there.


_NEEDS_ALL = {
    "grads": "looks at all gradients",
    "loss_scale": "may skip the update after it has seen all gradients",
    "value_and_grad": "runs several backward passes, or other ones",
    "reduce": "moves gradients over the ranks when all are there",
    "stays": "weighs all of an update's samples when its gradients are there",
}


@transform
class optimizer_in_backward:
    """Step the optimizer on each parameter as soon as its gradient is complete, and free that.

    Gradients are never all alive: the peak is that of a layer. The state is given to the step
    when the first gradient is there, so a backward pass that raises after it leaves a state
    that can be used no more. The LOMO of the paper is this with `torch.optim.SGD`; any
    optimizer will do that updates each parameter by its own gradient.

    Under `wrap_ddp` a parameter is stepped when its bucket has crossed the ranks. DDP's
    buckets hold all gradients as long as it lives, so what is saved there is nothing but
    gradients beside them.

    Acts on: init, which tries the optimizer; when the optimizer steps.

    Law:
        The result is bitwise that of the plain step; over more than 2 ranks, whose numbers a
        backend adds up in an order of its own, up to rounding.

    Cost:
        A call of the optimizer for each parameter, in place of one for all. Over ranks one
        number crosses them before the backward pass.

    Raises:
        CompositionError: beside what needs all gradients: `clip_grad_norm`, fp16,
            `skip_nonfinite`, `accumulate`, `local_sgd`, `compile`; or where DDP looks for
            unused parameters.
        OptimizerError: when the state is created, of an optimizer whose parameters are not
            updated each for itself; it is tried on small ones.
        GradsError: at `value_and_grad`, which has no gradients to return.

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
        """Refuse an optimizer that couples parameters."""
        kind = type(state.definition.optimizer).__name__
        try:
            whole, alone = (
                try_optimizer(state, alone=alone) for alone in (False, True)
            )
        except Exception as error:
            msg = (
                f"{self!r}: {kind} cannot be tried on small parameters, to see whether it"
                f" updates each for itself: {error!r}."
            )
            raise OptimizerError(msg) from error
        differ = [n for n in whole if not bool((whole[n] == alone[n]).all())]
        if differ:
            msg = (
                f"{self!r}: {kind} updates parameters by more than their own gradients:"
                f" stepped one by one, {', '.join(differ[:5])} came out otherwise. Leave"
                " this transform out, or take another optimizer."
            )
            raise OptimizerError(msg)
