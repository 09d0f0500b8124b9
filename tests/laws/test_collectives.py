# SPDX-License-Identifier: Apache-2.0
"""What collectives compute, for tensors of any kind, trees of them, and extreme numbers."""

import dataclasses
import math
import warnings
from collections import defaultdict, namedtuple
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
from tests.internals import collectives, tree
from tests.ranks.programs_of_trees import TreeCall, bits, for_each, tree_calls

DTYPES = [torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8]
LAYOUTS = ["contiguous", "transposed", "strided", "offset"]

sizes = st.sampled_from([1, 2, 3, 4])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@attrs.frozen
class Part:
    """A tensor of small integers that differs by rank, in some layout."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int

    def on(self, rank: int) -> torch.Tensor:
        """Return the rank's tensor; sums of a few are exact in any dtype."""
        generator = torch.Generator().manual_seed(97 * self.seed + rank)
        values = torch.randint(0, 16, self.shape, generator=generator).to(self.dtype)
        return laid_out(values, self.layout)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in memory of their own, laid out in another way."""
    match layout:
        case "transposed":
            reverse = tuple(reversed(range(values.ndim)))
            return values.permute(reverse).contiguous().permute(reverse)
        case "strided":
            wide = values.new_zeros((*values.shape, 2))
            wide[..., 0] = values
            return wide[..., 0]
        case "offset":
            flat = torch.cat([values.new_zeros(3), values.reshape(-1)])
            return flat[3:].view(values.shape)
        case "expanded":  # one row, seen several times
            return values[:1].expand(values.shape)
        case _:
            return values.clone()


part = st.builds(
    Part,
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 9),
)
parts = st.lists(part, min_size=1, max_size=4)


def exactly(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether dtype, shape and every element are the same."""
    same = expected.dtype == found.dtype and expected.shape == found.shape
    return same and torch.equal(expected, found)


@given(size=sizes, given=parts)
def test_all_reduce_is_the_sum(size: int, given: list[Part]) -> None:
    """Every element is the sum over ranks, in place, whatever the layout."""
    expected = [
        sum(each.on(rank) for rank in range(1, size)) + each.on(0) for each in given
    ]

    def reduce(world: af.World) -> None:
        tensors = [each.on(world.rank) for each in given]
        collectives.all_reduce_(tensors, world, label="sums")
        assert all(map(exactly, expected, tensors))

    log = simulate(size, reduce).log
    dtypes = {each.dtype for each in given}
    assert len(log) == (len(dtypes) if size > 1 else 0)


@given(size=sizes, given=part, layout=st.sampled_from([*LAYOUTS, "expanded"]))
def test_all_gather_gives_each_rank_s_tensor(size, given, layout):
    """The results are every rank's tensor, in order, and share memory with nothing."""
    if layout == "expanded" and not (given.shape and given.shape[0]):
        layout = "contiguous"

    def on(rank: int) -> torch.Tensor:
        return laid_out(given.on(rank), layout)

    def gather(world: af.World) -> None:
        mine = on(world.rank)
        found = collectives.all_gather_list(mine, world, label="gather")
        assert len(found) == size
        for rank, tensor in enumerate(found):
            assert exactly(on(rank), tensor)
        mine.fill_(99) if layout != "expanded" else None
        for rank, tensor in enumerate(found):
            assert exactly(on(rank), tensor)
            tensor.fill_(77)

    simulate(size, gather)


@given(texts=st.lists(st.text(max_size=9), min_size=1, max_size=4))
def test_texts_arrive_whole(texts: list[str]) -> None:
    """Every rank has every text, in rank order, whatever its characters and length."""

    def gather(world: af.World) -> list[str]:
        mine = texts[world.rank]
        return collectives.gather_text(mine, world, label="texts")

    assert simulate(len(texts), gather).results == (texts,) * len(texts)


totals = st.tuples(st.integers(-99, 99).map(float), st.integers(0, 9).map(float))
names = st.lists(st.sampled_from("abcd"), min_size=1, unique=True)


