# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, on real processes: the numbers of one rank, and states that do not meet."""

import functools
import gc
import importlib
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import accelfn as af
from accelfn.errors import GradsError, LossError, StateError, UnusedParametersError
from accelfn.testing import run_processes
from tests.internals import (
    Flats,
    ModuleOrder,
    all_gather_objects,
    collectives,
    engine_of,
)
from tests.laws.broken_off import KINDS, Breaking
from tests.laws.histories import Acts, Training, acts, check_apart_on
from tests.laws.split_models import LOSSES, Block, Net, Run, runs
from tests.laws.test_shard_histories import broken_backward, broken_forward
from tests.processes import RankError, run_ranks
from tests.ranks.commands import TRAINS, ended, launched
from tests.states import bits
from tests.strategies import differences, tensors

NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(NO_DEEPSPEED, reason="deepspeed is not installed"),
]
torch.set_num_threads(1)  # on the ranks, too, which import this file

Found = dict[str, torch.Tensor]
BEHIND = (af.clip_grad_norm(0.3), af.ema(0.5), af.checkpoint_activations(Block))
APART = {"stage3_param_persistence_threshold": 0}
"""Nothing is kept whole for being small."""
RUN = Run(9, 9, "mean", "adamw", in_list=True, micro=1, dtype=torch.float32)
MEAN = LOSSES["mean"]


@attrs.frozen
class Trained:
    """A training in a layout."""

    run: Run
    engine: Any

    @property
    def loss(self) -> Any:
        return LOSSES[self.run.loss]

    def state(self, world: af.World) -> af.TrainState:
        """Return the state before the first update."""
        return self.run.state(world, self.engine)

    def batch(self, state: af.TrainState) -> af.Batch:
        return self.run.batches(state, 1)[0]

    def stepped(
        self, state: af.TrainState, updates: int = 1, **options: Any
    ) -> af.TrainState:
        """Return a state after more updates."""
        step = af.make_step(self.loss)
        for batch in self.run.batches(state, updates):
            state, _ = step(state, batch, **options)
        return state

    def begun(self, world: af.World, updates: int = 1) -> af.TrainState:
        """Return the state after its first updates."""
        return self.stepped(self.state(world), updates)

    def by(self, engine: object) -> "Trained":
        """Return the same training in another layout."""
        return attrs.evolve(self, engine=engine)


def zero(stage: int, options: Any = None, **run: Any) -> Trained:
    """Return a small training under ZeRO."""
    config = {"zero_optimization": options or {}}
    engine = af.wrap_deepspeed(stage, config=config)
    return Trained(attrs.evolve(RUN, **run), engine)


def common(state: af.TrainState) -> Found:
    """Return what does not depend on what a rank has seen."""
    return {n: each for n, each in tensors(state).items() if n != "buffers.seen"}


def same(one: af.TrainState, other: af.TrainState) -> bool:
    return differences(tensors(one), tensors(other)) == []


def check_as_split(
    each: Trained,
    train: Callable[[Trained], af.TrainState],
    within: float = 1e-6,
    engine: object = None,
) -> None:
    """Check that ZeRO trains what wrap_fsdp does."""
    ours, theirs = train(each), train(each.by(engine or af.wrap_fsdp()))
    assert differences(common(ours), common(theirs), within=within) == []


# drawn trainings, several of them on the same processes

zeros = st.builds(
    lambda stage, keep_grads, zero: af.wrap_deepspeed(
        stage, keep_grads=keep_grads, config={"zero_optimization": zero}
    ),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["whole", "sharded"]),
    st.sampled_from(
        [
            {},
            APART,
            {"sub_group_size": 30, "reduce_bucket_size": 20},
            {"offload_optimizer": {"device": "cpu"}},
            {"round_robin_gradients": True},
        ]
    ),
)
trainings = st.builds(
    lambda run, optimizer, behind, engine: Trained(
        attrs.evolve(run, optimizer=optimizer, behind=tuple(behind)), engine
    ),
    runs(dtype=torch.float32),
    st.sampled_from(["adamw", "momentum", "sgd"]),
    st.lists(st.sampled_from(BEHIND), unique_by=lambda each: each.name),
    zeros,
)
engines = zeros | st.sampled_from([af.wrap_fsdp(), af.wrap_ddp()])
sizes = st.sampled_from([2, 3])
# ranks are started anew for each example: to look for a smaller one takes minutes
few = settings(max_examples=2, phases=[Phase.explicit, Phase.generate])


