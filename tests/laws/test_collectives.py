# SPDX-License-Identifier: Apache-2.0
"""What accelfn's collectives compute, for tensors of any shape, dtype and layout."""

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import collectives

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


@given(size=sizes, given=parts)
def test_broadcast_gives_the_values_of_rank_0(size: int, given: list[Part]) -> None:
    """All ranks hold what rank 0 held; once more changes nothing."""
    expected = [each.on(0) for each in given]

    def broadcast(world: af.World) -> None:
        tensors = [each.on(world.rank) for each in given]
        for _ in range(2):
            collectives.broadcast_(tensors, world, label="values of rank 0")
            assert all(map(exactly, expected, tensors))

    simulate(size, broadcast)


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


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    tail=shapes,
    dtype=st.sampled_from(DTYPES),
)
def test_ragged_rows_are_put_together(counts, tail, dtype):
    """Rows of unequal numbers, none too, come in rank order, and no row of padding."""
    given = [
        Part((max(count, 1), *tail), dtype, "contiguous", rank).on(rank)
        for rank, count in enumerate(counts)
    ]
    expected = torch.cat([t[:c] for t, c in zip(given, counts, strict=True)])

    def gather(world: af.World) -> None:
        mine = given[world.rank][: counts[world.rank]]
        found = collectives.join_rows(mine, counts, world, label="rows")
        assert exactly(expected, found)

    simulate(len(counts), gather)


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
