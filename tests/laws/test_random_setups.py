# SPDX-License-Identifier: Apache-2.0
"""Whatever is set up, it trains what a plain loop in float64 trains.

`python -m pytest tests/laws/test_random_setups.py --hypothesis-profile=deep` draws 2,000.
"""

import math
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws import plain_loop as plain
from tests.laws.plain_loop import Recipe
from tests.laws.reducing import GatherAll, SumAll
from tests.laws.worlds import single
from tests.strategies import differences

WITHIN = 1e-9


@attrs.frozen
class Setup:
    """A recipe, and how it is trained: by whom, in which parts, with which break."""

    recipe: Recipe
    reduce: str
    sizes: tuple[int, int]
    batch_size: int = 4
    remainder: str = "short"
    shuffle: bool = True
    seed: int = 0
    micro: tuple[str, int] | None = None
    precision: str | None = None
    skips: bool = False
    checkpointed: bool = False
    updates: int = 3
    cut: int = 1
    sums: str = "ring"
    copies: bool = False
    ddp: tuple[tuple[str, Any], ...] = ()
    fsdp: tuple[tuple[str, Any], ...] = ()

    def chain(self) -> af.chain:
        """Return the transforms; two that are about different fields stand in any order."""
        recipe = self.recipe
        norm, value = recipe.clip_norm, recipe.clip_value
        reduce = {
            "ddp": partial(af.wrap_ddp, **dict(self.ddp)),
            "fsdp": partial(af.wrap_fsdp, **dict(self.fsdp)),
            "local": partial(af.local_sgd, sync_every=1),
            "sums": SumAll,
            "gather": GatherAll,
        }
        return af.chain(
            af.shard_data(),
            None if self.reduce == "by hand" else reduce[self.reduce](),
            None if self.micro is None else af.accumulate(**dict([self.micro])),
            PRECISIONS[self.precision],
            af.skip_nonfinite() if self.skips else None,
            af.checkpoint_activations() if self.checkpointed else None,
            None if norm is None else af.clip_grad_norm(norm[0], norm_type=norm[1]),
            None if value is None else af.clip_grad_value(value),
            None if recipe.decay is None else af.ema(recipe.decay),
        )

    def state(self, world: af.World, setup: af.chain | None = None) -> af.TrainState:
        recipe = self.recipe
        schedule: Any = plain.FACTORS.get(recipe.schedule or "")
        if recipe.schedule in plain.SCHEDULERS:
            schedule = af.schedules.from_torch(plain.SCHEDULERS[recipe.schedule])
        return af.TrainState.create(
            model=lambda: plain.Net(recipe),
            optimizer=lambda named: plain.make_optimizer(
                recipe.optimizer, groups=recipe.groups, named=named
            ),
            schedule=schedule,
            data=af.Data(
                recipe.samples(),
                global_batch_size=self.batch_size,
                shuffle=self.shuffle,
                remainder=self.remainder,
            ),
            setup=self.chain() if setup is None else setup,
            world=world,
            seed=self.seed,
        )

    def order(self) -> list[list[int]]:
        """Return the samples of each batch, as one process reads them."""
        batches = af.batches(self.state(single(), af.chain()))
        return [batch.indices.tolist() for batch in islice(batches, self.updates)]


PRECISIONS = {
    None: None,
    "bf16": af.autocast("bf16"),  # float64 is none of what it lowers
    "fp16": af.autocast("fp16", init_scale=256.0, growth_interval=2),
}


def loss_fn(recipe: Recipe) -> Any:
    """Return the loss as a user of accelfn writes it."""

    def loss(net, batch):
        errors = plain.errors(net, *batch)
        if recipe.loss == "mean":
            return errors.mean()
        counted = plain.weights(recipe.loss, *batch)
        return af.Loss((errors * counted).sum(), counted.sum())

    def part(net, batch, count):
        counted = plain.weights(recipe.loss, *batch)
        return (plain.errors(net, *batch) * counted).sum() / count

    return part if recipe.loss == "counted" else loss


def step_of(setup: Setup) -> Any:
    """Return a step: accelfn's, or one that is put together of its halves."""
    recipe = setup.recipe
    how: dict[str, Any] = {}
    if recipe.loss == "counted":
        how["count"] = lambda batch: plain.weights("counted", *batch).sum()
    if setup.reduce != "by hand":
        return partial(af.make_step(loss_fn(recipe), **how), donate=not setup.copies)
    compute = af.value_and_grad(loss_fn(recipe), **how)

    def step(state, batch):
        metrics, grads = compute(state, batch, sync=False)
        if grads.reduced:
            return af.apply_grads(state, grads), metrics
        return af.apply_grads(state, af.sync_grads(state, grads)), metrics

    return step


@attrs.frozen
class Seen:
    """What a rank held after each batch, and read."""

    params: list[plain.Params]
    losses: list[float]
    skipped: list[int]
    rows: list[list[int]]
    averaged: plain.Params | None


