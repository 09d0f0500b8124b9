# SPDX-License-Identifier: Apache-2.0
"""Layers of which each rank along "tp" has a part, as in Megatron-LM.

A column layer has some of the output features, and a row layer the same features of its
input: what lies between the two, a region, is computed by each rank for its own features. The
ranks add up at the end of a region in the forward pass, and at its beginning in the backward
pass. Parameters are plain tensors of a rank's part.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn

from accelfn.base import draws
from accelfn.collectives import naming
from accelfn.engine.module.looks import Looks
from accelfn.world import World

# how a module keeps its parameters has no public name
# pyright: reportPrivateUsage=false

_LABEL = "tensor_parallel"


class Layers:
    """What the parallel layers of one module share.

    Attributes:
        ranks: those along "tp".
        looks: what layers were given, while a loss is looked at.
        is_whole: whether each rank computes with whole layers, to compare.
        is_checked: whether that was done.
        open: the column layer that has begun a region which no row layer has ended.
    """

    def __init__(self, ranks: World) -> None:
        """Take the ranks."""
        self.ranks, self.looks = ranks, Looks(ranks)
        self.is_whole, self.is_checked = False, False
        self.open: str | None = None
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._draws: draws.seeded | None = None
        self._begun: list[torch.Tensor] = []

    def enter(self, given: torch.Tensor) -> torch.Tensor:
        """Return what all ranks have, for computing with a part of a layer.

        Layers that are given the same, as those of query, key and value, add up its gradient
        over the ranks once.
        """
        kept = self._entered
        if kept is not None and kept[0] is given:
            return kept[1]
        entered = cast("Any", _Enter).apply(given, self.ranks)
        self._entered = (given, entered)
        return entered

    def begin_region(self, layer: "ColumnLinear") -> None:
        """Let each rank draw for its own features, while it trains."""
        self.open = layer.place
        if self._draws is None and layer.training:
            # no number is drawn for it: what all ranks draw is as it would be without
            before = b"".join(each.numpy().tobytes() for each in self._drawing())
            key = draws.key(before.hex(), layer.place, self.ranks.rank)
            self._draws = draws.seeded(key, self.ranks.device)
            self._draws.__enter__()
            self._begun = self._drawing()

    def end_region(self) -> None:
        """Let all ranks draw alike again."""
        self._entered = self.open = None
        if self._draws is not None:
            has_drawn = not all(map(torch.equal, self._begun, self._drawing()))
            ended, self._draws = self._draws, None
            ended.__exit__(None, None, None)
            if has_drawn:  # or layers that are called twice would draw the same twice
                for each in draws.generators(self.ranks.device):
                    torch.rand((), generator=each, device=each.device)

    def _drawing(self) -> list[torch.Tensor]:
        return [each.get_state() for each in draws.generators(self.ranks.device)]

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all of a parameter; a collective."""
        return _gathered(part.detach(), dim, self.ranks)

    @contextmanager
    def in_one_piece(self) -> Generator[None]:
        """Let each rank compute with whole layers, one at a time."""
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False


