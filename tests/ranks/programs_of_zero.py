# SPDX-License-Identifier: Apache-2.0
"""What ranks run under DeepSpeed: drawn trainings, several of them on the same processes."""

import functools
import gc
import importlib
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import accelfn as af
from tests.internals import Flats, ModuleOrder, collectives, engine_of
from tests.laws.histories import Acts, Training, check_apart_on
from tests.laws.split_models import LOSSES, Net, Run
from tests.laws.test_shard_histories import broken_backward, broken_forward
from tests.strategies import differences, tensors

UPDATES = 3


@attrs.frozen
class Trained:
    """A training in a layout.

    Attributes:
        run: of what.
        engine: which transform lays it out.
    """

    run: Run
    engine: object

    def state(self, world: af.World) -> af.TrainState:
        """Return the state before the first update."""
        return self.run.state(world, self.engine)


def numbers(world: af.World, trainings: Sequence[Trained]) -> list[list[Any]]:
    """Return of each training its tensors and metrics after each update."""
    torch.set_num_threads(1)
    found: list[list[Any]] = []
    for each in trainings:
        state, seen = each.state(world), list[Any]()
        step = af.make_step(LOSSES[each.run.loss])
        for batch in each.run.batches(state, UPDATES):
            state, metrics = step(state, batch)
            seen += [tensors(state), metrics.all_reduce_mean(world)]
        held_out = af.evaluate(state, each.run.data(), LOSSES[each.run.loss])
        found.append([*seen, held_out])
        af.release_engine(state)
    return found


def histories(
    world: af.World, drawn: Sequence[tuple[Trained, Acts]], folder: str
) -> None:
    """Check that states do not meet, whatever is done to them."""
    torch.set_num_threads(1)
    for i, (each, acts) in enumerate(drawn):
        of = Training(
            fresh=each.state,
            data=each.run.data,
            loss=LOSSES[each.run.loss],
            raising={"raise": broken_forward, "raise in backward": broken_backward},
        )
        check_apart_on(world, of, acts, str(Path(folder, str(i))))


def stepped(
    each: Trained, state: af.TrainState, updates: int, *, donate: bool = True
) -> af.TrainState:
    """Return a state after more updates."""
    step = af.make_step(LOSSES[each.run.loss])
    for batch in each.run.batches(state, updates):
        state, _ = step(state, batch, donate=donate)
    return state


def layouts(
    world: af.World, pairs: Sequence[tuple[Trained, object]], folder: str
) -> list[dict[str, torch.Tensor]]:
    """Check that another layout has the same bits, by way of a folder and at once; return them.

    Each goes on from there to the same numbers.
    """
    torch.set_num_threads(1)
    found: list[dict[str, torch.Tensor]] = []
    for i, (each, engine) in enumerate(pairs):
        place, other = Path(folder, str(i)), Trained(each.run, engine)
        state = stepped(each, each.state(world), 2)
        af.save(state, place / "saved")
        af.export_model(state, place / "one", at="train")
        saved = tensors(state)
        back = stepped(other, state.copy().with_setup(other.state(world).setup), 1)
        back = stepped(each, back.with_setup(state.setup), 1)
        moved = state.with_setup(other.state(world).setup)
        loaded = af.load(other.state(world), place / "saved")
        af.export_model(loaded, place / "other", at="train")
        for after in (moved, loaded):
            assert differences(_common(saved), _common(tensors(after))) == [], each
        exports = [place / name / "model.safetensors" for name in ("one", "other")]
        assert exports[0].read_bytes() == exports[1].read_bytes()
        loaded = stepped(other, loaded, 1)
        ours, theirs = tensors(stepped(each, state, 1)), tensors(loaded)
        differ = differences(_common(ours), _common(theirs), within=1e-6)
        assert differ == [], (
            each,
            engine,
            [(n, ours[n], theirs[n]) for n in differ[:3]],
        )
        ours = tensors(stepped(each, loaded.with_setup(state.setup), 1))
        differ = differences(_common(ours), _common(tensors(back)), within=1e-6)
        assert differ == [], (each, engine, differ)
        found.append(saved)
    return found


