# SPDX-License-Identifier: Apache-2.0
"""Collectives where numbers are extreme, records unusual, names permuted, or derivatives second."""

import dataclasses
import math
import warnings
from collections import defaultdict
from fractions import Fraction
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.test_collectives import sizes

NARROW = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32]
WHOLE = [*NARROW, torch.uint32, torch.int64]


def whole(dtype: torch.dtype) -> st.SearchStrategy[int]:
    """Draw integers of a dtype, its extremes often."""
    info = torch.iinfo(dtype)
    return st.sampled_from([info.min, info.max]) | st.integers(info.min, info.max)


@given(size=sizes, dtype=st.sampled_from(WHOLE), data=st.data())
def test_a_mean_of_integers_is_that_of_the_numbers(size, dtype, data):
    """However large they are: nothing wraps around, and the mean is a float."""
    drawn = data.draw(st.lists(whole(dtype), min_size=size, max_size=size))
    exact = float(Fraction(sum(drawn), size))
    largest = max(map(abs, drawn))

    def fn(world: af.World) -> None:
        found = af.all_reduce(torch.tensor(drawn[world.rank]).to(dtype), world, "mean")
        assert found.dtype == torch.get_default_dtype()
        assert abs(found.item() - exact) <= largest * torch.finfo(found.dtype).eps

    simulate(size, fn)


@given(
    size=sizes,
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    data=st.data(),
)
def test_a_mean_of_narrow_floats_does_not_overflow(size, dtype, data):
    """It lies between the least and the greatest, though their sum may be infinite."""
    info = torch.finfo(dtype)
    number = st.floats(info.min / 2, info.max / 2) | st.just(info.max * 0.5)
    if (
        dtype is torch.float16
    ):  # float32, in which they are added up, is no wider than bfloat16
        number |= st.sampled_from([info.min, info.max])
    given = torch.tensor(data.draw(st.lists(number, min_size=size, max_size=size)))
    given = (given / (1 if dtype is torch.float16 else size)).to(dtype)

    def fn(world: af.World) -> None:
        found = af.all_reduce(given[world.rank], world, "mean")
        assert found.dtype is dtype
        exact = given.double().mean()
        slack = 2 * info.eps * given.double().abs().max()
        assert abs(found.double() - exact) <= slack

    simulate(size, fn)


@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    data=st.data(),
)
def test_a_mean_of_narrow_floats_is_rounded_once(dtype, data):
    """However many ranks add what each addition in 16 bits would lose."""
    few = st.integers(0, 3).map(lambda ones: 1.0 + ones * torch.finfo(dtype).eps)
    drawn = data.draw(st.lists(few, min_size=2, max_size=5))
    large = data.draw(st.sampled_from([0.0, 64.0, 256.0]))
    given = torch.tensor([large, *drawn]).to(dtype)
    exact = given.double().mean().to(dtype)

    def fn(world: af.World) -> None:
        assert torch.equal(af.all_reduce(given[world.rank], world, "mean"), exact)

    simulate(len(given), fn)


floats = st.sampled_from(
    [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -2.0, 65504.0, 6e-8]
)


@given(
    dtype=st.sampled_from(
        [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    ),
    rows=st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=4),
    op=st.sampled_from(["min", "max"]),
)
def test_nan_is_the_least_and_the_greatest(dtype, rows, op):
    """Where any rank has NaN all get it, else the least or greatest, -0.0 being less than 0.0."""
    given = torch.tensor(rows, dtype=torch.float64).to(dtype)
    pick = min if op == "min" else max
    best = [
        math.nan
        if any(map(math.isnan, each))
        else pick(each, key=lambda x: (x, math.copysign(1, x)))
        for each in given.T.tolist()
    ]

    def fn(world: af.World) -> None:
        found = af.all_reduce(given[world.rank], world, op)
        assert found.dtype is dtype
        assert repr(best) == repr(found.tolist())

    log = simulate(len(rows), fn).log
    assert len(log) == (len(rows) > 1)


