# SPDX-License-Identifier: Apache-2.0
"""What hardly anybody gives: samples of no cost, a dead process's lock, a model without tensors."""

import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import CheckpointError
from accelfn.testing import assert_states_equal, simulate
from tests.internals import (
    WEIGHTS,
    Ended,
    Failure,
    _port_of_job,
    best_of,
    commit,
    few_bits,
    manifest,
    script,
    split_into_files,
    token_budget,
    tree,
)
from tests.states import linear_state
from tests.waiting import HANGS, wait_until

ENDS = ["true"]


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=30), limit=st.integers(9, 30)
)
def test_a_batch_has_a_sample_though_it_costs_nothing(costs, limit):
    """As many as fit, the longest counted for each, and at least one."""
    fitting = token_budget(costs, limit=limit)._count_fitting(np.array(costs))
    fits = [max(costs[:n]) * n <= limit for n in range(1, len(costs) + 1)]
    assert fitting == (fits.index(False) if not all(fits) else len(costs))
    assert fitting >= 1


def saved(directory: Path, losses: list[float]) -> None:
    """Write a checkpoint of each step, with a loss."""
    with af.CheckpointStore(directory) as store:
        for step, loss in enumerate(losses, 1):
            store.save(attrs.evolve(linear_state(), step=step), metrics={"loss": loss})


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_a_manifest_that_cannot_be_read_hides_no_other(broken, tmp_path):
    """`best_of` finds all others, and a restore names the newest of the older ones."""
    saved(tmp_path, [0.3, 0.1, 0.2])
    (tmp_path / manifest.name_of(broken) / "manifest.json").write_text("{")
    others = [each for each in (2, 3, 1) if each != broken]
    assert best_of(tmp_path, "loss", "min") == others
    with (
        af.CheckpointStore(tmp_path) as store,
        pytest.raises(CheckpointError) as caught,
    ):
        store.restore(linear_state(), step=broken)
    older = [f"store.restore(state, step={broken - 1})"] if broken > 1 else []
    notes = getattr(caught.value, "__notes__", [])
    found = [each.partition("with ")[2].rstrip(".") for each in notes]
    assert [each for each in found if each] == older


def test_a_process_that_is_dead_holds_no_lock():
    """Though its parent has not asked how it ended, and its number is taken."""
    with subprocess.Popen(ENDS) as ended:
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

    for rank in range(size):
        one, other = (
            simulate(size, lambda w, d=d: trained(w, as_dense=d))[rank]
            for d in (True, False)
        )
        assert torch.equal(one, other)


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


@pytest.mark.parametrize("options", [{}, {"rtol": 0.1}, {"atol": 1.0}])
def test_nan_is_equal_to_nan_alone(options):
    """Whatever is tolerated."""
    state = linear_state()
    nan = {name: torch.full_like(p, torch.nan) for name, p in state.params.items()}
    broken = state.copy().with_params(nan)
    assert_states_equal(broken, broken.copy(), **options)
    with pytest.raises(AssertionError, match="weight"):
        assert_states_equal(state, broken, **options)


def test_views_of_gradients_are_used_up_with_them():
    """An update works in their memory."""
    state = linear_state(2, 2)
    compute = af.value_and_grad(lambda model, batch: model(batch).square().mean())
    _, grads = compute(state, torch.ones(3, 2))
    views = grads.map(lambda each: each.view_as(each))
    af.apply_grads(state.copy(), grads)
    with pytest.raises(af.errors.Error):
        af.apply_grads(state, views)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_numbers_beyond_the_exponents_of_a_byte_are_the_nearest_that_there_are(bits):
    """As float64 has them: what is too small is 0, and what is too large the largest."""
    tiny, huge = torch.tensor([[1e-60], [-1e300]], dtype=torch.float64)
    blocks = torch.stack([each.expand(few_bits.BLOCK) for each in (tiny, huge)])
    found = few_bits.dequantize(few_bits.quantize(blocks, bits), bits, torch.float64)
    largest = (2 ** (bits - 1) - 1) * 2.0**127
    assert found.unique(dim=1).flatten().tolist() == [0.0, -largest]
