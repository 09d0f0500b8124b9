# SPDX-License-Identifier: Apache-2.0
"""A mean over ranks is the same in any pieces, of tensors that lie in any way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import average_

LAYOUTS = {
    "in one piece": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "every other": lambda t: t.repeat_interleave(2, 3)[..., ::2],
}


@given(
    shapes=st.lists(
        st.tuples(
            st.tuples(*[st.integers(1, 3)] * 4), st.sampled_from(sorted(LAYOUTS))
        ),
        min_size=1,
        max_size=4,
    ),
    dtype=st.sampled_from(
        [torch.float64, torch.float32, torch.bfloat16, torch.complex64]
    ),
    weights=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    most=st.integers(1, 40) | st.none(),
)
def test_a_mean_is_that_of_all_in_any_pieces(shapes, dtype, weights, most):
    """By weight, in buffers of any size, larger and smaller than a tensor."""

    def given_to(rank: int) -> list[torch.Tensor]:
        draws = torch.Generator().manual_seed(rank)
        unit = 1 - 2j if dtype.is_complex else 1
        return [
            torch.randint(-8, 9, shape, generator=draws).to(dtype) * unit
            for shape, _ in shapes
        ]

    def train(world: af.World) -> list[torch.Tensor]:
        tensors = [
            LAYOUTS[layout](each)
            for each, (_, layout) in zip(given_to(world.rank), shapes, strict=True)
        ]
        cap = None if most is None else (most + 0.5) * dtype.itemsize / 2**20
        try:
            average_(
                tensors, weights[world.rank], world, label="mean", bucket_cap_mb=cap
            )
        except RuntimeError as error:
            pytest.fail(f"{shapes}: {error}")
        return tensors

    seen = weights if any(weights) else [1] * len(weights)
    wide = torch.promote_types(dtype, torch.float64)
    all_given = [given_to(rank) for rank in range(len(weights))]
    for found in simulate(len(weights), train):
        for number, each in enumerate(found):
            parts = [
                w * one[number].to(wide) for w, one in zip(seen, all_given, strict=True)
            ]
            expected = torch.stack(parts).sum(0) / sum(seen)
            eps = torch.finfo(dtype).eps
            assert torch.allclose(each.to(wide), expected, rtol=4 * eps, atol=4 * eps)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    most=st.integers(1, 40),
    size=st.integers(2, 4),
)
def test_a_mean_crosses_in_buffers_as_large_as_asked(lengths, most, size):
    """No larger ones, however large a tensor is; each has the weight beside its numbers."""

    def rank(world: af.World) -> None:
        given = [torch.full((n,), float(world.rank)) for n in lengths]
        cap = (most + 0.5) * 4 / 2**20
        found = af.all_reduce(given, world, "mean", weight=1, bucket_cap_mb=cap)
        assert [each.tolist() for each in found] == [
            [(size - 1) / 2] * n for n in lengths
        ]

    sent = [each.num_bytes // 4 for each in simulate(size, rank).log]
    assert max(sent) <= most + 1
    assert sum(sent) == sum(lengths) + len(sent)