@dataclasses.dataclass
class Late:
    """A dataclass with a field that no argument sets, and an argument that is no field."""

    x: Any
    factor: dataclasses.InitVar[int]
    late: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self, factor: int) -> None:
        self.late = {"y": self.x * factor}


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A frozen dataclass with slots, one of which it sets itself."""

    x: Any
    late: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "late", (self.x * 3,))


@attrs.define
class Counted:
    """An attrs record whose own field is set after the others."""

    x: Any
    late: Any = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.late = [self.x + 1]


RECORDS = {
    "dataclass": lambda x: Late(x, 2),
    "slots": Slotted,
    "attrs": Counted,
    "defaultdict": lambda x: defaultdict(list, {"x": x, "late": [x]}),
}


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("given", ["set", "changed"])
def test_records_keep_every_field(kind, given):
    """Those too that no argument of the record's class sets, whoever set them last."""

    def fn(world: af.World) -> tuple[str, str]:
        mine = torch.tensor([world.rank])
        record = RECORDS[kind](mine)
        everyone = RECORDS[kind](torch.arange(world.size))
        if given == "changed" and kind != "slots":
            for each, x in ((record, mine), (everyone, torch.arange(world.size))):
                each.__setitem__("late", 5 * x) if kind == "defaultdict" else setattr(
                    each, "late", 5 * x
                )
        found = af.all_gather(record, world)
        assert type(found) is type(record)
        return _shown(everyone), _shown(found)

    def _shown(record: Any) -> str:
        names = ("x", "late") if kind != "defaultdict" else ()
        return repr(
            [getattr(record, name, "unset") for name in names] or sorted(record.items())
        )

    for expected, found in simulate(3, fn):
        assert expected == found


@given(
    orders=st.lists(st.permutations(["a", "b", "c"]), min_size=1, max_size=4),
    kind=st.sampled_from(
        ["gather", "reduce", "broadcast", "all_to_all", "pad", "ragged"]
    ),
)
def test_entries_meet_by_name(orders: list[list[str]], kind: str) -> None:
    """Ranks fill a dict in any order; each entry is that of its name, and the order stays."""
    calls = {
        "gather": af.all_gather,
        "reduce": af.all_reduce,
        "broadcast": af.broadcast,
        "all_to_all": lambda t, w: af.all_to_all([t] * w.size, w)[0],
        "pad": af.pad_across,
        "ragged": partial(af.all_gather, ragged=True),
    }

    def fn(world: af.World) -> None:
        numbers = {name: torch.tensor([ord(name) + world.rank]) for name in "abc"}
        mine = {name: numbers[name] for name in orders[world.rank]}
        found = calls[kind](mine, world)
        assert list(found) == orders[world.rank]
        expected = calls[kind](numbers, world)
        assert all(torch.equal(expected[name], found[name]) for name in "abc")
        assert len({each.sum().item() for each in found.values()}) == 3

    simulate(len(orders), fn)


some_names = st.lists(st.sampled_from("abcd"), min_size=2, max_size=2, unique=True)


@given(names=st.lists(some_names, min_size=1, max_size=4))
def test_metrics_of_other_names_are_told(names: list[list[str]]) -> None:
    """Where nothing compares calls beforehand, too, and in the same all-reduce; on all ranks."""

    def fn(world: af.World) -> str:
        world.connection.simulated = None  # as in a world of real processes
        mine = af.Metrics({name: (ord(name), 1) for name in names[world.rank]})
        try:
            found = mine.all_reduce_mean(world)
        except af.errors.CollectiveMismatchError as error:
            return str(error)
        assert found == {name: ord(name) for name in names[world.rank]}
        return ""

    run = simulate(len(names), fn)
    if len({tuple(sorted(each)) for each in names}) == 1:
        assert set(run.results) == {""}
        assert len(run.log) == (len(names) > 1)
        return
    for told in run.results:
        for rank, each in enumerate(names):
            listed = ", ".join(f'"{name}"' for name in sorted(each))
            assert f"\n  rank {rank}: [{listed}]" in told


