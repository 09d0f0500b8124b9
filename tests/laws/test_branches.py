# SPDX-License-Identifier: Apache-2.0
"""Ranks whose samples take different ways through a model train what one process trains."""

from functools import partial
from math import prod

import pytest
from hypothesis import event, given

import accelfn as af
from accelfn.testing import simulate
from tests.laws.branching_models import Branching, branchings
from tests.strategies import differences


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a skipped tower's input
@given(run=branchings())
def test_ranks_run_other_layers(run: Branching) -> None:
    """Experts, heads and towers that ranks run in other orders, or not: right numbers, or an
    error on every rank before the optimizer runs; by replicas and by units of any kind.
    """
    errors: list[af.Error] = []
    size = prod(run.axes.values())
    try:
        found = simulate(size, partial(run, errors=errors), axes=run.axes)
    except af.UnusedParametersError:
        event(f"{run.wrap} raises")
        assert not run.options["find_unused_parameters"]
        assert len(errors) == size
        return
    event(f"{run.wrap} trains")
    alone = run(af.World.single(device="cpu"), errors)
    for each in found:
        assert differences(alone, each, within=1e-12) == []
