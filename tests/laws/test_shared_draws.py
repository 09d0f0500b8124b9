# SPDX-License-Identifier: Apache-2.0
"""What transforms draw is the same on all ranks, and kept as what a state can train with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.disks import lent
from tests.laws.worlds import DDP, single
from tests.states import linear_state
from tests.strategies import differences, tensors

Drawn = dict[str, list[float]]


class _Noting:
    """Each field draws a number and notes it by the field's name; a slot keeps the last."""

    tells: ClassVar[Mapping[str, Any]] = {"sees_skips": True}

    seen: Drawn = attrs.field(factory=dict, kw_only=True, eq=False)

    def init(self, state):
        del state
        return self._drawn("init")

    def loss(self, loss_fn, slot, update):
        del update
        self._drawn("loss")
        return loss_fn, slot

    def value_and_grad(self, inner, slot, update):
        del update
        self._drawn("value_and_grad")
        return inner, slot

    def grads(self, grads, slot, update):
        del slot
        skipping = grads.with_skip(update.num_tried == 1, agreed=True)
        return skipping, self._drawn("grads")

    def hyper(self, hyper, slot, update):
        del hyper, update
        self._drawn("hyper")
        return {}, slot

    def after_update(self, state, slot, update):
        del slot
        return state, self._drawn("after_skip" if update.skipped else "after_update")

    def eval_params(self, params, slot, update):
        del update
        self._drawn("eval_params")
        return params, slot

    def finalize(self, state, slot, update):
        del slot, update
        return state, self._drawn("finalize")

    def _drawn(self, field):
        value = torch.rand((), dtype=torch.float64)
        self.seen.setdefault(field, []).append(value.item())
        return value


FIELDS = {name for name in vars(_Noting) if not name.startswith("_")}
FIELDS = FIELDS - {"seen", "tells"} | {"after_skip"}
Noting = af.transform(_Noting)


@af.transform
class Quiet:
    """Has every field that draws could be in, and says that it draws nothing."""

    tells: ClassVar[Mapping[str, Any]] = {"draws_nothing": True}

    def loss(self, loss_fn, slot, update):
        return loss_fn, slot

    def hyper(self, hyper, slot, update):
        return {}, slot

    def after_update(self, state, slot, update):
        return state, slot

    def finalize(self, state, slot, update):
        return state, slot


@contextmanager
def in_modes(grad: bool, inference: bool) -> Iterator[None]:
    """Be a caller who has gradients on or off, or inference mode."""
    with torch.set_grad_enabled(grad), torch.inference_mode(inference):
        yield


def seen_by(
    world: af.World,
    modes: tuple[bool, bool],
    seed: int,
    name: str,
    beside: Sequence[Any],
) -> Drawn:
    """Take three updates, the second of which is skipped; return what each field drew."""
    seen: Drawn = {}
    step = af.make_step(lambda net, batch: net(batch).square().mean())
    noting = Noting(seen=seen)
    with in_modes(*modes):
        ddp = af.wrap_ddp() if world.size > 1 else None
        state = linear_state(
            2,
            data=af.Data(torch.ones(24, 2), global_batch_size=8),
            setup=af.chain(af.shard_data(), ddp, *beside, noting),
            world=world,
            seed=seed,
            name=name,
        )
    kept = [state.slots[noting.name]]
    for batch in af.batches(state, until_epoch=1):
        with in_modes(*modes):
            state, _ = step(state, batch)
        kept.append(state.slots[noting.name])
    with in_modes(*modes):
        af.eval_params(state)
        state = af.finalize(state)
    kept.append(state.slots[noting.name])
    assert [each.is_inference() for each in kept] == [False] * len(kept)
    assert not any(each.requires_grad for each in kept)
    return seen


BESIDE = [af.clip_grad_norm(1.0), af.ema(0.5), af.clip_grad_value(1.0), Quiet()]


@given(
    size=st.integers(1, 3),
    grad=st.booleans(),
    inference=st.booleans(),
    seed=st.integers(0, 3),
    ambient=st.integers(0, 9),
    beside=st.lists(st.sampled_from(BESIDE), max_size=2, unique_by=type),
)
def test_what_transforms_draw_is_of_the_state(
    size, grad, inference, seed, ambient, beside
):
    """A6: in every field that has a state, draws are alike on all ranks and all their own.

    They are a function of the seed, the state's name and the update, whatever stands beside
    and draws nothing; no two fields, seeds or names share one. The caller's generator is as
    before, and his modes touch no slot.
    """
    torch.manual_seed(ambient)  # nothing may depend on it
    runs = simulate(
        size, lambda world: seen_by(world, (grad, inference), seed, "state", beside)
    ).results
    assert set(runs[0]) == FIELDS
    assert all(each == runs[0] for each in runs)
    before = torch.get_rng_state()
    alone, *others = (
        seen_by(single(), (True, False), *each, ())
        for each in [(seed, "state"), (seed + 1, "state"), (seed, "other")]
    )
    assert torch.equal(before, torch.get_rng_state())
    assert alone == runs[0]
    numbers = [x for each in (alone, *others) for drawn in each.values() for x in drawn]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("size", [1, 2])
def test_draws_of_two_beginnings_differ(size):
    """A6: two transforms that draw in `init` draw apart, whichever comes first."""

    def slots(world: af.World, names: tuple[str, ...]) -> dict[str, float]:
        setup = af.chain(*(Noting(name=name) for name in names))
        state = linear_state(setup=setup, world=world)
        return {name: state.slots[name].item() for name in names}

    one, two = (
        simulate(size, lambda world, n=names: slots(world, n)).results
        for names in (("a", "b"), ("b", "a"))
    )
    assert one == two == (one[0],) * size
    assert len(set(one[0].values())) == 2


@af.transform
class Noisy:
    """Draws after each update."""

    def init(self, state):
        del state
        return torch.zeros(())

    def after_update(self, state, slot, update):
        return state, slot + torch.rand(())


@given(
    size=st.integers(1, 2),
    seeds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    steps=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    starts=st.none() | st.integers(0, 3),
)
def test_what_is_loaded_draws_by_its_own_seed(size, seeds, steps, starts):
    """A6: loaded into a state that has drawn by another seed, a run draws as it would have."""
    step = af.make_step(lambda model, x: model(x * torch.rand(())).square().mean())
    sends = starts is not None and af.compress_grads(
        "powersgd", start_powerSGD_iter=starts, min_compression_rate=0
    )

    def trained(state: af.TrainState, count: int) -> af.TrainState:
        for _ in range(count):
            state, _ = step(state, torch.full((2, 2), 1.0 + state.world.rank))
        return state

    setup = af.chain(DDP, Noisy(), sends or None)

    def rank(world: af.World) -> None:
        first, other = (
            linear_state(2, 3, setup=setup, seed=seed, world=world) for seed in seeds
        )
        saved = trained(first, steps[0])
        af.save(saved, root / "saved")
        other = trained(other, steps[1])
        whole, loaded = (
            trained(state, 1) for state in (saved, af.load(other, root / "saved"))
        )
        assert differences(tensors(whole), tensors(loaded)) == []

    with lent() as root:
        simulate(size, rank)
