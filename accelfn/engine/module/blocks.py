# SPDX-License-Identifier: Apache-2.0
"""Attention to a block of keys, with what it takes to join it to that to other blocks.

Beside what queries see in a block there is the logarithm of the sum of their exponentials
(`lse`), by which the results of several blocks are weighed (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"). The gradients of a block follow from the result
and the `lse` of all blocks together (Dao et al. 2022, "FlashAttention").

torch's own kernels compute both where they can: its public attention does not return `lse`.
"""

import math
from typing import Any, TypeAlias

import attrs
import torch

Three: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_aten: Any = torch.ops.aten
_NOTHING = -math.inf
"""The `lse` of a query that sees nothing."""


@attrs.frozen
class Block:
    """Queries, and the keys and values that they may see.

    Attributes:
        mask: what is added to products, of four dims; or None.
        is_causal: whether a query sees no key behind its own place.
        scale: what products are multiplied by.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    scale: float

    def attended(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each query sees, and its `lse`."""
        kernel = self._kernel()
        if kernel is None:
            products = self._products()
            lse = products.logsumexp(-1)
            shares = (products - _finite(lse)[..., None]).exp()
            return shares @ _shared(wide(self.value), self), lse
        seen, lse = kernel.attended(self)
        if self.mask is None:
            return seen, lse
        sees = (self.mask != _NOTHING).any(-1)
        return seen, lse.masked_fill(~sees, _NOTHING)

    def gradients(
        self, upstream: torch.Tensor, seen: torch.Tensor, lse: torch.Tensor
    ) -> Three:
        """Return the gradients of query, key and value.

        Args:
            upstream: that of what is seen.
            seen: in all blocks together.
            lse: of all blocks together.
        """
        kernel = self._kernel()
        if kernel is None:
            return self.gradients_with_mask(upstream, seen, lse)[:3]
        query, key, value = kernel.gradients(self, upstream, seen, _finite(lse))
        return query, self._summed(key), self._summed(value)

    def gradients_with_mask(
        self, upstream: torch.Tensor, seen: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of query, key and value, and of products before the mask."""
        upstream, seen, query = wide(upstream), wide(seen), wide(self.query)
        key, value = _shared(wide(self.key), self), _shared(wide(self.value), self)
        shares = (self._products() - _finite(lse)[..., None]).exp()
        through = upstream @ value.mT - (upstream * seen).sum(-1, keepdim=True)
        products = shares * through
        return (
            products @ key * self.scale,
            self._summed(products.mT @ query * self.scale),
            self._summed(shares.mT @ upstream),
            products,
        )

    def _products(self) -> torch.Tensor:
        products = wide(self.query) @ _shared(wide(self.key), self).mT * self.scale
        if self.mask is not None:
            products = products + self.mask
        if self.is_causal:
            seen = torch.ones(products.shape[-2:], dtype=torch.bool).tril()
            products = products.masked_fill(~seen.to(products.device), _NOTHING)
        return products

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of keys or values from that for each head."""
        return gradient.unflatten(1, (self.key.shape[1], -1)).sum(2)

    def _kernel(self) -> "type[_OnHost | _OnCuda] | None":
        features = self.query.shape[-1]
        if (
            features != self.value.shape[-1]
            or not self.query.numel() * self.key.numel()
        ):
            return None  # of empty sequences a kernel ends the process
        if self.query.device.type == "cpu":
            return _OnHost
        is_fit = self.query.dtype in (torch.float16, torch.bfloat16)
        is_fit = is_fit and features % 8 == 0 and features <= 256 and self.mask is None
        return _OnCuda if self.query.device.type == "cuda" and is_fit else None


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype in which blocks add up: float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def join(
    seen: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, lse_of_more: torch.Tensor
) -> None:
    """Weigh what was seen, in place, by what is seen in one block more."""
    both = torch.logaddexp(lse, lse_of_more)
    ours, theirs = (
        (each - _finite(both)).exp()[..., None] for each in (lse, lse_of_more)
    )
    seen.mul_(ours).add_(more * theirs)
    lse.copy_(both)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Return 0 for a query that sees nothing: its exponentials are 0 then, and no NaN."""
    return lse.masked_fill(lse == _NOTHING, 0.0)


class _OnHost:
    """torch's kernel for the CPU."""

    @staticmethod
    def attended(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            *_of_each_head(block),
            is_causal=block.is_causal,
            attn_mask=block.mask,
            scale=block.scale,
        )

    @staticmethod
    def gradients(
        block: Block, upstream: torch.Tensor, seen: torch.Tensor, lse: torch.Tensor
    ) -> Three:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream,
            *_of_each_head(block),
            seen,
            lse.contiguous(),
            0.0,
            block.is_causal,
            attn_mask=block.mask,
            scale=block.scale,
        )


class _OnCuda:
    """torch's kernel for GPUs: 16 bits, without a mask."""

    @staticmethod
    def attended(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        seen, lse, *_ = _aten._scaled_dot_product_flash_attention(
            *_of_each_head(block), is_causal=block.is_causal, scale=block.scale
        )
        return seen, lse

    @staticmethod
    def gradients(
        block: Block, upstream: torch.Tensor, seen: torch.Tensor, lse: torch.Tensor
    ) -> Three:
        none_drawn = torch.zeros((), dtype=torch.int64, device=seen.device)
        return _aten._scaled_dot_product_flash_attention_backward(
            upstream,
            *_of_each_head(block),
            seen,
            lse.contiguous(),
            *(None, None),  # where sequences of several lengths begin
            *(block.query.shape[2], block.key.shape[2]),
            0.0,
            block.is_causal,
            *(none_drawn, none_drawn),
            scale=block.scale,
        )


def _of_each_head(block: Block) -> Three:
    return block.query, _shared(block.key, block), _shared(block.value, block)


def _shared(each: torch.Tensor, block: Block) -> torch.Tensor:
    """Return keys or values for each head of the queries, some of which share them."""
    shared_by = block.query.shape[1] // each.shape[1]
    return each if shared_by == 1 else each.repeat_interleave(shared_by, 1)
