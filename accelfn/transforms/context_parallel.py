# SPDX-License-Identifier: Apache-2.0
"""Split each sample's sequence over the ranks along "cp"."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from accelfn.base import tree
from accelfn.base.arguments import advise, integer, option, qualname, truth
from accelfn.base.devices import is_positive, on_host
from accelfn.collectives import all_gather
from accelfn.definition.transform import transform
from accelfn.engine.context_parallel import Attending, Heads, Ring
from accelfn.engine.doctor import Coarsest, first_of, preserve_model
from accelfn.engine.loss import LossFunction
from accelfn.errors import BatchError, LossError
from accelfn.state.metrics import Loss
from accelfn.state.state import TrainState
from accelfn.world import World

_KEPT = "_accelfn_sequence"
"""Under which name the engine's own module keeps how sequences are split."""
_MANY = 2048
"""Positions that are compared at most."""
_FEW = 64
"""Roundings that the order of a sum may cost."""
_COARSE = 0.02


@transform
class context_parallel:
    """Split each sample's sequence over the ranks along "cp", which attend to all of it.

    The ranks along "cp" take the same samples. Of each tensor of a batch that has the dim
    `seq_dim`, a rank's loss is given its own part; tensors of fewer dims are whole.
    In `F.scaled_dot_product_attention` ranks exchange heads for positions, by an all-to-all
    before and one after it, so each attends to all positions with its share of the heads; or,
    with `ring`, each keeps its queries, and keys and values go round from rank to rank.
    Whatever else the model does must go position by position, and what depends on a position,
    as embeddings and rotations, must come with the batch: positions that the model counts for
    itself would begin at 0 on every rank. The first loss is compared with the same loss in
    one piece, on one sample, so that none of this goes wrong in silence.

    A loss returns `af.Loss(total, weight)`: a mean over a part cannot tell of how many tokens
    it is. Evaluation and prediction see whole sequences on each rank.

    A part is contiguous, and with `ring` two pieces: of 2n pieces rank r has the r-th and the
    r-th from the end, so that a causal mask leaves all ranks as much to do.

    Without a world with "cp" it changes nothing.

    Acts on: loss, module.

    Args:
        seq_dim: the dim of a batch's tensors that is the sequence; dim 0 is the samples.
        ring: whether keys and values go round, which shares no heads out: "cp" may be larger
            than their number. Nothing can be dropped in attention then.

    Law:
        Parameters, weights and metrics are those of one process on the whole sequences, up to
        rounding; each token counts once. Dropout draws otherwise on each rank.

    Cost:
        With n ranks along "cp", 1/n of the activations a rank, and two all-to-alls each in the
        forward and the backward pass of every attention: 2 (n - 1) / n² of the bytes of query,
        key, value and result together. Gradients cross as under `wrap_ddp` or `wrap_fsdp`,
        which count "cp" to their ranks. With `ring`, in place of the all-to-alls, n - 1 times
        a rank's keys and values each in the forward and in the backward pass, and n times
        their gradients (in float32 at least), most of it while a block is computed; attention
        over blocks is torch's own kernel on CPUs, and on GPUs in 16 bits without a mask, and
        elsewhere has one block's products in memory. Once for each engine, two forward passes
        on one sample, of at most 2,048 positions if the model takes so few. A mask is kept
        for the backward pass, of a rank's queries and all keys.

    Raises:
        CompositionError: when composed, beside `local_sgd`, `compile`, or another of its kind.
        BatchError: at a step, tensors with the dim differ in its length, or "cp" does not
            divide it (with `ring`, twice as many); or the ranks along "cp" were given
            different batches.
        LossError: at a step, the loss is no `af.Loss`, or not the same in parts; heads do not
            divide by "cp", a mask is for other positions, something is dropped in a ring's
            attention, or the model calls nn.MultiheadAttention.

    References:
        Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of
        Extreme Long Sequence Transformer Models". Liu, Zaharia, Abbeel 2023, "Ring Attention
        with Blockwise Transformers for Near-Infinite Context".

    Example:
        >>> context_parallel(seq_dim=2)
        af.context_parallel(seq_dim=2)
    """

    tells: ClassVar[Mapping[str, Any]] = {
        "draws_nothing": True,
        "splits_sequences": True,
    }
    refuses: ClassVar[Mapping[str, str]] = {
        "apart": "gives ranks parts of the same samples, whose gradients are sums, and under"
        " {other!r} each rank keeps its own. Leave out one of the two.",
        "compiles": "exchanges heads between ranks in the midst of attention, which {other!r}"
        " cannot trace. Leave out one of the two.",
        "splits_sequences": "and {other!r} would split a part once more. Leave out one.",
    }
    seq_dim: int = attrs.field(
        default=1,
        validator=integer(1, "a dim behind that of the samples"),
        kw_only=True,
    )
    ring: bool = option(default=False, validator=truth())

    def module(self, module: nn.Module, state: TrainState) -> nn.Module:
        """Let the engine's own module know which part of a sequence it sees."""
        if state.world.along("cp").size > 1:
            ranks = state.world.along("cp")
            way = Ring(ranks) if self.ring else Heads(ranks)
            vars(module)[_KEPT] = _Sequence(state.world, self.seq_dim, way)
        return module

    def loss(self, loss_fn: LossFunction) -> LossFunction:
        """Give the loss function this rank's part of a batch."""

        def loss_of_part(model: nn.Module, batch: Any, *extras: Any) -> Any:
            sequence: _Sequence | None = vars(model).get(_KEPT)
            if sequence is None:
                return loss_fn(model, batch, *extras)
            if not sequence.is_checked:
                sequence.check(loss_fn, model, batch, *extras)
            return sequence.of_part(loss_fn, model, batch, *extras)

        loss_of_part.__qualname__ = qualname(loss_fn)
        return loss_of_part


