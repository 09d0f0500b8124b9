# SPDX-License-Identifier: Apache-2.0
"""Golden runs: record the exact bits of many runs, and compare them after a refactoring.

`python -m tests.golden.runs write FILE` trains 200 random setups on 1 to 4 simulated ranks and
runs every example. FILE gets digests of all results.

`python -m tests.golden.runs compare FILE [WORD]` repeats the runs in FILE, and prints each
difference. WORD selects runs by name or setup. The bits depend on the machine and on torch, so
FILE is not committed.
"""

import json
import os
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

import accelfn as af
from accelfn import testing
from tests.golden import setups
from tests.golden.make import FIELDS
from tests.golden.setups import Setup
from tests.scripts import run_script

NUM_SETUPS = 200
EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHED: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("03", "04", "09", "11", "12", "15"), (2, "")),
    "16": (2, "cp=2"),
    "17": (2, "tp=2"),
    "18": (2, "tp=2"),
}
SMALLER = {"22": {"layers": 2}}
"""Arguments for `main` of an example, the same as in its test."""
NOISE = r"\d+(\.\d+)? (s|ms|us)\b|/tmp/\S+|0x\w+|:\d{4,5}\b|^\[20.*$|│ +[\d.]+ +│$"
Result: TypeAlias = dict[str, Any]


def update_hash(hasher: Any, value: Any) -> None:
    """Update a hash with the exact bits of a tree of tensors and plain data."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        flat = local.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        hasher.update(
            f"{value.dtype} {tuple(value.shape)} {tuple(local.shape)}".encode()
        )
        hasher.update(np.asarray(flat.cpu().view(torch.uint8)).tobytes())
    elif isinstance(value, Mapping):
        hasher.update(b"{%d" % len(value))
        for key in value:
            update_hash(hasher, key)
            update_hash(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(b"[%d" % len(value))
        for each in value:
            update_hash(hasher, each)
    elif isinstance(value, (bool, int, float, str, bytes, type(None))):
        hasher.update(repr(value).encode() + b",")
    elif isinstance(value, af.Pending):  # its values are in a later state
        hasher.update(b"pending")
    elif attrs.has(type(value)):
        update_hash(hasher, attrs.astuple(value, recurse=False))
    else:
        msg = f"no bits of a {type(value).__qualname__}"
        raise TypeError(msg)


def digest(value: Any) -> str:
    """Return a digest of the exact bits of a value."""
    hasher = blake2b(digest_size=8)
    update_hash(hasher, value)
    return hasher.hexdigest()


def metric_values(metrics: af.Metrics) -> dict[str, float]:
    """Return the means of an update's metrics."""
    found = {name: metrics[name] for name in metrics}
    return {n: 0.0 if each.is_meta else float(each) for n, each in found.items()}


def digest_state(state: af.TrainState) -> dict[str, str]:
    """Return a digest of each field of a state."""
    return {field: digest(getattr(state, field)) for field in (*FIELDS, "lrs")}


def train(setup: Setup, folder: Path, world: af.World, *, first: bool) -> Result:
    """Train the first half and save, or load and train the second half."""
    state, step, seen = (
        setups.create_state(setup, world),
        setups.build_step(setup),
        Result(),
    )
    cut = setup["cut"]
    if not first:
        state = af.load(state, folder)
    seen["begins"], seen["metrics"] = digest_state(state), []
    for batch in islice(af.batches(state), cut if first else setup["updates"] - cut):
        state, metrics = step(state, batch)
        seen["metrics"].append(
            digest([metric_values(metrics), metrics.all_reduce_mean(world)])
        )
        if any(name == "reduce_lr_on_plateau" for name, _ in setup["chain"]):
            state = af.report_metric(state, 1.0)
    if first:
        if setup["freezes"]:
            state = state.with_trainable(lambda name, _: "head" in name)
        af.save(state, folder)
    seen |= digest_state(state)
    held_out = setups.make_data(setup | {"batch_size": 3, "remainder": "short"})
    seen["evaluate"] = digest(af.evaluate(state, held_out, setups.weighted_loss))
    seen["predict"] = digest([*af.predict(state, held_out, lambda m, b: m(*b))])
    seen["end"] = digest(af.full_params(af.finalize(state), at="eval"))
    return seen


