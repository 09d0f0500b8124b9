# SPDX-License-Identifier: Apache-2.0
"""What gather, reduce, broadcast, pad, scatter and objects give, for trees of any kind."""

import dataclasses
import math
from collections import namedtuple
from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import tree
from tests.laws.test_collectives import Part, exactly, part, shapes, sizes
from tests.ranks.programs_of_trees import TreeCall, bits, for_each, tree_calls

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


@given(size=sizes, rows=st.integers(0, 3), scalar=st.booleans())
def test_gathering_is_differentiated(size: int, rows: int, scalar: bool) -> None:
    """A rank's part gets the sum of the gradients that all ranks have for it."""
    shape = () if scalar else (rows, 2)
    count = size * (1 if scalar else rows * 2)

    def fn(world: af.World) -> None:
        generator = torch.Generator().manual_seed(3)
        factors = torch.randint(-4, 5, (size, count), generator=generator).double()
        mine = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        joined = af.all_gather(mine, world, grad=True)
        (joined.reshape(-1) * factors[world.rank]).sum().backward()
        own = count // size
        expected = factors.sum(0)[world.rank * own :][:own].reshape(shape)
        assert mine.grad is not None
        assert exactly(expected, mine.grad)

    simulate(size, fn)


def test_contrastive_losses_are_those_of_one_process():
    """Under `wrap_ddp`, a loss over all ranks' embeddings trains as on one rank."""
    rows = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(8, 2) / 16

    def train(world: af.World) -> torch.Tensor:
        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            everyone = af.all_gather(model(batch), world, grad=True)
            return (everyone @ everyone.T).logsumexp(1).mean()

        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(2, 3, dtype=torch.float64),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            data=af.Data(rows, global_batch_size=8),
            setup=af.chain(af.shard_data(), af.wrap_ddp()),
            world=world,
        )
        step = af.make_step(loss)
        for batch in af.batches(state, until_epoch=3):
            state, _ = step(state, batch)
        return state.params["weight"].clone()

    (alone,) = simulate(1, train)
    for each in (*simulate(2, train), *simulate(4, train)):
        assert torch.allclose(alone, each, rtol=1e-12, atol=0)
