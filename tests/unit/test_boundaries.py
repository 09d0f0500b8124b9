# SPDX-License-Identifier: Apache-2.0
"""Boundaries: the last, the first, the empty, what hardly anybody gives, two rare options."""

import ast
import math
import os
import shutil
import signal
import string
import subprocess
import sys
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import accelfn as af
from accelfn.schedules import factors
from accelfn.testing import Link, simulate, traffic
from accelfn.track import tracker
from tests.internals import (
    WEIGHTS,
    Ended,
    Failure,
    _port_of_job,
    agent,
    best_of,
    commit,
    entries_of,
    failures,
    few_bits,
    files,
    manifest,
    optimizer,
    run,
    script,
    split_into_files,
    token_budget,
    tree,
    worker,
)
from tests.states import STEP, linear_state, recorded_warnings
from tests.unit.test_data_streams import Stateful
from tests.unit.test_partition import Counting
from tests.waiting import HANGS, wait_until

DDP = af.chain(af.shard_data(), af.wrap_ddp())
state_of = partial(linear_state, 2, 2)
NET = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))  # noqa: E731


class Late(torch.optim.SGD):
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"]]
        for param in params:
            if self.state[param]:
                param.grad /= torch.stack([each.grad.norm() for each in params]).norm()
            self.state[param]["seen"] = True
        super().step(closure)


def test_an_optimizer_that_couples_later_is_found():
    """As those do that choose their own rate by all that they saw."""
    state = state_of(optimizer=partial(Late, lr=0.1))
    with pytest.raises(af.errors.OptimizerError, match="by its own gradient only"):
        optimizer.check_elements(state, "here", dims=(0,))


class Decaying(lr_scheduler.LRScheduler):
    """Changes weight decay, for the first time at its third update."""

    def get_lr(self):
        if self.last_epoch >= 3:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.5 * self.last_epoch
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_disk_that_was_lent_is_given_back(tmp_path):
    """Behind the block a model on the host has memory of its own, and no file that is gone."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with af.on_devices(
        model, af.plan_devices(model, {"cpu": 20_000, "disk": tmp_path})
    ) as lent:
        lent(torch.ones(1, 64))
    here = [each.data_ptr() for each in model.parameters()]
    lines = Path("/proc/self/maps").read_text().splitlines()
    for line in (each for each in lines if str(tmp_path) in each):
        start, stop = (int(each, 16) for each in line.split()[0].split("-"))
        assert not any(start <= each < stop for each in here), line


@pytest.mark.parametrize("warn_only", [False, True])
def test_a_program_that_sets_determinism_leaves_the_callers(*, warn_only):
    """Whether it warns or raises."""
    try:
        torch.use_deterministic_algorithms(mode=True, warn_only=warn_only)
        simulate(1, lambda _: torch.use_deterministic_algorithms(mode=False))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("axes", [{"dp_shard": 2, "cp": 2}, {"cp": 2, "dp_shard": 2}])
def test_what_ranks_of_any_group_keep_is_not_sent(axes):
    """Of two ranks that exchange two parts, each sends one, wherever in the world they are."""

    def fn(world):
        af.all_to_all([torch.ones(8), torch.ones(8)], world.along("cp"))

    alone = simulate(2, fn, axes={"cp": 2}).sent(by="kind")
    both = simulate(4, fn, axes=axes).sent(by="kind")
    assert both == {kind: 2 * sent for kind, sent in alone.items()}


@given(asked=st.lists(st.integers(0, 8), min_size=2, max_size=6))
def test_a_schedule_goes_back_to_what_was_before(asked):
    """What a scheduler changes late is as the optimizer has it at updates before."""
    optimizer = partial(torch.optim.SGD, lr=0.1, weight_decay=0.25)
    state = state_of(optimizer=optimizer, schedule=af.schedules.from_torch(Decaying))
    rates = state.definition.rates
    for update in asked:
        found = rates(update).get((0, "weight_decay"), 0.25)
        assert found == (0.25 if update < 3 else 0.5 * update), update


@given(size=st.sampled_from([2, 3]), reduces=st.sampled_from(["mean", "total"]))
def test_gradients_of_a_rank_stay_when_they_are_added_up(size, reduces):
    """`sync_grads` gives others; a rank's own are read beside them, as for the noise scale."""

    def loss(model, batch):
        each = model(batch).square().mean(1)
        return each.mean() if reduces == "mean" else af.Loss(each.sum(), len(batch))

    def fn(world):
        state = state_of(world=world, setup=DDP)
        batch = torch.ones(2 + world.rank, 2) * (1 + world.rank)
        _, own = af.value_and_grad(loss)(state, batch, sync=False)
        before = {name: each.clone() for name, each in own.tensors.items()}
        together = af.sync_grads(state, own)
        for name, each in before.items():
            assert torch.equal(each, own.tensors[name]), name
            assert not torch.equal(each, together.tensors[name]), name

    simulate(size, fn)


