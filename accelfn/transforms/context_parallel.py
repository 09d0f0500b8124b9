# SPDX-License-Identifier: Apache-2.0
"""Split each sample's sequence over the ranks along "cp"."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from accelfn.base import tree
from accelfn.base.arguments import advise, integer, option, qualname, truth
from accelfn.base.devices import is_positive, on_host
from accelfn.collectives.packed import all_gather_list
from accelfn.definition.transform import transform
from accelfn.engine.context_parallel import Attending, Heads, Ring
from accelfn.engine.doctor import Coarsest, first_of, preserve_model
from accelfn.engine.runner import LossFunction
from accelfn.errors import BatchError, LossError
from accelfn.state.results import Loss
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.world import World

_KEPT = "_accelfn_sequence"
"""The attribute of the engine's module with its `_Sequence`."""
_MANY = 2048
"""The maximum number of positions to compare."""
_FEW = 64
"""The tolerance of a comparison, in rounding errors."""
_COARSE = 0.02


@transform
class context_parallel:
    """Split each sample's sequence over the ranks along "cp" (context parallelism).

    The ranks along "cp" take the same samples. If a tensor of a batch has the dim `seq_dim`,
    each rank's loss gets its own part of it; tensors with fewer dims stay whole.
    `F.scaled_dot_product_attention` attends to all positions: ranks exchange heads for
    positions by an all-to-all before and after it, so each rank computes a share of the heads;
    or, with `ring`, each rank keeps its queries, and keys and values go around a ring.

    All other operations of the model must work position by position. Position-dependent inputs,
    such as position ids, must come with the batch: positions counted inside the model would
    begin at 0 on every rank. To find such mistakes, accelfn compares the first loss with the
    unsplit loss, on one sample.

    The loss must return `af.Loss(total, weight)`, because a mean over a part does not say its
    number of tokens. Evaluation and prediction use whole sequences on each rank.

    A part is contiguous. With `ring` a part is two of 2n pieces: rank r has the r-th and the
    r-th from the end, so that under a causal mask all ranks have the same work.

    In a world without "cp" nothing changes.

    Acts on: loss, module.

    Args:
        seq_dim: the sequence dim of a batch's tensors; dim 0 is the samples.
        ring: whether keys and values go around a ring, instead of exchanging heads; "cp" may
        then be larger than the number of heads. A ring does not support attention dropout.

    Law:
        Parameters, weights and metrics are those of one process on the whole sequences, up to
        rounding; each token counts once. Dropout masks differ by rank.

    Cost:
        With n ranks along "cp", each rank holds 1/n of the activations. Every attention makes
        two all-to-alls in the forward and two in the backward pass: 2 (n - 1) / n² of the bytes
        of query, key, value and result together. `wrap_ddp` or `wrap_fsdp` reduce gradients
        over "cp" too. With `ring`, instead of the all-to-alls, a rank sends n - 1 times its
        keys and values in the forward and in the backward pass, and n times their gradients (in
        float32 or wider), mostly overlapped with computing. Attention over blocks uses torch's
        kernel on CPUs, and on GPUs in 16 bits without a mask; otherwise one block's products
        are in memory. Once per engine, two forward passes run on one sample of at most 2,048
        positions, if the model supports that length. The backward pass keeps a mask of a rank's
        queries and all keys.

    Raises:
        CompositionError: when composed with `local_sgd`, `compile`, or another context_parallel.
        BatchError: at a step, sequence lengths differ, or "cp" (with `ring`, twice "cp") does
        not divide the length; or the ranks along "cp" got different batches.
        LossError: at a step, the loss is not an `af.Loss`, or differs from the unsplit loss;
        "cp" does not divide the number of heads; a mask has a wrong shape; a ring's attention
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
        "apart": "gives ranks parts of the same samples, whose gradients are sums, and under"
        " {other!r} each rank keeps its own. Leave out one of the two.",
        "compiles": "exchanges heads between ranks in the midst of attention, which {other!r}"
        " cannot trace. Leave out one of the two.",
        "splits_sequences": "and {other!r} would split a part once more. Leave out one.",
    }
    seq_dim: int = option(1, integer(1, "a dim behind that of the samples"))
    ring: bool = option(default=False, validator=truth())

    def module(self, module: nn.Module, state: TrainState) -> nn.Module:
        """Tell the engine's module which part of a sequence it computes."""
        if state.world.along("cp").size > 1:
            ranks = state.world.along("cp")
            scheme = Ring(ranks) if self.ring else Heads(ranks)
            vars(module)[_KEPT] = _Sequence(state.world, self.seq_dim, scheme)
        return module

    def loss(
        self, loss_fn: LossFunction, slot: None, update: Update
    ) -> tuple[LossFunction, None]:
        """Give the loss function this rank's part of a batch."""

        def loss_of_part(model: nn.Module, batch: Any, *extras: Any) -> Any:
            sequence: _Sequence | None = vars(model).get(_KEPT)
            if sequence is None:
                return loss_fn(model, batch, *extras)
            if not sequence.is_checked:
                sequence.check(loss_fn, model, batch, *extras)
            return sequence.of_part(loss_fn, model, batch, *extras)

        loss_of_part.__qualname__ = qualname(loss_fn)
        return loss_of_part, slot


