# SPDX-License-Identifier: Apache-2.0
"""The list of benchmarks on one accelerator, for `run.py --device`."""

from suite import Benchmark

_ONE_RANK = (
    "There is one rank, of the accelerator's own backend: accelfn leaves the model whole, with "
    "nothing to split it over, and by hand the engine does what it does among many. "
)

DEVICES = (
    Benchmark(
        name="step",
        module="step",
        title="A step on batches that are there already",
        how=(
            "The three small models of the first benchmark; a step gives the accelerator some "
            "hundred kernels that compute next to nothing, so it is the host's time that is "
            "taken. One block is 100 steps of the first, 20 of the others, and the accelerator's "
            "end."
        ),
        targets=(
            ("mlp: accelfn", 1.02),
            ("convnet: accelfn", 1.02),
            ("transformer: accelfn", 1.02),
        ),
        rounds=24,
        quick_rounds=8,
    ),
    Benchmark(
        name="precision",
        module="precision",
        title="A step in 16 bits",
        how=(
            "A decoder of 101 million parameters: two layers of width 2048, 16 heads, over 8 "
            "sequences of 1,024 places. Parameters are in float32, AdamW(fused=True), and bf16 "
            "is autocast's. One block is 5 steps, and the accelerator's end."
        ),
        targets=(("accelfn", 1.02),),
        rounds=20,
        quick_rounds=6,
    ),
    Benchmark(
        name="precision_compiled",
        module="precision_compiled",
        title="A compiled step in 16 and in 8 bits",
        how=(
            "The same model; fp8 is torchao's, with a scale for each tensor, in all linear "
            "layers but the last. By hand the model is compiled, by accelfn the loss with its "
            "gradients; compiling is not timed. One block is 5 steps, and the accelerator's end."
        ),
        targets=(("bf16, accelfn", 1.02), ("fp8, accelfn", 1.0)),
        rounds=20,
        quick_rounds=6,
    ),
    Benchmark(
        name="memory",
        module="step_memory",
        title="Memory at the peak",
        how=(
            "Three updates of a model of 42 million parameters, batch 32, AdamW(fused=True), "
            "in a process of its own. MiB of the accelerator that torch gave out at most."
        ),
        targets=(("accelfn", 1.01),),
        rounds=4,
        quick_rounds=2,
        unit="MiB",
    ),
    Benchmark(
        name="fsdp",
        module="fsdp",
        title="A step under fully_shard",
        how=(
            "Six transformer layers of width 128 over 16 tokens, AdamW, 8 rows; each layer is a "
            f"unit. {_ONE_RANK}One block is 10 steps, and the accelerator's end."
        ),
        targets=(("accelfn", 0.75),),
        rounds=12,
        quick_rounds=6,
        nproc=1,
    ),
    Benchmark(
        name="zero",
        module="zero",
        title="A step under DeepSpeed's ZeRO",
        how=(
            "The same layers; by hand, DeepSpeed's engine is called as its tutorial has it, "
            "without clipping, and each ratio is to that of the same stage. "
            f"{_ONE_RANK}One block is 10 steps, and the accelerator's end."
        ),
        targets=tuple((f"stage {stage}, accelfn", 1.05) for stage in (1, 2, 3)),
        rounds=8,
        quick_rounds=4,
        nproc=1,
    ),
    Benchmark(
        name="offload",
        module="offload",
        title="A forward pass of a model that lies elsewhere",
        how=(
            "A decoder of 136 million parameters, 542 MB in float32, over 16 tokens; its layers "
            "lie on the disk or on the host, and come to the accelerator to compute."
        ),
        targets=(("disk: accelfn", 1.0), ("host: accelfn", 1.0)),
        rounds=8,
        quick_rounds=4,
    ),
)
"""Each benchmark has a separate section in docs/benchmarks.md. Each rank uses one accelerator."""