def some(strategy: Any, count: int) -> Any:
    return st.lists(strategy, min_size=count, max_size=count)


def differing(one: Any, other: Any) -> list[str]:
    """Return where two differ by more than 1e-6 of the largest number there, or of 1.

    What an optimizer keeps is given 4e-6: rounding alone drives its sums of gradients apart,
    under `wrap_ddp` as far. So is a loss, which multiplies the parameters' differences.
    """
    one, other = (
        {
            name: torch.as_tensor(value, dtype=torch.float64)
            for name, value in dict(found).items()
            if name
            not in ("skipped", "buffers.seen")  # what only ZeRO tells, or a rank
        }
        for found in (one, other)
    )
    largest = {
        name: max(1.0, float(each.abs().amax()) if each.numel() else 0.0)
        * (4 if name.startswith(("opt_state.", "loss")) else 1)
        for name, each in one.items()
    }
    ours, theirs = (
        {name: each / largest.get(name, 1.0) for name, each in found.items()}
        for found in (one, other)
    )
    return differences(ours, theirs, within=1e-6)


def numbers(world: af.World, several: Sequence[Trained]) -> list[list[Any]]:
    """Return of each training its tensors and metrics after each update."""
    found: list[list[Any]] = []
    for each in several:
        state, step = each.state(world), af.make_step(each.loss)
        found.append([])
        for batch in each.run.batches(state, 3):
            state, metrics = step(state, batch)
            found[-1] += [tensors(state), metrics.all_reduce_mean(world)]
        found[-1].append(af.evaluate(state, each.run.data(), each.loss))
        af.release_engine(state)
    return found


@few
@given(several=some(trainings, 8), size=sizes)
def test_it_trains_as_one_rank(several: list[Trained], size: int) -> None:
    """Parameters, optimizer state, averages, metrics and evaluations, to 1e-6."""
    alone = numbers(af.World.single(device="cpu"), several)
    for found in run_ranks(size, numbers, several):
        for each, one, other in zip(several, alone, found, strict=True):
            for ours, theirs in zip(one, other, strict=True):
                assert differing(ours, theirs) == [], each


Part = tuple[float, float, float]
"""Which file of those that a step comes through, which call in it, and which of its times."""
PARTS = st.floats(0, 1, exclude_max=True)


def broken_off(
    world: af.World, several: Sequence[Trained], parts: Sequence[Part], kind: str
) -> None:
    """Check that a state is as before and goes on so, or is over, wherever its step raised."""
    for each in several:
        state = each.begun(world)
        expected = bits(tensors(each.stepped(state.copy(), 2)))
        with Breaking(kind=KINDS[kind]) as counted:
            each.stepped(state.copy())
        # the calls that all ranks make, and as often
        first, *others = all_gather_objects(dict(counted.counts), world, pickle=True)
        counts = {
            place: number
            for place, number in sorted(first.items())
            if all(other.get(place) == number for other in others)
        }
        for file, line, which in parts:
            files = sorted({place[0] for place in counts})
            calls = [c for c in counts if c[0] == files[int(file * len(files))]]
            place = calls[int(line * len(calls))]
            hit = state.copy()
            before, error = bits(tensors(hit)), None
            breaking = Breaking(place, int(which * counts[place]), KINDS[kind])
            try:
                with breaking:
                    each.stepped(hit)
            except KINDS[kind] as raised:
                error = raised
            assert (error is None) == (breaking.raised is None), place
            if not hit.lease.is_over:
                assert bits(tensors(hit)) == before, place
                assert bits(tensors(each.stepped(hit, 2))) == expected, place
            assert bits(tensors(each.stepped(state.copy(), 2))) == expected, place
        af.release_engine(state)


