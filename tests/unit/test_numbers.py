# SPDX-License-Identifier: Apache-2.0
"""Numbers and inputs that are wrong, or odd: rows N1 to N14 of the catalogue of faults."""

import copy
import functools
import math
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import (
    BatchError,
    GradsError,
    ModelError,
    NonFiniteGradsError,
    OptimizerError,
)
from accelfn.testing import assert_states_equal, simulate

DDP = af.chain(af.shard_data(), af.wrap_ddp())
SGD = functools.partial(torch.optim.SGD, lr=0.5)


def create(setup: object = None, model: Any = None, **options: Any) -> af.TrainState:
    return af.TrainState.create(
        model=model or (lambda: nn.Linear(2, 1)),
        optimizer=options.pop("optimizer", SGD),
        setup=setup,
        **options,
    )


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


ROWS = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize("tolerant", [True, False])
def test_n1_one_element_on_one_rank(tolerant):
    """N1: all ranks skip, or all raise; the parameter, the rank and the update are named."""

    def run(world):
        skip = af.skip_nonfinite(max_consecutive=int(tolerant))
        state = create(af.chain(DDP, skip), world=world)
        rows = ROWS.clone()
        if world.rank == 1:
            rows[0, 0] = math.nan
        if tolerant:
            state, metrics = af.make_step(mean_loss)(state, rows)
            assert (state.step, state.num_skipped, metrics["skipped"]) == (0, 1, 1)
            return
        with pytest.raises(NonFiniteGradsError) as caught:
            af.make_step(mean_loss)(state, rows)
        assert "update 0" in str(caught.value)
        assert "rank 1: 2 (weight, bias); its loss is not finite" in str(caught.value)

    simulate(2, run)


@pytest.mark.parametrize("clip", [af.clip_grad_norm(1.0), af.clip_grad_value(1.0)])
def test_n2_sparse_gradients(clip):
    """N2: what torch cannot clip is refused by name; the state is as it was, and trains."""
    table = functools.partial(nn.EmbeddingBag, 5, 3, sparse=True, mode="sum")
    state, rows = create(clip, table), torch.tensor([[0, 1], [1, 3]])
    with pytest.raises(GradsError, match="'weight' is sparse"):
        af.make_step(mean_loss)(state, rows)
    af.make_step(mean_loss)(state.with_setup(None), rows)


class Odd(nn.Module):
    """A model with parameters that no optimizer can move, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.phase = nn.Parameter(torch.tensor([3.0 + 4.0j, 1.0j]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows * self.phase).abs().square()


@pytest.mark.parametrize(
    "reducing", [DDP, af.chain(af.shard_data(), af.local_sgd(sync_every=1))]
)
def test_n6_integers_and_complex_numbers(reducing):
    """N6: integers and booleans stay; complex numbers are averaged, and normed by their size."""

    def run(world):
        setup = af.chain(reducing, af.clip_grad_norm(math.inf))
        state = create(setup, Odd, world=world)
        rows = ROWS if world.size == 1 else ROWS[world.rank * 2 :][:2]
        state, metrics = af.make_step(mean_loss)(state, rows / 8)
        assert metrics["grad_norm"] > 0
        return {n: p.clone() for n, p in af.finalize(state).params.items()}

    def mean_loss(model, rows):
        return model(rows).mean()

    (alone,) = simulate(1, run).results
    for found in simulate(2, run).results:
        assert torch.equal(found["table"], torch.arange(3))
        assert torch.equal(found["mask"], torch.tensor([True, False]))
        assert torch.allclose(found["phase"], alone["phase"])


@pytest.mark.parametrize("count", [2**31, 2**53 + 1, 2**63 - 2])
def test_n7_huge_counts(count, tmp_path):
    """N7: a step and a cursor below 2**63 are saved, loaded, and counted on."""
    cursor = attrs.evolve(create().cursor, epoch=count)
    state = attrs.evolve(create(), step=count, num_skipped=count, cursor=cursor)
    af.save(state, tmp_path / "at")
    loaded = af.load(create(), tmp_path / "at")
    assert_states_equal(state, loaded)
    loaded, _ = af.make_step(mean_loss)(loaded, ROWS)
    assert (loaded.step, loaded.num_skipped) == (count + 1, count)


@attrs.frozen
class Pair:
    rows: torch.Tensor
    label: str


class Named(NamedTuple):
    rows: torch.Tensor
    label: str


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (["a", None, ROWS], lambda b: b[2]),
        ({"rows": [ROWS], "label": "x"}, lambda b: b["rows"][0]),
        (Pair(ROWS, "x"), lambda b: b.rows),
        (Named(ROWS, "x"), lambda b: b.rows),
        ((np.asarray(ROWS), 3), lambda b: torch.as_tensor(b[0])),
        ("text", lambda _: ROWS),
        (None, lambda _: ROWS),
    ],
)
def test_n10_batches_of_any_kind(batch, rows):
    """N10: what is no tensor reaches the loss as it was given, the very object."""
    seen = []

    def loss(model, value):
        seen.append(value)
        return model(rows(value)).sum()

    af.make_step(loss)(create(), batch)
    assert seen[0] is batch


def test_n10_ragged_batches():
    """N10: tensors of different numbers of rows are not split, and the numbers are said."""
    with pytest.raises(BatchError, match=r"4.*3|3.*4"):
        af.micro_batches({"x": ROWS, "y": torch.zeros(3)}, 2)


def test_a_model_belongs_to_one_state():
    """An instance, or a factory that gives the same modules again, is refused the second time."""
    net = nn.Linear(2, 1)
    with pytest.raises(OptimizerError):
        create(model=net, optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0))
    copied, weight = copy.deepcopy(net), net.weight
    create(model=net)  # an attempt that failed has not taken it
    with pytest.raises(ModelError, match="it already belongs to the state 'state'"):
        create(model=net)
    create(model=copied)
    copied = nn.Linear(2, 1)
    copied.weight = weight
    with pytest.raises(ModelError, match="already belong to another state: weight"):
        create(model=copied)
    shared = functools.partial(nn.Sequential, nn.Linear(2, 1))
    with pytest.raises(ModelError, match="not a partial with modules"):
        simulate(2, lambda world: create(model=shared, world=world))