@given(names=names, size=st.integers(1, 4), data=st.data(), as_tensors=st.booleans())
def test_mean_is_that_of_the_union(names, size, data, as_tensors):
    """Metrics of all ranks and steps, however dealt, give the mean over all that was seen."""
    dealt = data.draw(
        st.lists(st.lists(totals, max_size=3), min_size=size, max_size=size)
    )
    total = sum(t for mine in dealt for t, _ in mine)
    weight = sum(w for mine in dealt for _, w in mine)
    expected = total / weight if weight else 0.0  # of nothing, 0 is reported

    def number(value: float) -> object:
        return torch.tensor(value, dtype=torch.float64) if as_tensors else value

    def report(world: af.World) -> dict[str, float]:
        entries = [(number(t), number(w)) for t, w in dealt[world.rank]]
        found = af.Metrics(dict.fromkeys(names, (number(0.0), number(0.0))))
        for entry in entries:
            found = found + af.Metrics(dict.fromkeys(names, entry))
        return found.all_reduce_mean(world)

    run = simulate(size, report)
    assert run.results == (dict.fromkeys(names, expected),) * size
    assert len(run.log) == (1 if size > 1 else 0)


@given(names=st.lists(st.sets(st.sampled_from("ab")), min_size=2, max_size=4))
def test_metrics_with_different_names_are_refused(names: list[set[str]]) -> None:
    """Ranks with different names raise an error, also where a rank has no metrics."""

    def report(world: af.World) -> dict[str, float]:
        mine = af.Metrics(dict.fromkeys(names[world.rank], (1.0, 2)))
        return mine.all_reduce_mean(world)

    if all(each == names[0] for each in names):
        assert simulate(len(names), report)[0] == dict.fromkeys(names[0], 0.5)
        return
    with pytest.raises(af.errors.CollectiveMismatchError, match="do not match"):
        simulate(len(names), report)


@given(size=sizes, given=part)
def test_a_barrier_waits_for_all_and_changes_nothing(size: int, given: Part) -> None:
    """No rank passes before all have come; tensors and generators are as they were."""
    come: list[int] = []

    def wait(world: af.World) -> None:
        mine, before = given.on(world.rank), torch.get_rng_state()
        come.append(world.rank)
        af.barrier(world)
        assert sorted(come) == list(range(size))
        assert exactly(given.on(world.rank), mine)
        assert torch.equal(before, torch.get_rng_state())

    simulate(size, wait)


# Trees


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - as users have them


@dataclasses.dataclass(frozen=True)
class Data:
    """A dataclass of trees."""

    left: Any
    right: Any


@attrs.frozen
class Record:
    """An attrs record of trees."""

    left: Any
    _right: Any


CONTAINERS = {
    "dict": lambda a, b: {"left": a, "right": [b]},
    "list": lambda a, b: [a, (b,)],
    "namedtuple": Pair,
    "dataclass": Data,
    "record": Record,
    "nested": lambda a, b: Record(Data({"x": a}, []), Pair((b,), {})),
}
kinds = st.sampled_from(sorted(CONTAINERS))


def made(kind: str, parts: tuple[Part, Part], rank: int) -> Any:
    return CONTAINERS[kind](*(each.on(rank) for each in parts))


def alike(expected: Any, found: Any) -> bool:
    """Whether containers, dtypes, shapes and elements are the same."""
    pairs = zip(tree.tree_leaves(expected), tree.tree_leaves(found), strict=True)
    same = all(exactly(one, other) for one, other in pairs)
    bare = lambda _: None  # noqa: E731
    return same and tree.tree_map(bare, expected) == tree.tree_map(bare, found)


def untouched(world: af.World, given: Any, call: Any) -> Any:
    """Return what a call gives, having checked that it changes and shares nothing."""
    before = tree.clone(given)
    found = call(given, world)
    for leaf in tree.tensor_leaves(found):
        leaf.fill_(7)
    assert alike(before, given)
    return call(given, world)


@given(size=sizes, kind=kinds, parts=st.tuples(part, part))
def test_gathered_trees_split_into_the_ranks_own(size, kind, parts):
    """Every rank has every rank's rows, in rank order; a scalar is a row."""

    def rows(leaf: torch.Tensor) -> torch.Tensor:
        return leaf if leaf.ndim else leaf.reshape(1)

    ranks = [tree.tree_leaves(made(kind, parts, rank)) for rank in range(size)]
    joined = iter(
        [torch.cat([rows(t) for t in same]) for same in zip(*ranks, strict=True)]
    )
    expected = tree.tree_map(lambda _: next(joined), made(kind, parts, 0))

    def fn(world: af.World) -> None:
        found = untouched(world, made(kind, parts, world.rank), af.all_gather)
        assert alike(expected, found)

    log = simulate(size, fn).log
    dtypes = {each.dtype for each in parts}
    assert len(log) == (2 * len(dtypes) if size > 1 else 0)


