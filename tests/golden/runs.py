# SPDX-License-Identifier: Apache-2.0
"""Runs whose every bit is written down before a refactoring, and looked at after it.

`python -m tests.golden.runs write FILE` draws 200 programs, trains each on 1 to 3 ranks, and
every example on one process and on two; it writes the programs down as code, beside a digest
of all that their states and metrics held. `python -m tests.golden.runs compare FILE` trains
what is written there and names each run that differs. Bits are those of one machine and one
torch, so no such file is kept.
"""

import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate, strategies
from accelfn.testing.comparing.entries import entries

NUM_PROGRAMS = 200
FOLDER = Path(__file__).parents[2] / "examples"
Run: TypeAlias = dict[str, Any]


def digest_into(sha: Any, value: Any) -> None:
    """Feed a tree of tensors and plain data, to the bit."""
    if isinstance(value, Mapping):
        for key, leaf in value.items():
            sha.update(repr(key).encode())
            digest_into(sha, leaf)
    elif isinstance(value, (list, tuple)):
        for leaf in value:
            digest_into(sha, leaf)
    elif isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        sha.update(np.asarray(flat).tobytes())
    else:
        sha.update(repr(value).encode())


def digest(*values: Any) -> str:
    """Return a short name of all bits of some values."""
    sha = hashlib.sha256()
    digest_into(sha, values)
    return sha.hexdigest()[:16]


def drawn_programs() -> list[Run]:
    """Draw programs and numbers of ranks, each once."""
    drawn: dict[str, Run] = {}

    @seed(0)
    @settings(
        max_examples=4 * NUM_PROGRAMS,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @given(strategies.programs(updates=st.integers(2, 4)), st.integers(1, 3))
    def draw(program: Any, ranks: int) -> None:
        if len(drawn) < NUM_PROGRAMS:
            code = f"{ranks} ranks: {program!r}"
            drawn[code] = {"program": repr(program), "ranks": ranks}

    draw()
    return list(drawn.values())


def outcome(run: Run) -> str:
    """Train a program; return its digest, or the error that it ends with."""
    known = {name: getattr(strategies, name) for name in dir(strategies)}
    program = eval(run["program"], {**vars(af), **_names(), **known})  # noqa: S307

    def train(world: af.World) -> str:
        state, metrics = program.train(program.state(world))
        return digest(entries(state), [_numbers(update) for update in metrics])

    try:
        return " ".join(simulate(run["ranks"], train))
    except (af.Error, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _names() -> dict[str, Any]:
    """Return what programs print without `af.`."""
    from accelfn import schedules

    names = {name: getattr(af, name) for name in dir(af)}
    factors = {
        name: getattr(schedules, name) for name in ("constant", "linear", "join")
    }
    return {**names, **factors, "af": af, "torch": torch, "inf": float("inf")}


def _numbers(metrics: af.Metrics) -> dict[str, float]:
    return {name: float(metrics[name]) for name in metrics}


def record_example(script: str, folder: str) -> None:
    """Run a script; write down a digest of each update that it takes, a file a process."""
    seen: list[str] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            parts = answer if isinstance(answer, tuple) else (answer,)
            states = [part for part in parts if isinstance(part, af.TrainState)]
            metrics = [part for part in parts if isinstance(part, af.Metrics)]
            seen.append(digest([*map(entries, states)], [*map(_numbers, metrics)]))
            return answer

        return call

    make_step = af.make_step

    def make_recorded_step(*args: Any, **kwargs: Any) -> Any:
        return recorded(make_step(*args, **kwargs))

    af.apply_grads = recorded(af.apply_grads)
    af.make_step = make_recorded_step
    runpy.run_path(script, run_name="__main__")
    rank = os.environ.get("RANK", "0")
    Path(folder, f"{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def example(script: Path, num_processes: int) -> str:
    """Run an example in a folder of its own; return the digests of its processes' updates."""
    launcher = ["-m", "accelfn", "launch", "--nproc", str(num_processes)]
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as out:
        words = [__file__, "example", str(script), out]
        done = subprocess.run(
            [sys.executable, *(launcher if num_processes > 1 else []), *words],
            cwd=work,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        ranks = [json.loads(file.read_text()) for file in sorted(Path(out).iterdir())]
    last = "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
    return f"{len(ranks)} ranks, {len(ranks[0]) if ranks else 0} calls: {digest(ranks)} {last}"


def bits_of(run: Run) -> str:
    """Run it again; return a digest of all that it computed."""
    if "program" in run:
        return outcome(run)
    return example(FOLDER / run["example"], run["processes"])


def write(file: str) -> None:
    """Draw runs; write them and their digests down."""
    examples: list[Run] = [
        {"example": script.name, "processes": processes}
        for script in sorted(FOLDER.glob("[0-9]*.py"))
        for processes in (1, 2)
    ]
    found = [{**run, "bits": bits_of(run)} for run in [*drawn_programs(), *examples]]
    Path(file).write_text(json.dumps(found, indent=1), encoding="utf-8")


def compare(file: str) -> None:
    """Run what is written down; name each run whose digest is another one now."""
    runs: list[Run] = json.loads(Path(file).read_text(encoding="utf-8"))
    differ = 0
    for run in runs:
        bits = bits_of(run)
        if bits != run["bits"]:
            differ += 1
            sys.stdout.write(f"{run}\n  became {bits}\n")
    sys.stdout.write(f"{len(runs)} runs, {differ} differ\n")
    sys.exit(differ > 0)


if __name__ == "__main__":
    if sys.argv[1] == "example":
        record_example(*sys.argv[2:])
    else:
        torch.set_num_threads(1)
        {"write": write, "compare": compare}[sys.argv[1]](sys.argv[2])