@given(
    values=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=3),
    op=st.sampled_from(["min", "max"]),
)
def test_large_unsigned_numbers_are_in_order(values, op):
    """Of 2**31 and more, too."""

    def fn(world):
        mine = torch.tensor([values[world.rank]], dtype=torch.int64).to(torch.uint32)
        return int(af.all_reduce(mine, world, op))

    expected = {"min": min, "max": max}[op](values)
    assert set(simulate(len(values), fn)) == {expected}


def test_parts_that_two_ranks_have_exchanged_are_told():
    """Ranks of a copy that hold one another's rows hold another model than the other copy."""
    axes = {"dp_replicate": 2, "dp_shard": 2}

    def fn(world):
        setup = af.chain(af.shard_data(), af.wrap_fsdp(), af.check_replicas(every=1))
        frozen = partial(torch.optim.SGD, lr=0.0)
        state = linear_state(4, 4, optimizer=frozen, setup=setup, world=world)
        whole = af.full_params(state, at="train")
        if world.along("dp_replicate").rank:
            whole = {name: each.roll(len(each) // 2, 0) for name, each in whole.items()}
        state = state.with_params(whole)
        with pytest.raises(af.errors.ReplicaMismatchError, match=r"weight"):
            STEP(state, torch.ones(2, 4))

    simulate(4, fn, axes=axes)


@pytest.mark.parametrize("count", [1, 5, 6, 9])
def test_what_a_loss_froze_is_trained_once_it_is_told(count):
    """All of it, however much: the next function trains as if nothing had been."""
    model = lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))  # noqa: E731
    state = state_of(model=model)

    def freezes(model, batch):
        for param in islice(model.parameters(), count):
            param.requires_grad_(requires_grad=False)
        return model(batch).square().mean()

    with pytest.raises(af.errors.LossError, match="False on parameters that"):
        af.make_step(freezes)(state, torch.ones(2, 2))
    before = {name: each.clone() for name, each in state.params.items()}
    state, _ = STEP(state, torch.ones(2, 2))
    assert not any(
        torch.equal(before[name], each) for name, each in state.params.items()
    )


@pytest.mark.parametrize("broken", ["a", "b", "c"])
def test_of_large_tensors_the_one_that_changed_is_named(broken, tmp_path):
    """Those that threads check beside one another."""
    names = ("a", "b", "c")
    state = state_of().with_slot(
        "large", {name: torch.full((1 << 19,), 1.0 + i) for i, name in enumerate(names)}
    )
    af.save(state, tmp_path / "saved")
    value = 1.0 + names.index(broken)
    pattern = torch.full((1024,), value).numpy().tobytes()
    for path in (tmp_path / "saved").iterdir():
        content = bytearray(path.read_bytes())
        at = content.find(pattern)
        if at >= 0:
            content[at + 5] ^= 1
            path.write_bytes(content)
    with pytest.raises(af.errors.CheckpointCorruptError, match=rf"large.*{broken}\b"):
        af.load(state_of().with_slot("large", None), tmp_path / "saved")


def test_a_row_layer_with_a_bias_keeps_the_dtype_of_autocast():
    """What comes out of it has the dtype that it has in one process."""
    seen = []

    def loss(model, batch):
        out = model(batch)
        seen.append(out.dtype)
        return out.square().mean()

    def fn(world):
        plan = {"0": "column", "2": "row"}
        setup = af.chain(af.wrap_ddp(), af.tensor_parallel(plan), af.autocast("bf16"))
        state = state_of(model=NET, setup=setup, world=world)
        af.make_step(loss)(state, torch.ones(2, 2))

    simulate(2, fn, axes={"tp": 2})
    assert set(seen) == {torch.bfloat16}


