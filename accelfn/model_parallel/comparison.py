# SPDX-License-Identifier: Apache-2.0
"""Compare a model that is split over ranks with the whole model, on one sample."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accelfn import World
from accelfn.errors import BatchError
from accelfn.plug import collectives, devices, draws, tree

_FAR = 1e-3
"""The relative tolerance in 32 bits, because the order of sums differs."""
_COARSE = 0.1
"""The relative tolerance in 16 bits."""


class InputComparison:
    """Compares the inputs of split row layers with the inputs of the same layers unsplit."""

    def __init__(self, ranks: World) -> None:
        """Initialize with the ranks that share the features, in order."""
        self._ranks = ranks
        self._seen: tuple[dict[str, torch.Tensor], ...] = ()

    def begin(self) -> None:
        """Start to record inputs."""
        self._seen = {}, {}

    def see(self, place: str, tensor: torch.Tensor, *, is_whole: bool) -> None:
        """Record a layer's input. If the layer is called several times, the last call counts."""
        if self._seen and not torch.is_grad_enabled():
            self._seen[is_whole][place] = tensor.detach()

    def end(self) -> str | None:
        """Stop recording; return the name of a layer whose inputs differ, or None."""
        (parts, wholes), self._seen = self._seen, ()
        if wholes.keys() != parts.keys():
            return next(iter(wholes.keys() ^ parts.keys()))
        differing = (n for n, full in wholes.items() if not self._fit(full, parts[n]))
        return next(differing, None)

    def _fit(self, full: torch.Tensor, actual: torch.Tensor) -> bool:
        part = full.chunk(self._ranks.size, -1)[self._ranks.rank]
        if part.shape != actual.shape:
            return False
        if part.is_meta:
            return True
        far = _COARSE if actual.dtype.itemsize < 4 else _FAR
        distance, length = (x.double().norm() for x in (actual - part, part))
        return not math.isfinite(distance) or bool(distance <= far * length)


class Coarsest(TorchFunctionMode):
    """A mode that records the lowest precision of torch's results, as their largest `eps`."""

    def __init__(self) -> None:
        """Start without results."""
        super().__init__()
        self.eps = 0.0

    @property
    def tolerance(self) -> float:
        """The relative tolerance for results of this precision."""
        return _COARSE if self.eps > _FAR else _FAR

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, and record the precision of its result."""
        del types
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            is_float32 = result.dtype is torch.float32
            eps = devices.eps() if is_float32 else torch.finfo(result.dtype).eps
            self.eps = max(self.eps, eps)
        return result


@contextmanager
def preserve_model(model: nn.Module, device: torch.device) -> Generator[Any]:
    """Set a model to evaluation mode in a `with` block, and restore the model afterwards.

    Buffers and the default random generators are restored too.

    Yields: a function that returns whether random numbers were drawn.
    """
    modules = [*model.modules()]
    training = [module.training for module in modules]
    tables = [(m._buffers, dict(m._buffers)) for m in modules]  # pyright: ignore[reportPrivateUsage]
    try:
        with torch.no_grad(), draws.seeded(0, device):
            before = draws.generator_states(device)
            for table, buffers in tables:
                table.update(tree.clone(buffers))
            model.eval()
            yield lambda: draws.generator_states(device) != before
    finally:
        for module, was in zip(modules, training, strict=True):
            module.training = was
        for table, buffers in tables:
            table.clear()
            table.update(buffers)


def first_of(batch: Any) -> Any:
    """Return a batch's first sample, or the whole batch if its tensors differ in rows."""
    try:
        tree.num_rows(batch)
    except BatchError:
        return batch

    def first(leaf: Any) -> Any:
        return leaf[:1] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf

    return tree.tree_map(first, batch)


def gather_numbers(
    numbers: Sequence[Any], ranks: World, all_ranks: World, *, label: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather numbers from all ranks; a collective.

    Args:
        numbers: this rank's numbers.
        ranks: the ranks that share a sample, along the innermost axis of `all_ranks`.
        all_ranks: the ranks that run the loss, such as `world.loss`.
        label: the operation, for errors.

    Returns: a row of numbers of each rank of `all_ranks`, and those of `ranks` on the CPU.
    """
    row = [torch.as_tensor(n, dtype=torch.float64).to(ranks.device) for n in numbers]
    rows = collectives.all_gather_list(torch.stack(row), all_ranks, label=label)
    table, begin = torch.stack(rows), all_ranks.rank - ranks.rank
    return table, devices.on_host(table)[begin : begin + ranks.size]


def different_batches(axis: str, losses: torch.Tensor) -> str:
    """Return the error text for ranks along an axis that got different batches."""
    return (
        f'the ranks along "{axis}" must get the same batches, but the losses of their first'
        f" samples are {losses.tolist()}. Use af.batches(state), or choose the samples by"
        " world.batch.rank."
    )
