# SPDX-License-Identifier: Apache-2.0
"""Whatever options an optimizer has, and whoever sets its rates, it does what torch's own does."""

import math
import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws import plain_updates as plain
from tests.laws.plain_updates import Moment, Params, Part, Recipe

WITHIN = 1e-9


@af.transform
class Sets:
    """Set a hyperparameter, of all groups or one, in every other update, to a value that falls."""

    key: Any
    value: float

    def hyper(self, hyper: Mapping[Any, Any], slot: None, update: af.Update) -> Any:
        return plain.planned(self.key, self.value, update.state.step), slot


@attrs.frozen
class Setup:
    """A recipe, and how it is trained: by how many ranks, in which way, with which break."""

    recipe: Recipe
    how: str
    sizes: tuple[int, int]
    scaled: bool
    cut: int | None

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        """Return an optimizer, perhaps of parts."""
        head, *rest = (part.make for part in self.recipe.parts)
        if not rest:
            return head(named)
        return af.combine_optimizers((is_head, head), (..., *rest))(list(named))

    def chain(self, how: str) -> af.chain:
        """Return the transforms."""
        parts = {"accumulate": af.accumulate(num_micro_batches=2)}
        clips = {
            "norm": af.clip_grad_norm,
            "groups": partial(af.clip_grad_norm, per_group=True),
            "value": lambda bound, **_: af.clip_grad_value(bound),
        }
        return af.chain(
            af.shard_data(),
            af.wrap_ddp(),
            parts.get(how),
            af.optimizer_in_backward() if how == "in backward" else None,
            af.autocast("fp16", init_scale=64.0, growth_interval=1)
            if self.scaled
            else None,
            af.skip_nonfinite() if self.recipe.broken is not None else None,
            *(
                af.reduce_lr_on_plateau(value, patience=1, name=f"plateau-{i}")
                if kind == "plateau"
                else Sets(key, value=value, name=f"sets-{i}")
                for i, (kind, key, value) in enumerate(self.recipe.setters)
            ),
            *(
                attrs.evolve(clips[kind](bound, norm_type=p), name=f"clip-{i}")
                for i, (kind, bound, p) in enumerate(self.recipe.clips)
            ),
            *(af.ema(d, name=f"ema-{i}") for i, d in enumerate(self.recipe.decays)),
        )

    def state(self, world: af.World, how: str) -> af.TrainState:
        """Return the state before the first update."""
        recipe = self.recipe
        return af.TrainState.create(
            model=lambda: plain.Net(recipe.seed, is_complex=recipe.is_complex),
            optimizer=self.optimizer,
            schedule=plain.factor if recipe.schedule else None,
            data=af.Data(recipe.samples(), global_batch_size=recipe.batch_size),
            setup=self.chain(how),
            world=world,
        )


def is_head(name: str, param: torch.Tensor) -> bool:
    del param
    return name.startswith("head")


def loss_fn(net: nn.Module, batch: Any) -> af.Loss:
    return af.Loss(*plain.total_and_weight(net, batch))


def train(setup: Setup, folder: Path, world: af.World, *, first: bool) -> list[Moment]:
    """Train to the cut and save, or load and train from there, without what frees gradients."""
    state = setup.state(world, setup.how if first else "plain")
    if not first:
        state = af.load(state, folder, allow=("options",))
    cut = setup.recipe.updates if setup.cut is None else setup.cut
    number = cut if first else setup.recipe.updates - cut
    step, moments = af.make_step(loss_fn), list[Moment]()
    for batch in islice(af.batches(state) if number else (), number):
        state, _ = step(state, batch)
        if any(kind == "plateau" for kind, _, _ in setup.recipe.setters):
            state = af.report_metric(state, 1.0)
        kept = tuple(
            {n: p.clone() for n, p in state.slots[f"ema-{i}"].items()}
            for i, _ in enumerate(setup.recipe.decays)
        )
        params = {n: p.clone() for n, p in state.params.items()}
        moments.append(Moment(params, kept, state.lrs, state.num_skipped))
        evaluated = af.eval_params(state)
        last = kept[-1] if kept else params  # two that evaluate: the last has the say
        assert all(torch.equal(evaluated[name], last[name]) for name in last)
    if first and setup.cut is not None:
        af.save(state, folder)
    return moments


