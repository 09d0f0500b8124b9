# SPDX-License-Identifier: Apache-2.0
"""A compiled loss and recomputed activations change how a step runs, not what it does.

States whose loss is compiled are made once for all examples, with sizes as symbols: to
compile takes a second.
"""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from tests.laws.worlds import single
from tests.strategies import IN, LOSSES, OPTIMIZERS, OUT, differences, model, tensors

KINDS = st.sampled_from(["plain", "tied", "frozen", "unused", "norm", "dropout"])
CHAINS = {
    "alone": (),
    "clipped": (af.clip_grad_norm(0.25),),
    "apart": (af.autocast("fp16", init_scale=8.0),),
}


@functools.cache
def begun(kind: str, chain: str, *, compiled: bool) -> af.TrainState:
    """Return a state before its first update; those of one kind are equal."""
    by = af.compile(backend="aot_eager", dynamic=True) if compiled else None
    return af.TrainState.create(
        model=model(kind),
        optimizer=OPTIMIZERS["momentum"],
        setup=af.chain(by, *CHAINS[chain]),
        world=single(),
    )


@functools.cache
def gradients(loss: str) -> Any:
    return af.value_and_grad(LOSSES[loss])


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = functools.partial(
        torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return draw(count, IN), draw(count, OUT)


def updated(state, loss, updates):
    """Take updates, each of micro-batches of so many rows, from a copy of a state."""
    state, told = state.copy(), []
    for sizes in updates:
        into, seen = None, af.Metrics({})
        for i, size in enumerate(sizes):
            batch = rows(size, 10 * state.step + i)
            metrics, into = gradients(loss)(state, batch, into=into)
            seen = seen + metrics
        state = af.apply_grads(state, into)
        told.append({name: float(seen[name]) for name in seen})
    return state, told


updates = st.lists(
    st.lists(st.integers(4, 7), min_size=1, max_size=3), min_size=1, max_size=2
)


@pytest.mark.filterwarnings("ignore::accelfn.errors.RecompilationWarning")
@given(
    kind=KINDS,
    loss=st.sampled_from(sorted(LOSSES)),
    chain=st.sampled_from(sorted(CHAINS)),
    sizes=updates,
)
def test_compiling_changes_nothing(kind, loss, chain, sizes):
    """Parameters, buffers, optimizer and metrics are those of the plain step, to rounding."""
    plain, expected = updated(begun(kind, chain, compiled=False), loss, sizes)
    found, told = updated(begun(kind, chain, compiled=True), loss, sizes)
    assert differences(tensors(plain), tensors(found), within=1e-9) == []
    assert [each.keys() for each in expected] == [each.keys() for each in told]
    for one, two in zip(expected, told, strict=True):
        assert all(abs(one[name] - two[name]) <= 1e-9 for name in one)