@few
@given(
    several=st.tuples(
        *(
            trainings.map(lambda e, n=n: e.by(attrs.evolve(e.engine, stage=n)))
            for n in (1, 2, 3)
        )
    ),
    parts=some(st.tuples(PARTS, PARTS, PARTS), 12),
    kind=st.sampled_from(["Broken", "MemoryError"]),
)
def test_a_step_that_is_broken_off_was_not_begun_or_says_so(
    several: list[Trained], parts: list[Part], kind: str
) -> None:
    """On all ranks at once: a state goes on bitwise in the same engine, or is over."""
    run_ranks(2, broken_off, several, parts, kind)


def histories(
    world: af.World, drawn: Sequence[tuple[Trained, Acts]], folder: str
) -> None:
    """Check that states do not meet, whatever is done to them."""
    for i, (each, drawn_acts) in enumerate(drawn):
        raising = {"raise": broken_forward, "raise in backward": broken_backward}
        of = Training(each.state, each.run.data, each.loss, raising)
        check_apart_on(world, of, drawn_acts, str(Path(folder, str(i))))


@few
@given(several=some(st.tuples(trainings, acts), 5))
def test_states_do_not_meet(several: list[tuple[Trained, Acts]]) -> None:
    """Each has, bitwise, what one alone has that was stepped on the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, histories, several, folder)


def layouts(
    world: af.World, pairs: Sequence[tuple[Trained, object]], folder: str
) -> list[Found]:
    """Check that another layout has the same bits, by way of a folder and at once; return them.

    Each goes on from there to the same numbers.
    """
    found: list[Found] = []
    for i, (each, engine) in enumerate(pairs):
        place, other = Path(folder, str(i)), each.by(engine)
        state = each.begun(world, 2)
        home, there = state.setup, other.state(world).setup
        af.save(state, place / "saved")
        af.export_model(state, place / "one", at="train")
        saved = tensors(state)
        back = other.stepped(state.copy().with_setup(there))
        back = each.stepped(back.with_setup(home))
        moved = state.with_setup(there)
        loaded = af.load(other.state(world), place / "saved")
        af.export_model(loaded, place / "other", at="train")
        for after in (moved, loaded):
            assert differences(common(state), common(after)) == [], each
        exports = [place / name / "model.safetensors" for name in ("one", "other")]
        assert exports[0].read_bytes() == exports[1].read_bytes()
        loaded = other.stepped(loaded)
        ours = common(each.stepped(state))
        assert differences(ours, common(loaded), within=1e-6) == [], (each, engine)
        ours = common(each.stepped(loaded.with_setup(home)))
        assert differences(ours, common(back), within=1e-6) == [], (each, engine)
        found.append(saved)
    return found


@few
@given(pairs=some(st.tuples(trainings, engines), 5))
def test_what_lies_in_one_layout_lies_in_another(
    pairs: list[tuple[Trained, object]],
) -> None:
    """Saved and loaded, or by with_setup: bitwise, on ranks and in one process; so are exports."""
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(2, layouts, pairs, folder):
            for i, ((each, _), saved) in enumerate(zip(pairs, found, strict=True)):
                alone = each.run.state(af.World.single(device="cpu"))
                loaded = common(af.load(alone, Path(folder, str(i), "saved")))
                del saved["buffers.seen"]
                assert differences(saved, loaded) == []


def bent_loss(net: Any, batch: Any, bad: bool) -> torch.Tensor:
    """Return a loss that is finite, and has gradients that are not where it is said."""
    loss = MEAN(net, batch)
    return loss + (net.scale * 0).sqrt() if bad else loss


def skipped(world: af.World, each: Trained) -> Found:
    """Return a state's tensors where one rank's gradients are not finite at one update."""
    state, step = each.state(world), af.make_step(bent_loss)
    for i, batch in enumerate(each.run.batches(state, 3)):
        before, bad = tensors(state), i == 1
        state, metrics = step(state, batch, bad and world.rank == world.size - 1)
        assert float(metrics["skipped"]) == bad
        if bad:
            seen = {"cursor.samples", "cursor.epoch", "num_skipped"}
            counts = {name for name in before if name.startswith("slots.skip")}
            differ = {*differences(before, tensors(state))} - seen - counts
            assert not differ, (each, differ)
    assert (state.step, state.num_skipped) == (2, 1)
    return tensors(state)


def skips(world: af.World, several: Sequence[Trained]) -> None:
    """Check that an update that is not finite is left out as under wrap_fsdp."""
    for drawn in several:
        run = attrs.evolve(drawn.run, loss="mean", n=8, batch_size=6)
        each = Trained(run, drawn.engine)
        skip = af.skip_nonfinite()
        theirs = skipped(world, each.by(af.chain(af.wrap_fsdp(), skip)))
        ours = skipped(world, each.by(af.chain(each.engine, skip)))
        assert differing(theirs, ours) == []
        alike = {n: v for n, v in theirs.items() if not n.startswith("slots.skip")}
        assert differing(alike, skipped(world, each)) == []


@few
@given(several=some(trainings, 4), size=sizes)
def test_an_update_that_is_not_finite_is_left_out_by_all(
    several: list[Trained], size: int
) -> None:
    """It is counted, and what follows is what skip_nonfinite gives under wrap_fsdp."""
    run_ranks(size, skips, several)


# one training, at each stage


def judged(world: af.World, stage: int) -> None:
    """Beside skip_nonfinite a loss may be NaN; too many in a row are told, and change nothing."""

    def loss(net: Any, batch: Any, bad: bool) -> torch.Tensor:
        made = MEAN(net, batch)
        return made * float("nan") if bad and world.rank else made

    def train(each: Trained) -> af.TrainState:
        skip = af.skip_nonfinite(max_consecutive=1)
        of = each.by(af.chain(each.engine, skip))
        state, step = of.state(world), af.make_step(loss)
        *batches, last = of.run.batches(state, 5)
        for batch, bad in zip(batches, [0, 1, 0, 1], strict=True):
            state, metrics = step(state, batch, bad)
            assert float(metrics["skipped"]) == bad
        before = tensors(state)
        too_many = r"(?s)2 updates.*rank 1: .*; its loss is"
        with pytest.raises(af.errors.NonFiniteGradsError, match=too_many):
            step(state, last, 1)
        assert differences(before, tensors(state)) == []
        return state

    check_as_split(zero(stage), train)


def mistakes(world: af.World, stage: int) -> None:
    """Gradients that DeepSpeed holds are seen by nobody, nor mistaken for others; every parameter
    takes part.
    """
    each = zero(stage, APART)
    state = each.state(world)
    batch, take = each.batch(state), af.value_and_grad(each.loss)
    _, first = take(state, batch)
    for look in (
        lambda: first.tensors["scale"],
        lambda: dict(first.tensors),
        lambda: list(first.tensors.values()),
        lambda: first.map(torch.clone),
    ):
        with pytest.raises(GradsError, match="These gradients cannot be read"):
            look()
    assert repr(first).startswith("<Grads of 0 parameters")
    take(state, batch)
    gone = "DeepSpeed no longer has these"
    with pytest.raises(GradsError, match=gone):
        af.apply_grads(state, first)
    for use in (af.apply_grads, af.sync_grads):
        _, part = take(state, batch, sync=False)
        with pytest.raises(GradsError, match="sync=True"):
            use(state, part)
    _, whole = take(state, batch)
    with pytest.raises(GradsError, match=gone):
        af.apply_grads(state, whole.with_tensors({"scale": torch.ones(())}))
    _, whole = take(state, batch)
    state, alone = each.begun(world), af.apply_grads(state, whole)
    assert same(alone, state)
    state.params["last.weight"].mul_(2)
    with pytest.raises(StateError, match=r"params: last\.weight were changed"):
        each.stepped(state)
    doubled = {**state.params, "last.weight": state.params["last.weight"] * 1}
    after = each.stepped(state.with_params(doubled)).params["last.weight"]
    assert not torch.equal(after, alone.params["last.weight"])
    state = each.begun(world)
    state.opt_state["bias"]["exp_avg"].zero_()
    with pytest.raises(StateError, match=r"opt_state: bias\.exp_avg were"):
        each.stepped(state)
    refused: dict[Any, tuple[type[Exception], str]] = {
        first_layer: (UnusedParametersError, r"took no part.*Use af\.wrap_fsdp")
    }
    if stage == 3:
        refused[penalised] = LossError, "had not gathered"
        for loss in (logged, *map(added, NORMS.values())):
            refused[loss] = LossError, "parameter 'scale' that DeepSp"
        af.value_and_grad(asking)(each.state(world), batch)
    for loss, (kind, said) in refused.items():
        with pytest.raises(kind, match=said):
            af.value_and_grad(loss)(each.state(world), batch)


def first_layer(net: Any, batch: Any) -> torch.Tensor:
    return net.first(batch[0]).square().mean()


def added(norm: Callable[[Any], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a loss that adds what stage 3 has not gathered, of which a norm would be 0."""
    return lambda net, batch: MEAN(net, batch) + norm(net)