def test_a_first_loss_that_is_nan_is_told_as_such():
    """Under split layers, too, where ranks compare it before the first update."""

    def loss(model, batch):
        return (model(batch).square().mean() * -1 - 1).log()

    def fn(world):
        setup = af.chain(af.wrap_ddp(), af.tensor_parallel({"": "gathered"}))
        state = state_of(setup=setup, world=world)
        af.make_step(loss)(state, torch.ones(2, 2))

    with pytest.raises(af.errors.NonFiniteLossError):
        simulate(2, fn, axes={"tp": 2})


@given(arg=st.text("$l{}_ocarnk", max_size=20) | st.sampled_from(["$local_rank", "$$"]))
def test_arguments_of_a_script_are_not_filled_in(arg):
    """torch's launcher takes them for templates; whatever is in them comes as it is."""
    filled = string.Template(agent._as_template(arg)).safe_substitute(local_rank="0")
    assert filled == arg


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loop_that_was_left_is_not_what_the_next_begins_with(*, sharded):
    """Of a stream that knows where it stands, whoever reads it."""
    state = state_of(
        data=af.Data(Stateful(12), global_batch_size=2, sharded=sharded),
        setup=af.shard_data(),
        model=lambda: nn.Linear(1, 1),
    )
    first = [each.value for each in islice(af.batches(state, until_epoch=1), 2)]
    again = [each.value for each in islice(af.batches(state, until_epoch=1), 4)]
    assert torch.equal(torch.stack(again[:2]), torch.stack(first))
    assert torch.stack(again).flatten().tolist() == [float(i) for i in range(8)]


def test_a_run_has_as_many_updates_as_the_rank_with_most():
    """Where the first one left before the others."""

    def fn(world):
        state = state_of(world=world, setup=af.local_sgd(sync_every=100))
        for _ in range(1 + 2 * world.rank):
            state, _ = STEP(state, torch.ones(2, 2))

    assert simulate(2, fn).updates == 3


@pytest.mark.parametrize("numbers", [(15, 15), (15, 0), (0, 2), (15, 2), (2, 15, 15)])
def test_ranks_that_are_all_sent_a_signal_agree_on_it(numbers):
    """As a scheduler sends it to all; of two, on one of them."""

    def fn(world):
        stop = run.Stop(world)
        stop.received = numbers[world.rank]
        assert stop.requested()
        return stop.signal

    assert set(simulate(len(numbers), fn)) == {max(numbers)}


def test_parts_of_parts_keep_entries_of_no_parameter(tmp_path):
    """Each under its own key, through copies and checkpoints."""
    make = partial(Counting, lr=0.1)
    inner = af.combine_optimizers((lambda name, _: name == "0.bias", make), (..., make))
    optimizer = af.combine_optimizers(
        (lambda name, _: name != "2.bias", inner), (..., make)
    )
    state = state_of(model=NET, optimizer=optimizer)
    for _ in range(2):
        state, _ = STEP(state.copy(), torch.ones(2, 2))
    kept = state.opt_state["<optimizer>"]
    assert set(kept.values()) == {2}
    af.save(state, tmp_path / "saved")
    loaded = af.load(state_of(model=NET, optimizer=optimizer), tmp_path / "saved")
    loaded, _ = STEP(loaded, torch.ones(2, 2))
    assert set(loaded.opt_state["<optimizer>"].values()) == {3}


def test_a_folder_may_be_made_by_several_at_once(tmp_path, monkeypatch):
    """Where another process makes it between the look and the act."""
    there = tmp_path / "run"
    look = files.arguments.is_directory

    def looked(path):
        found = look(path)
        there.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(files.arguments, "is_directory", looked)
    files.make(there)
    assert there.is_dir()


@pytest.mark.parametrize("size", [2, 4])
def test_a_link_is_measured_in_rounds(size, monkeypatch):
    """What a sum takes on a link is what its model says, and the model is found again."""
    true = Link(latency=0.001, bandwidth=1_000_000)

    def reduced(count, world):
        rounds = 2 * (world.size - 1)
        latency = rounds * true.latency
        return latency + 4 * (count - 1) * rounds / world.size / true.bandwidth

    monkeypatch.setattr(traffic, "_time_sum", reduced)

    def fn(world):
        monkeypatch.setattr(world.connection, "simulated", None)
        return Link.measured(world)

    for found in simulate(size, fn):
        assert found.latency == pytest.approx(true.latency)
        assert found.bandwidth == pytest.approx(true.bandwidth)