REDUCED = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "mean": lambda stacked: stacked.sum(0, dtype=stacked.dtype) / len(stacked),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
}


@given(
    size=sizes, kind=kinds, parts=st.tuples(part, part), op=st.sampled_from([*REDUCED])
)
def test_reduced_trees_are_combined_element_by_element(size, kind, parts, op):
    """Sum, mean, least, greatest and product over ranks; a mean of integers is a float."""
    ranks = [tree.tree_leaves(made(kind, parts, rank)) for rank in range(size)]
    combined = iter(
        [REDUCED[op](torch.stack(same)) for same in zip(*ranks, strict=True)]
    )
    expected = tree.tree_map(lambda _: next(combined), made(kind, parts, 0))

    def fn(world: af.World) -> None:
        given = made(kind, parts, world.rank)
        found = untouched(world, given, lambda t, w: af.all_reduce(t, w, op))
        assert alike(expected, found)

    simulate(size, fn)


@given(shapes=st.lists(shapes, max_size=20), size=sizes)
def test_a_tree_of_a_dtype_is_one_collective(shapes, size):
    """However many tensors are reduced, one vector of all their elements is sent."""

    def fn(world: af.World) -> None:
        given = {f"{i}": torch.ones(shape) for i, shape in enumerate(shapes)}
        found = af.all_reduce(given, world, "max")
        for leaf in found.values():
            others = [each.clone() for each in found.values() if each is not leaf]
            leaf.fill_(7)
            rest = [each for each in found.values() if each is not leaf]
            assert all(map(exactly, others, rest))

    log = simulate(size, fn).log
    elements = sum(math.prod(shape) for shape in shapes)
    sent = [(each.kind, each.num_bytes) for each in log]
    assert sent == ([("all_reduce", 4 * elements)] if shapes and size > 1 else [])


@given(size=sizes, flags=st.lists(st.booleans(), min_size=4, max_size=4))
def test_booleans_are_counted_and_combined(size: int, flags: list[bool]) -> None:
    """A sum is an integer count; the greatest is "any", the least is "all", as flags have it."""
    mine = flags[:size]

    def fn(world: af.World) -> tuple[Any, ...]:
        flag = torch.tensor(flags[world.rank])
        tensors = [af.all_reduce(flag, world, op) for op in ("sum", "max", "min")]
        assert [each.dtype for each in tensors] == [torch.int64, torch.bool, torch.bool]
        found = [each.item() for each in tensors]
        own = flags[world.rank]
        return (*found, af.any_rank(own, world), af.all_ranks(own, world))

    expected = (sum(mine), any(mine), all(mine), any(mine), all(mine))
    assert simulate(size, fn).results == (expected,) * size


@given(size=sizes, kind=kinds, parts=st.tuples(part, part), data=st.data())
def test_broadcast_trees_are_the_root_s(size, kind, parts, data):
    """All ranks hold what the root has; once more changes nothing."""
    root = data.draw(st.integers(0, size - 1))

    def fn(world: af.World) -> None:
        given = made(kind, parts, world.rank)
        found = untouched(world, given, lambda t, w: af.broadcast(t, w, root=root))
        assert alike(made(kind, parts, root), found)
        assert alike(found, af.broadcast(found, world, root=root))

    simulate(size, fn)


ragged = st.lists(st.integers(0, 4), min_size=1, max_size=4)
tails = st.lists(st.integers(0, 2), max_size=2).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool])


@given(counts=ragged, tail=tails, dtype=dtypes)
def test_ragged_trees_are_gathered_without_padding(counts, tail, dtype):
    """`gather_ragged` is `gather` of what was padded, without the padding."""
    given = [
        torch.full((count, *tail), rank + 1).to(dtype)
        for rank, count in enumerate(counts)
    ]
    longest = max(counts)

    def fn(world: af.World) -> None:
        mine = {"x": given[world.rank]}
        found = untouched(world, mine, partial(af.all_gather, ragged=True))["x"]
        assert exactly(torch.cat(given), found)
        padded = af.all_gather(af.pad_across(mine, world), world)["x"]
        kept = [padded[rank * longest :][:count] for rank, count in enumerate(counts)]
        assert exactly(found, torch.cat(kept))

    simulate(len(counts), fn)