penalised = added(lambda net: sum(p.square().sum() for p in net.parameters()))
NORMS = {
    "of each": lambda net: sum(p.norm() for p in net.parameters()),
    "by name": lambda net: torch.linalg.vector_norm(x=next(net.parameters())),
    "of a list": lambda net: sum(torch._foreach_norm([*net.parameters()])),
}


def logged(net: Any, batch: Any) -> af.Loss:
    """Report what would be 0."""
    with torch.no_grad():
        norm = torch.norm(next(iter(net.state_dict(keep_vars=True).values())))
    return af.Loss(MEAN(net, batch), 1, norm=norm)


def asking(net: Any, batch: Any) -> torch.Tensor:
    """Ask what models ask their parameters for."""
    first = next(net.parameters())
    assert (first.dtype, first.device.type) == (torch.float32, "cpu")
    assert first.is_floating_point()
    return MEAN(net, batch).to(first.dtype)


def orders(world: af.World, stage: int) -> None:
    """Gradients may come in different orders; at stage 3 ranks are told, and go on."""
    each = zero(stage, {"reduce_bucket_size": 20, **APART})

    def loss(net: Any, batch: Any) -> torch.Tensor:
        """Use a parameter once more, on one rank before the model and on the other behind it."""
        early = net.bias.square().sum() if world.rank else 0.0
        made = MEAN(net, batch)
        return made + (early if world.rank else net.bias.square().sum())

    def train(of: Trained) -> af.TrainState:
        state = of.state(world)
        for batch in of.run.batches(state, 2):
            state, _ = af.make_step(loss)(state, batch)
        return state

    if stage < 3:
        check_as_split(each, train)
    else:
        said = r"rank 0 ran the model, rank 1 used the parameter 'bias' by name"
        check_told(world, each, loss, LossError, said)


