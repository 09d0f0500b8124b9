# SPDX-License-Identifier: Apache-2.0
"""How gradients in a bucket of DistributedDataParallel cross the ranks in fewer bytes.

What is compressed is near the mean gradient, not a total: the weight of all ranks' losses is
known by then, and divided by. So 16 bits overflow no sooner for a large batch, and what an
approximation left out of one update means the same in the next. A loss scale, which brings
small gradients into the range of 16 bits, is divided out where no 16 bits are.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import attrs
import torch
import torch.distributed as dist

from accelfn.base import draws
from accelfn.collectives import pack, sum_, unpack_
from accelfn.world import World

Gradients: TypeAlias = Mapping[str, torch.Tensor]
Reduced: TypeAlias = torch.futures.Future[torch.Tensor]

_LABEL = "compressed gradients"


class Compression(Protocol):
    """What gradients cross the ranks by, one pass after the other."""

    @property
    def name(self) -> str:
        """Whose slot it works on."""
        ...

    def begin(self, slot: Any, seed: int, loss_scale: torch.Tensor | None) -> None:
        """Begin a pass of a state of that seed, whose losses are multiplied by a scale."""
        ...

    def weigh(self, weight: torch.Tensor) -> None:
        """Take the weight of all ranks' losses, by which the mean is divided."""
        ...

    def reduce(self, bucket: torch.Tensor, gradients: Gradients) -> Reduced:
        """Set a bucket, of which gradients are views, to its mean over the ranks."""
        ...

    def end(self) -> dict[str, Any]:
        """Return the slot after the pass, by its name; or nothing."""
        ...


class Narrow:
    """Sums in 16 bits, of gradients that are near a mean, or were scaled for 16 bits."""

    def __init__(self, name: str, dtype: torch.dtype, ranks: World) -> None:
        """Take the dtype in which they cross."""
        self.name = name
        self._dtype, self._ranks = dtype, ranks
        self._is_scaled = False
        self._unit = torch.ones(())

    def begin(self, slot: None, seed: int, loss_scale: torch.Tensor | None) -> None:
        """Note whether there is a scale; there is no slot, and nothing is drawn."""
        del slot, seed
        self._is_scaled = loss_scale is not None

    def weigh(self, weight: torch.Tensor) -> None:
        """Choose a unit, the next power of 2 of the weight; dividing by it changes no bit."""
        mantissa, exponent = torch.frexp(weight)
        exponent = exponent - (mantissa == 0.5).to(exponent)  # it is one itself
        unit = torch.ldexp(torch.ones_like(weight), exponent)
        divides = (weight > 0) & (not self._is_scaled)
        self._unit = torch.where(divides, unit, 1.0)

    def reduce(self, bucket: torch.Tensor, gradients: Gradients) -> Reduced:
        """Sum over the ranks in few bits, while the backward pass goes on."""
        del gradients
        unit, size = self._unit.to(bucket), self._ranks.size
        narrow = (bucket / unit).to(self._dtype)
        work: Any = dist.all_reduce(narrow, group=self._ranks.group, async_op=True)

        def widen(done: Any) -> torch.Tensor:
            return bucket.copy_(done.value()[0]).mul_(unit / size)

        return work.get_future().then(widen)

    def end(self) -> dict[str, Any]:
        """Keep nothing."""
        return {}


@attrs.frozen
class _Matrix:
    """A gradient as a matrix, in units of the mean gradient, and its factor of before."""

    name: str
    gradient: torch.Tensor
    rows: torch.Tensor
    factor: torch.Tensor