@given(
    counts=ragged,
    dim=st.sampled_from([0, 1, -1, -2]),
    first=st.booleans(),
    value=st.integers(-2, 2),
)
def test_padding_is_as_long_as_the_longest(counts, dim, first, value):
    """A rank's own values stand at one end, and what fills up at the other."""

    def fn(world: af.World) -> None:
        shape = [2, 2]
        shape[dim] = counts[world.rank]
        mine = torch.full(shape, 9)
        found = af.pad_across(mine, world, dim=dim, value=value, first=first)
        ends = [found.shape[dim] - counts[world.rank], counts[world.rank]]
        filling, own = found.split(ends if first else ends[::-1], dim)[
            :: 1 if first else -1
        ]
        assert found.shape[dim] == max(counts)
        assert exactly(mine, own)
        assert bool((filling == value).all())

    simulate(len(counts), fn)


@given(call=tree_calls(), size=sizes)
def test_any_dtype_travels(call: TreeCall, size: int) -> None:
    """Floats, integers, booleans and complex numbers of any width keep every bit."""
    gathered = [
        tree.tree_leaves(call.tree(rank, call.count(0))) for rank in range(size)
    ]
    joined = [
        torch.cat([leaf if leaf.ndim else leaf.reshape(1) for leaf in same])
        for same in zip(*gathered, strict=True)
    ]
    root = call.root % size

    def fn(world: af.World) -> None:
        given = call.tree(world.rank, call.count(0))
        found = tree.tree_leaves(af.all_gather(given, world))
        assert list(map(bits, joined)) == list(map(bits, found))
        given = call.tree(world.rank, call.count(0))
        found = tree.tree_leaves(af.broadcast(given, world, root=root))
        assert list(map(bits, gathered[root])) == list(map(bits, found))

    simulate(size, fn)


@given(
    size=st.integers(2, 4),
    dtype=st.sampled_from([torch.int16, torch.uint16, torch.uint32, torch.uint8]),
    op=st.sampled_from(["sum", "product", "min", "max"]),
    data=st.data(),
)
def test_integers_of_any_width_are_reduced(size, dtype, op, data):
    """Those too that a backend does not know; sums and products wrap around."""
    info = torch.iinfo(dtype)
    numbers = st.lists(st.integers(info.min, info.max), min_size=size, max_size=size)
    drawn = data.draw(numbers)
    combine = {"sum": sum, "product": math.prod, "min": min, "max": max}[op]
    expected = (combine(drawn) - info.min) % 2**info.bits + info.min

    def fn(world: af.World) -> None:
        mine = torch.tensor([drawn[world.rank]]).to(dtype)
        assert [expected] == af.all_reduce(mine, world, op).tolist()

    simulate(size, fn)


@given(call=tree_calls(), size=sizes)
def test_all_to_all_is_a_transpose(call: TreeCall, size: int) -> None:
    """A rank gets, of each, what that had for it, of any dtypes and sizes; twice is nothing."""

    def fn(world: af.World) -> None:
        found = af.all_to_all(for_each(world, call), world)
        theirs = [attrs.evolve(world, rank=rank) for rank in range(size)]
        expected = [for_each(each, call)[world.rank] for each in theirs]
        assert tree.tree_map(bits, expected) == tree.tree_map(bits, found)
        again = af.all_to_all(found, world)
        assert tree.tree_map(bits, for_each(world, call)) == tree.tree_map(bits, again)

    simulate(size, fn)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.tuples(inner)
    ),
    max_leaves=4,
)
values = st.lists(plain, min_size=1, max_size=4)


@given(values=values, pickle=st.booleans(), data=st.data())
def test_objects_arrive_whole(values, pickle, data):
    """Gathered, broadcast or scattered, an object is what it was; scattered ones gather."""
    size, root = len(values), data.draw(st.integers(0, len(values) - 1))

    def fn(world: af.World) -> tuple[Any, ...]:
        mine = values[world.rank]
        here = world.rank == root
        return (
            af.all_gather_objects(mine, world, pickle=pickle),
            af.broadcast_object(
                mine if here else None, world, root=root, pickle=pickle
            ),
            af.all_gather_objects(
                af.scatter(values if here else None, world, root=root), world
            ),
        )

    expected = (values, values[root], values)
    for found in simulate(size, fn):
        assert repr(expected) == repr(found)


# Extreme numbers, unusual records, permuted names, and second derivatives


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
