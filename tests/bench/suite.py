# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: what each is about, and what accelfn has to reach."""

import attrs


@attrs.frozen(kw_only=True)
class Benchmark:
    """One comparison.

    Attributes:
        name: what it is called; `module` measures it.
        title: what is compared.
        how: how it is measured, as sentences.
        contestant: whose figure has a target.
        target: the largest value of that figure that is good enough.
        rounds: how often each contestant runs.
        quick_rounds: how often with `--quick`.
        unit: of the figure: none for a ratio to the base, or what it is over the base.
        nproc: how many processes take part.
    """

    name: str
    module: str
    title: str
    how: str
    contestant: str = "accelfn"
    target: float
    rounds: int
    quick_rounds: int
    unit: str = ""
    nproc: int = 1


SUITE = (
    Benchmark(
        name="step",
        module="step",
        title="A step on batches that are there already",
        how=(
            "A network of five layers 64 to 64 with ReLU and one 64 to 10, batch 32, "
            "AdamW(fused=True), 16 batches made beforehand and used in turn. One block "
            "is 100 steps. accelfn gets plain values and an empty setup."
        ),
        target=1.03,
        rounds=80,
        quick_rounds=8,
    ),
    Benchmark(
        name="epoch",
        module="epoch",
        title="An epoch with each library loading its own data",
        how=(
            "The same network and optimizer on a TensorDataset of 16,000 rows of 64 floats, "
            "batch 32, shuffled. One block is an epoch of 500 steps. All but accelfn "
            "read through torch's DataLoader without workers, as they stand or prepared."
        ),
        target=0.85,
        rounds=24,
        quick_rounds=4,
    ),
    Benchmark(
        name="ddp",
        module="ddp",
        title="A step of DistributedDataParallel on two processes",
        how=(
            "The same network and optimizer on two processes joined by Gloo, 64 rows an "
            "update, 32 a rank. All contestants wrap it in torch's DistributedDataParallel "
            "and live side by side in these two processes. One block is 100 steps, from one "
            "barrier to the next. All-reduces are those of an update, as torch's profiler sees "
            "them in a run of its own."
        ),
        target=1.03,
        rounds=60,
        quick_rounds=8,
        nproc=2,
    ),
    Benchmark(
        name="local_sgd",
        module="local_sgd",
        title="Local SGD against DistributedDataParallel on two processes",
        how=(
            "A network of six layers 256 to 256 with ReLU between, AdamW(fused=True), "
            "two processes joined by Gloo, 32 rows a rank. Local SGD averages every 8 updates; "
            "by hand, that is one all-reduce of all parameters as one vector. One block is 96 "
            "steps, from one barrier to the next. All-reduces are those of an update, as torch's "
            "profiler sees them in a run of its own."
        ),
        contestant="accelfn local_sgd",
        target=0.4,
        rounds=40,
        quick_rounds=6,
        nproc=2,
    ),
    Benchmark(
        name="import",
        module="import_time",
        title="What importing accelfn adds to importing torch",
        how=(
            "Whole processes in turn, from start to end: "
            '`python -c "import torch"` and `python -c "import torch, accelfn"`.'
        ),
        contestant="import torch, accelfn",
        target=60,
        rounds=24,
        quick_rounds=4,
        unit="ms",
    ),
)
