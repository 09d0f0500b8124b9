# SPDX-License-Identifier: Apache-2.0
"""`throughput`: samples, tokens and floating-point operations per second."""

import re
import time
from collections.abc import Mapping

import attrs
import torch

from accelfn import Metrics, TrainState, all_reduce
from accelfn.errors import ArgumentError
from accelfn.plug import arguments

_PEAKS: Mapping[str, float] = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "MI300X": 1307e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""FLOP/s of dense matrix products in 16 bits, from data sheets, by words of the GPU's name."""

_is_positive = attrs.validators.optional(
    arguments.number(lambda value: value > 0, "a positive number")
)


@attrs.define(eq=False, kw_only=True)
class throughput:
    """Measure the speed of a run between two calls, in `af.run` or in your own loop.

    The first call returns an empty dict, and starts the clock. So the speed does not include the
    first updates, which compile functions and allocate memory. Each later call returns a dict:

    - `samples_per_second`, over all ranks, including samples that remainder="drop" leaves out;
    - `tokens_per_second`, if you pass `tokens_per_sample`;
    - `mfu`, if you pass `flops_per_sample`: the model FLOPs utilization, which is the FLOP/s of
      the model divided by the peak of all devices.

    Args:
        tokens_per_sample: the number of tokens in each sample.
        flops_per_sample: the floating-point operations of a forward and backward pass per
            sample, without recomputation. torch's `FlopCounterMode` counts them.
        peak_flops: the peak of one device in FLOP/s. Default: the peak in 16 bits that the data
            sheet of this GPU states, without sparsity.

    Law: the numbers are equal on all ranks. The time is that of the slowest rank.

    Cost: each call waits for the device, and reduces one number over the ranks.

    Raises:
        ArgumentError: an argument is not positive. In a call: the state has no data, or
            `peak_flops` is missing for a device that accelfn does not know.

    References:
        Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B.

    Example:
        >>> throughput(tokens_per_sample=1024)
        throughput(tokens_per_sample=1024, flops_per_sample=None, peak_flops=None)
    """

    tokens_per_sample: float | None = attrs.field(default=None, validator=_is_positive)
    flops_per_sample: float | None = attrs.field(default=None, validator=_is_positive)
    peak_flops: float | None = attrs.field(default=None, validator=_is_positive)
    _before: tuple[float, int, int, int] | None = attrs.field(
        default=None, init=False, repr=False
    )

    def __call__(
        self, state: TrainState, metrics: Metrics | None = None
    ) -> dict[str, float]:
        """Return the speed since the last call, by name; call this on all ranks."""
        del metrics
        if state.data is None:
            msg = "af.track.throughput: the state has no data. Create it with data=af.Data(...)."
            raise ArgumentError(msg)
        world, cursor = state.world, state.cursor
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        now = time.perf_counter(), state.step, cursor.epoch, cursor.samples
        before, self._before = self._before, now
        peak = None if self.flops_per_sample is None else self._peak(world.device)
        if before is None or state.step == before[1]:
            return {}
        seconds, updates, epochs, samples = (
            new - old for new, old in zip(now, before, strict=True)
        )
        if epochs and state.data.is_stream:  # the length of the last epoch is unknown
            samples = updates * int(state.data.global_batch_size)
        elif epochs:
            samples += epochs * len(state.data)
        duration = torch.tensor(seconds, dtype=torch.float64)
        slowest = all_reduce(duration, world, op="max")
        speed = float(samples) / float(slowest)
        result = {"samples_per_second": speed}
        if self.tokens_per_sample is not None:
            result["tokens_per_second"] = speed * self.tokens_per_sample
        if self.flops_per_sample is not None and peak is not None:
            result["mfu"] = speed * self.flops_per_sample / (peak * world.size)
        return result

    def _peak(self, device: torch.device) -> float:
        """Return the peak FLOP/s of one device.

        Raises:
            ArgumentError: the peak is unknown.
        """
        if self.peak_flops is not None:
            return self.peak_flops
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        gpu = next((gpu for gpu in _PEAKS if re.search(rf"\b{gpu}\b", name)), None)
        if gpu is None:
            msg = (
                f"af.track.throughput(flops_per_sample=...): accelfn does not know the peak of"
                f" {name!r}. Pass peak_flops=, the FLOP/s of one device."
            )
            raise ArgumentError(msg)
        return _PEAKS[gpu]
