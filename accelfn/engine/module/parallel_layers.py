# SPDX-License-Identifier: Apache-2.0
"""Layers of which each rank along "tp" has a part, as in Megatron-LM.

A column layer has some of the output features, and a row layer the same features of its
input: what lies between the two, a region, is computed by each rank for its own features. The
ranks add up at the end of a region in the forward pass, and at its beginning in the backward
pass. Parameters are plain tensors of a rank's part.

Where sequences are split between regions, a region begins by putting them together, and ends
with a rank's part of the sum.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn

from accelfn.engine.module import crossing
from accelfn.engine.module.apart import Apart
from accelfn.engine.module.looks import Looks
from accelfn.engine.module.scores import Scores
from accelfn.errors import LossError
from accelfn.world import World

# how a module keeps its parameters has no public name
# pyright: reportPrivateUsage=false

_SEQUENCE = -2
"""The dim of activations that is split between regions; the last is the features."""


class Layers:
    """What the parallel layers of one module share.

    Attributes:
        ranks: those along "tp".
        sequence: whether sequences are split between regions.
        looks: what layers were given, while a loss is looked at.
        is_whole: whether each rank computes with whole layers, to compare.
        is_checked: whether that was done.
        open: the column layer that has begun a region which no row layer has ended.
        split: the layer behind which sequences are split, until a head has them whole.
    """

    def __init__(self, ranks: World, *, sequence: bool) -> None:
        """Take the ranks."""
        self.ranks, self.sequence, self.looks = ranks, sequence, Looks(ranks)
        self.is_whole, self.is_checked = False, False
        self._apart = Apart(ranks)
        self.begin()

    def begin(self) -> None:
        """Know of nothing that began before."""
        self.open: str | None = None
        self.split: str | None = None
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._apart.begin()

    def enter(self, given: torch.Tensor) -> torch.Tensor:
        """Return what all ranks have, for computing with a part of a layer.

        Layers that are given the same, as those of query, key and value, add up its gradient
        over the ranks once.
        """
        kept = self._entered
        if kept is not None and kept[0] is given:
            return kept[1]
        if self.sequence:
            entered = crossing.gathered_and_handed(given, _SEQUENCE, self.ranks)
        else:
            entered = crossing.handed(given, self.ranks)
        self._entered = (given, entered)
        return entered

    def leave(self, part: torch.Tensor, layer: "Parallel") -> torch.Tensor:
        """Return the sum of what ranks made, or this rank's positions of it."""
        if not self.sequence:
            return crossing.summed(part, self.ranks)
        self._check_length(part, layer.place)
        return crossing.summed_and_taken(part, _SEQUENCE, self.ranks)

    def begin_region(self, place: str, *, training: bool) -> None:
        """Let each rank draw for its own features, while it trains."""
        self.open = place
        if training:
            self._apart.draw(place)

    def end_region(self) -> None:
        """Let all ranks draw alike again, unless they have positions of their own."""
        self._entered = self.open = None
        if not self.sequence:
            self._apart.draw_alike()

    def begin_sequence(self, place: str, *, training: bool) -> None:
        """Let each rank draw for its own positions."""
        self.split = place
        if training:
            self._apart.draw(place)

    def end_sequence(self) -> None:
        """Let all ranks draw alike again."""
        self._entered = self.split = None
        if self.sequence:
            self._apart.draw_alike()

    def scattered(self, whole: torch.Tensor, place: str) -> torch.Tensor:
        """Return this rank's positions of what all ranks have."""
        self._check_length(whole, place)
        return crossing.taken(whole, _SEQUENCE, self.ranks)

    def _check_length(self, whole: torch.Tensor, place: str) -> None:
        if whole.ndim < 2 or whole.shape[_SEQUENCE] % self.ranks.size:
            msg = (
                f"af.tensor_parallel(sequence=True): {place!r} gives {tuple(whole.shape)}, and"
                f" its last dim but one is to be a sequence that {self.ranks.size} ranks along"
                ' "tp" share alike. Pad the sequences of a batch to a multiple of that.'
            )
            raise LossError(msg)

    def part(self, param: torch.Tensor | None) -> torch.Tensor | None:
        """Return what all ranks have, for each to use with its positions alone."""
        if param is None or not self.sequence or self.is_whole:
            return param
        return crossing.handed(param, self.ranks)

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all of a parameter; a collective."""
        return crossing.all_parts(part.detach(), dim, self.ranks)

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


class SplitsItself(nn.Module):
    """A layer that knows how it is split, and is in no plan, as Megatron's.

    Its parameters have Megatron's attributes, which say at which dim each is cut.
    """

    def split(self, layers: Layers, place: str) -> None:
        """Compute as one of the ranks from now on, whose parts its parameters are."""
        raise NotImplementedError

    def check(self, size: int, place: str, shown: str, *, sequence: bool) -> None:
        """Refuse ranks that cannot share it.

        Raises:
            ModelError: they cannot.
        """
        raise NotImplementedError


def own_cut(param: torch.Tensor) -> int | None:
    """Return the dim at which a parameter says that it is cut; None: it does not."""
    said = vars(param)
    return said.get("partition_dim") if said.get("tensor_model_parallel") else None


class _Linear(Parallel, nn.Linear):
    """A linear layer of which a rank has a part."""

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias: torch.Tensor | None = self.bias
        weight = self.now("weight", self.weight)
        return weight, bias if bias is None else self.now("bias", bias)

    def _features(self, given: torch.Tensor) -> torch.Tensor:
        """Return the features that this rank has, or now all of them."""
        weight, bias = self._tensors()
        if not self.layers.is_whole:
            given = self.layers.enter(given)
        return F.linear(given, weight, bias)


class ColumnLinear(_Linear):
    """Has some of the output features, and gives them on."""

    cuts = {"weight": 0, "bias": 0}  # noqa: RUF012 - of all

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return this rank's features, for a row layer to take."""
        made = self._features(input)
        if not self.layers.is_whole:
            self.layers.begin_region(self.place, training=self.training)
        return made