@pytest.mark.parametrize("frozen", ["write", "hash"])
@given(first=st.sampled_from(["0.", "2."]))
def test_what_is_loaded_is_in_the_models_order(frozen, first):
    """Whatever order it was saved in, and what of it by a hash."""

    def make():
        net = NET()
        for name, param in net.named_parameters():
            param.requires_grad_(not name.startswith(first))
        torch.nn.init.ones_(net[0].weight)
        return state_of(model=lambda: net)

    with tempfile.TemporaryDirectory() as folder:
        state = make()
        path = Path(folder) / "saved"
        af.save(state, path, frozen=frozen)
        loaded = af.load(state, path)
    assert list(loaded.params) == list(state.params)
    for name, each in state.params.items():
        assert torch.equal(each, loaded.params[name])


@pytest.mark.parametrize(
    ("axes", "is_all"), [({"tp": 2}, True), ({"dp_shard": 2}, False)]
)
def test_metrics_are_tracked_that_are_all_there_is(axes, tmp_path, *, is_all):
    """Ranks that share each sample see the loss of all; others a part of it."""

    def fn(world):
        metrics = af.Metrics({"loss": (4.0, 2.0)})
        with af.track.jsonl(tmp_path / "run.jsonl", world=world) as tracker:
            if is_all:
                tracker(metrics, 1)
            else:
                with pytest.raises(af.errors.ArgumentError, match="of this rank only"):
                    tracker(metrics, 1)

    simulate(2, fn, axes=axes)


