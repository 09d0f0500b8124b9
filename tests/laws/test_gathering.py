# SPDX-License-Identifier: Apache-2.0
"""Ranks with unequal parts go together, and together have each sample once."""

import copy
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.reading import REMAINDERS, Counting, Remembering, plain
from tests.laws.worlds import DDP, single
from tests.states import linear_state
from tests.strategies import LOSSES, Run, differences, tensors

COUNTS = st.lists(st.integers(1, 7), min_size=1, max_size=8)


# lockstep


def in_lockstep(counts: list[int], ends: str) -> list[list[tuple[Any, ...]]]:
    """Return what each rank is given of the numbers that it has."""

    def go(world: af.World) -> list[tuple[Any, ...]]:
        mine = [(10 * world.rank + i,) for i in range(counts[world.rank])]
        batches = af.join_uneven(iter(mine), world, ends=ends)
        return [(*batch.value, batch.weights, batch.ends_epoch) for batch in batches]

    return list(simulate(len(counts), go))


@given(counts=COUNTS, ends=st.sampled_from(["last", "first"]))
def test_lockstep_gives_every_rank_as_many(counts: list[int], ends: str) -> None:
    """To the last rank's end, with what does not count for the others, or to the first's."""
    total = max(counts) if ends == "last" else min(counts)
    for rank, found in enumerate(in_lockstep(counts, ends)):
        assert len(found) == total
        for i, (value, weights, _) in enumerate(found):
            assert value == 10 * rank + min(i, counts[rank] - 1)
            assert weights == ((None,) if i < counts[rank] else (0,))


@given(counts=COUNTS)
def test_lockstep_together_is_together(counts: list[int]) -> None:
    """With ends="together" ranks that end apart are told both numbers, all others go on."""
    if len(set(counts)) == 1:
        assert in_lockstep(counts, "together") == in_lockstep(counts, "last")
        return
    first = min(counts)
    with pytest.raises(
        af.errors.DataError, match=rf"has {first} batches, .* {first + 1}"
    ):
        in_lockstep(counts, "together")


def by_update(world: af.World, run: Run, batches: Any) -> list[dict[str, Any]]:
    """Return the state after a first update on each batch, and its loss."""
    found, step = [], af.make_step(LOSSES[run.loss])
    for batch in batches:
        state = run.state(world)
        if start := getattr(batch, "start", None):  # of the state's own data
            state = attrs.evolve(state, cursor=start)
        state, metrics = step(state, batch)
        loss = torch.tensor(metrics.all_reduce_mean(world)["loss"])
        found.append({**tensors(state), "loss": loss})
    return found


def check_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, two in zip(found, expected, strict=True):
        assert differences(one, two) == []


@given(
    counts=st.sampled_from([1, 2, 4]).flatmap(
        lambda size: st.lists(st.integers(1, 4), min_size=size, max_size=size)
    ),
    rows=st.lists(st.integers(1, 5), min_size=16, max_size=16),
    seed=st.integers(0, 3),
)
def test_lockstep_trains_on_the_mean_over_all(
    counts: list[int], rows: list[int], seed: int
) -> None:
    """With ends="last" an update is, bitwise, that on the samples of all that had any left."""
    run = Run(n=sum(rows), loss="weighted", seed=seed, setup=af.wrap_ddp())
    x, y = run.dataset()
    pieces = list(zip(x.split(rows), y.split(rows), strict=True))
    own = [pieces[4 * rank : 4 * rank + count] for rank, count in enumerate(counts)]
    rounds = [
        tuple(
            map(
                torch.cat, zip(*[mine[i] for mine in own if i < len(mine)], strict=True)
            )
        )
        for i in range(max(counts))
    ]
    expected = by_update(single(), attrs.evolve(run, setup=af.chain()), rounds)

    def fn(world: af.World) -> list[dict[str, Any]]:
        return by_update(world, run, af.join_uneven(own[world.rank], world))

    for found in simulate(len(counts), fn):
        check_equal(found, expected)


# gather_valid

KINDS = {
    "tensors": lambda rows: {"x": torch.tensor(rows), "y": (torch.tensor(rows) * 2.5,)},
    "objects": lambda rows: [{"name": str(i), "of": (i, None, [i / 2])} for i in rows],
    "ragged": lambda rows: [torch.arange(i % 5) + i for i in rows],
}


