# SPDX-License-Identifier: Apache-2.0
"""Golden runs: record the exact bits of many runs, and compare them after a refactoring.

`python -m tests.golden.runs write FILE` trains 200 random setups on 1 to 4 simulated ranks and
runs every example. FILE gets digests of all results.

`python -m tests.golden.runs compare FILE [WORD]` repeats the runs in FILE, and prints each
difference. WORD selects runs by name or setup. The bits depend on the machine and on torch, so
FILE is not committed. Setups are plain data, and use public names only, so that they also run on
later versions.
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
from math import nan, prod
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import accelfn as af
from accelfn import testing
from tests.golden.make import FIELDS
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


Setup: TypeAlias = dict[str, Any]
WAYS = (
    "ddp",
    "fsdp",
    "local_sgd",
    "diloco",
    "compress_grads",
    "tensor",
    "context",
    "by hand",
)
BY_RANK = "local_sgd", "diloco", "compress_grads"
AXES: dict[str, list[dict[str, int]]] = {
    "tensor": [{"tp": 2}, {"tp": 4}, {"dp_shard": 2, "tp": 2}],
    "context": [{"cp": 2}, {"cp": 4}, {"dp_shard": 2, "cp": 2}],
    "fsdp": [{}, {}, {"dp_replicate": 2, "dp_shard": 2}],
}
PLAN = {"letters": "vocabulary", "[qkv]": "column", "out": "row", "head": "vocabulary"}
SEQUENCES = {**PLAN, "places": "scattered", "norm": "sequence"}
HAS = "tied", "frozen", "unused", "norm", "drop", "double"
DATA = "tensors", "tensors", "list", "stream", "mix", "budget", "weighted", "bucketed"


class Net(nn.Module):
    """Two or three layers with optional tied, frozen and unused parameters."""

    def __init__(self, has: list[str]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 5)
        self.third = nn.Linear(5, 5, bias=False)
        if "tied" in has:
            self.third.weight = self.second.weight
        if "frozen" in has:
            self.first.requires_grad_(requires_grad=False)
        if "unused" in has:
            self.unused = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(1) if "norm" in has else nn.Identity()
        self.drop, self.head = nn.Dropout(0.25 * ("drop" in has)), nn.Linear(5, 2)
        self.register_buffer("table", torch.arange(2), persistent=False)
        self.to(torch.float64 if "double" in has else torch.float32)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        """Return two numbers a sample."""
        x = self.first(x.to(self.head.weight.dtype)).unsqueeze(1)
        x = torch.tanh(self.norm(x).squeeze(1))
        return self.head(self.drop(self.third(torch.tanh(self.second(x))))) + self.table


class Text(nn.Module):
    """One attention layer on tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(16, 8), nn.Embedding(8, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, codes: Tensor, _: Tensor, places: Tensor) -> Tensor:
        """Return the logits of the next token."""
        x = self.letters(codes) + self.places(places)
        layers = self.q, self.k, self.v
        heads = [y(x).unflatten(-1, (-1, 2)).transpose(1, 2) for y in layers]
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        return self.head(self.norm(x + self.out(seen.transpose(1, 2).flatten(2))))


class Stream:
    """An iterable dataset."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples."""
        return iter(self.rows)


def draw_setup(number: int) -> Setup:
    """Return the setup with this number."""
    draw = Random(f"golden {number}")  # noqa: S311 - the same on each machine
    pick, way = draw.choice, WAYS[number % len(WAYS)]
    text = way in ("tensor", "context")
    net = "text" if text else [each for each in HAS if draw.random() < 0.25]
    axes = pick(AXES.get(way, [{}]))
    size = prod(axes.values()) if axes else draw.randint(2, 4)
    chain = [*draw_reduction(way, net, axes, pick), *draw_transforms(way, net, draw)]
    draw.shuffle(chain)
    skips = any(name == "skip_nonfinite" or "init_scale" in by for name, by in chain)
    updates = draw.randint(2, 5)
    return {
        "way": way,
        "axes": axes,
        "sizes": [size, size if axes or way in BY_RANK else draw.randint(1, 4)],
        "chain": chain,
        "net": net,
        "n": draw.randint(8, 20),
        "broken": skips and not text,
        "batch_size": pick([4, 6, 8]),
        "shuffle": pick([True, False]),
        "remainder": pick(["short", "pad", "drop"]),
        "data": "tensors" if text else pick(DATA),
        "loss": "weighted" if text else pick(["mean", "weighted", "counted"]),
        "optimizer": pick(sorted(OPTIMIZERS)),
        "schedule": pick([None, *sorted(SCHEDULES)]),
        "step": way if way == "by hand" else pick(["whole", "whole", "halves"]),
        "freezes": pick([True, False, False, False]),
        "seed": draw.randint(0, 9),
        "sums": pick(["ranks", "ring", "tree"]),
        "updates": updates,
        "cut": draw.randint(1, updates),
    }