def check_told(
    world: af.World, each: Trained, loss: Any, kind: Any, said: str, later: int = 0
) -> None:
    """Check that a loss is refused in the first update of an engine, and in later ones."""
    state = each.state(world)
    for updates in range(1 + later):
        before = tensors(state)
        for _ in range(2):
            with pytest.raises(kind, match=said):
                af.make_step(loss)(state, each.batch(state))
        assert differences(before, tensors(state)) == []
        state = each.stepped(state)
        assert same(each.begun(world, updates + 1), state)


def unused(world: af.World, stage: int) -> None:
    """Ranks that use other parameters are told, by rank and name, and go on."""

    def loss(net: Any, batch: Any) -> torch.Tensor:
        made = net.blocks[0](net.first(batch[0])) if world.rank else net(batch[0])
        return made.square().mean()

    kind, said = LossError, "rank 0 ran the model, rank 1 ran 'first'"
    if stage < 3:
        kind = UnusedParametersError
        said = "on rank 0 none; on rank 1 scale, bias, blocks.1.layer.weight"
    for micro, options in ((1, {}), (2, APART)):
        each = zero(stage, options, micro=micro)
        check_told(world, each, loss, kind, said, later=stage < 3)


def ways(world: af.World, stage: int) -> None:
    """Ranks may use a model in other ways, in whichever updates, if all do."""

    def loss(net: Any, batch: Any, turn: int) -> torch.Tensor:
        made = MEAN(net, batch)
        early = net.blocks[turn % 2](net.first(batch[0])).square().mean()
        return made + early if turn else made

    def train(of: Trained) -> af.TrainState:
        state, step = of.state(world), af.make_step(loss)
        batches = of.run.batches(state, 6)
        for batch, turn in zip(batches, (0, 1, 0, 2, 1, 0), strict=True):
            state, _ = step(state, batch, turn)
        return state

    if stage > 1:
        check_as_split(zero(stage, APART), train, engine=af.wrap_fsdp(nn.Linear))