@pytest.mark.parametrize("safe", [False, True])
def test_a_script_has_the_folders_that_python_gives_it(safe, tmp_path):
    """Its own first, unless Python was told not to; then those that the environment names."""
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.path[:2])")
    options = ["-P"] if safe else []
    words = [worker.__file__, str(os.getpid()), str(script)]
    done = subprocess.run(
        [sys.executable, *options, *words],
        env={**os.environ, "PYTHONPATH": "/first"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = ast.literal_eval(done.stdout)
    assert (first == str(tmp_path)) is not safe
    assert (first if safe else second) == "/first"


@pytest.mark.parametrize("error", [ArithmeticError, KeyError])
def test_a_hook_that_wrote_before_it_raised_has_changed_the_state(error):
    """The error is the hook's, though the optimizer's own step had not begun."""

    def optimizer(named):
        made = torch.optim.SGD(named, lr=0.1)

        def hook(stepped, *_):
            for group in stepped.param_groups:
                for param in group["params"]:
                    param.data.add_(1.0)
            raise error

        made.register_step_pre_hook(hook)
        return made

    state = state_of(optimizer=optimizer)
    with pytest.raises(error):
        STEP(state, torch.ones(2, 2))
    with pytest.raises(af.errors.StateDonatedError):
        state.params["weight"]


@given(seed=st.integers(0, 3), drawn=st.integers(0, 2))
def test_a_collate_of_a_table_draws_by_its_place(seed, drawn):
    """Whatever the process drew; each batch and epoch for itself."""
    table = pa.table({"x": list(range(8))})

    def masked(rows):
        return torch.rand(len(rows))

    def values():
        data = af.Data(table, global_batch_size=4, collate=masked)
        batches = af.batches(state_of(data=data, seed=seed), until_epoch=2)
        return [each.value.tolist() for each in batches]

    first = values()
    torch.rand(drawn)
    assert values() == first
    assert len({tuple(each) for each in first}) == 4


@pytest.mark.parametrize("bad", [math.nan, -0.5, 1.5, math.inf])
@given(at=st.integers(0, 3))
def test_an_image_with_a_number_of_no_colour_is_refused(bad, at):
    """Wherever it is; NaN is neither below nor above."""
    image = torch.full((1, 2, 2), 0.5)
    image.view(-1)[at] = bad
    with pytest.raises(af.errors.ArgumentError, match="'seen' has values from"):
        tracker.pixels("seen", image)


REFUSING = [
    (af.reduce_lr_on_plateau(min_lr=[1.0, 2.0]), af.errors.Error),
    (af.diloco(sync_every=9, fragments=9), af.errors.Error),
]


@pytest.mark.parametrize(("setup", "error"), REFUSING)
def test_a_model_is_taken_by_a_state_that_is_made(setup, error):
    """One that a transform refused leaves the model, and the optimizer, to a second try."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error):
        state_of(model=model, optimizer=optimizer, setup=setup)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    state, _ = STEP(state_of(model=model, optimizer=optimizer), torch.ones(2, 2))
    assert state.step == 1


def warnings_of_an_end(schedule, updates):
    """Return the warnings of a rate of 0 at some updates."""
    rates, looks_at = state_of(schedule=schedule).definition.rates, 0.0
    with recorded_warnings() as told:
        for update in updates:
            looks_at = factors.advise_of_end(rates, update, looks_at)
    return [str(each.message) for each in told]


@given(start=st.integers(20, 60), pause=st.integers(1, 40))
def test_a_pause_at_zero_is_not_the_end(start, pause):
    """What comes back is no schedule that is too short, however long it waits."""

    def schedule(update):
        return float(update < start) or 0.5 * (update >= start + pause)

    assert warnings_of_an_end(schedule, range(start, start + pause)) == []


@pytest.mark.parametrize("last", [60, 100, None])
def test_a_schedule_that_raises_behind_its_zeros_has_ended(last):
    """No update can be taken there, so the zeros are its end, from the first of them on."""

    def schedule(update):
        if last is not None and update > last:
            raise ValueError(update)
        return float(update < 20)

    (said,) = warnings_of_an_end(schedule, range(20, 60))
    assert "rate is 0 since update 20" in said


@given(
    order=st.permutations(["a", "b", "c", "d"]),
    cut=st.integers(1, 3),
    own=st.integers(1, 4),
)
def test_names_in_an_optimizers_file_are_believed(order, cut, own):
    """Whatever groups it has, and in whatever order: positions count where no names are."""
    params = {name: nn.Parameter(torch.zeros(2)) for name in order}
    named = list(params.items())
    optimizer = torch.optim.SGD(
        [{"params": named[:cut]}, {"params": named[cut:]}], lr=1.0, momentum=0.5
    )
    for name, param in named:
        param.grad = torch.full((2,), float("abcd".index(name)))
    optimizer.step()
    ours = ["a", "b", "c", "d"]
    groups = [ours[:own], ours[own:]] if own < 4 else [ours]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "optimizer.bin"
        torch.save(optimizer.state_dict(), file)
        entries = entries_of(file, groups, ours)
        found = {
            name: float(entry["momentum_buffer"][0]) for name, entry in entries.items()
        }
    assert found == {name: float(i) for i, name in enumerate("abcd")}


def test_whom_a_part_of_a_world_waits_for_is_told_by_the_world():
    """Of two ranks along an axis the other one need not be the one that is gone."""

    def fn(world):
        whole = world.whole
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failures, "_somebody", lambda found: f"of {found.size}")
            patch.setattr(type(whole.connection), "roll_call", None, raising=False)
            return failures.missing(world.along("tp"), "sum")

    assert simulate(4, fn, axes={"dp_shard": 2, "tp": 2})[0] == "of 4"


@given(drawn=st.integers(1, 12), replacement=st.booleans())
def test_costs_are_of_the_dataset_whatever_an_order_takes_of_it(drawn, *, replacement):
    """A budget looks up each sample's, be as many drawn as there are, fewer or more."""
    num = min(drawn, 6) if not replacement else drawn
    order = af.orders.weighted([1.0] * 6, num_samples=num, replacement=replacement)
    costs = [1, 2, 3, 1, 2, 3]
    data = af.Data(
        torch.ones(6, 2), global_batch_size=af.token_budget(costs, limit=6), order=order
    )
    batches = list(af.batches(state_of(data=data), until_epoch=1))
    assert sum(len(each.value) for each in batches) == num
    with pytest.raises(af.errors.Error, match="costs"):
        af.Data(
            torch.ones(6, 2),
            global_batch_size=af.token_budget([1] * (num + 7), limit=6),
            order=order,
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_split_head_has_its_loss_in_the_dtype_of_torchs(reduction):
    """Under autocast torch computes it in 32 bits of what 16 hold."""
    seen: list[torch.dtype] = []

    def loss(model, batch):
        targets = torch.arange(len(batch)) % 4
        found = nn.functional.cross_entropy(model(batch), targets, reduction=reduction)
        seen.append(found.dtype)
        return found.mean()

    def fn(world):
        setup: list[Any] = [af.wrap_ddp(), af.autocast("bf16")]
        if world.size > 1:
            setup.append(af.tensor_parallel({"0": "vocabulary"}))
        net = lambda: nn.Sequential(nn.Linear(2, 4))  # noqa: E731
        state = state_of(model=net, setup=af.chain(*setup), world=world)
        af.make_step(loss)(state, torch.ones(6, 2))

    simulate(1, fn)
    simulate(2, fn, axes={"tp": 2})
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("parts", [False, True])
def test_what_an_optimizer_of_other_options_lacks_is_told(parts, tmp_path):
    """As what amsgrad keeps, in a checkpoint of a run without it."""

    def created(*, amsgrad):
        make = partial(torch.optim.Adam, lr=0.1, amsgrad=amsgrad)
        is_bias = lambda name, _: name == "bias"  # noqa: E731
        both = af.combine_optimizers((is_bias, make), (..., make))
        return state_of(optimizer=both if parts else make)

    state, _ = STEP(created(amsgrad=False), torch.ones(2, 2))
    af.save(state, tmp_path / "saved")
    with pytest.raises(af.errors.CheckpointError, match="max_exp_avg_sq: missing"):
        af.load(created(amsgrad=True), tmp_path / "saved")
    allow = ("opt_state",)
    loaded = af.load(created(amsgrad=True), tmp_path / "saved", allow=allow)
    with pytest.raises(af.errors.OptimizerError, match="the entry 'max_exp_avg_sq'"):
        STEP(loaded, torch.ones(2, 2))


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=30), limit=st.integers(9, 30)
)
def test_a_batch_has_a_sample_though_it_costs_nothing(costs, limit):
    """As many as fit, the longest counted for each, and at least one."""
    fitting = token_budget(costs, limit=limit)._count_fitting(np.array(costs))
    fits = [max(costs[:n]) * n <= limit for n in range(1, len(costs) + 1)]
    assert fitting == (fits.index(False) if not all(fits) else len(costs))
    assert fitting >= 1


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_a_manifest_that_cannot_be_read_hides_no_other(broken, tmp_path):
    """`best_of` finds all others, and a restore names the newest of the older ones."""
    with af.CheckpointStore(tmp_path) as store:
        for step, loss in enumerate([0.3, 0.1, 0.2], 1):
            store.save(attrs.evolve(linear_state(), step=step), metrics={"loss": loss})
    (tmp_path / manifest.name_of(broken) / "manifest.json").write_text("{")
    others = [each for each in (2, 3, 1) if each != broken]
    assert best_of(tmp_path, "loss", "min") == others
    with (
        af.CheckpointStore(tmp_path) as store,
        pytest.raises(af.errors.CheckpointError) as caught,
    ):
        store.restore(linear_state(), step=broken)
    older = [f"store.restore(state, step={broken - 1})"] if broken > 1 else []
    notes = getattr(caught.value, "__notes__", [])
    found = [each.partition("with ")[2].rstrip(".") for each in notes]
    assert [each for each in found if each] == older


def test_a_process_that_is_dead_holds_no_lock():
    """Though its parent has not asked how it ended, and its number is taken."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert commit._process_start(ended.pid) is None
    assert commit._process_start(os.getpid()) is not None


def test_a_model_without_tensors_is_a_file_too():
    """An export of nothing has its one file."""
    assert split_into_files({}, 4) == {WEIGHTS: []}


@given(job=st.integers(1, 10**6), step=st.integers(0, 20), other=st.integers(0, 20))
def test_steps_of_jobs_that_follow_one_another_have_other_ports(job, step, other):
    """Else two programs of one machine meet at one address."""

    def port(job, step):
        return _port_of_job({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})

    assert (port(job, step) == port(job, other)) == (step == other)
    assert port(job, step) != port(job + 1, other)


@given(names=st.permutations(["b", "a", "d", "c", "f", "e", "g"]))
def test_metrics_come_in_the_order_that_they_have(names):
    """And each name once in the trail of what a rank did."""

    def fn(world):
        mine = 1.0 + world.rank
        numbers = {name: (mine * at, 2.0) for at, name in enumerate(sorted(names))}
        found = af.Metrics({name: numbers[name] for name in names}).all_reduce_mean(
            world
        )
        af.start_all_reduce([torch.ones(2)], world, label="a sum").wait()
        trail = [label for label, _ in world.connection.activity.trail]
        return found, [each for each in trail if each == "a sum"]

    for size in (1, 2):
        for found, trail in simulate(size, fn).results:
            assert [*found] == names
            means = [found[each] for each in sorted(names)]
            assert means == [at * (1 + size) / 4 for at in range(7)]
            assert trail == ["a sum"] * (size > 1)


def test_an_error_of_several_lines_is_told_by_its_first():
    """It has the kind of the error; the rest is in the traceback."""
    lines = "ValueError: it is wrong\nin two ways"
    failed = [
        Failure(rank=rank, pid=1, status=1, at=float(rank), error=lines, traceback="")
        for rank in range(2)
    ]
    said = Ended(failed, range(2), 0.0).report
    assert "rank 1 followed: ValueError: it is wrong" in said.splitlines()


def test_a_stopped_process_is_known_whatever_its_name(tmp_path):
    """The system writes the name in brackets, and a name may have some."""
    program = tmp_path / "a) S (b"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "60"]) as process:
        try:
            wait_until(lambda: "a) S" in Path(f"/proc/{process.pid}/stat").read_text())
            assert not script._is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert script._is_stopped(process.pid)
        finally:
            process.kill()
            process.wait(HANGS)


OF_SEVERAL_TENSORS = {
    "sparse": lambda x: x.to_sparse(),
    "by rows": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
}


@pytest.mark.filterwarnings("ignore:.*in (beta|prototype):UserWarning")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", OF_SEVERAL_TENSORS)
def test_a_batch_of_another_layout_is_a_batch(kind, size):
    """Sparse and nested tensors train as the dense one, on ranks that have their own, too."""

    def dense(batch):
        is_nested = batch.is_nested
        return batch.to_padded_tensor(0.0) if is_nested else batch.to_dense()

    def trained(world, *, as_dense):
        x = torch.eye(3)[world.rank :]
        setup = af.chain(af.shard_data(), af.wrap_ddp())
        state = linear_state(3, 1, setup=setup, world=world)
        step = af.make_step(lambda model, batch: model(dense(batch)).square().mean())
        value = x if as_dense else OF_SEVERAL_TENSORS[kind](x)
        return af.full_params(step(state, value)[0])["weight"].clone()

    one, other = (
        simulate(size, lambda w, d=d: trained(w, as_dense=d)) for d in (True, False)
    )
    assert all(map(torch.equal, one, other))


def test_a_tensor_laid_as_another_leaves_that_one_s_dtype_alone():
    """As a momentum in another precision, of which a rank has the rows of its parameter."""

    def program(world):
        state = linear_state(4, 4, world=world, setup=af.wrap_fsdp())
        param = state.params["weight"]
        dtype = torch.float64 if param.dtype is torch.float32 else torch.float32
        laid = tree.with_local(param, tree.local(param).to(dtype))
        assert (laid.dtype, laid.shape) == (dtype, param.shape)
        assert param.dtype is param._spec.tensor_meta.dtype is tree.local(param).dtype

    simulate(2, program)


@pytest.mark.parametrize("part", range(6))
def test_a_change_far_into_a_file_is_noticed(part, tmp_path):
    """Though its tensors are compared while more of it is read, a MiB at a time."""
    model = partial(torch.nn.ModuleList, [torch.nn.Linear(512, 512) for _ in "six..."])
    state = linear_state(model=model)
    af.save(state, tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) - (1 << 20) * part - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(af.errors.CheckpointCorruptError, match="BLAKE3 digest of"):
        af.load(state, tmp_path / "saved")


@pytest.mark.parametrize("weight", [0.0, torch.tensor(0.0)])
def test_a_mean_of_no_weight_is_the_plain_one(weight):
    """Whether the weight is a number or a tensor: nobody divides by 0."""

    def fn(world):
        values = torch.tensor([1.0, 3.0]) + world.rank
        return af.all_reduce(values, world, "mean", weight=weight).tolist()

    assert list(simulate(2, fn)) == [[1.5, 3.5]] * 2


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_numbers_beyond_the_exponents_of_a_byte_are_the_nearest_that_there_are(bits):
    """As float64 has them: what is too small is 0, and what is too large the largest."""
    tiny, huge = torch.tensor([[1e-60], [-1e300]], dtype=torch.float64)
    blocks = torch.stack([each.expand(few_bits.BLOCK) for each in (tiny, huge)])
    found = few_bits.dequantize(few_bits.quantize(blocks, bits), bits, torch.float64)
    largest = (2 ** (bits - 1) - 1) * 2.0**127
    assert found.unique(dim=1).flatten().tolist() == [0.0, -largest]
