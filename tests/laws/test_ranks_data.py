# SPDX-License-Identifier: Apache-2.0
"""The data of real ranks: one global order for every world, and honest lengths."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.processes import run_ranks
from tests.ranks import programs
from tests.strategies import Run, runs

pytestmark = pytest.mark.ranks(2)


@given(run=runs(), size=st.sampled_from([2, 4]), parts=st.integers(1, 3))
def test_global_order_does_not_depend_on_the_world(
    run: Run, size: int, parts: int
) -> None:
    """Batch by batch, the ranks' samples in rank order are those of one process."""
    setup = af.chain(af.shard_data(), af.accumulate(num_micro_batches=parts))
    alone = [
        [i for i, _ in zip(batch.indices.tolist(), batch.filler, strict=True)]
        for batch in af.batches(run.state(), epochs=1)
    ]
    split = run_ranks(size, programs.global_orders, attrs.evolve(run, setup=setup))
    for number, expected in enumerate(alone):
        found = []
        for rank in range(size):
            indices, filler = split[rank][number]
            padded = run.remainder == "pad"
            found += [
                i for i, f in zip(indices, filler, strict=True) if padded or not f
            ]
        if run.remainder == "short":
            assert found == expected
        else:  # padding is filler too; stand-ins of empty shares come on top
            assert set(found) == set(expected)
    assert {len(batches) for batches in split} == {len(alone)}