def frozen(world: af.World, stage: int) -> None:
    """Frozen values are those of each state, stepped in turns, bitwise."""
    for options in ({}, APART):
        each = zero(stage, options)

        def begun(each: Trained = each) -> list[af.TrainState]:
            first = each.state(world)
            other = {**first.params, "first.bias": first.params["first.bias"] + 1}
            return [first, first.copy().with_params(other)]

        # each of a definition of its own, of which no other was stepped
        alone = [each.stepped(begun()[i], 3) for i in range(2)]
        turns, step = begun(), af.make_step(each.loss)
        for batch in each.run.batches(turns[0], 3):
            turns = [step(state, batch)[0] for state in turns]
        biases = [state.params["first.bias"] for state in alone]
        assert biases[0].ne(biases[1]).all()
        assert all(map(same, alone, turns))


def buffers(world: af.World, stage: int) -> None:
    """An update begins with the buffers of rank 0."""
    each = zero(stage)
    state, value = each.state(world), each.run.data().dataset[:]
    state.buffers["seen"].fill_(world.rank + 7.0)
    state, _ = af.make_step(each.loss)(state, [value])
    want = torch.full((3,), 7.0).lerp(value[0].mean(0), 0.5)
    assert torch.equal(want, state.buffers["seen"])


def thrown_away(world: af.World, stage: int) -> None:
    """Gradients that no update takes leave nothing behind, reduced or not."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    for micro, keep_grads, options in (
        *((1, "whole", {}), (2, "sharded", {})),
        *((1, "sharded", offload), (2, "whole", offload)),
    ):
        each = zero(stage, options, micro=micro)
        each = each.by(attrs.evolve(each.engine, keep_grads=keep_grads))
        take, step = af.value_and_grad(each.loss), af.make_step(each.loss)
        state, alone = each.state(world), each.begun(world, 2)
        for batch in each.run.batches(state, 2):
            for sync in (False, True, False):
                take(state, batch, sync=sync)
            state, _ = step(state, batch)
        assert same(alone, state)


def clipped(world: af.World, stage: int) -> None:
    """Of two bounds of the norm the lower one holds, in whichever order they are."""
    bounds = [af.clip_grad_norm(bound, name=f"to-{bound}") for bound in (0.3, 0.1)]
    for behind in (bounds, bounds[::-1]):
        each = zero(stage, behind=tuple(behind))
        check_as_split(each, lambda of: of.begun(world, 2), within=1e-5)


def large_weights(world: af.World, stage: int) -> None:
    """Weights are exact beyond float32: 2**24 tokens are no rare batch of a large model."""
    weights, each = [2**24 + 1, 2**25 + 2], zero(stage)
    state = each.state(world)

    def loss(net: Any, batch: Any) -> af.Loss:
        weight = weights[world.rank]
        return af.Loss(MEAN(net, batch) * weight, weight)

    _, grads = af.value_and_grad(loss)(state, each.batch(state))
    assert float(grads.weight) == sum(weights)


def thawing(world: af.World, stage: int) -> None:
    """What is frozen keeps its moments; what is thawed has counted other updates than its group,
    of which there is one count.
    """

    def is_last(name: str, _: torch.Tensor) -> bool:
        return name.startswith("last.")

    def train(of: Trained) -> af.TrainState:
        return of.stepped(of.begun(world, 2).with_trainable(is_last))

    each = zero(stage)
    check_as_split(each, train)
    state = train(each).with_trainable(lambda name, _: name != "first.bias")
    with pytest.raises(af.errors.OptimizerError, match="has another number of updates"):
        each.stepped(state)


def holds_parts(optimizer: Any) -> bool:
    """Whether an optimizer of DeepSpeed's has parts of gradients between updates."""
    kept = ("__param_id_to_grad_partition", "grad_partitions_flat_buffer")
    found = [v for name, v in vars(optimizer).items() if name.endswith(kept)]
    return any(value is not None and len(value) > 0 for value in found)


