# SPDX-License-Identifier: Apache-2.0
"""Ranks that would train something else than one another are told so before they do."""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import ReplicaMismatchError
from accelfn.testing import simulate
from tests.states import STEP, linear_state, square

X = torch.linspace(-1, 1, 96).reshape(32, 3)
SGD, ADAM = torch.optim.SGD, torch.optim.Adam
SHARED = af.chain(af.shard_data(), af.wrap_ddp())


@af.transform
class Rate:
    value: float

    def hyper(self, hyper: Any, slot: None, update: af.Update) -> Any:
        return {"lr": self.value}, slot


PARTS: dict[str, list[Callable[[], Any]]] = {
    "optimizer": [
        lambda: partial(SGD, lr=0.1),
        lambda: partial(SGD, lr=0.2),
        lambda: partial(SGD, lr=torch.tensor(0.3)),
        lambda: partial(SGD, lr=torch.tensor(0.4)),
        lambda: partial(SGD, lr=0.1, momentum=0.5),
        lambda: partial(ADAM, lr=0.1),
        lambda: partial(ADAM, lr=0.1, betas=(0.9, 0.99)),
        lambda: partial(ADAM, lr=0.1, amsgrad=True),
    ],
    "setup": [
        lambda: SHARED,
        lambda: af.chain(SHARED, af.clip_grad_norm(1.0)),
        lambda: af.chain(SHARED, af.clip_grad_norm(2.0)),
        lambda: af.chain(SHARED, af.accumulate(num_micro_batches=2)),
        lambda: af.chain(SHARED, Rate(0.1)),
        lambda: af.chain(SHARED, Rate(0.2)),
    ],
    "schedule": [
        lambda: None,
        lambda: lambda update: 1 / (1 + update),
        lambda: lambda update: 1 / (2 + update),
        lambda: af.schedules.warmup_cosine(2, num_updates=20),
        *(lambda: halved(50), lambda: halved(500)),
    ],
    "data": [
        lambda: af.Data(X, global_batch_size=8),
        lambda: af.Data(X, global_batch_size=16),
        lambda: af.Data(X[:24], global_batch_size=8),
        lambda: af.Data(X, global_batch_size=8, shuffle=True),
    ],
    "seed": [lambda: 0, lambda: 1],
    "model": [
        lambda: partial(torch.nn.Linear, 3, 1),
        lambda: partial(frozen, "bias"),
        lambda: partial(frozen, "weight"),
        lambda: partial(torch.nn.Linear, 3, 2),
    ],
}


WHAT = dict.fromkeys(PARTS, "states") | {"model": "models"}


def frozen(name: str) -> torch.nn.Module:
    """Return a model of which a parameter is not trained."""
    model = torch.nn.Linear(3, 1)
    model.get_parameter(name).requires_grad_(requires_grad=False)
    return model


def halved(after: int) -> af.schedules.Schedule:
    """Return a schedule that halves rates after so many updates."""
    whole = af.schedules.constant()
    return af.schedules.join((after, whole), af.schedules.constant(0.5))


def reduced_by_hand(state: af.TrainState) -> None:
    """Take gradients and reduce them; the setup does not say that ranks train together."""
    by_hand = state.with_setup(
        af.chain(*[each for each in state.setup if each.name != "wrap_ddp"])
    )
    batch = next(iter(af.batches(by_hand)))
    _, grads = af.value_and_grad(square)(by_hand, batch, sync=False)
    af.sync_grads(by_hand, grads)


def trained(choices: list[dict[str, int]], *, by_hand: bool = False) -> list[str]:
    """Train an update on ranks that made these choices; return how each rank ended."""

    def rank(world):
        chosen = {part: PARTS[part][i]() for part, i in choices[world.rank].items()}
        try:
            state = af.TrainState.create(world=world, **chosen)
            if by_hand:
                reduced_by_hand(state)
            af.prepare_engine(state)
        except ReplicaMismatchError as error:
            return str(error)
        STEP(state, next(iter(af.batches(state))))
        return ""

    return list(simulate(len(choices), rank).results)


choices = st.fixed_dictionaries(
    {part: st.integers(0, len(made) - 1) for part, made in PARTS.items()}
)


@given(common=choices, size=st.integers(2, 3), by_hand=st.booleans(), data=st.data())
def test_definitions_that_differ_are_refused(common, size, by_hand, data):
    """Made alike on each rank, they train; with one part that differs, all ranks say so.

    So they do where a step reduces the gradients by hand, as soon as it does.
    """
    ranks = [dict(common) for _ in range(size)]
    assert trained(ranks, by_hand=by_hand) == [""] * size
    part = data.draw(st.sampled_from(list(PARTS)))
    other = data.draw(
        st.integers(0, len(PARTS[part]) - 1).filter(lambda i: i != common[part])
    )
    odd = data.draw(st.integers(0, size - 1))
    ranks[odd][part] = other
    said = trained(ranks, by_hand=by_hand)
    assert len(set(said)) == 1
    assert said[0].startswith(f"The ranks have {WHAT[part]} that differ")
    assert all(f"\n  rank {rank}: " in said[0] for rank in range(size))


@pytest.mark.parametrize("part", PARTS)
def test_any_two_that_differ_are_told_apart(part):
    """Each of what a part may be is another than each of the rest, to both ranks."""
    common = dict.fromkeys(PARTS, 0)
    for one, two in combinations(range(len(PARTS[part])), 2):
        said = trained([{**common, part: one}, {**common, part: two}])
        assert said[0] == said[1]
        assert said[0].startswith(f"The ranks have {WHAT[part]} that differ"), (
            one,
            two,
        )


@given(size=st.integers(2, 9))
def test_ranks_that_agree_say_as_much_on_any_number_of_ranks(size):
    """What each gives, and gets, before the first update does not grow; no text is sent."""

    def rank(world):
        setup = af.chain(af.shard_data(), af.local_sgd(sync_every=2))
        data = af.Data(X, global_batch_size=8)
        af.prepare_engine(linear_state(3, setup=setup, data=data, world=world))

    said = [(each.kind, each.num_bytes) for each in simulate(size, rank).log]
    assert said == [("all_reduce", 48)] * 4  # definitions, data, structure, values


def test_data_of_each_rank_may_be_its_own():
    """Where ranks share none, nothing is compared."""

    def rank(world):
        data = af.Data(X[world.rank :], global_batch_size=8 + world.rank)
        state = linear_state(3, setup=af.wrap_ddp(), data=data, world=world)
        return STEP(state, next(iter(af.batches(state))))[0].step

    assert simulate(2, rank).results == (1, 1)


def test_functions_may_lie_anywhere():
    """Setups whose functions are each rank's own are alike; others are shown as written."""

    def rank(world, clipped):
        compiled = af.compile(backend=lambda graph, _: graph)
        setup = af.chain(SHARED, compiled, af.clip_grad_norm(clipped))
        state = linear_state(3, setup=setup, schedule=lambda _: 1.0, world=world)
        try:
            af.prepare_engine(state)
        except ReplicaMismatchError as error:
            return str(error)
        return ""

    assert simulate(2, lambda world: rank(world, 1.0)).results == ("", "")
    said, _ = simulate(2, lambda world: rank(world, 1.0 + world.rank)).results
    assert "rank 0: transform 3: af.clip_grad_norm(1.0)\n" in said
    assert "rank 1: transform 3: af.clip_grad_norm(2.0)\n" in said