class LowRank:
    """PowerSGD: matrices cross as products of two thin ones, and what is lost is kept.

    Each matrix is for itself, by its parameter's name, so how they lie in buckets, which a
    resumed run does otherwise, changes nothing.
    """

    def __init__(
        self, name: str, state: str, ranks: World, *, rank: int, start: int, rate: float
    ) -> None:
        """Take the options under short names, and the name of the states that it is for."""
        self.name = name
        self._state, self._seed, self._ranks = state, 0, ranks
        self._rank, self._start, self._rate = rank, start, rate
        self._scale: torch.Tensor | None = None
        self._unit = torch.ones(())
        self._before: dict[str, Any] = {}
        self._errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}

    def begin(
        self, slot: dict[str, Any], seed: int, loss_scale: torch.Tensor | None
    ) -> None:
        """Take over what was kept."""
        self._before, self._seed, self._scale = slot, seed, loss_scale
        self._errors, self._factors = dict(slot["error"]), dict(slot["q"])

    def weigh(self, weight: torch.Tensor) -> None:
        """Choose the unit of the mean gradient."""
        scale = 1.0 if self._scale is None else self._scale.to(weight)
        # without any weight, what was left out is applied as it is, scaled as all losses are
        self._unit = torch.where(weight > 0, weight / self._ranks.size, 1.0) * scale

    def end(self) -> dict[str, Any]:
        """Return what is to be kept."""
        count = self._before["iter"] + 1
        slot = {"iter": count, "error": self._errors, "q": self._factors}
        self._before, self._errors, self._factors = {}, {}, {}
        return {self.name: slot}

    def reduce(self, bucket: torch.Tensor, gradients: Gradients) -> Reduced:
        """Reduce before the backward pass goes on, so that ranks meet in one order."""
        plain: list[torch.Tensor] = []
        matrices: list[_Matrix] = []
        for name, gradient in gradients.items():
            if self._before["iter"] >= self._start and self._pays(gradient):
                matrices.append(self._matrix(name, gradient))
            else:
                plain.append(gradient)
        if plain:
            self._mean_(plain)
        if matrices:
            self._approximate_(matrices)
        done: Reduced = torch.futures.Future()
        done.set_result(bucket)
        return done

    def _pays(self, gradient: torch.Tensor) -> bool:
        """Whether the factors are that much smaller than the matrix."""
        if gradient.ndim < 2 or not gradient.numel():
            return False
        rows, columns = _shape(gradient)
        rank = min(rows, columns, self._rank)
        return (rows + columns) * rank * self._rate < rows * columns

    def _matrix(self, name: str, gradient: torch.Tensor) -> _Matrix:
        wide = _wide(gradient).reshape(_shape(gradient)).contiguous()
        rows = wide / self._unit.to(wide)
        if name in self._errors:
            rows = rows + self._errors[name]
        factor = self._factors.get(name)
        if factor is None:
            factor = self._drawn(name, rows)
        return _Matrix(name, gradient, rows, torch.linalg.qr(factor).Q)

    def _drawn(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return a first factor, the same on all ranks."""
        key = draws.key(self._seed, self._state, self.name)
        seed = draws.key(key, name) % 2**63
        generator = torch.Generator().manual_seed(seed)
        shape = rows.shape[1], min(*rows.shape, self._rank)
        return torch.randn(shape, dtype=rows.dtype, generator=generator).to(rows.device)

    def _approximate_(self, matrices: list[_Matrix]) -> None:
        """Set gradients to their approximate mean, and keep what it lacks."""
        left = [each.rows @ each.factor for each in matrices]
        self._mean_(left)
        left = [torch.linalg.qr(each).Q for each in left]
        right = [
            each.rows.mH @ basis for each, basis in zip(matrices, left, strict=True)
        ]
        self._mean_(right)
        for each, basis, factor in zip(matrices, left, right, strict=True):
            found = basis @ factor.mH
            self._errors[each.name] = each.rows - found
            self._factors[each.name] = factor
            each.gradient.copy_((found * self._unit.to(found)).view_as(each.gradient))

    def _mean_(self, tensors: list[torch.Tensor]) -> None:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = pack(same)
            sum_(flat, self._ranks, label=_LABEL)
            unpack_(flat.div_(self._ranks.size), same)


def _shape(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the shape of a gradient as a matrix: the first dimension by all others."""
    return gradient.shape[0], gradient.numel() // gradient.shape[0]


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.float() if gradient.dtype.itemsize < 4 else gradient
