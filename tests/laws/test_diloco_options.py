# SPDX-License-Identifier: Apache-2.0
"""diloco goes on with other options from where it was finished."""

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.outer_by_hand import OUTER, ByHand, Values, close, moves, options


@given(
    moves=moves(),
    first=options(),
    then=options(),
    bits=st.tuples(*[st.sampled_from([32, 16, 8, 4])] * 2),
    outer=OUTER,
    cut=st.integers(0, 8),
)
def test_other_options_go_on_from_the_anchor(moves, first, then, bits, outer, cut):
    """After finalize a run has other options, the same anchor and the same outer momentum.

    To itself a rank sends nothing, so alone it may have any number of bits, too.
    """
    sgd = partial(torch.optim.SGD, nesterov=outer["momentum"] > 0, **outer)
    before, after = bits if moves.ranks == 1 else (32, 32)

    def train(world: af.World) -> Values:
        state = moves.state(world, af.diloco(outer=sgd, bits=before, **first))
        for _ in moves.slopes[:cut]:
            state = moves.step(state)
        state = af.finalize(state)
        state = state.with_setup(af.diloco(outer=sgd, bits=after, **then))
        for _ in moves.slopes[cut:]:
            state = moves.step(state)
        return dict(af.finalize(state).params)

    one, two = (
        {name: value for name, value in chosen.items() if name != "bucket_cap_mb"}
        for chosen in (first, then)
    )
    expected = ByHand(moves, **one, **outer)
    for _ in moves.slopes[:cut]:
        expected.update()
    expected.finish()
    expected.go_on(**two)
    for _ in moves.slopes[cut:]:
        expected.update()
    expected.finish()
    for rank, found in enumerate(simulate(moves.ranks, train)):
        assert close(found, expected.x[rank])
