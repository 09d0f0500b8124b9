# SPDX-License-Identifier: Apache-2.0
"""Ranks that have a part of each layer train what one rank with all of them does."""

import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.internals import cut_axes, local, tensor_leaves
from tests.laws.parallel_layers import (
    DDP,
    FEW,
    FSDP,
    LYING,
    PLAN,
    SEQUENCE,
    UNSPLIT,
    Found,
    Lying,
    Speech,
    check_near,
    loss_of_tokens,
    seen,
    speeches,
    stepped,
)
from tests.laws.worlds import single
from tests.strategies import differences, tensors

ROWS = ("blocks.0.out.weight", "blocks.0.down.weight")
WHOLE = ("blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.of_heads.weight")
WHOLE += ("blocks.0.down.bias",)
"""Parameters whose columns are split, and those that are not split, by `PLAN`."""
lying = st.sampled_from(LYING)


@given(
    speech=speeches(),
    lying=lying,
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
)
def test_parts_of_layers_train_what_the_whole_does(
    speech: Speech, lying: Lying, dtype: torch.dtype
) -> None:
    """Parameters, optimizer state, averages, metrics and evaluation are those of one rank."""
    speech = attrs.evolve(speech, dtype=dtype)
    setup = lying.setup(speech.plan)
    ranks = lying.on_ranks(lambda world: seen(speech.state(world, *setup), speech))
    check_near(seen(speech.state(single()), speech), ranks, dtype)


@given(speech=speeches(), lying=lying)
def test_each_token_counts_once(speech: Speech, lying: Lying) -> None:
    """The weight of an update, and of its metrics, is that of all tokens of its texts."""

    def weights(world: af.World, *setup: object) -> tuple[float, float]:
        state = speech.state(world, *setup)
        batch = next(iter(af.batches(state)))
        metrics, grads = af.value_and_grad(loss_of_tokens)(state, batch)
        total = torch.as_tensor(metrics.sums["nll"].weight, dtype=torch.float64)
        seen = af.all_reduce(total.reshape(1), world.loss)
        return float(grads.taken.divisor) * grads.taken.num_averaged, float(seen)

    _, expected = weights(single())
    setup = lying.setup(speech.plan)
    for found in lying.on_ranks(lambda world: weights(world, *setup)):
        assert found == pytest.approx((expected, expected), rel=1e-12)


@given(
    speech=speeches(),
    one=st.sampled_from([*LYING, *UNSPLIT]),
    other=st.sampled_from([*LYING, *UNSPLIT]),
    plans=st.tuples(*[st.sampled_from([PLAN, SEQUENCE, FEW])] * 2),
    updates=st.integers(0, 1),
    frozen=st.sampled_from(["write", "hash"]),
    begun=st.booleans(),
)
def test_what_is_saved_in_one_layout_is_loaded_in_another(
    speech: Speech,
    one: Lying,
    other: Lying,
    plans: Any,
    updates: int,
    frozen: Any,
    begun: bool,
) -> None:
    """Parameters, optimizer state and averages, bitwise, on all ranks, which go on from there
    alike; and exports from either have the same bytes.
    """
    assume(one in LYING or other in LYING)
    first, second = plans
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def save(world: af.World) -> tuple[Found, Found]:
            begun = speech.state(world, *one.setup(first))
            state, _ = stepped(begun, updates)
            af.save(state, place / "saved", frozen=frozen)
            af.export_model(state, place / "one", at="train")
            return tensors(state), tensors(stepped(state, 1)[0])

        def load(world: af.World) -> tuple[Found, Found]:
            state = speech.state(world, *other.setup(second))
            if begun:  # what it had before has no say
                state, _ = stepped(state, 1)
            state = af.load(state, place / "saved")
            af.export_model(state, place / "other", at="train")
            return tensors(state), tensors(stepped(state, 1)[0])

        (saved, after), *_ = one.on_ranks(save)
        for loaded, further in other.on_ranks(load):
            loaded["buffers.seen"] = saved["buffers.seen"]  # rank 0's count
            assert differences(saved, loaded) == []
            further["buffers.seen"] = after["buffers.seen"]
            assert differences(after, further, within=1e-9) == []
        exports = [place / name / "model.safetensors" for name in ("one", "other")]
        assert exports[0].read_bytes() == exports[1].read_bytes()


