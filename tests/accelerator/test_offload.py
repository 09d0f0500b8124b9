# SPDX-License-Identifier: Apache-2.0
"""What lies in the host's memory is trained as what lies on the device, and is not there."""

import tempfile
from functools import partial
from math import prod
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.accelerator import fake, tested_device
from tests.accelerator.meter import metered
from tests.accelerator.tested_device import IS_FAKE, near
from tests.internals import SimulatedGroup, is_shard, local, tensor_leaves
from tests.laws.histories import Acts, Training, acts, check_apart_on
from tests.laws.split_models import AXES, LOSSES, Block, Run, runs
from tests.laws.test_fully_sharded import Stack
from tests.laws.test_shard_histories import broken_backward, broken_forward
from tests.strategies import tensors

pytestmark = pytest.mark.gpu
of_the_fake_one = pytest.mark.skipif(not IS_FAKE, reason="looks into the fake one")
HERE = [AXES[0], AXES[2], AXES[6]]
dtypes = st.sampled_from([None, None, torch.float32])
options = st.fixed_dictionaries(
    {
        "units": st.sampled_from([None, Block, nn.Linear]),
        "reshard_after_forward": st.booleans(),
        "keep_grads": st.sampled_from(["whole", "sharded"]),
        "find_unused_parameters": st.booleans(),
        "gather_dtype": dtypes,
        "reduce_dtype": dtypes,
    }
)
beside = st.sampled_from([(), (), (af.skip_nonfinite(),)])
on_host = partial(af.wrap_fsdp, cpu_offload=True)
ELSEWHERE = ("same device", "incompatible tensor", "should be materialized on CPU")
"""How torch says that something lies where it should not."""


def on_ranks(axes: dict[str, int], fn: Any) -> list[Any]:
    """Return what a function of a world gives on each rank of some, on the device.

    What lies on one device meets nothing of another.
    """
    try:
        return list(
            simulate(prod(axes.values()), fn, axes=axes, device=tested_device.NAME)
        )
    except RuntimeError as error:
        if any(said in str(error) for said in ELSEWHERE):
            pytest.fail(str(error))
        raise


def check_same(axes: dict[str, int], fn: Any, engine: Any = None) -> None:
    """Check that an engine on the host gives what it gives on the device.

    The function returns tensors by name, and metrics.
    """
    one, two = engine or (af.wrap_fsdp(), on_host())
    there, here = (on_ranks(axes, partial(fn, engine=each)) for each in (one, two))
    for (ours, metrics), (theirs, others) in zip(there, here, strict=True):
        assert different_from(ours, theirs) == []
        # what skips on the device begins to keep what an update left as it was
        more = ours.keys() - theirs.keys()
        assert not [name for name in more if ours[name].any()]
        assert near(metrics, others)


def different_from(one: Any, two: Any) -> list[str]:
    return [name for name in two if not near(one[name], two[name])]


def lies(state: af.TrainState) -> set[tuple[bool, str]]:
    """Return of what a state has in a parameter's shape whether it is a part, and where."""
    fields = [dict(state.params), dict(state.opt_state), dict(state.slots)]
    return {
        (is_shard(leaf), local(leaf).device.type)
        for leaf in tensor_leaves(fields)
        if leaf.ndim
    }


def stepped(run: Run, state: af.TrainState, updates: int = 2) -> Any:
    """Return a state after more updates, and their metrics."""
    step, seen = af.make_step(LOSSES[run.loss]), []
    for batch in run.batches(state, updates):
        state, metrics = step(state, batch)
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


@example(
    run=Run(4, 4, "weighted", "adagrad", in_list=True, micro=2),
    options={},
    more=(),
    axes=HERE[0],
)
@example(  # a norm of parts of two devices, in the order of one
    run=Run(
        *(6, 4, "mean", "adamw"),
        in_list=True,
        micro=1,
        behind=(af.clip_grad_norm(0.3),),
        seed=2,
    ),
    options={"keep_grads": "sharded"},
    more=(),
    axes=HERE[0],
)
@example(
    run=Run(4, 4, "weighted", "adagrad", in_list=True, micro=1),
    options={},
    more=(),
    axes=HERE[2],
)
@settings(max_examples=8)
@given(
    run=runs(),
    options=options,
    more=beside,
    axes=st.sampled_from(HERE),
)
def test_what_is_offloaded_trains_what_is_not(
    run: Run, options: Any, more: Any, axes: dict[str, int]
) -> None:
    """Parameters, buffers, optimizer, slots and metrics, bitwise; parts of them on the host."""

    def fn(world: af.World, engine: Any) -> Any:
        state, metrics = stepped(run, run.state(world, engine, *more))
        where = "cpu" if engine.cpu_offload else tested_device.NAME
        assert lies(state) == {(True, where)}
        return tensors(state), metrics

    check_same(axes, fn, (af.wrap_fsdp(**options), on_host(**options)))