class GatheredLinear(_Linear):
    """Has some of the output features, and gathers those of all."""

    cuts = {"weight": 0, "bias": 0}  # noqa: RUF012 - of all

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return all features."""
        made = self._features(input)
        if self.layers.is_whole:
            return made
        self.layers.end_sequence()
        return crossing.gathered(made, -1, self.layers.ranks)


class VocabularyLinear(_Linear):
    """Has the scores of some of the words."""

    cuts = {"weight": 0, "bias": 0}  # noqa: RUF012 - of all

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return scores of which this rank has some."""
        made = self._features(input)
        if self.layers.is_whole:
            return made
        self.layers.end_sequence()
        return Scores.of(made, self.layers.ranks)


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
        total = layers.leave(F.linear(input, weight), self)
        bias = layers.part(bias)
        return total if bias is None else total + bias.to(total.dtype)


class VocabularyEmbedding(Parallel, nn.Embedding):
    """Has the vectors of some of the words."""

    cuts = {"weight": 0}  # noqa: RUF012 - of all

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        """Return the vectors of all words, each from the rank that has it."""
        weight, layers = self.now("weight", self.weight), self.layers
        if layers.is_whole:
            return F.embedding(input, weight, self.padding_idx)
        count, ranks = len(weight), layers.ranks
        begin = ranks.rank * count
        here = (input >= begin) & (input < begin + count)
        padding = self.padding_idx
        has_padding = padding is not None and begin <= padding < begin + count
        vectors = F.embedding(
            (input - begin).masked_fill(~here, 0),
            weight,
            cast("int", padding) - begin if has_padding else None,
        )
        vectors = layers.leave(vectors.masked_fill(~here.unsqueeze(-1), 0), self)
        if layers.sequence:
            layers.begin_sequence(self.place, training=self.training)
        return vectors


def scatter(module: nn.Module, place: str, layers: Layers) -> None:
    """Let each rank have its positions of what a module gives, which is alike on all."""

    def give_some(module: nn.Module, _: object, made: Any) -> Any:
        if layers.is_whole:
            return made
        made = layers.scattered(made, place)
        layers.begin_sequence(place, training=module.training)
        return made

    module.register_forward_hook(give_some)


def share_gradients(
    module: nn.Module, place: str, layers: Layers, *, by_position: bool
) -> None:
    """Let the ranks add up the gradients of a module's own parameters.

    All have these, and each computes with them for the features of a region, or the positions,
    that it has.
    """

    def lend(module: nn.Module, *_: object) -> None:
        if layers.is_whole:
            return
        if not layers.is_checked:
            _check_stands(place, layers, by_position=by_position)
        if not torch.is_grad_enabled():
            return
        tables = module._parameters
        kept = vars(module)["_accelfn_own"] = dict(tables)
        for name, param in kept.items():
            if param is not None and param.requires_grad:
                tables[name] = cast("Any", crossing.handed(param, layers.ranks))

    def put_back(module: nn.Module, *_: object) -> None:
        module._parameters.update(vars(module).pop("_accelfn_own", {}))

    for each in module.modules():
        each.register_forward_pre_hook(lend)
        each.register_forward_hook(put_back, always_call=True)


def _check_stands(place: str, layers: Layers, *, by_position: bool) -> None:
    """Refuse to sum gradients that all ranks have whole.

    Raises:
        LossError: it is so.
    """
    if (layers.split if by_position else layers.open) is not None:
        return
    word, where = ("replicated", "between a column and a row layer")
    if by_position:
        word, where = ("sequence", "where sequences are split")
    msg = (
        f"af.tensor_parallel: {place!r} is {word!r}, and does not stand {where}: all ranks"
        " compute the same with it, and a sum of its gradients would count each several times."
        " Leave it out of the plan."
    )
    raise LossError(msg)
