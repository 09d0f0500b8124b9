# SPDX-License-Identifier: Apache-2.0
"""Split each sample's sequence over the ranks along "cp" (context parallelism)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from accelfn import Loss, TrainState, Update, World, transform
from accelfn.errors import BatchError, LossError
from accelfn.model_parallel import attention, comparison
from accelfn.plug import arguments, devices, tree

LossFunction: TypeAlias = Callable[..., Any]

_KEPT = "_accelfn_sequence"
"""The attribute of the engine's module that holds its `_Sequence`."""
_MANY = 2048
"""The maximum number of positions for which losses are compared."""
_FEW = 64
"""The tolerance of the comparison, as a multiple of the rounding error."""
_COARSE = 0.02


@transform
class context_parallel:
    """Split each sample's sequence over the ranks along "cp" (context parallelism).

    The ranks along "cp" get the same samples. If a tensor of a batch has the dim `seq_dim`,
    each rank's loss gets its own part of the tensor. Tensors with fewer dims are not split.
    `F.scaled_dot_product_attention` still computes attention over all positions. By default, an
    all-to-all before and after attention exchanges positions for heads, so that each rank has
    all positions of some heads. With `ring`, each rank keeps its queries, and keys and values
    are passed around a ring of ranks.

    All other operations of the model must work position by position. Inputs that depend on the
    position, such as position ids, must be in the batch: if the model counted positions itself,
    it would start at 0 on every rank. To find such mistakes, accelfn compares the first loss
    with the unsplit loss, on one sample.

    The loss must return `af.Loss(total, weight)`, because a mean does not say over how many
    tokens it was taken. Evaluation and prediction use whole sequences on each rank.

    A rank's part of a sequence is contiguous. With `ring`, sequences are cut into 2n pieces for
    n ranks. Rank r has the r-th piece from the start and the r-th piece from the end, so that
    all ranks have the same work under a causal mask.

    In a world without "cp" nothing changes.

    Acts on: loss, module.

    Args:
        seq_dim: the sequence dim of the tensors in a batch; dim 0 is the samples.
        ring: pass keys and values around a ring, instead of exchanging heads. There may then be
        more ranks along "cp" than heads. Attention dropout is not supported.

    Law:
        Parameters, weights and metrics equal those of one process with whole sequences, up to
        rounding. Each token counts once. Dropout masks differ between ranks.

    Cost:
        With n ranks along "cp", each rank holds 1/n of the activations. Every attention call
        makes two all-to-alls in the forward and two in the backward pass. Together they send
        2 (n - 1) / n² of the bytes of query, key, value and result. `wrap_ddp` or
        `wrap_fsdp` also reduce gradients over "cp".

        With `ring`, instead of all-to-alls, a rank sends keys and values n - 1 times in
        each of the two passes, and their gradients n times (in float32 or wider). Most of this
        overlaps with computation. Ring attention uses torch's kernel on CPUs, and on GPUs in 16
        bits without a mask. Otherwise the scores of one block are in memory. For the backward
        pass it keeps the mask of a rank's queries and all keys.

        Once per engine, two forward passes run on one sample of at most 2,048 positions, or of
        full length if the model does not support a shorter one.

    Raises:
        CompositionError: when composed with `local_sgd`, `compile`, or another
        context_parallel.
        BatchError: at a step, the tensors of a batch have different sequence lengths; "cp"
        (with `ring`, twice "cp") does not divide the length; or the ranks along "cp" got
        different batches.
        LossError: at a step, the loss is not an `af.Loss`, or differs from the unsplit loss;
        "cp" does not divide the number of heads; a mask has a wrong shape; attention in a ring
        has dropout; or the model calls nn.MultiheadAttention.

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
        "apart": "splits each sample over several ranks, so their gradients must be summed,"
        " but under {other!r} each rank keeps its own gradients. Leave out one of the two.",
        "compiles": "exchanges tensors between ranks inside attention, and {other!r} cannot"
        " trace this. Leave out one of the two.",
        "splits_sequences": "and {other!r} would both split sequences. Leave out one.",
    }
    seq_dim: int = arguments.option(
        1, arguments.integer(1, "a dim after dim 0, the samples")
    )
    ring: bool = arguments.option(default=False, validator=arguments.truth())

    def module(self, module: nn.Module, state: TrainState) -> nn.Module:
        """Store on the engine's module how this rank's sequences are split."""
        if state.world.along("cp").size > 1:
            vars(module)[_KEPT] = _Sequence(state.world, self.seq_dim, ring=self.ring)
        return module

    def loss(
        self, loss_fn: LossFunction, slot: None, update: Update
    ) -> tuple[LossFunction, None]:
        """Wrap the loss function, so that it gets this rank's part of a batch."""

        def loss_of_part(model: nn.Module, batch: Any, *extras: Any) -> Any:
            sequence: _Sequence | None = vars(model).get(_KEPT)
            if sequence is None:
                return loss_fn(model, batch, *extras)
            if not sequence.is_checked:
                sequence.check(loss_fn, model, batch, *extras)
            return sequence.of_part(loss_fn, model, batch, *extras)

        loss_of_part.__qualname__ = arguments.qualname(loss_fn)
        return loss_of_part, slot


