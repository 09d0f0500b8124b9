# SPDX-License-Identifier: Apache-2.0
"""A split model's step is the loop that torch's tutorial on `fully_shard` writes by hand."""

from math import isclose, prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from accelfn.testing import simulate
from tests.laws.fully_sharded import CALLS, OPTIMIZERS, Loop, both
from tests.laws.split_models import AXES
from tests.strategies import differences

dtypes = st.sampled_from([None, None, torch.float32, torch.bfloat16])
options = st.fixed_dictionaries(
    {
        "reshard_after_forward": st.booleans(),
        "gather_dtype": dtypes,
        "reduce_dtype": dtypes,
        "keep_grads": st.sampled_from(["whole", "sharded"]),
    }
)
loops = st.builds(
    Loop,
    st.sampled_from(sorted(OPTIMIZERS)),
    micro=st.sampled_from([1, 2, 4]),  # by which a division is exact
    clip=st.sampled_from([None, None, 0.1]),
    options=options,
    dtype=st.sampled_from([torch.float64, torch.float32]),
    call=st.sampled_from(sorted(CALLS)),
)


@example(
    loop=Loop(
        "sgd",
        1,
        None,
        {
            "reshard_after_forward": True,
            "gather_dtype": torch.bfloat16,
            "reduce_dtype": None,
            "keep_grads": "whole",
        },
        call="by name",
    ),
    axes=AXES[0],
)
@given(loop=loops, axes=st.sampled_from([AXES[0], AXES[2], AXES[6]]))
def test_a_step_is_that_of_the_tutorial(loop, axes):
    """Bitwise, of equal shares, in any dtypes and axes, with micro-batches, however the model
    is called; up to rounding where a norm is clipped.
    """
    eps = torch.finfo(loop.dtype).eps

    def fn(world):
        try:
            ours, theirs, (loss, by_hand) = both(world, loop)
        except RuntimeError as error:
            if "same dtype" in str(error):
                pytest.fail(str(error))
            raise
        for one, other in zip(ours, theirs, strict=True):
            within = 0.0 if loop.clip is None else 64 * eps
            assert differences(other, one, within=within) == []
        assert isclose(loss, by_hand, rel_tol=64 * eps)

    simulate(prod(axes.values()), fn, axes=axes)
