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
from accelfn.engine.module.regions import Regions, are_regions, chosen
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
        for each in chosen(module, self.regions, f"{self!r}"):
            # its own attribute: the model's structure and names stay as they are
            each.forward = partial(_checkpointed, each, each.forward)
        return module


def _checkpointed(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a module's forward under torch's checkpointing."""
    if any(True for _ in module.buffers()):
        forward = partial(_guarded, module, forward, [])
    modes = _get_current_function_mode_stack()
    if modes:  # the backward pass runs outside of them
        kwargs["context_fn"] = partial(_again, modes)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _again(modes: list[Any]) -> tuple[Any, Any]:
    """Return what is around a first run, and around a second: torch's modes of the first."""
    return nullcontext(), _inside(modes)


@contextmanager
def _inside(modes: list[Any]) -> Generator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def _guarded(
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
    with runs[0].watched() if is_first else runs[0].as_before():
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
    def watched(self) -> Generator[None]:
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
    def as_before(self) -> Generator[None]:
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