class _Sequence:
    """Splits the sequences of batches over the ranks along "cp", and checks the loss."""

    def __init__(self, world: World, dim: int, *, ring: bool) -> None:
        self._ranks, self._loss_ranks, self._dim = world.along("cp"), world.loss, dim
        rank, size = self._ranks.rank, self._ranks.size
        self._pieces = attention.ring_pieces(rank, size) if ring else (rank,)
        self._num_pieces = size * len(self._pieces)
        attend = attention.attend_in_ring if ring else attention.attend_by_heads
        self._attending = attention.Attending(partial(attend, self._ranks))
        self.is_checked = False

    def of_part(
        self, loss_fn: LossFunction, model: nn.Module, batch: Any, *extras: Any
    ) -> Loss:
        """Return the loss of this rank's part of a batch."""
        size = self._length(batch) // self._num_pieces
        begins = [piece * size for piece in self._pieces]

        def take_pieces(leaf: torch.Tensor) -> torch.Tensor:
            parts = [leaf.narrow(self._dim, begin, size) for begin in begins]
            return parts[0] if len(parts) == 1 else torch.cat(parts, self._dim)

        part = self._of_sequences(take_pieces, batch)
        with self._attending:
            loss = loss_fn(model, part, *extras)
        if not isinstance(loss, Loss):
            msg = (
                f"af.context_parallel: {arguments.qualname(loss_fn)} returned"
                f" {type(loss).__name__} for a part of each sequence, but a mean does not say over"
                " how many tokens. Return af.Loss(total, weight): the sum over the tokens of this"
                " part, and their number."
            )
            raise LossError(msg)
        return loss

    def check(
        self, loss_fn: LossFunction, model: nn.Module, batch: Any, *extras: Any
    ) -> None:
        """Compare the split loss with the unsplit loss, on the first sample of a batch.

        If the weight of this sample is 0, the check runs again at the next batch.

        Raises:
            BatchError: the ranks have different batches.
            LossError: the two losses differ.
        """
        num = self._num_pieces
        length = self._length(batch)
        few = min(max(_MANY // num, 1) * num, length)
        one = comparison.first_of(batch)
        first = self._of_sequences(lambda t: t.narrow(self._dim, 0, few), one)
        with comparison.preserve_model(model, self._ranks.device) as has_drawn:
            with comparison.Coarsest() as coarsest:
                try:
                    full = loss_fn(model, first, *extras)
                except RuntimeError:
                    if few == length:
                        raise
                    # the model may support only the full length, for example because of a mask
                    few, first = length, one
                    full = loss_fn(model, first, *extras)
            is_random = has_drawn()
            part = self.of_part(loss_fn, model, first, *extras)
        if not isinstance(full, Loss):
            full = Loss(full, 0)
        numbers = full.total, full.weight, part.total, part.weight, float(is_random)
        # all ranks run equally many passes: a pass may gather parameters of all ranks
        rows, table = comparison.gather_numbers(
            numbers, self._ranks, self._loss_ranks, label="context_parallel"
        )
        is_random = bool(table[:, 4].any())
        self.is_checked = is_random or any(devices.is_positive(row[1]) for row in rows)
        if is_random:
            arguments.advise(
                f"af.context_parallel: {arguments.qualname(loss_fn)} draws random numbers, so"
                " accelfn could not compare the split loss with the unsplit loss. Check yourself"
                " that all operations except attention work position by position."
            )
            return
        # for a loss that is infinite or NaN, the step itself raises an error
        if not table.isfinite().all():
            return
        if not torch.equal(table[:, :2], table[:1, :2].expand_as(table[:, :2])):
            msg = f"af.context_parallel: {comparison.different_batches('cp', table[:, 0])}"
            raise BatchError(msg)
        tol = min(_FEW * coarsest.eps, _COARSE)
        (total, weight), (total_of_parts, weights) = table[0, :2], table[:, 2:4].sum(0)
        size = max(float(total.abs()), float(table[:, 2].abs().sum()))
        if weight != weights or float((total - total_of_parts).abs()) > tol * size:
            msg = (
                f"af.context_parallel: {arguments.qualname(loss_fn)} gives another result if"
                f" sequences are split. For the first {few} positions of a sample, the unsplit loss"
                f" is Loss({float(total):.6g}, weight={float(weight):g}), but the parts sum to"
                f" Loss({float(total_of_parts):.6g}, weight={float(weights):g}). All operations"
                " except F.scaled_dot_product_attention must work position by position: pass"
                " position ids in the batch, and shift labels before you make batches."
            )
            raise LossError(msg)

    def _length(self, batch: Any) -> int:
        """Return the sequence length of a batch.

        Raises:
            BatchError: no tensor has the sequence dim, lengths differ, or the ranks cannot
            divide the length.
        """
        leaves = tree.tensor_leaves(batch)
        shapes = [tuple(t.shape) for t in leaves if t.ndim > self._dim]
        lengths = {shape[self._dim] for shape in shapes}
        if len(lengths) != 1:
            msg = (
                f"af.context_parallel(seq_dim={self._dim}): expected tensors of equal length in"
                f" dim {self._dim}, got {shapes or 'no tensor with this dim'}. Pass a tensor"
                " that is not a sequence with fewer dims, or as an extra."
            )
            raise BatchError(msg)
        (length,) = lengths
        if length % self._num_pieces:
            msg = (
                f'af.context_parallel(seq_dim={self._dim}): {self._ranks.size} ranks along "cp"'
                f" need {self._num_pieces} pieces of equal length, but the sequences have"
                f" {length} positions. When you make batches, pad sequences to a multiple of"
                f" {self._num_pieces} with tokens of weight 0."
            )
            raise BatchError(msg)
        return length

    def _of_sequences(self, change: Callable[[torch.Tensor], Any], batch: Any) -> Any:
        def change_leaf(leaf: Any) -> Any:
            is_sequence = isinstance(leaf, torch.Tensor) and leaf.ndim > self._dim
            return change(leaf) if is_sequence else leaf

        return tree.tree_map(change_leaf, batch)