@given(
    speech=speeches(),
    engines=st.tuples(*[st.sampled_from([DDP, *FSDP])] * 2),
    plans=st.tuples(*[st.sampled_from([PLAN, SEQUENCE, FEW])] * 2),
    axes=st.sampled_from([{"dp_shard": 2, "tp": 2}, {"dp_shard": 3, "tp": 2}]),
)
def test_another_plan_and_back_changes_nothing(
    speech: Speech, engines: Any, plans: Any, axes: dict[str, int]
) -> None:
    """A state's numbers are the same bits in another layout, and what comes back trains on as
    what never went.
    """
    here, there = (
        Lying(axes, engine).setup(plan)
        for engine, plan in zip(engines, plans, strict=True)
    )

    def fn(world: af.World) -> None:
        state, _ = stepped(speech.state(world, *here), 1)
        home, before = state.setup, tensors(state)
        micro = af.accumulate(num_micro_batches=speech.micro)
        setup = af.chain(af.shard_data(), *there, micro, *speech.behind)
        moved = state.with_setup(setup)
        assert differences(before, tensors(moved)) == []
        returned = moved.with_setup(home)
        assert differences(before, tensors(returned)) == []
        elsewhere = tensors(stepped(moved.copy(), 1)[0])
        further, stayed = (
            tensors(stepped(each, 1)[0]) for each in (returned, state.copy())
        )
        assert differences(stayed, further) == []
        assert differences(stayed, elsewhere, within=1e-9) == []

    Lying(axes).on_ranks(fn)


@given(
    speech=speeches(dropout=0.5, plan=PLAN) | speeches(dropout=0.5, plan=SEQUENCE),
    lying=lying,
)
def test_what_all_ranks_have_stays_the_same(speech: Speech, lying: Lying) -> None:
    """Bit by bit along tp, and what is dropped elsewhere, though between layers each rank drops
    features of its own, and positions where it has such.
    """
    by_position = speech.plan is SEQUENCE

    def fn(world: af.World) -> tuple[int, Found, dict[str, list[torch.Tensor]]]:
        inside: list[torch.Tensor] = []
        elsewhere: list[torch.Tensor] = []
        outside: list[torch.Tensor] = []

        def noting(seen: list[torch.Tensor]) -> Any:
            def note(module: nn.Module, _: Any, made: torch.Tensor) -> None:
                if module.training:
                    seen.append(made.detach() == 0)

            return note

        def loss(net: Any, batch: Any) -> af.Loss:
            block = net.blocks[0]
            hooks = [
                block.inside.register_forward_hook(noting(inside)),
                block.outside.register_forward_hook(
                    noting(outside if by_position else elsewhere)
                ),
            ]
            try:
                return loss_of_tokens(net, batch)
            finally:
                for hook in hooks:
                    hook.remove()

        state, _ = stepped(speech.state(world, *lying.setup(speech.plan)), 3, loss)
        fields = {"params": dict(state.params), **state.opt_state}
        shared = {
            f"{name} {i}": local(leaf).clone()
            for name, value in fields.items()
            for i, leaf in enumerate(tensor_leaves(value))
            if "tp" not in cut_axes(leaf)
        }
        shared |= {f"dropped {i}": each for i, each in enumerate(elsewhere)}
        return world.loss.rank, shared, {"inside": inside, "outside": outside}

    first: dict[int, tuple[Found, dict[str, list[torch.Tensor]]]] = {}
    apart: dict[tuple[int, str], bool] = {}
    for place, shared, dropped in lying.on_ranks(fn):
        kept, masks = first.setdefault(place, (shared, dropped))
        assert differences(kept, shared) == []
        for where in ["inside", "outside"] if by_position else ["inside"]:
            pairs = zip(masks[where], dropped[where], strict=True)
            others = not all(torch.equal(*pair) for pair in pairs)
            apart[place, where] = apart.get((place, where), False) or others
    assert all(apart.values())


@given(speech=speeches(), lying=st.sampled_from(LYING[:2]))
def test_what_a_loss_draws_is_what_one_rank_draws(speech: Speech, lying: Lying) -> None:
    """Noise that the loss draws, before the model and behind it, is that of one rank."""

    def noisy(net: nn.Module, batch: Any) -> af.Loss:
        places = batch["places"] + torch.rand_like(batch["places"])
        found = loss_of_tokens(net, {**batch, "places": places})
        return af.Loss(found.total * (1 + torch.rand(())), found.weight)

    alone, _ = seen(speech.state(single()), speech, noisy)
    setup = lying.setup(speech.plan)
    for found, _ in lying.on_ranks(
        lambda world: seen(speech.state(world, *setup), speech, noisy)
    ):
        whole = {name: value for name, value in alone.items() if name in found}
        assert differences(whole, found, within=1e-12) == []