@given(
    rows=st.lists(
        st.lists(st.integers(-3, 3), max_size=2), min_size=1, max_size=4
    ).filter(any),
    powers=st.tuples(st.integers(2, 4), st.integers(2, 4)),
    seed=st.integers(0, 9),
)
def test_gradients_of_gradients_are_those_of_one_process(rows, powers, seed):
    """Of the sum of all ranks' losses, each of which has all ranks' rows, to the third order."""
    size, numbers = len(rows), [number for each in rows for number in each]
    lengths = [len(each) for each in rows]
    gather = partial(af.all_gather, ragged=len({*lengths}) > 1)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(-3, 4, (size, len(numbers)), generator=generator).double()

    def loss(everyone: torch.Tensor, mine: torch.Tensor, rank: int) -> torch.Tensor:
        among = (weights[rank] * everyone ** powers[0]).sum()
        own = (rank + 1) * mine ** powers[1] + everyone.sum() ** 2 * mine
        return among + own.sum()

    def orders(values: torch.Tensor, total: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            (grad,) = torch.autograd.grad(total, values, create_graph=True)
            found.append(grad.detach())
            total = (grad * grad).sum()
        return found

    alone = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    parts = alone.split(lengths)
    total = sum(loss(alone, parts[rank], rank) for rank in range(size))
    expected = orders(alone, total)

    def fn(world: af.World) -> None:
        mine = torch.tensor(rows[world.rank], dtype=torch.float64, requires_grad=True)
        everyone = gather(mine, world, grad=True)
        for one, found in zip(
            expected, orders(mine, loss(everyone, mine, world.rank)), strict=True
        ):
            assert torch.equal(one.split(lengths)[world.rank], found)

    simulate(size, fn)


def quantized() -> torch.Tensor:
    """Return a quantized tensor, which torch warns of."""
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    """Return a nested tensor, which torch warns of too."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2)])


REFUSED = {
    "no tensor": lambda w: af.all_gather({"x": [1, 2]}, w),
    "no tensor to reduce": lambda w: af.all_reduce("x", w),
    "no such operation": lambda w: af.all_reduce(torch.ones(1), w, "median"),
    "complex greatest": lambda w: af.all_reduce(
        torch.ones(1, dtype=torch.cfloat), w, "max"
    ),
    "float8 to reduce": lambda w: af.all_reduce(
        torch.ones(1).to(torch.float8_e4m3fn), w
    ),
    "too few for all": lambda w: af.all_to_all([torch.ones(1)], w),
    "one for all": lambda w: af.all_to_all(torch.ones(2), w),
    "others for one": lambda w: af.all_to_all([torch.ones(1), torch.ones(1, 1)], w),
    "objects for all": lambda w: af.all_to_all(["a", "b"], w),
    "no such root": lambda w: af.broadcast(torch.ones(1), w, root=2),
    "no such dimension": lambda w: af.pad_across(torch.ones(1), w, dim=1),
    "half a dimension": lambda w: af.pad_across(torch.ones(1), w, dim=0.5),
    "half an integer": lambda w: af.pad_across(torch.ones(1).int(), w, value=0.5),
    "a negative byte": lambda w: af.pad_across(torch.ones(1).byte(), w, value=-1),
    "a flag of 7": lambda w: af.pad_across(torch.ones(1).bool(), w, value=7),
    "an integer NaN": lambda w: af.pad_across(torch.ones(1).int(), w, value=math.nan),
    "too large a half": lambda w: af.pad_across(torch.ones(1).half(), w, value=7e4),
    "filled with text": lambda w: af.pad_across(torch.ones(1), w, value="x"),
    "sparse": lambda w: af.all_gather(torch.eye(2).to_sparse(), w),
    "meta": lambda w: af.all_reduce(torch.ones(2, device="meta"), w),
    "quantized": lambda w: af.all_gather(quantized(), w),
    "nested": lambda w: af.broadcast(nested(), w),
    "sparse to all": lambda w: af.all_to_all([torch.eye(2).to_sparse()] * 2, w),
    "operations": lambda w: af.all_reduce(torch.ones(1), w, ["sum"]),
    "many flags": lambda w: af.any_rank(torch.ones(2), w),
    "many flags on all": lambda w: af.all_ranks(torch.ones(2), w),
    "no world": lambda _: af.all_reduce(torch.ones(1), None),
    "no world to all": lambda _: af.all_to_all([torch.ones(1)], None),
    "no world for flags": lambda _: af.any_rank(True, None),  # noqa: FBT003
    "a dict to scatter": lambda w: af.scatter({"a": 1, "b": 2}, w, root=w.rank),
    "a number to scatter": lambda w: af.scatter(5, w, root=w.rank),
    "a generator": lambda w: af.scatter(iter([1, 2]), w, root=w.rank),
    "no pickle": lambda w: af.all_gather_objects(lambda: 1, w, pickle=True),
    "too few": lambda w: af.scatter([1], w, root=w.rank),
    "nothing": lambda w: af.scatter(None, w, root=w.rank),
    "an object": lambda w: af.all_gather_objects(object(), w),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_travel_is_refused(case):
    """Before anything is sent, on the rank that gave it."""
    with pytest.raises(
        (af.errors.ArgumentError, af.errors.PlainDataError),
        match=r"af\.|value|leaf|flag|pickle=True",
    ):
        simulate(2, REFUSED[case])
