# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is split over ranks: by heads (Ulysses), or in a ring."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, cast

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint, noop_context_fn

from accelfn import World
from accelfn.errors import LossError
from accelfn.plug import collectives, draws, tree

HEADS, POSITIONS = 1, 2
"""The dims of heads and positions in query, key and value."""


@attrs.frozen
class Attention:
    """The arguments of one call of `F.scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def three(self) -> dict[str, torch.Tensor]:
        """The query, key and value by name."""
        return {"query": self.query, "key": self.key, "value": self.value}

    def check_dims(self) -> None:
        """Raise unless query, key and value have a dim of heads.

        Raises:
            LossError: the dims of a tensor are not samples, heads, positions and features.
        """
        for name, tensor in self.three.items():
            if tensor.ndim != 4:
                msg = (
                    f"af.context_parallel: attention was called with a {name} of shape"
                    f" {tuple(tensor.shape)}; expected (samples, heads, positions, features)."
                )
                raise LossError(msg)

    def check_mask(self, *lengths: int) -> None:
        """Raise unless the mask has these numbers of query and key positions.

        Raises:
            LossError: the mask does not cover all positions of the unsplit sequence.
        """
        mask = self.attn_mask
        if mask is None:
            return
        ends = zip(mask.shape[-2:], lengths, strict=False)
        if mask.ndim < 2 or any(a not in (1, b) for a, b in ends):
            msg = (
                f"af.context_parallel: attn_mask has the shape {tuple(mask.shape)}, but ranks"
                f" attend to {lengths[0]} x {lengths[1]} positions. Pass is_causal=True, or a"
                " mask for all positions. accelfn splits tensors of the batch that have the dim"
                " seq_dim, so make the mask a buffer of the model, or give it fewer dims."
            )
            raise LossError(msg)


class Attending(TorchFunctionMode):
    """A torch function mode that replaces `F.scaled_dot_product_attention`."""

    def __init__(self, attend: Callable[[Attention], torch.Tensor]) -> None:
        """Initialize with the function that replaces attention."""
        super().__init__()
        self._attend, self._with_gradients = attend, False

    def __enter__(self) -> Self:
        """Enter the mode, and record whether gradients are enabled."""
        self._with_gradients = torch.is_grad_enabled()
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or the function that replaces attention."""
        del types
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if self._with_gradients and _may_run_again():
                _refuse_rerun()
            return self._attend(Attention(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            msg = (
                "af.context_parallel: nn.MultiheadAttention would see this rank's positions only."
                " Use linear layers and F.scaled_dot_product_attention instead."
            )
            raise LossError(msg)
        return func(*args, **kwargs)


def _may_run_again() -> bool:
    """Return whether the current layer may be inside torch's activation checkpointing."""
    hooks = cast("Any", torch)._C._autograd
    ignore_is_tracing = True
    is_hooked = hooks._top_saved_tensors_default_hooks(ignore_is_tracing) is not None
    return is_hooked or not torch.is_grad_enabled()


_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def _refuse_rerun() -> None:
    """Raise in a layer that torch would run a second time outside of this mode.

    torch's activation checkpointing runs a layer again in the backward pass. Two kinds of layers
    are allowed. Layers without gradients, such as a teacher's, run only once.
    `af.checkpoint_activations` enters this mode again for the second run.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__ or (
            frame.f_code is _CHECKPOINT
            and frame.f_locals["context_fn"] is noop_context_fn
        ):
            msg = (
                "af.context_parallel: an attention layer runs under torch.utils.checkpoint, which"
                " would run it again with only the positions of this rank. Turn that off (in a"
                " Transformers model: model.gradient_checkpointing_disable()), and add"
                " af.checkpoint_activations() to the setup instead."
            )
            raise LossError(msg)
        frame = frame.f_back


# Attention over split sequences, each rank with all positions of some heads (Ulysses).
#
# Before attention, an all-to-all gives each rank all positions of its heads. After attention,
# an all-to-all reverses the exchange. All other operations work position by position.


def attend_by_heads(ranks: World, attention: Attention) -> torch.Tensor:
    """Return the result of attention for this rank's positions, computed by heads.

    Args:
        ranks: the ranks that share a sequence, in order.
        attention: the call of attention with this rank's positions.

    Raises:
        LossError: the number of ranks does not divide the number of heads, or a mask does
        not have all positions.
    """
    attention.check_dims()
    for name, tensor in attention.three.items():
        if tensor.shape[HEADS] % ranks.size:
            msg = (
                f"af.context_parallel: the {name} of shape {tuple(tensor.shape)} has"
                f" {tensor.shape[HEADS]} heads, which cannot be divided among {ranks.size}"
                ' ranks along "cp". Use a number of ranks that divides the number of heads,'
                " or af.context_parallel(ring=True), which does not split heads."
            )
            raise LossError(msg)
    query, key, value = _exchange(ranks, (HEADS, POSITIONS), *attention.three.values())
    attention.check_mask(query.shape[POSITIONS], key.shape[POSITIONS])
    mask = attention.attn_mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask.chunk(ranks.size, -3)[ranks.rank]
    options = attrs.asdict(attention, recurse=False)
    options |= {"query": query, "key": key, "value": value, "attn_mask": mask}
    output = F.scaled_dot_product_attention(**options)
    return _exchange(ranks, (POSITIONS, HEADS), output)[0]


class _Exchange(torch.autograd.Function):
    """An all-to-all that splits tensors along `dims[0]` and joins them along `dims[1]`.

    The tensors have one dtype. The backward pass is the reverse exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, ranks: World, dims: tuple[int, int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.dims = ranks, dims
        split_dim, cat_dim = dims
        num = ranks.size
        rows = [torch.stack(tensor.chunk(num, split_dim)) for tensor in tensors]
        outgoing = torch.cat([row.reshape(num, -1) for row in rows], dim=1)
        got = torch.empty_like(outgoing)
        with collectives.naming("context_parallel: heads for positions", ranks):
            dist.all_to_all_single(got, outgoing, group=ranks.group)
        parts = got.split([row[0].numel() for row in rows], dim=1)
        return tuple(
            torch.cat([*part.reshape(row.shape)], dim=cat_dim)
            for part, row in zip(parts, rows, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        split_dim, cat_dim = ctx.dims
        return None, None, *_exchange(ctx.ranks, (cat_dim, split_dim), *gradients)


_exchange: Any = _Exchange.apply


# Blockwise attention: attention to a block of keys, and combining the results of blocks.
#
# Each block returns its result and the logarithm of the sum of exponentials (`lse`). The `lse`
# gives the weights to combine the results of several blocks (Milakov and Gimelshein 2018,
# "Online normalizer calculation for softmax"). The gradients of a block follow from the result
# and the `lse` of all blocks together (Dao et al. 2022, "FlashAttention").
#
# Where possible, torch's internal kernels compute the result and the `lse`, because torch's
# public attention function does not return the `lse`.


_aten: Any = torch.ops.aten
_NOTHING = -math.inf
"""The `lse` of a query without keys."""


@attrs.frozen
class Block:
    """Queries, with a block of keys and values that they attend to.

    Attributes:
        mask: a mask of four dims that is added to the scores, or None.
        is_causal: whether queries attend only to keys up to their own position.
        scale: the factor of the scores.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    scale: float

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each query's result, and its log-sum-exp of scores (`lse`)."""
        if not self._has_kernel():
            products = self._products()
            lse = products.logsumexp(-1)
            shares = (products - finite(lse)[..., None]).exp()
            return shares @ self._expand_heads(tree.wide(self.value)), lse
        three, options = self._of_each_head()
        if not self.query.is_cpu:
            return _aten._scaled_dot_product_flash_attention(*three, **options)[:2]
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *three, **options, attn_mask=self.mask
        )
        if self.mask is None:
            return output, lse
        sees = (self.mask != _NOTHING).any(-1)
        return output, lse.masked_fill(~sees, _NOTHING)

    def gradients(
        self, upstream: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key and value.

        Args:
            upstream: the gradient of the result of all blocks.
            output: the result of all blocks together.
            lse: the `lse` of all blocks together.
        """
        if not self._has_kernel():
            return self.gradients_with_mask(upstream, output, lse)[:3]
        three, options = self._of_each_head()
        inputs: Any = (upstream, *three, output, finite(lse).contiguous())
        if self.query.is_cpu:
            kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
            options["attn_mask"] = self.mask
        else:
            kernel = _aten._scaled_dot_product_flash_attention_backward
            # cumulative lengths: only batches of sequences of different lengths have them
            inputs += (None, None, self.query.shape[2], self.key.shape[2])
            none_drawn = torch.zeros((), dtype=torch.int64, device=output.device)
            options |= {"philox_seed": none_drawn, "philox_offset": none_drawn}
        query, key, value = kernel(*inputs, dropout_p=0.0, **options)
        return query, self._sum_heads(key), self._sum_heads(value)

    def gradients_with_mask(
        self, upstream: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key, value, and of the scores before masking."""
        upstream, output, query = map(tree.wide, (upstream, output, self.query))
        key, value = (self._expand_heads(tree.wide(t)) for t in (self.key, self.value))
        shares = (self._products() - finite(lse)[..., None]).exp()
        through = upstream @ value.mT - (upstream * output).sum(-1, keepdim=True)
        products = shares * through
        return (
            products @ key * self.scale,
            self._sum_heads(products.mT @ query * self.scale),
            self._sum_heads(shares.mT @ upstream),
            products,
        )

    def _products(self) -> torch.Tensor:
        key = self._expand_heads(tree.wide(self.key))
        products = tree.wide(self.query) @ key.mT * self.scale
        if self.mask is not None:
            products = products + self.mask
        if self.is_causal:
            causal = torch.ones(products.shape[-2:], dtype=torch.bool).tril()
            products = products.masked_fill(~causal.to(products.device), _NOTHING)
        return products

    def _sum_heads(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum a gradient over the query heads that share the same keys or values."""
        return gradient.unflatten(1, (self.key.shape[1], -1)).sum(2)

    def _expand_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Repeat keys or values for all query heads that share them (GQA)."""
        shared_by = self.query.shape[1] // tensor.shape[1]
        return tensor if shared_by == 1 else tensor.repeat_interleave(shared_by, 1)

    def _of_each_head(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return query, key and value for a kernel of torch, and the kernel's options."""
        three = map(self._expand_heads, (self.query, self.key, self.value))
        options = {"is_causal": self.is_causal, "scale": self.scale}
        # kernels need contiguous features, but do not check it
        return [t if t.stride(-1) == 1 else t.contiguous() for t in three], options

    def _has_kernel(self) -> bool:
        """Return whether torch has a kernel: on the CPU, or for 16 bits without a mask."""
        query, mask, features = self.query, self.mask, self.query.shape[-1]
        if features != self.value.shape[-1] or not query.numel() * self.key.numel():
            return False  # kernels crash on empty sequences
        if query.is_cpu:  # the kernel's backward pass does not support two dtypes
            return mask is None or mask.dtype is query.dtype
        is_fit = query.dtype in (torch.float16, torch.bfloat16) and mask is None
        is_fit = is_fit and features % 8 == 0 and features <= 256
        return is_fit and query.is_cuda and _has_flash(query.device)


def join(
    output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, its_lse: torch.Tensor
) -> None:
    """Combine the result of one more block with an earlier result, in place."""
    total_lse = torch.logaddexp(lse, its_lse)
    ours, theirs = ((x - finite(total_lse)).exp()[..., None] for x in (lse, its_lse))
    output.mul_(ours).add_(more * theirs)
    lse.copy_(total_lse)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Replace minus infinity by 0, so that a difference of two values is not NaN."""
    return lse.masked_fill(lse == _NOTHING, 0.0)


def _has_flash(device: torch.device) -> bool:
    """Return whether a GPU supports the flash kernel, and torch has enabled it."""
    cuda = torch.cuda
    is_old = cuda.is_available() and cuda.get_device_capability(device) < (8, 0)
    return torch.backends.cuda.flash_sdp_enabled() and not is_old


# A ring of ranks: each rank sends its current tensors to the next rank while it computes with them.


def owners(ranks: World) -> list[int]:
    """Return the ranks that own the tensors which a ring brings to this rank, in that order.

    This rank is first, because it starts with its own tensors.
    """
    return [(ranks.rank - hop) % ranks.size for hop in range(ranks.size)]


def pass_ring(
    tensors: Sequence[torch.Tensor], ranks: World
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pass tensors around a ring; yield every rank's tensors, in the order of `owners`.

    While the caller uses the yielded tensors, the next tensors are already being sent.

    Args:
        tensors: tensors of one dtype, with the same shapes on all ranks.
        ranks: the ranks of the ring.
    """
    current = _flat(tensors)
    for _ in range(ranks.size - 1):
        receive = _start_step(current, ranks)
        yield _split_flat(current, tensors)
        current = receive()
    yield _split_flat(current, tensors)


def _start_step(outgoing: torch.Tensor, ranks: World) -> Callable[[], torch.Tensor]:
    """Send a vector to the next rank; return a function that receives the previous rank's."""
    size = ranks.size
    leaving, coming = [0] * size, [0] * size
    leaving[(ranks.rank + 1) % size] = len(outgoing)
    coming[(ranks.rank - 1) % size] = len(outgoing)
    got, among = torch.empty_like(outgoing), {"group": ranks.group, "async_op": True}
    begin = partial(dist.all_to_all_single, got, outgoing, coming, leaving, **among)
    wait = collectives.start(
        begin, "context_parallel: keys and values round a ring", ranks
    )

    def receive() -> torch.Tensor:
        wait()
        return got

    return receive


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _split_flat(
    flat: torch.Tensor, like: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Split a vector into views with the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return tuple(p.view(tensor.shape) for p, tensor in zip(parts, like, strict=True))


# Attention over split sequences, with keys and values passed around a ring of ranks.
#
# Each rank keeps its queries, and passes keys and values to the next rank, until every query
# has been combined with all keys. In the backward pass, keys and values go around the ring once
# more, followed by the gradients of keys and values.
#
# Under a causal mask, early positions attend to few keys and late positions to many. So each
# rank has one piece from the start and one piece from the end of the sequence. Then, with the
# keys of each of the other ranks, it computes half of the scores between all its queries and
# all these keys, so all ranks have equal work (the order of "zigzag" ring attention).


_ALL = slice(None)


def attend_in_ring(ranks: World, attention: Attention) -> torch.Tensor:
    """Return the result of attention for this rank's positions, computed in a ring.

    Args:
        ranks: the ranks that share a sequence, in order.
        attention: the call of attention with this rank's positions.

    Raises:
        LossError: numbers of heads or samples differ, a mask does not have all positions,
        or attention has dropout.
    """
    for problem in _ring_problems(attention):
        msg = f"af.context_parallel(ring=True): {problem}"
        raise LossError(msg)
    three = [_as_autocast(tensor) for tensor in attention.three.values()]
    scale = attention.scale
    scale = three[0].shape[-1] ** -0.5 if scale is None else scale
    masks = _ring_masks(attention, three[0].dtype, ranks)
    how = ranks, attention.is_causal, scale
    return cast("Any", _Attention).apply(how, *three, *masks)


def _ring_masks(
    attention: Attention, dtype: torch.dtype, ranks: World
) -> list[torch.Tensor | None]:
    """Return one mask for each rank, in the order of `owners`; None means no mask.

    A mask is for this rank's queries and the keys of the other rank (or its own keys).
    """
    query, key, mask = attention.query, attention.key, attention.attn_mask
    if mask is None:
        return [None] * ranks.size
    lengths = (tensor.shape[POSITIONS] * ranks.size for tensor in (query, key))
    attention.check_mask(*lengths)
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, _NOTHING).to(dtype)
    mask = _as_autocast(mask)[(None,) * (4 - mask.ndim)]
    rows = _of_pieces(mask, -2, ranks.rank, ranks.size)
    # a mask may have large finite numbers, such as -1e9, instead of -inf. Subtract each row's
    # maximum, because an `lse` near -1e9 would lose the scores in rounding
    if rows.shape[-1]:
        rows = rows - finite(rows.detach().amax(-1, keepdim=True))
    return [_of_pieces(rows, -1, owner, ranks.size) for owner in owners(ranks)]


def ring_pieces(rank: int, size: int) -> tuple[int, int]:
    """Return the indices of a rank's two pieces of a sequence, in order."""
    return rank, 2 * size - 1 - rank


def _of_pieces(mask: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    if mask.shape[dim] == 1:
        return mask
    chunks = mask.chunk(2 * size, dim)
    return torch.cat([chunks[piece] for piece in ring_pieces(rank, size)], dim)


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to the dtype that autocast uses for attention."""
    kind = tensor.device.type
    if tensor.dtype is torch.float64 or not is_autocast_available(kind):
        return tensor
    is_enabled = torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if is_enabled else tensor


def _ring_problems(attention: Attention) -> Iterator[str]:
    """Yield a message for each reason why a ring cannot compute attention."""
    attention.check_dims()
    query, key, value = attention.three.values()
    if attention.dropout_p:
        yield (
            "a ring has no dropout, but attention was called with"
            f" dropout_p={attention.dropout_p:g}. Set dropout_p=0, or leave out ring=True."
        )
    if attention.is_causal and attention.attn_mask is not None:
        yield (
            "attention was called with both attn_mask and is_causal=True. Pass only one of the"
            " two: a mask can also hide later positions."
        )
    shared_by, rest = divmod(query.shape[HEADS], max(key.shape[HEADS], 1))
    is_fit = rest == 0 and (shared_by == 1 or attention.enable_gqa)
    is_fit = is_fit and key.shape[: POSITIONS + 1] == value.shape[: POSITIONS + 1]
    if not is_fit or query.shape[0] != key.shape[0]:
        yield (
            f"the query of shape {tuple(query.shape)} does not fit the key of"
            f" {tuple(key.shape)} and the value of {tuple(value.shape)}. They must have equal"
            " numbers of samples and heads, and key and value equal numbers of positions. With"
            " enable_gqa=True, the query may have a multiple of the heads."
        )
    num_queries, num_keys = query.shape[POSITIONS], key.shape[POSITIONS]
    has_places = attention.is_causal or attention.attn_mask is not None
    is_odd = has_places and (num_queries % 2 or num_keys % 2)
    if is_odd or (attention.is_causal and num_queries != num_keys):
        yield (
            f"attention was called with {num_queries} queries and {num_keys} keys on this rank."
            " With a mask or is_causal=True both numbers must be even, and with is_causal=True"
            " they must be equal. Pass one query and one key for each position of this rank's"
            " part."
        )


def _blocks(
    how: tuple[World, bool, float], query: torch.Tensor, *tensors: Any
) -> Iterator[tuple[Block, slice, slice]]:
    """Yield a block of this rank's queries and a rank's keys, in the order of `owners`.

    With each block, yield slices of the queries in the block, and of the keys that they attend
    to. Without a causal mask, all queries attend to all keys. With a causal mask, both pieces of
    this rank attend to the first piece of an earlier rank. Both pieces of a later rank are
    between the two pieces of this rank, so only this rank's second piece attends to them. The
    block of a rank's own keys is causal.

    Args:
        how: the ranks, whether attention is causal, and the factor of the scores.
        query: this rank's queries.
        *tensors: this rank's keys and values, and a mask or None for each rank.
    """
    ranks, is_causal, scale = how
    key, value, *masks = tensors
    half = query.shape[POSITIONS] // 2
    ring = pass_ring((key, value), ranks)
    for owner, pair, mask in zip(owners(ranks), ring, masks, strict=True):
        rows = slice(half, None) if is_causal and owner > ranks.rank else _ALL
        columns = slice(half) if is_causal and owner < ranks.rank else _ALL
        keys, values = (part[:, :, columns] for part in pair)
        is_own = is_causal and owner == ranks.rank
        block = Block(query[:, :, rows], keys, values, mask, is_own, scale)
        yield block, rows, columns


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, how: Any, *tensors: Any) -> torch.Tensor:
        query, key, value, *masks = tensors
        blocks = _blocks(how, *tensors)
        with _plainly(query):
            first, *_ = next(blocks)  # this rank's own keys, with all queries
            output, lse = map(tree.wide, first.attend())
            for block, rows, _ in blocks:
                result = map(tree.wide, block.attend())
                join(output[:, :, rows], lse[:, :, rows], *result)
        output = output.to(query.dtype)
        ctx.how = how
        ctx.save_for_backward(query, key, value, output, lse, *masks)
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: torch.Tensor
    ) -> Any:
        query, key, value, output, lse, *masks = ctx.saved_tensors
        ranks: World = ctx.how[0]
        of_query = torch.zeros_like(tree.wide(query))
        # sums that go around the ring: each rank adds to them, and they end at their owner
        like = tree.wide(key), tree.wide(value)
        receive: Callable[[], torch.Tensor] = partial(torch.zeros_like, _flat(like))
        of_masks: list[torch.Tensor | None] = []
        needs_grad = ctx.needs_input_grad[-ranks.size :]
        blocks = _blocks(ctx.how, query, key, value, *masks)
        with _plainly(query):
            for (block, rows, columns), needs in zip(blocks, needs_grad, strict=True):
                parts = (part[:, :, rows] for part in (upstream, output, lse))
                if needs:
                    *three, of_products = block.gradients_with_mask(*parts)
                    mask = cast("torch.Tensor", block.mask)
                    of_masks.append(of_products.sum_to_size(mask.shape))
                else:
                    three = block.gradients(*parts)
                    of_masks.append(None)
                of_query[:, :, rows] += three[0]
                sums = receive()
                for total, part in zip(_split_flat(sums, like), three[1:], strict=True):
                    total[:, :, columns] += part
                receive = _start_step(sums, ranks)
        results = (of_query, *_split_flat(receive(), like), *of_masks)
        gradients = zip(results, (query, key, value, *masks), strict=True)
        return None, *(g if g is None else g.to(like.dtype) for g, like in gradients)


def _plainly(tensor: torch.Tensor) -> Any:
    """Return a context without autocast, on the tensor's device."""
    kind = tensor.device.type
    has_autocast = is_autocast_available(kind)  # the meta device has no autocast
    return torch.autocast(kind, enabled=False) if has_autocast else draws.NOTHING