@given(speech=speeches(plan=PLAN), lying=lying)
def test_each_rank_has_its_part_of_layers(speech: Speech, lying: Lying) -> None:
    """Of what is split a part alone: at the start, after updates, with averages, and after a
    load; and gradients lie as parameters do.
    """
    ranks = lying.axes["tp"]
    shards = lying.axes.get("dp_shard", 1) * lying.axes.get("cp", 1)
    rows = shards if lying.engine in FSDP else 1

    def look(state: af.TrainState) -> None:
        fields = [state.params, state.opt_state, state.slots.get("ema", {})]
        for name, param in state.params.items():
            if not param.ndim:
                continue
            lengths = [*param.shape]
            if name not in WHOLE:
                lengths[1 if name in ROWS else 0] //= ranks
            lengths[0] = -(-lengths[0] // rows)
            for field in fields:
                for leaf in tensor_leaves(field.get(name, ())):
                    if leaf.shape == param.shape:
                        assert local(leaf).numel() <= torch.Size(lengths).numel(), name

    with tempfile.TemporaryDirectory() as folder:

        def fn(world: af.World) -> None:
            setup = lying.setup(speech.plan)
            state = speech.state(world, *setup)
            look(state)
            batch = next(iter(af.batches(state)))
            _, grads = af.value_and_grad(loss_of_tokens)(state, batch)
            for name, grad in grads.tensors.items():
                assert local(grad).shape == local(state.params[name]).shape
            state, _ = stepped(state, 2)
            look(state)
            af.save(state, f"{folder}/saved")
            look(af.load(speech.state(world, *setup), f"{folder}/saved"))

        lying.on_ranks(fn)


@af.transform
class Breaking:
    """Makes one element of one rank's part of a gradient infinite, at some updates."""

    rank: int
    updates: frozenset[int]

    def grads(self, grads: af.Grads, slot: None, update: af.Update) -> Any:
        if update.num_tried in self.updates and update.world.rank == self.rank:
            local(grads.tensors["blocks.0.up.weight"]).view(-1)[:1] = float("inf")
        return grads, slot


@given(
    speech=speeches(behind=(), micro=1, frozen=()),
    lying=st.sampled_from(LYING[:5]),
    updates=st.frozensets(st.integers(0, 2), max_size=3),
    data=st.data(),
)
def test_an_update_is_skipped_on_all_ranks_or_none(speech, lying, updates, data):
    """Though one rank alone has the part of a gradient that is infinite."""
    size = 4 if lying.axes != {"tp": 2} else 2
    breaking = Breaking(data.draw(st.integers(0, size - 1)), updates=updates)
    setup = *lying.setup(speech.plan), breaking, af.skip_nonfinite()

    def fn(world: af.World) -> tuple[tuple[int, int], Found]:
        state, _ = stepped(speech.state(world, *setup), 3)
        return (state.step, state.num_skipped), tensors(state)

    ranks = lying.on_ranks(fn)
    assert {numbers for numbers, _ in ranks} == {(3 - len(updates), len(updates))}
    for _, found in ranks:
        found["buffers.seen"] = ranks[0][1]["buffers.seen"]
        assert differences(ranks[0][1], found) == []


@given(
    speech=speeches(behind=()),
    lying=st.sampled_from([each for each in LYING if each.engine != FSDP[1]]),
)
def test_parts_are_reduced_by_hand_alike(speech: Speech, lying: Lying) -> None:
    """`sync_grads` gives what the last micro-batch does."""

    def fn(world: af.World) -> None:
        state = speech.state(world, *lying.setup(speech.plan))
        batch = next(iter(af.batches(state)))
        after, _ = af.make_step(loss_of_tokens)(state.copy(), batch)
        grads, compute = None, af.value_and_grad(loss_of_tokens)
        for part in batch.parts():
            _, grads = compute(state, part, into=grads, sync=False)
        done = af.apply_grads(state, af.sync_grads(state, grads))
        assert differences(tensors(after), tensors(done), within=1e-12) == []

    lying.on_ranks(fn)