class Parallel:
    """A layer of which a rank has a part.

    Attributes:
        cuts: at which dim each of its parameters is cut; others are whole.
        place: its name in the model.
        layers: what it shares with others.
    """

    cuts: ClassVar[Mapping[str, int]]
    place: str
    layers: Layers

    def now(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """Return a parameter as this rank computes now: its part, or the whole."""
        if not self.layers.is_whole or name not in self.cuts:
            return param
        return self.layers.whole(param, self.cuts[name])


class _Linear(Parallel, nn.Linear):
    """A linear layer of which a rank has a part."""

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias: torch.Tensor | None = self.bias
        weight = self.now("weight", self.weight)
        return weight, bias if bias is None else self.now("bias", bias)


class ColumnLinear(_Linear):
    """Has some of the output features, and gives them on."""

    cuts = {"weight": 0, "bias": 0}  # noqa: RUF012 - of all

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return this rank's features, for a row layer to take."""
        weight, bias = self._tensors()
        if self.layers.is_whole:
            return F.linear(input, weight, bias)
        made = F.linear(self.layers.enter(input), weight, bias)
        self.layers.begin_region(self)
        return made


class GatheredLinear(_Linear):
    """Has some of the output features, and gathers those of all."""

    cuts = {"weight": 0, "bias": 0}  # noqa: RUF012 - of all

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return all features."""
        weight, bias = self._tensors()
        if self.layers.is_whole:
            return F.linear(input, weight, bias)
        made = F.linear(self.layers.enter(input), weight, bias)
        return cast("Any", _Gather).apply(made, self.layers.ranks)


class RowLinear(_Linear):
    """Has some of the input features, and adds up what ranks make of theirs."""

    cuts = {"weight": 1}  # noqa: RUF012 - of all

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return the sum over the ranks, and the bias."""
        layers = self.layers
        weight, bias = self._tensors()
        layers.looks.see(self.place, input, is_whole=layers.is_whole)
        if layers.is_whole:
            return F.linear(input, weight, bias)
        layers.end_region()
        total = cast("Any", _Leave).apply(F.linear(input, weight), layers.ranks)
        return total if bias is None else total + bias.to(total.dtype)


class VocabularyEmbedding(Parallel, nn.Embedding):
    """Has the vectors of some of the words."""

    cuts = {"weight": 0}  # noqa: RUF012 - of all

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return the vectors of all words, each from the rank that has it."""
        weight = self.now("weight", self.weight)
        if self.layers.is_whole:
            return F.embedding(input, weight, self.padding_idx)
        count, ranks = len(weight), self.layers.ranks
        begin = ranks.rank * count
        here = (input >= begin) & (input < begin + count)
        padding = self.padding_idx
        has_padding = padding is not None and begin <= padding < begin + count
        vectors = F.embedding(
            (input - begin).masked_fill(~here, 0),
            weight,
            cast("int", padding) - begin if has_padding else None,
        )
        vectors = vectors.masked_fill(~here.unsqueeze(-1), 0)
        return cast("Any", _Leave).apply(vectors, ranks)


def share_gradients(module: nn.Module, layers: Layers) -> None:
    """Let the ranks add up the gradients of a module's own parameters.

    All have these, and each computes with them for the features of a region that it has.
    """

    def lend(module: nn.Module, *_: object) -> None:
        if layers.is_whole or not torch.is_grad_enabled():
            return
        tables = module._parameters
        kept = vars(module)["_accelfn_own"] = dict(tables)
        for name, param in kept.items():
            if param is not None and param.requires_grad:
                tables[name] = cast("Any", _Enter).apply(param, layers.ranks)

    def put_back(module: nn.Module, *_: object) -> None:
        module._parameters.update(vars(module).pop("_accelfn_own", {}))

    for each in module.modules():
        each.register_forward_pre_hook(lend)
        each.register_forward_hook(put_back, always_call=True)


class _Enter(torch.autograd.Function):
    """What all ranks have, given to parts of layers: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, ranks: World) -> torch.Tensor:
        ctx.ranks = ranks
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return cast("Any", _Leave).apply(gradients[0], ctx.ranks), None


class _Leave(torch.autograd.Function):
    """The sum of what ranks made of their parts: each has its gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: World) -> torch.Tensor:
        ctx.ranks = ranks
        total = part.clone(memory_format=torch.contiguous_format)
        with naming(_LABEL, ranks):
            dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return cast("Any", _Enter).apply(gradients[0], ctx.ranks), None


class _Gather(torch.autograd.Function):
    """The features of all ranks: each has the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: World) -> torch.Tensor:
        ctx.ranks = ranks
        return _gathered(part, -1, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return cast("Any", _Take).apply(gradients[0], ctx.ranks), None


class _Take(torch.autograd.Function):
    """This rank's features of what all have."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: World) -> torch.Tensor:
        ctx.ranks = ranks
        return whole.chunk(ranks.size, -1)[ranks.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return cast("Any", _Gather).apply(gradients[0], ctx.ranks), None


def _gathered(part: torch.Tensor, dim: int, ranks: World) -> torch.Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(ranks.size)]
    with naming(_LABEL, ranks):
        dist.all_gather(parts, part, group=ranks.group)
    return torch.cat(parts, dim)