class _Sequence:
    """How the sequences of a batch are split over ranks."""

    def __init__(self, world: World, dim: int, scheme: Heads | Ring) -> None:
        self._ranks, self._loss_ranks, self._dim = world.along("cp"), world.loss, dim
        self._way, self._attending = scheme, Attending(scheme.attend)
        self.is_checked = False

    def of_part(
        self, loss_fn: LossFunction, model: nn.Module, batch: Any, *extras: Any
    ) -> Loss:
        """Return the loss of this rank's part."""
        part = self._slice_part(batch, self._length(batch))
        with self._attending:
            loss = loss_fn(model, part, *extras)
        if not isinstance(loss, Loss):
            msg = (
                f"af.context_parallel: {qualname(loss_fn)} returned {type(loss).__name__} of"
                " a part of each sequence. Return af.Loss(total, weight), the sum over this"
                " part and the number of tokens that count in it."
            )
            raise LossError(msg)
        return loss

    def check(
        self, loss_fn: LossFunction, model: nn.Module, batch: Any, *extras: Any
    ) -> None:
        """Compare the split loss with the unsplit one, on the first sample with weight.

        Raises:
            BatchError: the ranks have different batches.
            LossError: the two losses differ.
        """
        num = self._way.num_pieces
        length = self._length(batch)
        few = min(_MANY // num * num, length)
        first = self._first(first_of(batch), few)
        with preserve_model(model, self._ranks.device) as has_drawn:
            with Coarsest() as coarsest:
                try:
                    full = loss_fn(model, first, *extras)
                except RuntimeError:
                    if few == length:
                        raise
                    # a mask may have the full length
                    few, first = length, first_of(batch)
                    full = loss_fn(model, first, *extras)
            is_random = has_drawn()
            part = self.of_part(loss_fn, model, first, *extras)
        # all ranks run as many passes: other ranks may gather units with them
        own_row = _numbers(full, part, is_random=is_random, device=self._ranks.device)
        rows = all_gather_list(own_row, self._loss_ranks, label="context_parallel")
        table, is_random = self._of_group(rows)
        self.is_checked = is_random or any(is_positive(row[1]) for row in rows)
        if is_random:
            advise(
                f"af.context_parallel: {qualname(loss_fn)} draws random numbers, so it could not"
                " be compared with the same loss in one piece. See for yourself that all but"
                " attention goes position by position."
            )
            return
        if not table.isfinite().all():  # the step raises for this
            return
        if not torch.equal(table[:, :2], table[:1, :2].expand_as(table[:, :2])):
            msg = (
                'af.context_parallel: the ranks along "cp" were given different batches: the'
                f" loss of the first sample is {table[:, 0].tolist()}. They share each sample:"
                " read by af.batches(state), or by world.batch.rank."
            )
            raise BatchError(msg)
        tol = min(_FEW * coarsest.eps, _COARSE)
        (total, weight), (total_of_parts, weights) = table[0, :2], table[:, 2:4].sum(0)
        size = max(float(total.abs()), float(table[:, 2].abs().sum()))
        if weight != weights or float((total - total_of_parts).abs()) > tol * size:
            msg = (
                f"af.context_parallel: {qualname(loss_fn)} differs between parts and whole. Of"
                f" the first {few} positions, in one piece, it is Loss({float(total):.6g}, weight="
                f"{float(weight):g}); the sums over parts are {float(total_of_parts):.6g} and"
                f" {float(weights):g}. Everything but F.scaled_dot_product_attention must go"
                " position by position: give positions with the batch, and shift labels before"
                " they are batched."
            )
            raise LossError(msg)

    def _of_group(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
        """Return the rows of ranks that share a sample, and whether any drew numbers."""
        size, rank = self._ranks.size, self._loss_ranks.rank
        begin = rank - rank % size  # "cp" is the innermost of these axes
        table = on_host(torch.stack(rows))
        return table[begin : begin + size], bool(table[:, 4].any())

    def _length(self, batch: Any) -> int:
        """Return the sequence length of a batch.

        Raises:
            BatchError: there is no length or several, or the ranks cannot share it.
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
        """Return this rank's part of a batch."""
        size = length // self._way.num_pieces
        begins = [piece * size for piece in self._way.pieces]

        def take_pieces(leaf: torch.Tensor) -> torch.Tensor:
            parts = [leaf.narrow(self._dim, begin, size) for begin in begins]
            return parts[0] if len(parts) == 1 else torch.cat(parts, self._dim)

        return self._of_sequences(take_pieces, batch)

    def _first(self, batch: Any, length: int) -> Any:
        """Return a batch with sequences cut to `length`."""
        return self._of_sequences(lambda t: t.narrow(self._dim, 0, length), batch)

    def _of_sequences(self, change: Callable[[torch.Tensor], Any], batch: Any) -> Any:
        def change_leaf(leaf: Any) -> Any:
            is_sequence = isinstance(leaf, torch.Tensor) and leaf.ndim > self._dim
            return change(leaf) if is_sequence else leaf

        return tree.tree_map(change_leaf, batch)


def _numbers(
    full: Any, part: Loss, *, is_random: bool, device: torch.device
) -> torch.Tensor:
    """Return total and weight of both losses, and whether random numbers were drawn."""
    if not isinstance(full, Loss):
        full = Loss(full, 0)
    numbers = (full.total, full.weight, part.total, part.weight, float(is_random))
    return torch.stack(
        [torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers]
    )