def draw_reduction(way: str, net: Any, axes: Any, pick: Any) -> list[tuple[str, Any]]:
    """Draw the transforms that split or reduce over ranks."""
    unused = {"find_unused_parameters": "unused" in net}
    cap = {"bucket_cap_mb": pick([25.0, 1e-5])}
    sync = {"sync_every": pick([2, 3]), **cap}
    flags = [pick([True, False]) for _ in range(2)]
    low_rank = {"start_powerSGD_iter": pick([0, 2]), "min_compression_rate": 0}
    methods = [
        {"method": "bf16"},
        {"method": "fp16"},
        {"method": "powersgd", **low_rank},
    ]
    ddp = ("wrap_ddp", {**unused, **cap, "gradient_as_bucket_view": flags[0]})
    how = {"reshard_after_forward": flags[0], "keep_grads": pick(["whole", "sharded"])}
    units = {} if "tied" in net or net == "text" else {"units": "Linear"}
    fsdp = ("wrap_fsdp", {**unused, **how, **units})
    bits = {"bits": pick([32, 16, 8, 4]), "mix": pick([0.0, 0.5])}
    parts = {"fragments": pick([1, 2]), "delay": pick([0, 1])}
    split = {"plan": SEQUENCES if flags[0] else PLAN, "sequence": flags[0]}
    return {
        "ddp": [ddp],
        "fsdp": [fsdp],
        "local_sgd": [
            ("local_sgd", {**sync, "buffers": flags[0], "opt_state": flags[1]})
        ],
        "diloco": [("diloco", {**sync, **bits, **parts})],
        "compress_grads": [ddp, ("compress_grads", pick(methods))],
        "tensor": [("tensor_parallel", split), *([fsdp] if "dp_shard" in axes else [])],
        "context": [("context_parallel", {"ring": flags[0]}), fsdp],
        "by hand": [],
    }[way]


def draw_transforms(way: str, net: Any, draw: Random) -> list[tuple[str, Any]]:
    """Draw more transforms that compose with these."""
    pick = draw.choice
    if way == "ddp" and "unused" not in net and draw.random() < 0.2:
        return [("optimizer_in_backward", {})]
    scaled = {"precision": "fp16", "init_scale": 256.0, "growth_interval": 2}
    local = way in ("local_sgd", "diloco", "by hand")
    options: dict[str, Any] = {
        "accumulate": pick([{"num_micro_batches": 2}, {"micro_batch_size": 3}]),
        "autocast": pick([{"precision": "bf16"}, scaled]),
        "clip_grad_norm": {"max_norm": 0.25, "norm_type": pick([1.0, 2.0])},
        "clip_grad_value": {"max_value": 0.125},
        "ema": None if way == "diloco" else {"decay": pick([0.5, 0.9])},
        "skip_nonfinite": {"max_consecutive": 4},
        "reduce_lr_on_plateau": {"factor": 0.5, "patience": 0},
        "check_replicas": None if local else {"every": 2},
        "sync_batchnorm": None if local or "norm" not in net else {},
        "checkpoint_activations": {},
        "identity": {},
    }
    allowed = [(name, given) for name, given in options.items() if given is not None]
    return [each for each in allowed if draw.random() < 0.3]


def build_chain(setup: Setup) -> af.chain:
    """Return the transforms."""
    units = {"units": nn.Linear}
    return af.chain(
        af.shard_data(),
        *(
            getattr(af, name)(
                **{n: units.get(n, value) for n, value in options.items()}
            )
            for name, options in setup["chain"]
        ),
    )


def make_samples(setup: Setup) -> tuple[Tensor, ...]:
    """Return inputs and targets; for text also positions."""
    n, generator = setup["n"], torch.Generator().manual_seed(setup["seed"])
    if setup["net"] == "text":
        codes = torch.randint(0, 16, (n, 9), generator=generator)
        return codes[:, :-1], codes[:, 1:], torch.arange(8).expand(n, -1)
    x, y = (torch.randn(n, k, generator=generator) for k in (3, 2))
    if setup["broken"]:
        x[1] = nan
    return x, y


