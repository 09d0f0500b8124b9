# SPDX-License-Identifier: Apache-2.0
"""Draw docs/how-to/communication.svg: predicted times, and the measured times of the benchmarks.

Run `python tests/bench/link_chart.py` after `run.py link_1 link_4`.
"""

import re
from functools import partial
from pathlib import Path

import torch
from draw_traffic import draw_traffic
from models import adamw, in_turn, loss_fn, mlp

import accelfn as af
from accelfn.testing import Link, communication

DOCS = Path(__file__).parents[2] / "docs"
OVER_TCP = 1.5 * 66 / 1448
UPDATES = 8
METHODS = {
    "DDP": ("accelfn wrap_ddp", af.wrap_ddp()),
    "DDP in bf16": (
        'accelfn compress("bf16")',
        af.chain(af.wrap_ddp(), af.compress_grads("bf16")),
    ),
    "local_sgd(8)": ("accelfn local_sgd", af.local_sgd(sync_every=UPDATES)),
    "diloco(8), 8 bits": (
        "accelfn diloco, 8 bits",
        af.diloco(sync_every=UPDATES, bits=8),
    ),
}
COMPUTE = 0.0005
"""Seconds of an update of this model without communication."""


def program(world: af.World, setup: object) -> None:
    """Train for one period of `sync_every` updates."""
    state = af.TrainState.create(model=mlp, optimizer=adamw, setup=setup, world=world)
    step = af.make_step(loss_fn)
    for batch in in_turn()(UPDATES):
        state, _ = step(state, batch)


def measured(contestant: str) -> dict[float, float]:
    """Read the milliseconds of an update from docs/benchmarks.md, by megabits per second."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    found = {}
    for section in sections:
        link = re.match(r"An update over a link of (\d+) Mbit", section)
        row = re.search(
            rf"^\| {re.escape(contestant)} \| ([\d.]+)", section, re.MULTILINE
        )
        if link and row:
            found[float(link[1])] = float(row[1])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = draw_traffic(
        {
            name: communication(partial(program, setup=setup))
            for name, (_, setup) in METHODS.items()
        },
        DOCS / "how-to" / "communication.svg",
        ranks=2,
        link=Link(latency=0.001, bandwidth=1, overhead=OVER_TCP),
        algorithm="gloo",
        compute=COMPUTE,
        measured={
            name: measured(contestant) for name, (contestant, _) in METHODS.items()
        },
    )
    print(words)
