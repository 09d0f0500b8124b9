# SPDX-License-Identifier: Apache-2.0
"""Run example 19 for several numbers of ranks and seeds; write a table of the results.

`python tests/bench/talking_less.py` writes the table into docs/how-to/communication.md, and needs
a quarter of an hour on one core. The table does not depend on the machine's speed, because ranks
are simulated, and the times are those of a network link.
"""

import importlib.util
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from accelfn.testing import Link, Traffic, simulate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "communication.md"
RANKS, SEEDS = (2, 4, 8), range(5)
LINK = Link(latency=0.01, bandwidth=10 * 125_000, overhead=0.068)
BEGIN, END = "<!-- tests/bench/talking_less.py -->", "<!-- end -->"


def example() -> ModuleType:
    """Import example 19 as a module."""
    path = ROOT / "examples" / "19_talking_less.py"
    spec = importlib.util.spec_from_file_location("talking_less", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(talking: ModuleType, ranks: int, way: str) -> dict[str, list[float]]:
    """Run one way of communication on a number of ranks; return the values of each seed."""
    seen: dict[str, list[float]] = {"loss": [], "accuracy": [], "MB": [], "seconds": []}
    for seed in SEEDS:
        train = partial(talking.train, way=talking.WAYS[way], seed=seed)
        run = simulate(ranks, train)
        traffic = Traffic(logs={ranks: run.log}, updates=run.updates)
        seen["loss"].append(run[0]["loss"])
        seen["accuracy"].append(run[0]["accuracy"])
        seen["MB"].append(sum(traffic.bytes(ranks).values()) / ranks / 1e6)
        seconds = traffic.seconds(LINK, ranks=ranks) * run.updates
        seen["seconds"].append(seconds)
    return seen


def spread(values: list[float], form: str) -> str:
    """Return the mean and the standard deviation of the seeds' values, as text."""
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return f"{mean:{form}} ± {deviation:{form}}"


def row(ranks: int, way: str, seen: dict[str, list[float]]) -> str:
    """Return a line of the table."""
    megabytes, seconds = (statistics.mean(seen[key]) for key in ("MB", "seconds"))
    cells = ranks, way, spread(seen["loss"], ".3f"), spread(seen["accuracy"], ".1%")
    told = (
        *cells,
        f"{min(seen['accuracy']):.1%}",
        f"{megabytes:.1f}",
        f"{seconds:.1f}",
    )
    return "| " + " | ".join(map(str, told)) + " |"


def main() -> None:
    """Write the table between its markers in the page."""
    torch.set_num_threads(1)
    head = (
        "ranks",
        "method",
        "held-out loss",
        "accuracy",
        "lowest accuracy",
        "MB per rank",
        "seconds",
    )
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    talking = example()
    for ranks in RANKS:
        for way in talking.WAYS:
            seen = found(talking, ranks, way)
            lines.append(row(ranks, way, seen))
            sys.stdout.write(f"{lines[-1]} {json.dumps(seen)}\n")
            sys.stdout.flush()
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = "\n".join([BEGIN, "", *lines, "", END])
    PAGE.write_text(before + text + after, encoding="utf-8")


if __name__ == "__main__":
    main()