def readable(values: Any) -> Any:
    """Return values as plain data."""
    if isinstance(values, dict):
        return [values["x"].tolist(), values["y"][0].tolist()]
    tensor = torch.Tensor
    return [each.tolist() if isinstance(each, tensor) else each for each in values]


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    remainder=REMAINDERS,
    size=st.integers(1, 8),
    parts=st.integers(1, 3),
    kind=st.sampled_from(sorted(KINDS)),
    sharded=st.booleans(),
    stream=st.booleans(),
)
def test_what_is_gathered_is_each_sample_once(
    n, batch_size, remainder, size, parts, kind, sharded, stream
):
    """On any ranks, sharded or not, values come as one process has them, without filler."""
    batch_size = min(batch_size, n) if remainder == "drop" else batch_size
    values = Counting(n) if stream else torch.arange(n).reshape(n, 1)

    def gathered(world: af.World) -> list[Any]:
        split = [af.shard_data()] if sharded else []
        data = af.Data(
            values,
            global_batch_size=batch_size,
            remainder=remainder,
            shuffle=not stream,
        )
        setup = af.chain(*split, af.accumulate(num_micro_batches=parts))
        state = linear_state(data=data, setup=setup, world=world)
        found = []
        for batch in af.batches(state, until_epoch=1):
            rows = [int(row[0]) for part in batch.micro_batches for row in part]
            found.append(readable(af.all_gather_valid(KINDS[kind](rows), batch, world)))
        return found

    order = [*range(n)]
    if not stream:
        data = af.Data(values, global_batch_size=1, shuffle=True)
        order = data.epoch(seed=0).order(np.arange(n)).tolist()
    if remainder == "drop":
        order = order[: n - n % batch_size]
    updates = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    expected = [readable(KINDS[kind](update)) for update in updates]
    for found in simulate(size, gathered):
        assert found == expected