CASTS = [
    af.autocast("bf16"),
    af.autocast("fp16", init_scale=4.0),
    # the first updates overflow, and are skipped
    af.autocast("fp16", init_scale=2.0**40),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_what_is_offloaded_is_computed_with_in_few_bits(cast, fused):
    """Under autocast, with a scale of the loss, and updates that are left out."""
    adamw = partial(torch.optim.AdamW, lr=0.1, fused=fused)
    inputs = torch.linspace(-1, 1, 60).view(12, 5)

    def fn(world: af.World, engine: Any) -> Any:
        state = af.TrainState.create(
            model=partial(Stack, torch.float32),
            optimizer=adamw,
            data=af.Data(inputs, global_batch_size=4),
            setup=af.chain(af.shard_data(), engine, cast),
            world=world,
        )
        step, seen = af.make_step(lambda model, batch: model(batch).square().mean()), []
        for batch in af.batches(state, until_epoch=2):
            state, metrics = step(state, batch)
            seen.append({name: float(value) for name, value in metrics.items()})
        return tensors(state), seen

    # the model's first parameter is in a unit, and lies on the host when a loss begins
    check_same(HERE[0], fn, (af.wrap_fsdp(nn.Linear), on_host(nn.Linear)))


PLAIN = Run(4, 4, "mean", "adamw", in_list=True, micro=1)


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_an_infinite_gradient_is_found_wherever_it_lies(name):
    """That of a lone number, on the device, or of a part, on the host."""

    def broken(net: nn.Module, batch: Any) -> torch.Tensor:
        return LOSSES["mean"](net, batch) + getattr(net, name).sum() * torch.inf

    def fn(world: af.World) -> tuple[int, bool]:
        state = PLAIN.state(world, on_host(), af.skip_nonfinite())
        before = tensors(state)
        (batch,) = PLAIN.batches(state, 1)
        state, _ = af.make_step(broken)(state, batch)
        after = tensors(state)
        params = [name for name in before if name.startswith("params")]
        return state.num_skipped, all(near(before[n], after[n]) for n in params)

    assert on_ranks(HERE[0], fn) == [(1, True)] * 2


@pytest.mark.parametrize("engine", [af.wrap_fsdp, on_host])
def test_gradients_that_are_reduced_by_hand_come_to_the_host(engine):
    """Zeros of what a loss did not use, too; the update is that of a step."""

    def without_last(net: nn.Module, batch: Any) -> torch.Tensor:
        return (net.first(batch[0]) * net.scale).square().mean()

    def fn(world: af.World) -> bool:
        wrap = engine(find_unused_parameters=True)
        one, two = (PLAIN.state(world, wrap) for _ in range(2))
        (batch,) = PLAIN.batches(one, 1)
        _, grads = af.value_and_grad(without_last)(one, batch, sync=False)
        one = af.apply_grads(one, af.sync_grads(one, grads))
        two, _ = af.make_step(without_last)(two, batch)
        pairs = tensors(one), tensors(two)
        return all(
            torch.allclose(pairs[0][name].cpu(), pairs[1][name].cpu(), rtol=1e-12)
            for name in pairs[1]
            if name.startswith("params")
        )

    assert on_ranks(HERE[0], fn) == [True] * 2


@example(
    run=attrs.evolve(PLAIN, micro=2),
    options={"keep_grads": "whole"},
    axes=HERE[0],
    acts=[("step", 0), ("load", 0), ("step", 2), ("look apart", 2), ("step", 2)],
)
@settings(max_examples=5)
@given(run=runs(), options=options, axes=st.sampled_from(HERE), acts=acts)
def test_states_on_the_host_do_not_meet(
    run: Run, options: Any, axes: dict[str, int], acts: Acts
) -> None:
    """Each has, bitwise, what one alone has that was stepped on the same batches."""
    options = {**options, "gather_dtype": None, "reduce_dtype": None}
    of = Training(
        fresh=lambda world: run.state(world, on_host(**options)),
        data=run.data,
        loss=LOSSES[run.loss],
        raising={"raise": broken_forward, "raise in backward": broken_backward},
    )
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(axes, lambda world: check_apart_on(world, of, acts, folder))


ENGINES = {
    "on the host": on_host(),
    "on the device": af.wrap_fsdp(),
    "replicas": af.wrap_ddp(),
}
engines = st.sampled_from(sorted(ENGINES))


@settings(max_examples=5)
@given(
    run=runs(),
    one=engines,
    other=engines,
    sizes=st.tuples(st.integers(2, 3), st.integers(2, 3)),
    begun=st.booleans(),
)
def test_what_is_saved_on_the_host_goes_on_anywhere(
    run: Run, one: str, other: str, sizes: tuple[int, int], begun: bool
) -> None:
    """Bitwise, and what is loaded lies as the state does into which it is."""
    with tempfile.TemporaryDirectory() as folder:

        def save(world: af.World) -> Any:
            state, _ = stepped(run, run.state(world, ENGINES[one]))
            af.save(state, f"{folder}/saved")
            return tensors(state)

        def load(world: af.World) -> Any:
            state = run.state(world, ENGINES[other])
            if begun:
                state, _ = stepped(run, state, 1)
            state = af.load(state, f"{folder}/saved")
            where = "cpu" if other == "on the host" else tested_device.NAME
            assert lies(state) == {(other != "replicas", where)}
            found = tensors(state)
            stepped(run, state, 1)
            return found

        (saved, *_), loaded = (
            on_ranks({"dp_shard": size}, fn)
            for size, fn in zip(sizes, (save, load), strict=True)
        )
        for found in loaded:
            del found["buffers.seen"]  # of rank 0
            assert different_from(saved, found) == []


@example(run=PLAIN, one="on the device", other="on the host", axes=HERE[0])
@settings(max_examples=4)
@given(run=runs(), one=engines, other=engines, axes=st.sampled_from(HERE))
def test_a_state_goes_to_the_host_and_back(
    run: Run, one: str, other: str, axes: dict[str, int]
) -> None:
    """By another setup, bitwise; and trains on as what never went."""

    def fn(world: af.World) -> None:
        state, _ = stepped(run, run.state(world, ENGINES[one]))
        setups = state.setup, run.state(world, ENGINES[other]).setup
        before = tensors(state.copy())
        moved = state.copy().with_setup(setups[1])
        where = "cpu" if other == "on the host" else tested_device.NAME
        assert lies(moved) == {(other != "replicas", where)}
        back = moved.with_setup(setups[0])
        for each in (tensors(moved), tensors(back)):
            assert different_from(each, before) == []
        went, stayed = (tensors(stepped(run, each, 1)[0]) for each in (back, state))
        assert different_from(went, stayed) == []

    on_ranks(axes, fn)


@settings(max_examples=4)
@given(run=runs(), axes=st.sampled_from(HERE))
def test_what_is_on_the_host_is_looked_at_as_on_the_device(
    run: Run, axes: dict[str, int]
) -> None:
    """Evaluated, predicted, lent, frozen and exported, bitwise."""

    def fn(world: af.World, engine: Any) -> Any:
        state, _ = stepped(run, run.state(world, engine))
        x = run.data().dataset[0].to(world.device)
        with af.borrow_model(state, at="train", gather=True) as module:
            lent = module.eval()(x).detach()
        frozen = af.snapshot_model(state, at="eval")(x)
        assert {lent.device.type, frozen.device.type} == {tested_device.NAME}
        whole = af.full_params(state, at="eval")
        assert {each.device.type for each in whole.values()} == {"cpu"}
        scores = af.evaluate(state, run.data(), LOSSES[run.loss])
        return {"lent": lent, "frozen": frozen, **whole}, scores

    check_same(axes, fn)


@settings(max_examples=4)
@given(run=runs(micro=1, behind=()), opt_state=st.booleans())
def test_copies_on_the_host_train_apart(run: Run, *, opt_state: bool) -> None:
    """Averages of parts that lie on the host are those of parts on the device, bitwise."""
    apart = af.local_sgd(sync_every=2, opt_state=opt_state)
    axes = {"dp_replicate": 2, "dp_shard": 2}

    def fn(world: af.World, engine: Any) -> Any:
        state, metrics = stepped(run, run.state(world, engine, apart), 3)
        return tensors(af.finalize(state)), metrics

    check_same(axes, fn)


# how much of a state lies where


@attrs.frozen
class Deep:
    """A training of so many equal layers, of a width that dwarfs what a sample has."""

    layers: int
    width: int
    micro: int
    options: Any

    @property
    def unit(self) -> int:
        """The bytes of a layer."""
        return 4 * self.width * (self.width + 1)

    def run(self, world: af.World, folder: str) -> None:
        """Train, a sample a rank and micro-batch; save, and load."""
        layers = [partial(nn.Linear, self.width, self.width)] * self.layers

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(make() for make in layers)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = torch.tanh(block(x))
                return x

        state = af.TrainState.create(
            model=Net,
            optimizer=partial(torch.optim.AdamW, lr=0.1),
            data=af.Data(torch.ones(8, self.width), global_batch_size=2 * self.micro),
            setup=af.chain(
                af.shard_data(),
                on_host(**self.options),
                af.accumulate(num_micro_batches=self.micro),
                af.clip_grad_norm(1.0),
                af.ema(0.9),
            ),
            world=world,
        )
        step = af.make_step(lambda model, batch: model(batch).square().mean())
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)
        af.save(state, f"{folder}/saved")
        af.load(state.copy(), f"{folder}/saved")

    def peak(self) -> int:
        """Return the most bytes that a rank has of its device, from the beginning on."""
        with metered() as meter, tempfile.TemporaryDirectory() as folder:
            on_ranks({"dp_shard": 2}, partial(self.run, folder=folder))
        return max(meter.peaks.values())


