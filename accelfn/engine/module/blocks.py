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
            shares = (products - finite(lse)[..., None]).exp()
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
        query, key, value = kernel.gradients(self, upstream, seen, finite(lse))
        return query, self._summed(key), self._summed(value)

    def gradients_with_mask(
        self, upstream: torch.Tensor, seen: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of query, key and value, and of products before the mask."""
        upstream, seen, query = wide(upstream), wide(seen), wide(self.query)
        key, value = _shared(wide(self.key), self), _shared(wide(self.value), self)
        shares = (self._products() - finite(lse)[..., None]).exp()
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
        if self.mask is not None and self.mask.dtype is not self.query.dtype:
            return None  # nor does it go back from numbers of two dtypes
        if self.query.device.type == "cpu":
            return _OnHost
        if self.query.device.type != "cuda":
            return None
        is_fit = self.query.dtype in (torch.float16, torch.bfloat16)
        is_fit = is_fit and features % 8 == 0 and features <= 256 and self.mask is None
        return _OnCuda if is_fit and _has_flash(self.query.device) else None


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype in which blocks add up: float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def join(
    seen: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, lse_of_more: torch.Tensor
) -> None:
    """Weigh what was seen, in place, by what is seen in one block more."""
    both = torch.logaddexp(lse, lse_of_more)
    ours, theirs = (
        (each - finite(both)).exp()[..., None] for each in (lse, lse_of_more)
    )
    seen.mul_(ours).add_(more * theirs)
    lse.copy_(both)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Return 0 in the place of minus infinity, of which a difference would be no number."""
    return lse.masked_fill(lse == _NOTHING, 0.0)


def _has_flash(device: torch.device) -> bool:
    """Whether a GPU has the kernel, and nobody has switched it off."""
    cuda = torch.backends.cuda
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (
        8,
        0,
    )
    return cuda.flash_sdp_enabled() and not is_old


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
    three = block.query, _shared(block.key, block), _shared(block.value, block)
    # kernels take features to lie side by side, and do not look
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in three)
    return query, key, value


def _shared(each: torch.Tensor, block: Block) -> torch.Tensor:
    """Return keys or values for each head of the queries, some of which share them."""
    shared_by = block.query.shape[1] // each.shape[1]
    return each if shared_by == 1 else each.repeat_interleave(shared_by, 1)
