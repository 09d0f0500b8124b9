# SPDX-License-Identifier: Apache-2.0
"""The list of benchmarks on one accelerator, for `run.py --device`."""

from suite import Benchmark

_ONE_RANK = (
    "There is one rank, with the accelerator's own backend. accelfn does not shard the model, "
    "because there is only one rank; the plain loop's engine works as with several ranks. "
)

DEVICES = (
    Benchmark(
        name="step",
        module="step",
        title="A step on batches in memory",
        how=(
            "The three models of the first benchmark. A step starts some hundred kernels on "
            "the accelerator, which compute very little, so this measures the time of the "
            "host. One block is 100 steps of the first model, and 20 steps of the others, "
            "until the accelerator has finished."
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
            "A decoder with 101 million parameters: two layers of width 2048 with 16 heads, "
            "over 8 sequences of 1,024 positions. Parameters are float32, the optimizer is "
            "AdamW(fused=True), and torch's autocast computes in bf16. One block is 5 steps, "
            "until the accelerator has finished."
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
            "The same model. fp8 is torchao's float8, with one scale per tensor, in all linear "
            "layers except the last. The plain loop compiles the model; accelfn compiles the "
            "loss and its gradients. Compilation is not timed. One block is 5 steps, until the "
            "accelerator has finished."
        ),
        targets=(("bf16, accelfn", 1.02), ("fp8, accelfn", 1.0)),
        rounds=20,
        quick_rounds=6,
    ),
    Benchmark(
        name="memory",
        module="step_memory",
        title="Peak memory of training",
        how=(
            "Three updates of a model with 42 million parameters, batch size 32, "
            "AdamW(fused=True), each loop in a new process. MiB at the peak of the accelerator "
            "memory that torch allocated."
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
            "Six transformer layers of width 128 over 16 tokens, AdamW, 8 rows. Each layer is a "
            f"unit. {_ONE_RANK}One block is 10 steps, until the accelerator has finished."
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
            "The same layers. The plain loop calls DeepSpeed's engine as in its tutorial, without "
            "clipping, and each ratio is to the plain loop at the same stage. "
            f"{_ONE_RANK}One block is 10 steps, until the accelerator has finished."
        ),
        targets=tuple((f"stage {stage}, accelfn", 1.05) for stage in (1, 2, 3)),
        rounds=8,
        quick_rounds=4,
        nproc=1,
    ),
    Benchmark(
        name="offload",
        module="offload",
        title="A forward pass of an offloaded model",
        how=(
            "A decoder with 136 million parameters (542 MB in float32), over 16 tokens. Its "
            "layers are on the disk or in the host's memory, and are copied to the accelerator "
            "to compute."
        ),
        targets=(("disk: accelfn", 1.0), ("host: accelfn", 1.0)),
        rounds=8,
        quick_rounds=4,
    ),
)
"""Each benchmark has a separate section in docs/benchmarks.md. Each rank uses one accelerator."""
