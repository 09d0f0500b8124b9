# SPDX-License-Identifier: Apache-2.0
"""Attention to blocks of keys, joined, is attention to all of them."""

from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from hypothesis import example, given
from hypothesis import strategies as st

from tests.internals import Block, join, wide


@attrs.frozen
class Call:
    """A call of attention, and where its keys are cut."""

    num: tuple[int, int, int, int]
    shared_by: int
    features: int | None
    mask: str | None
    cuts: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    device: str = "cpu"

    def drawn(self) -> list[Any]:
        """Return query, key, value, mask and the gradient of what is seen."""
        samples, heads, queries, features = self.num
        keys, all_heads = sum(self.cuts), heads * self.shared_by
        of_values = self.features or features
        draw = torch.Generator().manual_seed(self.seed)
        shapes = [
            (samples, all_heads, queries, features),
            (samples, heads, keys, features),
            (samples, heads, keys, of_values),
            (samples, all_heads, queries, of_values),
        ]
        found = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
        if self.seed % 2:  # features do not lie side by side
            found = [each.mT.contiguous().mT for each in found]
        *three, upstream = (each.to(self.dtype) for each in found)
        mask = None
        if self.mask is not None:
            sizes = {"h": all_heads, "q": queries, "k": keys}
            shape = [sizes[dim] if dim in self.mask else 1 for dim in "hqk"]
            mask = torch.randn(1, *shape, generator=draw).to(self.dtype)
            hidden = torch.rand(mask.shape, generator=draw) < 0.4
            mask = mask.masked_fill(hidden, -torch.inf)
        return [*three, mask, upstream]


LIMITS = ((0, 2), (1, 2), (0, 5), (1, 9))
"""Of samples, heads, queries and features."""
calls = st.builds(
    Call,
    st.tuples(*(st.integers(least, top) for least, top in LIMITS)),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([None, None, 4]),
    st.sampled_from([None, "", "k", "qk", "hqk", "hq"]),
    st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
    st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
NEAR = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 0.04}
"""bfloat16 has 8 bits, and each block's result is rounded to it."""


def in_one_piece(call: Call, *, is_causal: bool) -> list[torch.Tensor]:
    """Return what torch's attention sees in 64 bits, and its gradients."""
    *given, upstream = (
        each if each is None else each.double() for each in call.drawn()
    )
    leaves = [each if each is None else each.requires_grad_() for each in given]
    seen = F.scaled_dot_product_attention(
        *leaves, is_causal=is_causal, scale=0.5, enable_gqa=call.shared_by > 1
    )
    asked = [leaf for leaf in leaves if leaf is not None]
    grads = torch.autograd.grad(seen, asked, upstream, materialize_grads=True)
    return [seen, *grads]


def in_blocks(call: Call, *, is_causal: bool) -> list[torch.Tensor]:
    query, key, value, mask, upstream = (
        each if each is None else each.to(call.device) for each in call.drawn()
    )
    ends = [sum(call.cuts[:n]) for n in range(len(call.cuts) + 1)]
    blocks = []
    for begin, end in pairwise(ends):
        part = mask
        if mask is not None and mask.shape[-1] > 1:
            part = mask[..., begin:end]
        keys, values = key[:, :, begin:end], value[:, :, begin:end]
        blocks.append(Block(query, keys, values, part, is_causal=is_causal, scale=0.5))
    (seen, lse), *rest = (tuple(map(wide, block.attend())) for block in blocks)
    for more, of_more in rest:
        join(seen, lse, more, of_more)
    seen = seen.to(call.dtype)
    found = [block.gradients(upstream, seen, lse) for block in blocks]
    query_grad = sum(wide(each[0]) for each in found)
    others = [torch.cat([each[i] for each in found], 2) for i in (1, 2)]
    if mask is None:
        return [seen, query_grad, *others]
    again = [block.gradients_with_mask(upstream, seen, lse) for block in blocks]
    for one, other in zip(found, again, strict=True):
        for ours, theirs in zip(one, other[:3], strict=True):
            torch.testing.assert_close(
                ours.double(), theirs.double(), rtol=0, atol=8 * NEAR[call.dtype]
            )
    of_products = torch.cat([each[3] for each in again], -1)
    return [seen, query_grad, *others, of_products.sum_to_size(mask.shape)]


def check(call: Call, *, is_causal: bool) -> None:
    near = NEAR[call.dtype]
    expected, found = (
        fn(call, is_causal=is_causal) for fn in (in_one_piece, in_blocks)
    )
    for whole, joined in zip(expected, found, strict=True):
        size = max([1.0, *whole.detach().abs().flatten().tolist()])
        found = joined.cpu().double()
        assert torch.allclose(found, whole, rtol=0, atol=near * size * 4)


@given(call=calls)
@example(Call((1, 1, 2, 3), 1, None, "k", (1, 1), torch.float64, 1))
def test_blocks_that_are_joined_are_attention_to_all(call):
    """What is seen and all gradients, by torch's kernel and by products, under any mask."""
    check(call, is_causal=False)


@given(call=calls, features=st.sampled_from([None, 4]))
def test_a_block_may_be_causal(call, features):
    """Where queries and keys are of the same positions."""
    queries = call.num[2]
    one = attrs.evolve(call, cuts=(queries,), mask=None, features=features)
    check(one, is_causal=True)


@pytest.mark.parametrize("features", [None, 4])
def test_who_sees_nothing_gets_nothing(features):
    """In no block: zeros, and gradients of zero, as torch has it."""
    call = Call((1, 1, 2, 3), 1, features, None, (1, 1), torch.float64, 0)
    query, key, value, _, upstream = call.drawn()
    mask = torch.full((1, 1, 2, 1), -torch.inf, dtype=torch.float64)
    one, other = (
        Block(query, keys, values, mask, is_causal=False, scale=1.0)
        for keys, values in zip(key.split(1, 2), value.split(1, 2), strict=True)
    )
    (seen, lse), (more, of_more) = one.attend(), other.attend()
    join(seen, lse, more, of_more)
    assert not seen.any()
    for gradient in one.gradients(upstream, seen, lse):
        assert not gradient.any()