def released(world: af.World, stage: int) -> None:
    """An engine that is released keeps nothing; states have what they had, and go on."""
    each = zero(stage)
    state = each.begun(world)
    binding = engine_of(state).binding.zero
    after = each.stepped(state, donate=False)
    assert holds_parts(binding._optimizer) is (stage == 3)
    af.release_engine(state)
    gc.collect()
    assert not holds_parts(binding._optimizer)
    assert {p.numel() for p in binding._engine.module.parameters()} == {0}
    assert {flat.numel() for flat in binding.flats} == {0}
    assert same(after, each.stepped(state))


def forgotten(world: af.World, stage: int) -> None:
    """The memory of a state goes with it, while the engine steps another."""
    each = zero(stage)
    state = each.begun(world, 2)
    other = state.copy()
    kept = [t for entry in state._opt_state.content.values() for t in entry.values()]
    held = [*state._params.content.values(), *kept]
    memory = [StorageWeakRef(t.untyped_storage()) for t in held if torch.is_tensor(t)]
    other = each.stepped(other)
    del state, kept, held
    gc.collect()
    assert [each.expired() for each in memory] == [True] * len(memory)
    assert other.step == 3


def odd_optimizers(world: af.World, stage: int) -> None:
    """Optimizers may count by several numbers, which are not taken for elements of a lone one."""
    for kind in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam):

        def train(of: Trained, kind: Any = kind) -> af.TrainState:
            state = af.TrainState.create(
                model=functools.partial(Net, torch.float32, in_list=True),
                optimizer=functools.partial(kind, lr=0.01),
                data=of.run.data(),
                setup=af.chain(af.shard_data(), of.engine),
                world=world,
            )
            return of.stepped(of.stepped(state, 2).copy())

        check_as_split(zero(stage), train, within=2e-6)


def readings(world: af.World, stage: int) -> None:
    """Nothing that lies in flat tensors is brought into rows but what is read, once each."""
    each, read, count = zero(stage), Flats.read, [0]

    def counted(self: Flats, flats: Any) -> Any:
        count[0] += 1
        return read(self, flats)

    with mock.patch.object(Flats, "read", counted):
        state, step = each.state(world), af.make_step(each.loss)
        for batch in each.run.batches(state, 3):
            state, _ = step(state, batch)
            assert "scale" in state.params
            assert "scale" in state.opt_state
            assert {*state.params} == {*state.opt_state} | {"first.bias"}
            repr(state)
        assert count == [0]
        for _ in range(2):
            _ = state.params["scale"], state.params["bias"], state.opt_state["bias"]
    assert count == [3]  # parameters, and two moments of each


def begun_sums(state: af.TrainState, each: Trained) -> list[str]:
    """Return what an update begins to sum over ranks, in order."""
    comm: Any = importlib.import_module("deepspeed.comm")
    begun: list[str] = []

    def noted(owner: Any, name: str, what: str) -> Any:
        fn = getattr(owner, name)

        @functools.wraps(fn)
        def call(*args: Any, **options: Any) -> Any:
            begun.append(what)
            return fn(*args, **options)

        return mock.patch.object(owner, name, call)

    with ExitStack() as stack:
        stack.enter_context(noted(collectives, "start_sum_", "weights"))
        stack.enter_context(noted(collectives, "reduce_to_holders_", "others"))
        for name in ("all_reduce", "reduce", "reduce_scatter_fn"):
            stack.enter_context(noted(comm, name, "others"))
        each.stepped(state)
    return begun