def train(setup: Setup, folder: Path, world: af.World, *, first: bool) -> Seen:
    """Train to the cut and save, or load and train from there to the end."""
    state = setup.state(world)
    if not first:
        state = af.load(state, folder)
    number = setup.cut if first else setup.updates - setup.cut
    step, seen = step_of(setup), Seen([], [], [], [], None)
    for batch in islice(af.batches(state) if number else (), number):
        state, metrics = step(state, batch)
        seen.params.append(af.full_params(state, at="train"))
        seen.losses.append(float(metrics.all_reduce_mean(world)["loss"]))
        seen.skipped.append(state.num_skipped)
        parts = zip(batch.parts_indices, batch.weights, strict=True)
        seen.rows.append([i for rows, w in parts if w != 0 for i in rows.tolist()])
    if first:
        af.save(state, folder)
        return seen
    state = af.finalize(state)
    averaged = af.full_params(state, at="eval")
    return attrs.evolve(seen, averaged=averaged)


units = st.sampled_from([None, torch.nn.Linear])


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    n = draw(st.integers(2, 20))
    reduce = draw(
        st.sampled_from(["ddp", "fsdp", "fsdp", "local", "sums", "gather", "by hand"])
    )
    local = reduce == "local"
    precision = draw(st.sampled_from([None, None, "bf16", "fp16"]))
    skips = precision != "fp16" and draw(st.booleans())
    can_skip = skips or precision == "fp16"
    optimizers = ["sgd", "decay"] if local else plain.OPTIMIZERS
    norms = st.tuples(
        st.sampled_from([0.1, 1.0]), st.sampled_from([1.0, 2.0, 3.0, math.inf])
    )
    recipe = Recipe(
        n=n,
        seed=draw(st.integers(0, 99)),
        net=draw(st.sampled_from(["plain", "linear", "tied", "frozen", "unused"])),
        loss=draw(st.sampled_from(["mean", "weighted", "counted"])),
        optimizer=draw(st.sampled_from(optimizers)),
        groups=draw(st.booleans()),
        schedule=draw(st.none() | st.sampled_from(plain.SCHEDULES)),
        clip_norm=None if local else draw(st.none() | norms),
        clip_value=None if local else draw(st.none() | st.sampled_from([0.05, 0.5])),
        decay=draw(st.none() | st.sampled_from([0.5, 0.75, 0.9])),
        broken=draw(st.none() | st.integers(0, n - 1)) if can_skip else None,
    )
    batch_size = draw(st.integers(1, 9))
    kinds = ["short", "pad", *(["drop"] if batch_size <= n else [])]
    updates = draw(st.integers(1, 7))
    options = {
        "find_unused_parameters": recipe.net == "unused",
        "gradient_as_bucket_view": draw(st.booleans()),
        "bucket_cap_mb": draw(st.sampled_from([25, 1e-5])),
    }
    micro = st.tuples(
        st.sampled_from(["num_micro_batches", "micro_batch_size"]), st.integers(1, 4)
    )
    return Setup(
        recipe,
        reduce=reduce,
        sizes=(draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        batch_size=batch_size,
        remainder=draw(st.sampled_from(kinds)),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        micro=draw(st.none() | micro),
        precision=precision,
        skips=skips,
        checkpointed=draw(st.booleans()),
        updates=updates,
        cut=draw(st.integers(0, updates)),
        sums=draw(st.sampled_from(["ranks", "ring", "tree"])),
        copies=draw(st.booleans()),
        ddp=tuple(options.items()),
        fsdp=(
            ("units", None if recipe.net == "tied" else draw(units)),
            ("reshard_after_forward", draw(st.booleans())),
            ("keep_grads", draw(st.sampled_from(["whole", "sharded"]))),
            ("find_unused_parameters", recipe.net == "unused"),
        ),
    )


@given(setup=setups())
def test_it_trains_what_a_plain_loop_trains(setup):
    """Any setup, on 1 to 4 ranks and resumed on 1 to 4, comes to what a plain loop comes to."""
    order = setup.order()
    expected = plain.train(setup.recipe, order)
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            simulate(
                size,
                partial(train, setup, Path(folder) / "saved", first=first),
                sums=setup.sums,
            ).results
            for size, first in zip(setup.sizes, (True, False), strict=True)
        ]
    for half, begin in zip(halves, (0, setup.cut), strict=True):
        first, *others = half
        for i, params in enumerate(first.params):
            assert differences(expected.params[begin + i], params, within=WITHIN) == []
            for other in others:
                assert all(torch.equal(params[n], other.params[i][n]) for n in params)
            loss, want = first.losses[i], expected.losses[begin + i]
            assert loss == pytest.approx(want, rel=WITHIN, abs=WITHIN, nan_ok=True)
            assert first.skipped[i] == sum(expected.skipped[: begin + i + 1])
            read = [row for rank in half for row in rank.rows[i]]
            assert read == order[begin + i]
    last = expected.averaged or (expected.params or [None])[-1]
    for each in halves[1]:
        assert each.averaged is not None
        assert not last or differences(last, each.averaged, within=WITHIN) == []