def _common(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what does not depend on what a rank has seen."""
    return {name: each for name, each in found.items() if name != "buffers.seen"}


def bent_loss(net: Any, batch: Any, bad: bool) -> torch.Tensor:
    """Return a loss that is finite, and has gradients that are not where it is said."""
    loss = LOSSES["mean"](net, batch)
    return loss + (net.scale * 0).sqrt() if bad else loss


def skips(world: af.World, trainings: Sequence[Trained]) -> list[Any]:
    """Return tensors and metrics where one rank's gradients are not finite at one update."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for each in trainings:
        state, step = each.state(world), af.make_step(bent_loss)
        for i, batch in enumerate(each.run.batches(state, UPDATES)):
            before = tensors(state)
            bad = i == 1
            state, metrics = step(state, batch, bad and world.rank == world.size - 1)
            after = tensors(state)
            assert float(metrics["skipped"]) == bad
            if bad:
                seen = {"cursor.samples", "cursor.epoch", "num_skipped"}
                counts = {name for name in before if name.startswith("slots.skip")}
                differ = {*differences(before, after)} - seen - counts
                assert not differ, (each, differ)
        assert (state.step, state.num_skipped) == (UPDATES - 1, 1)
        found.append(tensors(state))
    return found


def judged(world: af.World, each: Trained) -> None:
    """Check that a loss may be NaN beside skip_nonfinite, and how often in a row."""
    torch.set_num_threads(1)

    def loss(net: Any, batch: Any, bad: bool) -> torch.Tensor:
        made = LOSSES["mean"](net, batch)
        return made * float("nan") if bad and world.rank else made

    found = []
    for engine in (each.engine, af.wrap_fsdp()):
        skip = af.skip_nonfinite(max_consecutive=1)
        of = Trained(each.run, af.chain(engine, skip))
        state, step = of.state(world), af.make_step(loss)
        for batch, bad in zip(
            of.run.batches(state, 6), [0, 1, 0, 1, 1, 0], strict=True
        ):
            before = tensors(state)
            if bad and state.num_skipped == 2:
                error = af.errors.NonFiniteGradsError
                with pytest.raises(
                    error, match=r"(?s)2 updates.*rank 1: .*; its loss is"
                ):
                    step(state, batch, bad)
                assert differences(before, tensors(state)) == []
                break
            state, metrics = step(state, batch, bad)
            assert float(metrics["skipped"]) == bad
        found.append(_common(tensors(state)))
    assert differences(*found, within=1e-6) == []


def parted_again(world: af.World, each: Trained) -> list[str]:
    """Return what ranks hear that go two ways which all of them have gone before."""
    engine_of(each.state(world))  # which opens the store of places
    course, told = ModuleOrder(world), list[str]()
    for places in (("left", "left"), ("right", "right"), ("left", "right")):
        course.begin()
        try:
            course.come(places[world.rank])
        except af.errors.LossError as error:
            told.append(str(error))
    return told


_OF_NOBODY = 27
"""A level of logging that only this test sets."""


def layers_of_others(world: af.World, each: Trained) -> list[bool]:
    """Return whether a linear layer is torch's own within the loss, and behind the update, and
    whether DeepSpeed's logger says what it said before.
    """
    torch.set_num_threads(1)
    logger = importlib.import_module("deepspeed.utils").logger
    logger.setLevel(_OF_NOBODY)
    own, found, loss = torch._C._nn.linear, list[bool](), LOSSES[each.run.loss]

    def looking(model: Any, batch: Any) -> Any:
        found.append(torch.nn.functional.linear is own)
        return loss(model, batch)

    state = each.state(world)
    (batch, *_) = each.run.batches(state, 1)
    af.make_step(looking)(state, batch)
    is_own = torch.nn.functional.linear is own
    return [all(found), is_own, logger.level == _OF_NOBODY]


def starts_of_processes(world: af.World, each: Trained) -> tuple[int, bool]:
    """Return how many processes updates start, and whether cores are listed as before then."""
    torch.set_num_threads(1)
    numa: Any = importlib.import_module("deepspeed.utils.numa")
    listing, start, started = numa.get_numa_cores, subprocess.Popen.__init__, 0
    state, step = each.state(world), af.make_step(LOSSES[each.run.loss])
    af.prepare_engine(state)

    def noted(self: Any, *args: Any, **options: Any) -> None:
        nonlocal started
        started += 1
        start(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", noted)
        for batch in each.run.batches(state, 2):
            state, _ = step(state, batch)
    return started, numa.get_numa_cores is listing


def sums_of_gradients(comm: Any) -> list[tuple[Any, str]]:
    """Return what sums over ranks under ZeRO: DeepSpeed's calls, and accelfn's over Gloo."""
    names = ("all_reduce", "reduce", "reduce_scatter_fn")
    return [*((comm, name) for name in names), (collectives, "reduce_to_holders_")]


def calls(world: af.World, each: Trained) -> list[int]:
    """Return how often an update sums gradients, for one micro-batch and for three."""
    torch.set_num_threads(1)
    comm: Any = importlib.import_module("deepspeed.comm")
    found: list[int] = []
    for micro in (1, 3):
        of = attrs.evolve(each, run=attrs.evolve(each.run, micro=micro))
        state, count = stepped(of, of.state(world), 1), [0]

        def counting(fn: Any, count: list[int] = count) -> Any:
            @functools.wraps(fn)
            def call(*args: Any, **kw: Any) -> Any:
                count[0] += 1
                return fn(*args, **kw)

            return call

        with ExitStack() as stack:
            for owner, name in sums_of_gradients(comm):
                counted = counting(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, counted))
            stepped(of, state, 1)
        found += count
    return found


def sums(world: af.World, each: Trained) -> list[list[str]]:
    """Return what an update begins to sum over ranks, for one micro-batch and for three."""
    torch.set_num_threads(1)
    comm: Any = importlib.import_module("deepspeed.comm")
    found: list[list[str]] = []
    for micro in (1, 3):
        of = attrs.evolve(each, run=attrs.evolve(each.run, micro=micro))
        state = stepped(of, of.state(world), 1)
        found.append([])

        def noted(
            owner: Any, name: str, what: str, begun: list[str] = found[-1]
        ) -> Any:
            fn = getattr(owner, name)

            def call(*args: Any, **kw: Any) -> Any:
                begun.append(what)
                return fn(*args, **kw)

            return mock.patch.object(owner, name, call)

        with ExitStack() as stack:
            stack.enter_context(noted(collectives, "start_sum_", "weights"))
            for owner, name in sums_of_gradients(comm):
                stack.enter_context(noted(owner, name, "others"))
            stepped(of, state, 1)
    return found


def readings(world: af.World, each: Trained) -> list[int]:
    """Return how often what lies in flat tensors is brought into rows."""
    torch.set_num_threads(1)
    read, found = Flats.read, [0]

    def counted(self: Flats, flats: Any) -> Any:
        found[-1] += 1
        return read(self, flats)

    with mock.patch.object(Flats, "read", counted):
        state, step = each.state(world), af.make_step(LOSSES[each.run.loss])
        for batch in each.run.batches(state, UPDATES):
            state, _ = step(state, batch)
            assert "scale" in state.params
            assert "scale" in state.opt_state
            assert {*state.params} == {*state.opt_state} | {"first.bias"}
            repr(state)
        found.append(0)
        for _ in range(2):
            _ = state.params["scale"], state.params["bias"], state.opt_state["bias"]
    return found


def mistakes(world: af.World, each: Trained) -> None:
    """Check that what gradients that DeepSpeed holds are not good for is said."""
    torch.set_num_threads(1)
    error = af.errors.GradsError
    state, loss = each.state(world), LOSSES[each.run.loss]
    (batch, *_) = each.run.batches(state, 1)
    take = af.value_and_grad(loss)
    _, first = take(state, batch)
    for look in (
        lambda: first.tensors["scale"],
        lambda: dict(first.tensors),
        lambda: list(first.tensors.values()),
        lambda: first.map(torch.clone),
    ):
        with pytest.raises(error, match="These gradients cannot be read"):
            look()
    assert repr(first).startswith("<Grads of 0 parameters")
    take(state, batch)
    with pytest.raises(error, match="DeepSpeed no longer has these"):
        af.apply_grads(state, first)
    _, part = take(state, batch, sync=False)
    with pytest.raises(error, match="sync=True"):
        af.apply_grads(state, part)
    _, part = take(state, batch, sync=False)
    with pytest.raises(error, match="sync=True"):
        af.sync_grads(state, part)
    _, whole = take(state, batch)
    with pytest.raises(error, match="DeepSpeed no longer has these"):
        af.apply_grads(state, whole.with_tensors({"scale": torch.ones(())}))
    _, whole = take(state, batch)
    alone = tensors(af.apply_grads(state, whole))
    assert differences(alone, tensors(stepped(each, each.state(world), 1))) == []
    state = stepped(each, each.state(world), 1)
    state.params["last.weight"].mul_(2)
    with pytest.raises(
        af.errors.StateError, match=r"params: last\.weight were changed"
    ):
        stepped(each, state, 1)
    doubled = {**state.params, "last.weight": state.params["last.weight"] * 1}
    after = tensors(stepped(each, state.with_params(doubled), 1))
    assert not torch.equal(after["params.last.weight"], alone["params.last.weight"])
    state = stepped(each, each.state(world), 1)
    state.opt_state["bias"]["exp_avg"].zero_()
    with pytest.raises(af.errors.StateError, match=r"opt_state: bias\.exp_avg were"):
        stepped(each, state, 1)
    if each.engine.stage == 3:
        with pytest.raises(af.errors.LossError, match="had not gathered"):
            af.value_and_grad(_penalised)(each.state(world), batch)
        for loss in (_normed, _logged, _stacked, _named):
            with pytest.raises(
                af.errors.LossError, match="parameter 'scale' that DeepSp"
            ):
                af.value_and_grad(loss)(each.state(world), batch)
        af.value_and_grad(_asking)(each.state(world), batch)
    with pytest.raises(
        af.errors.UnusedParametersError, match=r"took no part.*Use af\.wrap_fsdp"
    ):
        af.value_and_grad(_first)(each.state(world), batch)


def orders(world: af.World, each: Trained) -> None:
    """Check that ranks whose gradients come in different orders give the same, where they may.

    At stage 3 they are told, and go on.
    """
    torch.set_num_threads(1)

    def loss(net: Any, batch: Any) -> torch.Tensor:
        """Use a parameter once more, on one rank before the model and on the other behind it."""
        early = net.bias.square().sum() if world.rank else 0.0
        made = LOSSES["mean"](net, batch)
        return made + (early if world.rank else net.bias.square().sum())

    if each.engine.stage < 3:
        found = []
        for of in (each, attrs.evolve(each, engine=af.wrap_fsdp())):
            state = of.state(world)
            for batch in of.run.batches(state, 2):
                state, _ = af.make_step(loss)(state, batch)
            found.append(_common(tensors(state)))
        assert differences(*found, within=1e-6) == []
        return
    told = r"rank 0 ran the model, rank 1 used the parameter 'bias' by name"
    _told_and_going_on(world, each, loss, af.errors.LossError, told)


def unused(world: af.World, each: Trained) -> None:
    """Check that ranks that use other parameters are told, in whichever update, and go on."""
    torch.set_num_threads(1)

    def loss(net: Any, batch: Any) -> torch.Tensor:
        made = net.blocks[0](net.first(batch[0])) if world.rank else net(batch[0])
        return made.square().mean()

    missing = "on rank 0 none; on rank 1 scale, bias, blocks.1.layer.weight"
    kind, told = af.errors.UnusedParametersError, missing
    if each.engine.stage == 3:
        kind, told = af.errors.LossError, "rank 0 ran the model, rank 1 ran 'first'"
    _told_and_going_on(world, each, loss, kind, told, later=each.engine.stage < 3)


def _told_and_going_on(
    world: af.World,
    each: Trained,
    loss: Any,
    kind: type[Exception],
    told: str,
    *,
    later: bool = False,
) -> None:
    """Check that a loss is refused in the first update of an engine, and in a later one."""
    state = each.state(world)
    for updates in range(1 + later):
        before = tensors(state)
        (batch, *_) = each.run.batches(state, 1)
        for _ in range(2):
            with pytest.raises(kind, match=told):
                af.make_step(loss)(state, batch)
        assert differences(before, tensors(state)) == []
        state = stepped(each, state, 1)
        alone = stepped(each, each.state(world), updates + 1)
        assert differences(tensors(alone), tensors(state)) == []


def ways(world: af.World, each: Trained) -> None:
    """Check that ranks may use a model in other ways, in whichever updates, if all do."""
    torch.set_num_threads(1)

    def loss(net: Any, batch: Any, turn: int) -> torch.Tensor:
        made = LOSSES["mean"](net, batch)
        early = net.blocks[turn % 2](net.first(batch[0])).square().mean()
        return made + early if turn else made

    found = []
    for of in (each, attrs.evolve(each, engine=af.wrap_fsdp(torch.nn.Linear))):
        state, step = of.state(world), af.make_step(loss)
        for batch, turn in zip(
            of.run.batches(state, 6), (0, 1, 0, 2, 1, 0), strict=True
        ):
            state, _ = step(state, batch, turn)
        found.append(_common(tensors(state)))
    assert differences(*found, within=1e-6) == []


def astray(world: af.World, each: Trained) -> None:
    """Raise what a rank is told that leaves the known way alone, or waits for it in vain."""
    torch.set_num_threads(1)
    state = stepped(each, each.state(world), 2)
    (batch, *_) = each.run.batches(state, 1)

    def loss(net: Any, batch: Any) -> torch.Tensor:
        made = LOSSES["mean"](net, batch)
        return made + net.last(net.first(batch[0])).mean() if world.rank else made

    af.make_step(loss)(state, batch)


def frozen(world: af.World, each: Trained) -> None:
    """Check that states with other frozen values do not meet, stepped in turns."""
    torch.set_num_threads(1)

    def begun() -> list[af.TrainState]:
        first = each.state(world)
        bias = first.params["first.bias"]
        return [
            first,
            first.copy().with_params({**first.params, "first.bias": bias + 1}),
        ]

    # each of a definition of its own, of which no other was stepped
    alone = [tensors(stepped(each, begun()[i], 3)) for i in range(2)]
    turns, step = begun(), af.make_step(LOSSES[each.run.loss])
    for batch in each.run.batches(turns[0], 3):
        turns = [step(state, batch)[0] for state in turns]
    assert alone[0]["params.first.bias"].ne(alone[1]["params.first.bias"]).all()
    for want, state in zip(alone, turns, strict=True):
        assert differences(want, tensors(state)) == []


def stages(world: af.World, each: Trained) -> None:
    """Check that a state goes from stage to stage, and back, with the same bits."""
    torch.set_num_threads(1)
    others = [
        attrs.evolve(each, engine=af.wrap_deepspeed(stage)) for stage in (1, 2, 3)
    ]
    setups = [other.state(world).setup for other in others]
    state = stepped(others[0], others[0].state(world), 2)
    saved = tensors(state)
    stayed = stepped(others[0], others[0].state(world), 3)
    for i in (1, 2, 1, 0, 2, 0):
        state = state.with_setup(setups[i])
        after = tensors(stepped(others[i], state, 1, donate=False))
        assert differences(tensors(stayed), after, within=1e-6) == [], i
        assert differences(saved, tensors(state)) == [], i
    assert differences(tensors(stayed), tensors(stepped(others[0], state, 1))) == []


def buffers(world: af.World, each: Trained) -> None:
    """Check that an update begins with rank 0's buffers, on all ranks."""
    torch.set_num_threads(1)
    state, value = each.state(world), each.run.data().dataset[:]
    state.buffers["seen"].fill_(world.rank + 7.0)
    state, _ = af.make_step(LOSSES[each.run.loss])(state, [value])
    want = torch.full((3,), 7.0).lerp(value[0].mean(0), 0.5)
    assert torch.equal(want, state.buffers["seen"])


def thrown_away(world: af.World, each: Trained) -> None:
    """Check that gradients that no update takes leave nothing behind."""
    torch.set_num_threads(1)
    take = af.value_and_grad(LOSSES[each.run.loss])
    state, alone = each.state(world), stepped(each, each.state(world), 2)
    for batch in each.run.batches(state, 2):
        take(state, batch, sync=False)
        take(state, batch)
        take(state, batch, sync=False)
        state, _ = af.make_step(LOSSES[each.run.loss])(state, batch)
    assert differences(tensors(alone), tensors(state)) == []


def clipped(world: af.World, each: Trained) -> None:
    """Check that of two bounds of the norm the lower one holds, as under wrap_fsdp."""
    torch.set_num_threads(1)
    bounds = [af.clip_grad_norm(bound, name=f"to-{bound}") for bound in (0.3, 0.1)]
    for behind in (bounds, bounds[::-1]):
        run = attrs.evolve(each.run, behind=tuple(behind))
        found = []
        for engine in (each.engine, af.wrap_fsdp()):
            of = Trained(run, engine)
            found.append(_common(tensors(stepped(of, of.state(world), 2))))
        assert differences(*found, within=1e-5) == []


def large_weights(world: af.World, each: Trained) -> None:
    """Check that weights are counted exactly that float32 cannot hold."""
    torch.set_num_threads(1)
    weights = [2**24 + 1, 2**25 + 2]
    state = each.state(world)
    (batch, *_) = each.run.batches(state, 1)

    def loss(net: Any, batch: Any) -> af.Loss:
        weight = weights[world.rank]
        return af.Loss(LOSSES["mean"](net, batch) * weight, weight)

    _, grads = af.value_and_grad(loss)(state, batch)
    assert float(grads.weight) == sum(weights)


def thawing(world: af.World, each: Trained) -> None:
    """Check that what is frozen stays as it is, with what the optimizer has of it."""
    torch.set_num_threads(1)

    def is_last(name: str, _: torch.Tensor) -> bool:
        return name.startswith("last.")

    found = []
    for engine in (each.engine, af.wrap_fsdp()):
        of = Trained(each.run, engine)
        state = stepped(of, of.state(world), 2).with_trainable(is_last)
        found.append(tensors(stepped(of, state, 1)))
    ours, theirs = map(_common, found)
    assert differences(ours, theirs, within=1e-6) == []
    state = stepped(each, each.state(world), 2).with_trainable(is_last)
    state = stepped(each, state, 1).with_trainable(lambda name, _: name != "first.bias")
    with pytest.raises(af.errors.OptimizerError, match="has another number of updates"):
        stepped(each, state, 1)


def released(world: af.World, each: Trained) -> None:
    """Check that an engine that is let go of keeps nothing but what states have."""
    torch.set_num_threads(1)
    state = stepped(each, each.state(world), 1)
    zero = engine_of(state).binding.zero
    after = tensors(stepped(each, state, 1, donate=False))
    assert _holds_parts(zero._optimizer) is (zero.stage == 3)
    af.release_engine(state)
    gc.collect()
    assert not _holds_parts(zero._optimizer)
    assert {p.numel() for p in zero._engine.module.parameters()} == {0}
    assert {flat.numel() for flat in zero.flats} == {0}
    assert differences(after, tensors(stepped(each, state, 1))) == []


def forgotten(world: af.World, each: Trained) -> None:
    """Check that the memory of a state goes with it, while the engine steps another."""
    torch.set_num_threads(1)
    state = stepped(each, each.state(world), 2)
    other = state.copy()
    kept = [t for entry in state._opt_state.content.values() for t in entry.values()]
    held = [*state._params.content.values(), *kept]
    memory = [StorageWeakRef(t.untyped_storage()) for t in held if torch.is_tensor(t)]
    other = stepped(each, other, 1)
    del state, kept, held
    gc.collect()
    assert [each.expired() for each in memory] == [True] * len(memory)
    assert other.step == 3


def _holds_parts(optimizer: Any) -> bool:
    """Whether an optimizer of DeepSpeed's has parts of gradients between updates."""
    kept = ("__param_id_to_grad_partition", "grad_partitions_flat_buffer")
    found = [v for name, v in vars(optimizer).items() if name.endswith(kept)]
    return any(value is not None and len(value) > 0 for value in found)


def odd_optimizers(world: af.World, each: Trained) -> None:
    """Check those that count by several numbers, copied, where a lone number comes first."""
    torch.set_num_threads(1)
    for kind in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam):
        found = []
        for engine in (each.engine, af.wrap_fsdp()):
            of = Trained(each.run, engine)
            state = af.TrainState.create(
                model=functools.partial(Net, torch.float32, in_list=True),
                optimizer=functools.partial(kind, lr=0.01),
                data=each.run.data(),
                setup=af.chain(af.shard_data(), engine),
                world=world,
            )
            state = stepped(of, stepped(of, state, 2).copy(), 1)
            found.append(_common(tensors(state)))
        assert differences(*found, within=2e-6) == [], kind