@st.composite
def parts(draw: st.DrawFn, *, is_complex: bool) -> Part:
    kind = draw(st.sampled_from(plain.OFTEN))
    _, choices = plain.KINDS[kind]
    drawn = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    if (
        kind == "SGD"
        and drawn["nesterov"]
        and (not drawn["momentum"] or drawn["dampening"])
    ):
        drawn["nesterov"] = False
    drawn["weight_decay"] = draw(st.sampled_from([0, 0.5]))
    drawn["maximize"] = draw(st.booleans())
    kernels = [None, *([] if drawn.get("tensor rate") else ["foreach"])]
    if kind in plain.FUSED and not is_complex:
        kernels += ["fused"] * 3
    kernel = draw(st.sampled_from(kernels))
    return Part(kind, tuple(drawn.items()), kernel, draw(st.booleans()))


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    is_complex = draw(st.sampled_from([False, False, False, False, True]))
    n = draw(st.integers(2, 9))
    how = draw(st.sampled_from(["plain", "plain", "accumulate", "in backward"]))
    frees = how == "in backward"
    number = draw(st.sampled_from([1, 1, 2]))
    made = [draw(parts(is_complex=is_complex)) for _ in range(number)]
    grouped = [part.grouped for part in made]
    number = len(made) + sum(grouped)
    wheres = [*range(number), *(["biases"] if any(grouped) else [])]
    keys = st.sampled_from(["lr", "weight_decay"])
    sets = st.tuples(
        st.just("sets"),
        keys | st.tuples(st.sampled_from(wheres), keys),
        st.sampled_from([0.01, 0.25]),
    )
    setters = draw(st.lists(sets, max_size=3))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(setters)))
        setters.insert(place, ("plateau", None, draw(st.sampled_from([0.5, 0.1]))))
    labels = sum(grouped) < 2  # groups of one name are refused where each is clipped
    clip = st.tuples(
        st.sampled_from(
            [
                "norm",
                *(["groups"] if labels else []),
                *([] if is_complex else ["value"]),
            ]
        ),
        st.sampled_from([0.1, 1.0, 20.0]),
        st.sampled_from([1.0, 2.0, math.inf]),
    )
    updates = draw(st.integers(1, 5))
    scaled = not frees and draw(st.booleans())
    skips = not frees and draw(st.booleans())
    recipe = Recipe(
        parts=tuple(made),
        is_complex=is_complex,
        setters=tuple(setters),
        schedule=draw(st.booleans()),
        clips=() if frees else tuple(draw(st.lists(clip, max_size=2))),
        decays=tuple(draw(st.lists(st.sampled_from([0.5, 0.75, 1.0]), max_size=2))),
        n=n,
        batch_size=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 99)),
        updates=updates,
        broken=draw(st.integers(0, n - 1)) if skips else None,
    )
    return Setup(
        recipe,
        how=how,
        sizes=(draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        scaled=scaled,
        # what is complex has no place in the files of checkpoints
        cut=None if is_complex else draw(st.integers(0, updates)),
    )


@given(setup=setups())
def test_any_optimizer_does_as_torchs_own(setup: Setup) -> None:
    """Kernels, groups, parts, setters of rates, clips and averages together are the plain loop."""
    expected = plain.train(setup.recipe)
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            simulate(
                size, partial(train, setup, Path(folder) / "saved", first=first)
            ).results
            for size, first in zip(setup.sizes, (True, False), strict=True)
            if first or setup.cut is not None
        ]
    found = [moment for ranks in halves for moment in zip(*ranks, strict=True)]
    for one, ranks in zip(expected, found, strict=True):
        for two in ranks:
            assert one.skipped == two.skipped
            assert all(map(is_close, one.rates, two.rates))
            assert same(one.params, two.params)
            assert all(map(same, one.averages, two.averages))
            first = ranks[0].params
            assert all(torch.equal(first[name], two.params[name]) for name in first)


def is_close(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=WITHIN, abs_tol=WITHIN)


def same(one: Params, two: Params) -> bool:
    """Whether two sets of tensors differ by rounding at most."""
    return one.keys() == two.keys() and all(
        torch.allclose(one[name], two[name], rtol=WITHIN, atol=WITHIN) for name in one
    )
