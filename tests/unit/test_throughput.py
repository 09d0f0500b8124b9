# SPDX-License-Identifier: Apache-2.0
"""`af.track.throughput` counts what `af.batches` reads, over the slowest rank's time."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import accelfn as af
from accelfn.testing import simulate
from tests.states import STEP, linear_state


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@given(
    size=st.integers(1, 3),
    rows=st.integers(4, 12),
    batch_size=st.integers(1, 4),
    remainder=st.sampled_from(["drop", "short"]),
    streams=st.booleans(),
    every=st.integers(1, 3),
)
def test_speed_is_samples_over_seconds(
    size, rows, batch_size, remainder, streams, every
):
    """On all ranks alike, also where an epoch ends with a short batch."""
    inputs = torch.ones(rows, 1)

    def train(world):
        clock.now = 0.0
        data = af.Data(
            Stream(list(inputs)) if streams else inputs,
            global_batch_size=batch_size,
            remainder=remainder,
            replay=streams,
        )
        setup = af.chain(af.shard_data(), af.wrap_ddp())
        state = linear_state(data=data, setup=setup, world=world)
        speed = af.track.throughput(
            tokens_per_sample=7, flops_per_sample=10, peak_flops=1000
        )
        count, full, told = 0, 0, []
        for batch in af.batches(state, until_epoch=3):
            state, _ = STEP(state, batch)
            count, full = count + batch.num_samples, full + batch_size
            clock.now += 1.0 + world.rank
            if state.step % every == 0:
                told.append((speed(state), count, full, state.cursor.epoch))
        return told

    clock = threading.local()  # a rank is a thread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock.now)
        results = simulate(size, train).results
    assert all(told == results[0] for told in results)
    first, *later = results[0]
    assert first[0] == {}
    before = first
    for entry in later:
        numbers, count, full, epoch = entry
        samples = count - before[1]
        if epoch > before[3]:
            dropped = rows % batch_size if remainder == "drop" else 0
            samples += dropped * (epoch - before[3])
            samples = full - before[2] if streams else samples
        speed = samples / (every * size)  # the slowest rank takes `size` seconds
        assert numbers == pytest.approx(
            {
                "samples_per_second": speed,
                "tokens_per_second": 7 * speed,
                "mfu": speed * 10 / (1000 * size),
            }
        )
        before = entry


def test_an_unknown_device_asks_for_its_peak():
    """Of a CPU no data sheet is known, and a state without data reads no samples."""
    speed = af.track.throughput(flops_per_sample=1)
    state = linear_state(data=af.Data([0.0], global_batch_size=1))
    with pytest.raises(af.errors.ArgumentError, match="'CPU'. Pass peak_flops="):
        speed(state)
    with pytest.raises(af.errors.ArgumentError, match="has no data"):
        speed(linear_state())
    with pytest.raises(af.errors.ArgumentError, match="expected a positive number"):
        af.track.throughput(peak_flops=0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA T400", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(monkeypatch, name, peak):
    """A name within another one is not that GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    speed = af.track.throughput(flops_per_sample=1)
    if peak is None:
        with pytest.raises(af.errors.ArgumentError, match="Pass peak_flops="):
            speed._peak(torch.device("cuda"))
    else:
        assert speed._peak(torch.device("cuda")) == peak * 1e12
