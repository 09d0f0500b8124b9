# SPDX-License-Identifier: Apache-2.0
"""A reduction that was started is that of one call, whenever it is waited for."""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby, pairwise
from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.strategies import differences, tensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
OPS = ["sum", "mean", "min", "max", "product"]


@attrs.frozen
class Call:
    """A reduction of a tree whose numbers differ by rank."""

    op: str
    dtypes: list[torch.dtype]
    shape: tuple[int, ...]
    seed: int

    def values(self, rank: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(97 * self.seed + rank)
        drawn = torch.randint(0, 5, self.shape, generator=generator)
        return {f"{i}": drawn.to(dtype) for i, dtype in enumerate(self.dtypes)}


calls = st.builds(
    Call,
    op=st.sampled_from(OPS),
    dtypes=st.lists(st.sampled_from(DTYPES), max_size=3),
    shape=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    seed=st.integers(0, 9),
)


@given(
    several=st.lists(calls, min_size=1, max_size=4),
    size=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_it_is_the_reduction(several: list[Call], size: int, order: Any) -> None:
    """In whatever order a rank waits, and whatever becomes of the values meanwhile."""
    orders = [order.sample(range(len(several)), len(several)) for _ in range(size)]

    def go(world: af.World) -> None:
        expected = [
            af.all_reduce(each.values(world.rank), world, each.op) for each in several
        ]
        given = [each.values(world.rank) for each in several]
        begun = [
            af.start_all_reduce(values, world, each.op)
            for values, each in zip(given, several, strict=True)
        ]
        for values in given:
            for tensor in values.values():
                tensor.zero_()
        assert not any(each.has_arrived for each in begun)
        for at in orders[world.rank]:
            found = begun[at].wait()
            assert begun[at].wait() is found
            assert {n: t.dtype for n, t in found.items()} == {
                n: t.dtype for n, t in expected[at].items()
            }
            assert all(torch.equal(found[n], expected[at][n]) for n in found)

    simulate(size, go, sums="ring")


@given(
    weights=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    dtypes=st.lists(
        st.sampled_from([*DTYPES[:2], torch.int64]), min_size=1, max_size=3
    ),
    times=st.integers(1, 6),
    rows=st.integers(0, 9),
    cap=st.sampled_from([1e-4, 1e-4, 1e-5, None]),
    on_device=st.booleans(),
)
def test_a_mean_is_by_weight(weights, dtypes, times, rows, cap, on_device):
    """It is that of all samples; where nobody has any ranks count alike; inputs stay.

    No bucket is larger than it may be, and no two that follow one another fit in one.
    """
    dtypes = dtypes * times
    call = Call("mean", dtypes, (rows, 2), 0)

    def go(world: af.World) -> dict[str, torch.Tensor]:
        mine = weights[world.rank]
        weight = torch.tensor(mine) if on_device else mine
        values = call.values(world.rank)
        found = af.all_reduce(values, world, "mean", weight=weight, bucket_cap_mb=cap)
        assert differences(values, call.values(world.rank)) == []
        return found

    run = simulate(len(weights), go)
    counted = weights if any(weights) else [1] * len(weights)
    if cap is not None and any(weights):
        of_kinds = groupby(run.log, lambda each: each.shapes.split()[-1])
        for kind, buckets in of_kinds:
            itemsize = getattr(torch, kind).itemsize
            room = int(cap * 2**20) // itemsize
            sizes = [each.num_bytes // itemsize - 1 for each in buckets]  # the weight
            assert all(size <= room for size in sizes)
            assert all(one + two > room for one, two in pairwise(sizes))
    for found in run:
        for name, dtype in zip(found, dtypes, strict=True):
            given = [call.values(r)[name].double() for r in range(len(weights))]
            mean = sum(w * v for w, v in zip(counted, given, strict=True)) / sum(
                counted
            )
            wanted = dtype if dtype.is_floating_point else torch.get_default_dtype()
            assert found[name].dtype == wanted
            assert torch.allclose(found[name].double(), mean, rtol=0, atol=1e-6)


@given(
    how=st.sampled_from(["a rank", "a function"]),
    further=st.integers(0, 2),
    times=st.integers(1, 3),
)
def test_what_failed_on_its_way_fails_whoever_waits(how, further, times):
    """And as often: nobody is given nothing for values that never arrived."""
    told: list[str] = []

    def fail(*_: Any) -> Any:
        raise KeyError(how)

    def go(world: af.World) -> None:
        if world.rank:
            fail()
        pending = af.start_all_reduce(torch.ones(2), world)
        if how == "a function":
            pending = af.Pending.of(torch.ones(2)).then(fail)
        for _ in range(further):
            pending = pending.then(lambda values: values)
        for _ in range(times):
            with pytest.raises((af.errors.PeerFailedError, KeyError)) as caught:
                pending.wait()
            told.append(caught.type.__name__)
        assert not pending.has_arrived

    with pytest.raises(KeyError, match=how):
        simulate(2, go)
    kind = {"a rank": "PeerFailedError", "a function": "KeyError"}[how]
    assert told == [kind] * times


class Line(nn.Module):
    """A number."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2).double())


@af.transform
class late_mean:
    """Note the mean of parameters over ranks, an update late; a user's own."""

    gives_up: ClassVar[Mapping[str, str]] = {"replicas_agree": "always"}
    reduce: ClassVar[None] = None

    def init(self, state: af.TrainState) -> dict[str, Any]:
        return {"flying": None, "seen": torch.zeros(2).double()}

    def after_update(self, state, slot, update) -> tuple[af.TrainState, dict[str, Any]]:
        seen = slot["seen"]
        if slot["flying"] is not None:
            seen = seen + slot["flying"].wait()["x"]
        flying = af.start_all_reduce(dict(state.params), update.world, "mean")
        return state, {"flying": flying, "seen": seen}


@given(
    size=st.integers(1, 3),
    looks=st.lists(
        st.sampled_from(["go on", "copy", "save", "memory", "compare"]),
        min_size=1,
        max_size=5,
    ),
)
def test_in_a_slot_it_is_waited_for_by_whoever_looks(size, looks):
    """A copy, a checkpoint and a look change no bit, and what is kept has arrived."""

    def train(world: af.World, folder: str, looks: list[str]) -> dict[str, Any]:
        state = af.TrainState.create(
            model=Line,
            optimizer=partial(torch.optim.SGD, lr=1.0),
            setup=late_mean(),
            world=world,
        )
        step = af.make_step(lambda m, _: (m.x * (1 + world.rank)).sum())
        for at, look in enumerate(looks):
            state, _ = step(state, None)
            flying = state.slots["late_mean"]["flying"]
            assert not flying.has_arrived
            if look == "save":
                af.save(state, f"{folder}/{at}")
                state = af.load(state.copy(), f"{folder}/{at}")
            elif look == "copy":
                state = state.copy()
            elif look == "memory":
                assert af.memory(state).slots["late_mean"].here == 32
            elif look == "compare":
                with suppress(af.errors.ReplicaMismatchError):  # for they are apart
                    af.assert_replicas_agree(state)
            if look in ("save", "copy"):
                assert state.slots["late_mean"]["flying"].has_arrived
        return tensors(state)

    with tempfile.TemporaryDirectory() as folder:
        quiet = ["go on"] * len(looks)
        one = simulate(size, partial(train, folder=folder, looks=quiet))
        two = simulate(size, partial(train, folder=folder, looks=looks))
    for here, there in zip(one, two, strict=True):
        assert differences(here, there) == []