def run_safely(run: Callable[[Path], Result]) -> Result:
    """Return the result of a run, or its error, with accelfn's warnings."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        folder = Path(temporary).resolve()
        try:
            found = run(folder)
        except Exception as error:  # noqa: BLE001 - whatever it is
            said = re.sub(NOISE, "", str(error).replace(str(folder), "FOLDER"))
            found = {"raises": f"{type(error).__name__}: {said}"}
    messages = {
        str(each.message)
        for each in caught
        if issubclass(each.category, af.errors.AccelfnWarning)
    }
    return found | {"warnings": sorted(re.sub(NOISE, "", each) for each in messages)}


def run_setup(setup: Setup, folder: Path) -> Result:
    """Train a setup, save and load in the middle, often on another number of ranks."""
    found: Result = {}
    for half, size in enumerate(setup["sizes"]):
        run = partial(train, setup, folder / "saved", first=not half)
        axes = setup["axes"] if size == setup["sizes"][0] else {}
        ranks = testing.simulate(size, run, sums=setup["sums"], axes=axes)
        found[f"half {half}"] = ranks.results
        if not half:
            found["files"] = digest(read_files(folder / "saved"))
    return found


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file in a folder."""
    every = sorted(each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in every}


def run_example(script: Path, folder: Path) -> Result:
    """Run an example; return its output without times and paths, and a digest of its steps."""
    size, axes = LAUNCHED.get(script.name[:2], (1, ""))
    asked = {"ACCELFN_AXES": axes} if axes else {}
    ran = run_script(Path(__file__), folder, size, GOLDEN=str(script), **asked)
    if any(ran.codes):
        raise RuntimeError(ran.err)
    steps = [(folder / f"{rank}.steps").read_text() for rank in range(size)]
    printed = re.sub(NOISE, "", ran.out, flags=re.MULTILINE).splitlines()
    return {"printed": printed, "steps": [len(steps[0].splitlines()), digest(steps)]}


def record_example(script: Path) -> None:
    """Run a script; write a digest of every state and metric that its steps return."""
    seen: list[str] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            for part in answer if isinstance(answer, tuple) else (answer,):
                if isinstance(part, af.TrainState):
                    seen.append(digest(digest_state(part)))
                if isinstance(part, af.Metrics):
                    seen.append(digest(metric_values(part)))
            return answer

        return call

    make_step = af.make_step
    af.apply_grads = recorded(af.apply_grads)
    af.make_step = lambda *args, **kwargs: recorded(make_step(*args, **kwargs))
    smaller = SMALLER.get(script.name[:2])
    found = runpy.run_path(str(script), run_name="example" if smaller else "__main__")
    if smaller:
        found["main"](**smaller)
    Path(f"{os.environ.get('RANK', '0')}.steps").write_text("\n".join(seen))


def list_runs(written) -> Iterator[tuple[str, Any, Callable[[Path], Result]]]:
    """Yield the name, the setup and the function of each run."""
    for script in sorted(EXAMPLES.glob("[0-9]*.py")):
        yield f"example {script.name}", None, partial(run_example, script)
    for number in range(NUM_SETUPS):
        name = f"setup {number}"
        setup = (written or {}).get(name, {}).get("setup") or setups.draw_setup(number)
        yield name, setup, partial(run_setup, setup)


def find_differences(one: Any, two: Any, path: str) -> Iterator[str]:
    """Yield a line for each difference between two results."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in one | two:
            yield from find_differences(one.get(key), two.get(key), f"{path}, {key}")
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for i, (mine, yours) in enumerate(zip(one, two, strict=True)):
            yield from find_differences(mine, yours, f"{path}[{i}]")
    elif one != two:
        yield f"{path}: {one!r} became {two!r}\n"


def main(command: str, file: str, word: str = "") -> int:
    """Write the golden file, or compare with it; return the number of runs that differ."""
    torch.set_num_threads(1)
    written = json.loads(Path(file).read_text()) if command == "compare" else None
    results: dict[str, Any] = {}
    num_different = 0
    for name, setup, run in list_runs(written):
        if word not in f"{name} {setup}":
            continue
        result = json.loads(json.dumps({"setup": setup, **run_safely(run)}))
        results[name] = result
        if written is not None:
            lines = [*find_differences(written.get(name), result, name)]
            num_different += bool(lines)
            sys.stdout.write("".join(lines[:5]))
    if written is None:
        Path(file).write_text(json.dumps(results, indent=1))
    num_raised = sum("raises" in result for result in results.values())
    sys.stdout.write(
        f"{len(results)} runs, {num_raised} raise, {num_different} differ\n"
    )
    return num_different


if __name__ == "__main__":
    if "GOLDEN" in os.environ:
        record_example(Path(os.environ["GOLDEN"]))
    else:
        sys.exit(main(*sys.argv[1:]) > 0)