def _first(net: Any, batch: Any) -> torch.Tensor:
    return net.first(batch[0]).square().mean()


def _penalised(net: Any, batch: Any) -> torch.Tensor:
    """Use parameters that stage 3 has not gathered."""
    penalty = sum(param.square().sum() for param in net.parameters())
    return LOSSES["mean"](net, batch) + penalty


def _normed(net: Any, batch: Any) -> torch.Tensor:
    """Add what would be 0."""
    return LOSSES["mean"](net, batch) + sum(p.norm() for p in net.parameters())


def _logged(net: Any, batch: Any) -> af.Loss:
    """Report what would be 0."""
    with torch.no_grad():
        norm = torch.norm(next(iter(net.state_dict(keep_vars=True).values())))
    return af.Loss(LOSSES["mean"](net, batch), 1, norm=norm)


def _named(net: Any, batch: Any) -> torch.Tensor:
    """Add what would be 0, of an argument by name."""
    first = next(net.parameters())
    return LOSSES["mean"](net, batch) + torch.linalg.vector_norm(x=first)


def _stacked(net: Any, batch: Any) -> torch.Tensor:
    """Add what would be 0, of a list."""
    return LOSSES["mean"](net, batch) + sum(torch._foreach_norm([*net.parameters()]))


def _asking(net: Any, batch: Any) -> torch.Tensor:
    """Ask what models ask their parameters for."""
    first = next(net.parameters())
    assert (first.dtype, first.device.type) == (torch.float32, "cpu")
    assert first.is_floating_point()
    return LOSSES["mean"](net, batch).to(first.dtype)