def make_data(setup: Setup) -> af.Data:
    """Return the training data."""
    tensors, kind, size = make_samples(setup), setup["data"], setup["batch_size"]
    rows: list[Any] = list(zip(*tensors, strict=True))
    costs = [1 + i % 4 for i in range(setup["n"])]
    how = {name: setup[name] for name in ("shuffle", "remainder")}
    orders: dict[str, Any] = {
        "weighted": partial(af.orders.weighted, costs),
        "bucketed": partial(af.orders.bucketed, costs, window=4),
    }
    if kind == "stream":
        return af.Data(Stream(rows), global_batch_size=size, replay=True)
    if kind == "mix":
        return af.Data.mix(
            [rows[:5], rows[5:]], weights=[2, 1], global_batch_size=size, **how
        )
    if kind == "budget":
        return af.Data(
            tensors, global_batch_size=af.token_budget(costs, limit=12), shuffle=True
        )
    if kind in orders:
        return af.Data(tensors, global_batch_size=size, order=orders[kind]())
    return af.Data(rows if kind == "list" else tensors, global_batch_size=size, **how)


def _grouped(named: Any) -> torch.optim.Optimizer:
    listed = list(named)
    biases = [each for each in listed if "bias" in each[0]]
    others = [each for each in listed if "bias" not in each[0]]
    groups = [{"params": others}, {"params": biases, "lr": 0.02, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.05)


def _in_parts(named: Any) -> torch.optim.Optimizer:
    head = (lambda name, _: name.startswith("head")), partial(torch.optim.Adam, lr=0.05)
    return af.combine_optimizers(head, (..., partial(torch.optim.SGD, lr=0.1)))(
        list(named)
    )


OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.05),
    "amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "groups": _grouped,
    "parts": _in_parts,
}
SCHEDULES: dict[str, Any] = {
    "linear": lambda: af.schedules.linear(6),
    "warm-up": lambda: af.schedules.warmup_cosine(2, 8),
    "one cycle": lambda: af.schedules.one_cycle(8),
    "steps": lambda: af.schedules.from_torch(
        partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    ),
}


def create_state(setup: Setup, world: af.World) -> af.TrainState:
    """Return the state before the first step."""
    schedule = setup["schedule"]
    text = setup["net"] == "text"
    return af.TrainState.create(
        model=Text if text else partial(Net, setup["net"]),
        optimizer=OPTIMIZERS[setup["optimizer"]],
        schedule=None if schedule is None else SCHEDULES[schedule](),
        data=make_data(setup),
        setup=build_chain(setup),
        world=world,
        seed=setup["seed"],
    )


def sample_errors(model: nn.Module, batch: Any) -> Tensor:
    """Return the error of each sample or token."""
    if batch[0].dtype == torch.int64:
        return cross_entropy(model(*batch).mT, batch[1], reduction="none")
    return (model(*batch) - batch[1]).square().sum(1)


def weighted_loss(model: nn.Module, batch: Any) -> af.Loss:
    """Return a weighted loss with one more metric."""
    found = sample_errors(model, batch)
    weights = batch[1].abs().reshape(len(found), -1).sum(1) if found.dim() == 1 else 1
    total = (found * weights).sum()
    number = weights.sum() if isinstance(weights, Tensor) else found.numel()
    return af.Loss(total, number, worst=(found.detach().max(), 1))


def build_step(setup: Setup) -> Any:
    """Return a step function: one call, or two halves."""
    loss: Any = {
        "mean": lambda model, batch: sample_errors(model, batch).mean(),
        "weighted": weighted_loss,
        "counted": lambda model, batch, count: (
            sample_errors(model, batch).sum() / count
        ),
    }[setup["loss"]]
    how: dict[str, Any] = {}
    if setup["loss"] == "counted":
        how["count"] = lambda batch: len(batch[1])
    if setup["step"] == "whole":
        return af.make_step(loss, **how)
    compute = af.value_and_grad(loss, **how)

    def step(state: af.TrainState, batch: Any) -> Any:
        metrics, grads = compute(state, batch, sync=setup["step"] != "by hand")
        if not grads.reduced:
            grads = af.sync_grads(state, grads)
        return af.apply_grads(state, grads), metrics

    return step


# Runs of a setup or an example


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
        create_state(setup, world),
        build_step(setup),
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
    held_out = make_data(setup | {"batch_size": 3, "remainder": "short"})
    seen["evaluate"] = digest(af.evaluate(state, held_out, weighted_loss))
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
        setup = (written or {}).get(name, {}).get("setup") or draw_setup(number)
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
