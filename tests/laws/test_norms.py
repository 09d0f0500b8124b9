# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients is that of the whole, wherever its parts lie."""

from math import inf, nan, prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import clip, fold_axes
from tests.laws.test_whole_tensors import AXES, Piece, cut

POWERS = 1.0, 2.0, 3.0, inf
pieces = st.lists(
    st.builds(
        Piece,
        st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple),
        st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
        st.tuples(*[st.sampled_from([0, 1, None])] * 2),
    ),
    min_size=1,
    max_size=4,
)


@example(  # of which the last rank has no element that is as wide as the norm
    given=[
        Piece((4,), torch.float32, (0, None)),
        Piece((1,), torch.float64, (0, None)),
    ],
    axes={"dp_shard": 2},
    wrong=[],
)
@example(  # cut along both axes, and along the first alone, where 1 has no half
    given=[Piece((n,), torch.float64, (0, 0)) for n in (0, 1)],
    axes={"dp_shard": 3, "tp": 2},
    wrong=[],
)
@example(  # of no elements
    given=[Piece((0,), torch.bfloat16, (None, None))], axes={"dp_shard": 2}, wrong=[]
)
@given(
    given=pieces,
    axes=st.sampled_from(AXES),
    wrong=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([nan, nan, -inf]))),
)
def test_the_norm_of_parts_is_that_of_the_whole(given, axes, wrong):
    """On every rank, of parts along any axes and whole tensors; finite if all of them are."""
    count = sum(prod(each.shape) for each in given)
    flat = torch.arange(count, dtype=torch.float64) % 7 - 3
    for place, value in wrong if count else ():
        flat[place % count] = value
    split = flat.split([prod(each.shape) for each in given])
    wholes = [
        t.to(each.dtype).view(each.shape) for t, each in zip(split, given, strict=True)
    ]
    sizes = dict(axes)
    sizes["dp_shard"] = axes.get("dp_shard", 1) * sizes.pop("cp", 1)

    def norms(world: af.World) -> list[torch.Tensor]:
        lying, parts = fold_axes(world), list[torch.Tensor]()
        for whole, each in zip(wholes, given, strict=True):
            cuts = each.cuts(sizes)
            parts.append(cut(whole, cuts, lying) if cuts else whole)
        return [clip._total_norm(parts, power) for power in POWERS]

    found = simulate(prod(axes.values()), norms, axes=axes).results
    for power, *each in zip(POWERS, *found, strict=True):
        assert len({norm.dtype for norm in each}) == 1
        assert each[0].dtype.itemsize >= 4  # of 16 bits, too, and of no elements
        expected = flat.norm(power) if count else torch.zeros(())
        if expected.isfinite():
            assert [*map(float, each)] == [
                pytest.approx(float(expected), rel=1e-6)
            ] * len(each)
        assert {bool(norm.isfinite()) for norm in each} == {bool(expected.isfinite())}
