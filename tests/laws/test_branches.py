# SPDX-License-Identifier: Apache-2.0
"""Ranks whose samples take different ways through a model train what one process trains."""

from functools import partial
from math import prod

import pytest
from hypothesis import event, given

import accelfn as af
from accelfn.testing import simulate
from tests.laws.branching_models import branchings
from tests.strategies import differences

pytestmark = pytest.mark.filterwarnings(  # of a skipped tower's input
    "ignore:FSDP2-wrapped module"
)


@given(run=branchings())
def test_ranks_run_other_layers(run):
    """Experts, heads and towers that ranks run in other orders, or not: right numbers, or an
    error on every rank before the optimizer runs; by replicas and by units of any kind.
    """
    may_raise = run.options["find_unused_parameters"] is False
    check(run, af.errors.UnusedParametersError if may_raise else ())


@given(run=branchings(syncs=True))
def test_ranks_normalize_in_other_layers(run):
    """`sync_batchnorm` in branches is right, or an error on every rank names the layers."""
    may_raise = run.options["find_unused_parameters"] is False
    unused = (af.errors.UnusedParametersError,) if may_raise else ()
    check(run, (*unused, af.errors.CollectiveMismatchError))


def check(run, raised):
    errors: list[af.errors.Error] = []
    size, told, found = prod(run.axes.values()), None, ()
    try:
        found = simulate(size, partial(run, errors=errors), axes=run.axes)
    except raised as error:
        event(f"{run.wrap} raises {type(error).__name__}")
        told = str(error)
    if told is not None:
        assert len(errors) == size
        assert "parameters" in told or "sync_batchnorm stage" in told
        return
    event(f"{run.wrap} trains")
    alone = run(af.World.single(device="cpu"), errors)
    for each in found:
        assert differences(alone, each, within=1e-12) == []
