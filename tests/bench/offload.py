# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the forward pass of a model whose layers are on the disk, or on the host."""

from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import cpu_offload, disk_offload
from big_model import IDS, check, network, output, written
from device import DEVICE, IS_CPU, computing, wait
from figures import Figure
from rounds import Loop, compared, timed
from torch import nn

import accelfn as af


def empty() -> nn.Module:
    """Return the model without weights."""
    with af.empty_weights():
        return network().eval()


def away(model: nn.Module, where: str) -> af.typing.DeviceMap:
    """Return a device map that puts every unit on the disk, or on the host."""
    budgets = {str(DEVICE): "1GiB", "cpu": "1GiB", "disk": "build"}
    plan = af.plan_devices(model, budgets)
    for unit in plan.units:
        plan = plan.moved(unit.names[0], where)
    return plan


def forward(model: nn.Module) -> Loop:
    """Return a loop of forward passes."""

    ids = IDS.to(DEVICE)

    def passes(times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                model(ids)

    return passes


def measure(rounds: int) -> list[Figure]:
    """Measure the time of a forward pass of each contestant."""
    with written() as (ours, others, on_host), ExitStack() as stack:

        def placed(plan: af.typing.DeviceMap, weights: Path) -> nn.Module:
            return stack.enter_context(af.on_devices(empty(), plan, weights=weights))

        def read() -> nn.Module:
            return af.import_model(network, others).eval()

        models = {
            "disk: Accelerate": disk_offload(
                read(), others.parent / "offloaded", DEVICE
            ),
            "disk: accelfn": placed(away(empty(), "disk"), others),
            "disk: accelfn, of export_model": placed(away(empty(), "disk"), ours),
            "host: Accelerate": cpu_offload(read(), DEVICE),
            "host: accelfn": placed(away(empty(), "cpu"), others),
        }
        expected = on_host if IS_CPU else output(read().to(DEVICE))
        for model in models.values():
            check(model, expected)
        loops = {name: forward(model) for name, model in models.items()}
        taken = timed(loops, rounds=rounds, steps=1, fence=wait, clock=computing())
    groups = [{n: taken[n] for n in taken if n.startswith(w)} for w in ("disk", "host")]
    return [figure for group in groups for figure in compared(group)]