class _Sequence:
    """How the sequences of a batch are split over ranks."""

    def __init__(self, world: World, dim: int, way: Heads | Ring) -> None:
        self._ranks, self._loss_ranks, self._dim = world.along("cp"), world.loss, dim
        self._way, self._attending = way, Attending(way.attend)
        self.is_checked = False

    def of_part(
        self, loss_fn: LossFunction, model: nn.Module, batch: Any, *extras: Any
    ) -> Loss:
        """Return the loss of this rank's part."""
        part = self._slice_part(batch, self._length(batch))
        with self._attending:
            returned = loss_fn(model, part, *extras)
        if not isinstance(returned, Loss):
            msg = (
                f"af.context_parallel: {qualname(loss_fn)} returned {type(returned).__name__} of"
                " a part of each sequence. Return af.Loss(total, weight), the sum over this"
                " part and the number of tokens that count in it."
            )
            raise LossError(msg)
        return returned

    def check(
        self, loss_fn: LossFunction, model: nn.Module, batch: Any, *extras: Any
    ) -> None:
        """Compare the loss in parts with that in one piece, on the first sample that counts.

        Raises:
            BatchError: the ranks have different batches.
            LossError: the two differ.
        """
        num = self._way.num_pieces
        length = self._length(batch)
        few = min(_MANY // num * num, length)
        first = self._first(first_of(batch), few)
        with preserve_model(model, self._ranks.device) as has_drawn:
            with Coarsest() as coarsest:
                try:
                    whole = loss_fn(model, first, *extras)
                except RuntimeError:
                    if few == length:
                        raise
                    few, first = length, first_of(batch)  # a mask may be for all of it
                    whole = loss_fn(model, first, *extras)
            drawn = has_drawn()
            part = self.of_part(loss_fn, model, first, *extras)
        # all ranks look as often: beside others' samples, units of a model are gathered
        mine = _numbers(whole, part, drawn=drawn, device=self._ranks.device)
        rows = all_gather(mine, self._loss_ranks, label="context_parallel")
        told, drawn = self._of_group(rows)
        self.is_checked = drawn or any(is_positive(row[1]) for row in rows)
        if drawn:
            advise(
                f"af.context_parallel: {qualname(loss_fn)} draws random numbers, so it could not"
                " be compared with the same loss in one piece. See for yourself that all but"
                " attention goes position by position."
            )
            return
        if not told.isfinite().all():  # which a step says by itself
            return
        if not torch.equal(told[:, :2], told[:1, :2].expand_as(told[:, :2])):
            msg = (
                'af.context_parallel: the ranks along "cp" were given different batches: the'
                f" loss of the first sample is {told[:, 0].tolist()}. They share each sample:"
                " read by af.batches(state), or by world.batch.rank."
            )
            raise BatchError(msg)
        near = min(_FEW * coarsest.eps, _COARSE)
        (total, weight), (total_of_parts, weights) = told[0, :2], told[:, 2:4].sum(0)
        size = max(float(total.abs()), float(told[:, 2].abs().sum()))
        if weight != weights or float((total - total_of_parts).abs()) > near * size:
            msg = (
                f"af.context_parallel: {qualname(loss_fn)} is not the same in parts. Of the first"
                f" {few} positions, in one piece, it is Loss({float(total):.6g}, weight="
                f"{float(weight):g}); the sums over parts are {float(total_of_parts):.6g} and"
                f" {float(weights):g}. Everything but F.scaled_dot_product_attention must go"
                " position by position: give positions with the batch, and shift labels before"
                " they are batched."
            )
            raise LossError(msg)

    def _of_group(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
        """Return the rows of those who share a sample, and whether anybody has drawn."""
        size, rank = self._ranks.size, self._loss_ranks.rank
        begin = rank - rank % size  # "cp" is the innermost of these axes
        told = on_host(torch.stack(rows))
        return told[begin : begin + size], bool(told[:, 4].any())

    def _length(self, batch: Any) -> int:
        """Return the length of the sequences, which the ranks can share.

        Raises:
            BatchError: there is none, there are several, or they cannot.
        """
        leaves = tree.tensor_leaves(batch)
        shapes = [tuple(t.shape) for t in leaves if t.ndim > self._dim]
        lengths = {shape[self._dim] for shape in shapes}
        if len(lengths) != 1:
            msg = (
                f"af.context_parallel(seq_dim={self._dim}): expected tensors of one length at"
                f" dim {self._dim}, got the shapes {shapes}. What is no sequence needs fewer"
                " dims, or its place in extras."
            )
            raise BatchError(msg)
        (length,) = lengths
        if length % self._way.num_pieces:
            msg = (
                f"af.context_parallel(seq_dim={self._dim}): sequences of {length} positions"
                f" cannot be cut into {self._way.num_pieces} pieces of one length, for"
                f' {self._ranks.size} ranks along "cp". Pad them to a multiple where they are'
                " batched, with tokens of weight 0."
            )
            raise BatchError(msg)
        return length

    def _slice_part(self, batch: Any, length: int) -> Any:
        """Return what of a batch is this rank's."""
        size = length // self._way.num_pieces
        begins = [piece * size for piece in self._way.pieces]

        def cut(leaf: torch.Tensor) -> torch.Tensor:
            parts = [leaf.narrow(self._dim, begin, size) for begin in begins]
            return parts[0] if len(parts) == 1 else torch.cat(parts, self._dim)

        return self._of_sequences(cut, batch)

    def _first(self, batch: Any, length: int) -> Any:
        """Return a batch whose sequences are only so long."""
        return self._of_sequences(lambda t: t.narrow(self._dim, 0, length), batch)

    def _of_sequences(self, change: Callable[[torch.Tensor], Any], batch: Any) -> Any:
        def changed(leaf: Any) -> Any:
            is_sequence = isinstance(leaf, torch.Tensor) and leaf.ndim > self._dim
            return change(leaf) if is_sequence else leaf

        return tree.tree_map(changed, batch)


def _numbers(
    whole: Any, part: Loss, *, drawn: bool, device: torch.device
) -> torch.Tensor:
    """Return total and weight in one piece, and of this rank's part; and what was drawn."""
    if not isinstance(whole, Loss):
        whole = Loss(whole, 0)
    numbers = (whole.total, whole.weight, part.total, part.weight, float(drawn))
    return torch.stack(
        [torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers]
    )