@given(
    n=st.integers(1, 9),
    batch_size=st.integers(1, 5),
    orders=st.lists(st.permutations(["a", "b", "c"]), min_size=1, max_size=4),
    whole=st.booleans(),
)
def test_results_meet_by_name(
    n: int, batch_size: int, orders: list[list[str]], *, whole: bool
) -> None:
    """Ranks fill a dict in any order; one gather a dtype and batch brings each its entries."""
    size = len(orders)
    data = af.Data(torch.arange(n), global_batch_size=batch_size)

    def results(values: torch.Tensor, order: list[str]) -> dict[str, torch.Tensor]:
        made = {"a": values, "b": values + 100, "c": values[:, None] / 2}
        return {name: made[name] for name in order}

    def gathered(world: af.World) -> list[dict[str, Any]]:
        order = orders[world.rank]
        setup = None if whole else af.shard_data()
        state = linear_state(data=data, setup=setup, world=world)
        rows = af.predict(state, data, lambda _, batch: results(batch, order))
        found = [{name: row[name].tolist() for name in row} for row in rows]
        for batch in af.batches(state, until_epoch=1):
            (mine,) = batch.micro_batches
            valid = af.all_gather_valid(results(mine, order), batch, world)
            valid = {name: each.tolist() for name, each in valid.items()}
            parts = zip(*valid.values(), strict=True)
            found += [dict(zip(valid, part, strict=True)) for part in parts]
        assert all(list(each) == order for each in found)
        return found

    run = simulate(size, gathered)
    expected = [{"a": i, "b": i + 100, "c": [i / 2]} for i in range(n)]
    assert run.results == (expected * 2,) * size
    num_batches = -(-n // batch_size) if size > 1 else 0
    log = [(each.kind, each.label) for each in run.log]
    assert log.count(("all_gather", "predict")) == 2 * num_batches
    counts = 1 if whole else 3  # the numbers of rows, and what they are
    assert log.count(("all_gather", "all_gather_valid")) == counts * num_batches


# what is left early


class EnoughError(Exception):
    """Ends an evaluation."""


def outputs(net: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the model's outputs for numbers."""
    return net(batch.reshape(len(batch), -1)[:, :1].float())


def stop(_net: torch.nn.Module, _batch: torch.Tensor) -> torch.Tensor:
    """End an evaluation in its middle."""
    raise EnoughError


def leave(what: str, state: af.TrainState, data: af.Data) -> None:
    """Begin a loop, and end it early."""
    if what == "evaluate":
        with pytest.raises(EnoughError):
            af.evaluate(state, data, stop)
        return
    loops = {"batches": af.batches(state), "predict": af.predict(state, data, outputs)}
    for _ in loops[what]:
        break


@given(
    n=st.integers(2, 20),
    batch_size=st.integers(1, 5),
    size=st.integers(1, 3),
    left=st.sampled_from(["evaluate", "predict", "batches"]),
    at=st.sets(st.integers(0, 8), min_size=1),
    kind=st.sampled_from([Remembering, Counting, torch.arange]),
)
def test_what_is_left_early_harms_nothing(n, batch_size, size, left, at, kind):
    """Loops within the loop that end early change neither it nor what they read next."""

    def one(world: af.World) -> None:
        def state() -> af.TrainState:
            data = af.Data(kind(n), global_batch_size=batch_size)
            setup = DDP if world.size > 1 else None
            return linear_state(data=data, setup=setup, world=world)

        inner, held_out = state(), af.Data(kind(n), global_batch_size=batch_size)
        expected = plain(af.batches(state(), until_epoch=2))
        found = []
        for i, batch in enumerate(af.batches(state(), until_epoch=2)):
            found.append(batch)
            if i in at:
                leave(left, inner, held_out)
        assert plain(found) == expected
        assert [batch.ends_epoch for batch in found].count(True) == 2
        assert plain(af.batches(inner, until_epoch=2)) == expected
        rows = torch.stack(list(af.predict(inner, held_out, outputs)))
        with af.borrow_model(inner) as net, torch.no_grad():
            torch.testing.assert_close(rows, net(torch.arange(n).float()[:, None]))
        means = af.evaluate(inner, held_out, lambda *given: outputs(*given).mean())
        assert means["value"] == pytest.approx(float(rows.mean()), abs=1e-4)

    simulate(size, one)


# split

TREES = {
    "list": list,
    "tuple": tuple,
    "text": lambda values: "".join(map(chr, values)),
    "tensor": lambda values: torch.tensor(values, dtype=torch.int64).reshape(-1, 1),
    "array": lambda values: np.array(values, dtype=np.int64),
    "dict": lambda values: {"a": list(values), "b": torch.tensor(values)},
}


def items(value: Any) -> list[Any]:
    """Return what a sequence has, as plain data."""
    if isinstance(value, dict):
        return list(zip(value["a"], value["b"].tolist(), strict=True))
    return value.tolist() if hasattr(value, "tolist") else list(value)


@given(
    values=st.lists(st.integers(65, 90), max_size=40),
    kind=st.sampled_from(sorted(TREES)),
    size=st.integers(1, 8),
    pad=st.booleans(),
)
def test_split_gives_all_and_changes_nothing(
    values: list[int], kind: str, size: int, pad: bool
) -> None:
    """In rank order the parts are the values, beside repeats of the last; these are as before."""
    whole = TREES[kind](values or [65] * pad)
    before = copy.deepcopy(whole)
    parts = list(
        simulate(size, lambda world: af.split_over_ranks(whole, world, pad=pad))
    )
    assert items(whole) == items(before)
    assert {type(part) for part in parts} == {type(whole)}
    n = len(items(whole))
    lengths = [n // size + (rank < n % size) for rank in range(size)]
    found = []
    for part, length in zip(parts, lengths, strict=True):
        assert len(items(part)) == (lengths[0] if pad else length)
        found += items(part)[:length]
        repeated = items(part)[max(length - 1, 0) :]
        assert all(each == (found or items(whole))[-1] for each in repeated[1:])
    assert found == items(before)


@pytest.mark.parametrize(
    ("values", "size", "pad", "parts"),
    [
        (["A", "B", "C"], 2, False, [["A", "B"], ["C"]]),
        (["A", "B", "C"], 2, True, [["A", "B"], ["C", "C"]]),
        (("A", "B", "C"), 2, True, [("A", "B"), ("C", "C")]),
        (range(17), 2, False, [range(9), range(9, 17)]),
        (["A"], 3, False, [["A"], [], []]),
        (
            {"a": [1, 2, 3], "b": "xyz"},
            2,
            False,
            [{"a": [1, 2], "b": "xy"}, {"a": [3], "b": "z"}],
        ),
    ],
)
def test_split_as_others_do(values, size, pad, parts):
    """Known parts: the first ranks have one more, and a padded tuple is a tuple."""
    before = copy.deepcopy(values)
    found = list(
        simulate(size, lambda world: af.split_over_ranks(values, world, pad=pad))
    )
    assert found == parts
    assert values == before