def sums(world: af.World, stage: int) -> None:
    """An update is one reduction, of several micro-batches too, unless parts are asked for;
    weights are begun once, before DeepSpeed waits for the sums that close the update.
    """
    for keep_grads in ("whole", "sharded"):
        counts = []
        for micro in (1, 3):
            each = zero(stage, micro=micro)
            each = each.by(attrs.evolve(each.engine, keep_grads=keep_grads))
            begun = begun_sums(each.begun(world), each)
            counts.append(begun.count("others"))
            assert begun.count("weights") == 1
            # gradients, and their norm
            assert keep_grads == "sharded" or begun.index("weights") < len(begun) - 2
        parts = keep_grads == "sharded" and stage > 1
        assert counts[0] < counts[1] if parts else counts[0] == counts[1]


def starts_of_processes(world: af.World, stage: int) -> None:
    """An update starts no process: DeepSpeed has one list the host's cores at each reduction."""
    numa: Any = importlib.import_module("deepspeed.utils.numa")
    listing, each = numa.get_numa_cores, zero(stage, micro=3)
    state = each.state(world)
    af.prepare_engine(state)
    with mock.patch.object(subprocess.Popen, "__init__", side_effect=OSError) as no:
        each.stepped(state, 2)
    assert not no.called
    assert numa.get_numa_cores is listing


def layers_of_others(world: af.World, stage: int) -> None:
    """Layers of other models are torch's own; those of DeepSpeed's at stage 3, of other last bits,
    are there while it runs alone. What its logger tells is as the program has set it.
    """
    logger = importlib.import_module("deepspeed.utils").logger
    level = 27  # which only this test sets
    logger.setLevel(level)
    own, found, each = torch._C._nn.linear, list[bool](), zero(stage)

    def looking(model: Any, batch: Any) -> Any:
        found.append(nn.functional.linear is own)
        return each.loss(model, batch)

    state = each.state(world)
    af.make_step(looking)(state, each.batch(state))
    assert all(found) is (stage < 3)
    assert nn.functional.linear is own
    assert logger.level == level


def parted_again(world: af.World, stage: int) -> None:
    """Ranks that go two ways, which all of them have gone before, are told of both."""
    engine_of(zero(stage).state(world))  # which opens the store of places
    course = ModuleOrder(world)
    for places in (("left", "left"), ("right", "right")):
        course.begin()
        course.come(places[world.rank])
    course.begin()
    with pytest.raises(LossError, match=r"(?s)left.*right|right.*left"):
        course.come(("left", "right")[world.rank])


CHECKS = (
    *(starts_of_processes, layers_of_others, judged, mistakes, orders, unused, ways),
    *(frozen, buffers, thrown_away, clipped, large_weights, thawing, released),
    *(forgotten, odd_optimizers, readings, sums, parted_again),
)


PARTS_OF_CHECKS = 3
"""So that none takes minutes."""


def check_some(world: af.World, stage: int, part: int) -> None:
    """Run some of the checks, which say by their names what is wrong."""
    for check in CHECKS[part::PARTS_OF_CHECKS]:
        check(world, stage)
        gc.collect()  # engines, whose groups and buffers would add up


@pytest.mark.parametrize("part", range(PARTS_OF_CHECKS))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage(stage, part):
    """Each check of `CHECKS` holds on two processes."""
    run_ranks(2, check_some, stage, part)


def astray(world: af.World) -> None:
    """Raise what a rank is told that leaves the known way alone, or waits for it in vain."""
    each = zero(3, APART)
    state = each.begun(world, 2)

    def loss(net: Any, batch: Any) -> torch.Tensor:
        made = MEAN(net, batch)
        return made + net.last(net.first(batch[0])).mean() if world.rank else made

    af.make_step(loss)(state, each.batch(state))


def test_a_rank_that_goes_astray_is_told():
    """And those that wait for it hear of it, as soon as it gives up."""
    with pytest.raises(RankError, match="pass of the loss, rank 1 ran 'f"):
        run_processes(2, astray, timeout=45)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_is_gone_is_named(stage):
    """The launcher ends the run at once, and says which rank it was."""
    run = launched("--nproc", 2, TRAINS[1], "kill", 1, 60, stage)
    ((code, out, error),) = ended(run)
    assert code == 137
    assert "rank 1 failed first" in out + error
    followed = "rank 0 (followed: PeerFailed|was ended by SIGTERM)"
    assert re.search(followed, out + error)
