# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a model whose layers lie on the disk, or on the host."""

import time
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import cpu_offload, disk_offload
from big_model import IDS, check, network, written
from figures import Figure
from rounds import Loop, compared, timed
from torch import nn

import accelfn as af


def empty() -> nn.Module:
    """Return the model without weights."""
    with af.empty_weights():
        return network().eval()


def on_disk(model: nn.Module) -> af.DeviceMap:
    """Return a plan in which every unit is on the disk."""
    plan = af.place(model, {"cpu": "1GiB", "disk": "build"})
    for unit in plan.units:
        plan = plan.moved(unit.names[0], "disk")
    return plan


def forward(model: nn.Module) -> Loop:
    """Return a loop of forward passes."""

    def passes(times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                model(IDS)

    return passes


def measure(rounds: int) -> list[Figure]:
    """Return the time that each one's processor takes for a forward pass."""
    with written() as (ours, others, expected), ExitStack() as stack:

        def placed(plan: af.DeviceMap, weights: Path) -> nn.Module:
            return stack.enter_context(af.placed(empty(), plan, weights=weights))

        def read() -> nn.Module:
            return af.import_model(network, others).eval()

        plan, host = on_disk(empty()), torch.device("cpu")
        models = {
            "disk: Accelerate": disk_offload(read(), others.parent / "offloaded", host),
            "disk: accelfn": placed(plan, others),
            "disk: accelfn, of export_model": placed(plan, ours),
            "host: Accelerate": cpu_offload(read(), host),
            "host: accelfn": placed(af.place(empty(), {"cpu": "1GiB"}), others),
        }
        for model in models.values():
            check(model, expected)
        loops = {name: forward(model) for name, model in models.items()}
        taken = timed(loops, rounds=rounds, steps=1, clock=time.process_time)
    groups = [{n: taken[n] for n in taken if n.startswith(w)} for w in ("disk", "host")]
    return [figure for group in groups for figure in compared(group)]
