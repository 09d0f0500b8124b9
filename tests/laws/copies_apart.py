# SPDX-License-Identifier: Apache-2.0
"""What the laws of copies that train apart train: each copy on its own rows, split or whole."""

import math
import tempfile
from functools import partial
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.split_models import IN, OUT, Run, runs, weighted_loss, wraps
from tests.strategies import tensors

Found = dict[str, torch.Tensor]
UNSEEN = "buffers.seen"  # each rank's first batch norm sees its own rows


@attrs.frozen
class Apart:
    """Some copies that train apart, of so many ranks each; without an engine, whole models."""

    copies: int
    ranks: int
    engine: Any = None

    @property
    def axes(self) -> dict[str, int] | None:
        sizes = self.copies, self.ranks
        if getattr(self.engine, "within", None) == "dp_replicate":
            sizes = sizes[::-1]
        split = dict(zip(("dp_replicate", "dp_shard"), sizes, strict=True))
        return None if self.engine is None else split

    @property
    def copy_of_each(self) -> list[int]:
        return [self.place(rank)[0] for rank in range(self.copies * self.ranks)]

    def same(self, other: "Apart") -> bool:
        return self.copy_of_each == other.copy_of_each

    def place(self, rank: int) -> tuple[int, int]:
        """Return the copy of a rank, and which of its ranks it is."""
        if getattr(self.engine, "within", None) == "dp_replicate":
            return divmod(rank, self.copies)[::-1]
        return divmod(rank, self.ranks)

    def on_ranks(self, fn: Any) -> Any:
        """Return what a function of a world gives on each rank."""
        return simulate(self.copies * self.ranks, fn, axes=self.axes)

    def state(self, run: Run, world: af.World, every: Any) -> af.TrainState:
        engine = () if self.engine is None else (self.engine,)
        if isinstance(every, af.diloco):  # it says what is evaluated
            behind = [each for each in run.behind if not isinstance(each, af.ema)]
            run = attrs.evolve(run, behind=tuple(behind))
        return run.fed(world, *engine, every)

    def stepped(self, run, state, updates, bad=None):
        """Return it after more updates, on a part of the rows of its copy.

        Of an update and a copy that are bad, the first row is not finite.
        """
        step = af.make_step(weighted_loss)
        copy, part = self.place(state.world.rank)
        for _ in range(updates):
            rows = rows_of(run, state.num_tried, copy)
            if bad == (state.num_tried, copy):
                rows[0][0] = math.nan
            places = range(part, self.ranks * run.micro, self.ranks)
            state, _ = step(
                state, [some(rows, at, len(places) * self.ranks) for at in places]
            )
        return state


def rows_of(run: Run, update: int, copy: int) -> tuple[torch.Tensor, ...]:
    """Return 1 to 6 rows that a copy sees in an update; the tokens of one may be none."""
    generator = torch.Generator().manual_seed(run.seed + 10 * update + 100 * copy)
    count = int(torch.randint(1, 7, (), generator=generator))
    x = torch.randn(count, IN, generator=generator, dtype=torch.float64)
    y = torch.randn(count, OUT, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 3, (count,), generator=generator)
    return x.to(run.dtype), y.to(run.dtype), tokens.to(run.dtype)


def some(rows, at, count):
    """Return one of so many parts of rows; where it has none, one row that counts for nothing."""
    x, y, tokens = (each[at::count] for each in rows)
    if len(x):
        return x, y, tokens
    x, y, tokens = (each[:1] for each in rows)
    return x, y, tokens * 0


def both_views(state: af.TrainState) -> Found:
    """Return all of a state, and the average of copies that evaluation sees."""
    found = tensors(state)
    del found[UNSEEN]
    views = af.full_params(state, at="eval").items()
    return {**found, **{f"seen.{name}": value for name, value in views}}


def gone_on(run, two, every, updates):
    """Return what whole models by hand, and what the ranks, have after a load between two."""
    first, second = two
    between = [] if first.same(second) else [Apart(first.copies + 1, 1)]
    by_hand = [Apart(first.copies, 1), *between, Apart(second.copies, 1)]

    def run_by(*through):
        found: list[Found] = []
        counts = [updates[0], *[0] * (len(through) - 2), updates[1]]
        with tempfile.TemporaryDirectory() as folder:

            def go_on(at, world):
                state = through[at].state(run, world, every)
                if at:
                    state = af.load(state, f"{folder}/{at - 1}")
                state = through[at].stepped(run, state, counts[at])
                af.save(state, f"{folder}/{at}")
                return both_views(state)

            for at, apart in enumerate(through):
                found = list(apart.on_ranks(partial(go_on, at)))
        return found

    return run_by(*by_hand), run_by(first, second)


every = st.builds(af.local_sgd, sync_every=st.integers(1, 3), opt_state=st.booleans())
outer = st.builds(
    af.diloco,
    sync_every=st.just(3),
    fragments=st.sampled_from([1, 1, 2]),
    delay=st.integers(0, 2),
    mix=st.sampled_from([0.0, 0.5]),
    bucket_cap_mb=st.sampled_from([25, 1e-4]),
) | st.builds(af.diloco, sync_every=st.integers(1, 2))
shapes = st.sampled_from([(2, 2), (2, 2), (3, 2), (2, 3), (1, 3), (2, 4)])
apart = st.builds(lambda shape, wrap: Apart(*shape, wrap), shapes, wraps)
trainings = st.integers(1, 3).flatmap(
    lambda micro: runs(n=1, batch_size=1, loss="weighted", micro=micro)
)