@of_the_fake_one
@settings(max_examples=2)
@given(
    width=st.sampled_from([128, 160]),
    micro=st.sampled_from([1, 2]),
    layers=st.integers(3, 4),
    reduce_dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_a_device_has_a_few_units_however_many_there_are(
    width: int, micro: int, layers: int, reduce_dtype: Any
) -> None:
    """It has eight layers at most, when training, saving and loading; more of them add what a
    sample leaves in each, and their names.
    """
    options = {"keep_grads": "sharded", "reduce_dtype": reduce_dtype}
    few, many = (Deep(n, width, micro, options) for n in (layers, 3 * layers))
    least, most = few.peak(), many.peak()
    assert least <= 8 * few.unit
    assert most - least <= 2 * layers * few.unit / 8


@of_the_fake_one
def test_bytes_are_told_by_where_they_are():
    """Of a state whose parts lie on the host the table has a column more."""

    def fn(world: af.World, engine: Any) -> tuple[str, int, int]:
        memory = af.memory(PLAIN.state(world, engine))
        return str(memory).splitlines()[0], memory.params.host, memory.params.here

    axes = {"dp_shard": 2}
    for head, host, here in on_ranks(axes, partial(fn, engine=on_host())):
        assert head.split() == ["here", "on", "host", "whole"]
        assert host == here - 8  # of the lone number
    for head, host, _ in on_ranks(axes, partial(fn, engine=af.wrap_fsdp())):
        assert (head.split(), host) == (["here", "whole"], 0)


@of_the_fake_one
def test_one_rank_on_a_device_offloads_nothing_and_is_refused():
    """By a sentence that says what to write."""
    with pytest.raises(
        af.errors.WorldError, match="has only one rank, so the parameters"
    ):
        PLAIN.state(af.World.single(device=fake.NAME), on_host())


@of_the_fake_one
def test_a_backend_that_knows_devices_alone_is_refused(monkeypatch):
    """When the state is made."""

    def none(_: Any, device: torch.device) -> Any:
        msg = f"No backend type associated with device type {device}"
        raise RuntimeError(msg)

    monkeypatch.setattr(SimulatedGroup, "_get_backend", none)
    with pytest.raises(af.errors.WorldError, match='backend="cpu:gloo,fake:'):
        on_ranks({"dp_shard": 2}, lambda world: PLAIN.state(world, on_host()))
