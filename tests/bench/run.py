# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks, which compare accelfn with other loops.

`run.py [--quick] [--device D] [NAME ...]` prints a table for each benchmark. A run of all
benchmarks writes docs/benchmarks.md. A run of some of them, or on an accelerator such as
`--device cuda:0`, replaces or adds only their sections. Benchmarks do not pass or fail, because
their times depend on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import torch
from figures import Figure
from page import page, table
from rich.console import Console
from suite import SUITE, Benchmark
from suite_of_devices import DEVICES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ALONE = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores
    "KINETO_LOG_LEVEL": "6",  # mute the profiler that counts all-reduces
}
PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> None:
    """Run the benchmarks that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    device = asked_device()
    known = {each.name: each for each in on(device)}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument(
        "--device", help="an accelerator, such as cuda:0; default the CPU"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    words = parser.parse_args()
    unknown = [name for name in words.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in words.names or known]
    rounds = {b: b.quick_rounds if words.quick else b.rounds for b in chosen}
    console = Console(width=130)  # wide enough for the widest table, also in a log file
    found = {}
    for benchmark in chosen:
        found[benchmark] = measured(benchmark, rounds[benchmark], device)
        console.print(table(benchmark, found[benchmark]))
    if words.names and words.quick:
        return
    adds = words.names or device != "cpu"
    before = PAGE.read_text(encoding="utf-8") if adds else ""
    PAGE.write_text(page(found, rounds, before), encoding="utf-8")
    console.print(f"Written to {PAGE.relative_to(ROOT)}.")


def asked_device() -> str:
    """Return the value of `--device`; the valid benchmark names depend on the device."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cpu")
    return parser.parse_known_args()[0].device


def on(device: str) -> tuple[Benchmark, ...]:
    """Return the benchmarks that run on a device."""
    if device == "cpu":
        return SUITE
    name = torch.get_device_module(device).get_device_name(device)
    return tuple(
        attrs.evolve(each, title=f"{each.title}, on one {name}") for each in DEVICES
    )


def measured(benchmark: Benchmark, rounds: int, device: str) -> list[Figure]:
    """Run a benchmark in new processes, and return its figures."""
    start = [sys.executable]
    if benchmark.nproc:
        start += ["-m", "accelfn", "launch", "--nproc", str(benchmark.nproc)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        words = [str(HERE / "child.py"), benchmark.module, str(rounds), str(file)]
        if benchmark.megabits is not None:
            on_two_hosts([sys.executable, *words], benchmark.megabits)
        else:
            env = {**os.environ, **ALONE, "BENCH_DEVICE": device}
            subprocess.run([*start, *words], check=True, env=env)
        return [Figure(**found) for found in json.loads(file.read_text())]


def on_two_hosts(command: list[str], megabits: int) -> None:
    """Run a command as one rank on each of two simulated hosts, with a slow link between."""
    sys.path.append(str(ROOT))  # tests/hosts.py creates the hosts
    from tests.hosts import rank_there, two_hosts

    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **ALONE, "PYTHONPATH": paths, "MEGABITS": str(megabits)}
    with two_hosts(megabits) as hosts:
        ranks = [
            subprocess.Popen(
                host.command(*command), env={**env, **rank_there(host, rank)}
            )
            for rank, host in enumerate(hosts)
        ]
        for rank in ranks:
            if rank.wait():
                raise subprocess.CalledProcessError(rank.returncode, command)


if __name__ == "__main__":
    main()
