# SPDX-License-Identifier: Apache-2.0
"""The list of benchmarks on the CPU: what each measures, and accelfn's targets."""

from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class Benchmark:
    """A benchmark, which compares contestants.

    Attributes:
        name: the name on the command line of `run.py`.
        module: the module that measures the benchmark.
        title: the heading of its section in docs/benchmarks.md.
        how: sentences for docs/benchmarks.md about how it is measured.
        targets: contestants of accelfn, each with the largest figure that meets the target.
        rounds: the number of rounds.
        quick_rounds: the number of rounds with `--quick`.
        figure: the figure of a contestant: the "ratio" of its cost to that of the base, the
            difference in ms ("added"), or the cost "itself".
        nproc: the number of ranks; None without a launcher.
        unit: the unit of the cost.
        megabits: the bandwidth of a link between two processes, in megabits per second; None for
            processes without such a link.
    """

    name: str
    module: str
    title: str
    how: str
    targets: tuple[tuple[str, float], ...]
    rounds: int
    quick_rounds: int
    figure: Literal["ratio", "added", "itself"] = "ratio"
    nproc: int | None = None
    unit: str = "ms"
    megabits: int | None = None


def _over_a_link(megabits: int, rounds: int) -> Benchmark:
    """Return the benchmark over a link of this bandwidth, in megabits per second."""
    return Benchmark(
        name=f"link_{megabits}",
        module="link",
        title=f"An update over a link of {megabits} Mbit per second",
        how=(
            "Two processes with Gloo, each in its own network namespace. A virtual cable "
            f"(veth) connects them, with {megabits} Mbit per second in each direction (tc tbf). A "
            "network of 21,450 parameters, AdamW(fused=True), 32 rows per rank. Local SGD "
            "averages, and DiLoCo exchanges, every 8 updates. One block is 8 updates, between "
            "two barriers. Bytes are those that both ranks send in an update, including "
            "headers; the kernel counts them in a separate run. The predictions are those of "
            "accelfn.testing.communication, for a link of this bandwidth, a latency of 1 ms "
            "and an overhead of 0.068. They include the compute time of an update on two "
            "simulated ranks."
        ),
        targets=(("accelfn local_sgd", 0.16), ("accelfn diloco, 8 bits", 0.06)),
        rounds=rounds,
        quick_rounds=2,
        nproc=2,
        megabits=megabits,
    )


SUITE = (
    Benchmark(
        name="step",
        module="step",
        title="A step on batches in memory",
        how=(
            "Three models: five linear layers 64 to 64 with ReLU and one 64 to 10; two "
            "convolutions with batch normalization on images of 3 x 16 x 16; four transformer "
            "layers of width 64 over 16 tokens. Batch size 32, AdamW(fused=True), 16 batches "
            "in memory, used in turn. One block is 100 steps of the first model, and 20 steps "
            "of the others. accelfn gets plain values and an empty setup."
        ),
        targets=(
            ("mlp: accelfn", 1.02),
            ("convnet: accelfn", 1.02),
            ("transformer: accelfn", 1.02),
        ),
        rounds=60,
        quick_rounds=8,
    ),
    Benchmark(
        name="step_memory",
        module="step_memory",
        title="Peak memory of training",
        how=(
            "Three updates of a model with 42 million parameters, batch size 32, "
            "AdamW(fused=True), each loop in a new process. All processes import the same "
            "libraries. MiB at the peak of the process."
        ),
        targets=(("accelfn", 1.01),),
        rounds=4,
        quick_rounds=2,
        unit="MiB",
    ),
    Benchmark(
        name="compile",
        module="compiled",
        title="A compiled step",
        how=(
            "The three models of the first benchmark. The base is a plain PyTorch loop of the "
            "same model, which is not compiled. Compilation is not timed. Accelerate compiles "
            'the model with dynamo_backend="inductor", and the plain loop with torch.compile; '
            "accelfn compiles the loss and its gradients."
        ),
        targets=(
            ("mlp: accelfn, compile()", 0.75),
            ("convnet: accelfn, compile()", 1.0),
            ("transformer: accelfn, compile()", 1.0),
        ),
        rounds=40,
        quick_rounds=8,
    ),
    Benchmark(
        name="epoch",
        module="epoch",
        title="An epoch with each library loading its own data",
        how=(
            "The first model and its optimizer on a TensorDataset of 16,000 rows of 64 floats, "
            "batch size 32, shuffled. One block is an epoch of 500 steps. All except accelfn "
            "read with torch's DataLoader without workers, either plain or prepared by the "
            "library."
        ),
        targets=(("accelfn", 0.85),),
        rounds=24,
        quick_rounds=4,
    ),
    Benchmark(
        name="data",
        module="data",
        title="Reading rows of tensors and of arrays",
        how=(
            "16,000 rows of 64 floats and a class, batch size 32, shuffled, one process. "
            'Nothing is trained: a step reads a batch. "Tensors" is a TensorDataset. "Arrays" '
            "is a pair of NumPy arrays, which accelfn reads directly, and the others as a "
            "dataset of rows. One block is an epoch of 500 batches. A ratio of 0.125 means "
            "eight times as many samples per second."
        ),
        targets=(("accelfn, tensors", 0.125), ("accelfn, arrays", 0.125)),
        rounds=24,
        quick_rounds=4,
    ),
    Benchmark(
        name="data_workers",
        module="data_workers",
        title="Reading samples that take a millisecond each, by two workers",
        how=(
            "1,600 samples, each of which sleeps for a millisecond, batch size 32, shuffled, "
            "two worker processes. A step reads a batch. One block is three epochs of 50 "
            "batches. accelfn starts its workers once per block. torch's DataLoader starts "
            "them once per epoch, or, with persistent_workers, once for all blocks."
        ),
        targets=(("accelfn", 1.0),),
        rounds=12,
        quick_rounds=2,
    ),
    Benchmark(
        name="data_scale",
        module="data_scale",
        title="The first batch of 10^12 samples: time",
        how=(
            "A process that has imported accelfn, and created its data and state, reads the "
            "first batch of 32 of a shuffled dataset. The samples are their indices. It reads "
            "from the start of the epoch, or from sample 9·10^11. For comparison, torch's "
            "RandomSampler draws its first index of 10^8 in another process."
        ),
        targets=(
            ("accelfn, 10^12 samples", 10),
            ("accelfn, 10^12 samples, from 9·10^11 on", 10),
        ),
        rounds=4,
        quick_rounds=2,
        figure="itself",
    ),
    Benchmark(
        name="data_memory",
        module="data_memory",
        title="The first batch of 10^12 samples: memory",
        how=(
            "The same starts: the peak memory of the process, minus the memory before the "
            "start."
        ),
        targets=(
            ("accelfn, 10^12 samples", 20),
            ("accelfn, 10^12 samples, from 9·10^11 on", 20),
        ),
        rounds=4,
        quick_rounds=2,
        figure="itself",
        unit="MiB",
    ),
    Benchmark(
        name="checkpoint_pause",
        module="checkpoint_pause",
        title="How long training waits for a save",
        how=(
            "Ten linear layers 2048 to 2048 with AdamW: 42 million parameters, 504 MB with the "
            "optimizer's moments, on the CPU. The base copies the tensors into memory that is "
            "already allocated. For accelfn's asynchronous store, the time ends when `save` "
            "returns. For the others, which do not flush to the disk, it ends when all files "
            "are written."
        ),
        targets=(("accelfn CheckpointStore", 1.5),),
        rounds=12,
        quick_rounds=3,
    ),
    Benchmark(
        name="checkpoint_save",
        module="checkpoint_save",
        title="A complete save",
        how=(
            "The same state, until the call returns. accelfn's `af.save` has then computed "
            "digests of all data and flushed the files to the disk. The others do neither."
        ),
        targets=(("accelfn save", 1.0),),
        rounds=12,
        quick_rounds=3,
    ),
    Benchmark(
        name="checkpoint_load",
        module="checkpoint_load",
        title="Loading a checkpoint with verification",
        how=(
            "The same state, from files in the system's page cache. The base reads the file to "
            "compute its BLAKE3 digest, and loads it with safetensors, which maps the file and "
            "copies nothing."
        ),
        targets=(("accelfn load", 1.2),),
        rounds=12,
        quick_rounds=3,
    ),
    Benchmark(
        name="load_model",
        module="load_model",
        title="Creating a model and loading its weights from a file",
        how=(
            "A Llama model with 136 million parameters (542 MB) on the CPU, from a file in the "
            "system's page cache. save_pretrained wrote the file; in the last row, "
            "export_model wrote it. The time is CPU time, because other programs ran at the "
            "same time, until the model is loaded. Before, the outputs of all models are "
            "compared bitwise. Transformers maps the file and reads nothing yet. accelfn does "
            "the same with mapped=True, if tensors begin at multiples of 64 bytes in the file. "
            "Accelerate also maps the file, and collects garbage."
        ),
        targets=(("accelfn, mapped=True, of export_model", 1.0),),
        rounds=12,
        quick_rounds=4,
    ),
    Benchmark(
        name="load_model_used",
        module="load_model_used",
        title="Loading a model and a first forward pass",
        how=(
            "The same loads, with a forward pass over 16 tokens, which reads all weights. The "
            "time is CPU time, because other programs ran at the same time."
        ),
        targets=(("accelfn, mapped=True, of export_model", 1.0),),
        rounds=12,
        quick_rounds=4,
    ),
    Benchmark(
        name="load_model_memory",
        module="load_model_memory",
        title="Peak memory of loading a model",
        how=(
            "The same loads, each with a forward pass over 16 tokens, in a new process. MiB at "
            "the peak of the process, minus the memory before. The base is a model that was "
            "created in memory, plus the bytes of its largest tensor."
        ),
        targets=(
            ("accelfn import_model", 1.0),
            ("accelfn import_model, into values", 1.0),
            ("accelfn, mapped=True, of export_model", 1.0),
        ),
        rounds=2,
        quick_rounds=2,
        unit="MiB",
    ),
    Benchmark(
        name="offload",
        module="offload",
        title="A forward pass of a model that is offloaded",
        how=(
            "The same model. All its layers are on the disk, or in the host's memory, and "
            "compute on the CPU; 16 tokens. Accelerate's disk_offload writes its own files; "
            "its cpu_offload is the base of the second half. accelfn's af.on_devices maps the "
            "files of save_pretrained or export_model. Before, the outputs are compared "
            "bitwise. The time is CPU time, because other programs ran at the same time."
        ),
        targets=(
            ("disk: accelfn", 1.0),
            ("disk: accelfn, of export_model", 1.0),
            ("host: accelfn", 1.0),
        ),
        rounds=20,
        quick_rounds=4,
    ),
    Benchmark(
        name="ddp",
        module="ddp",
        title="A step of DistributedDataParallel on two processes",
        how=(
            "The first model and its optimizer on two processes with Gloo, 64 rows per update, "
            "32 per rank. All contestants use torch's DistributedDataParallel, and run in the "
            "same two processes. One block is 100 steps, between two barriers. All-reduces are "
            "those of an update, which torch's profiler counts in a separate run."
        ),
        targets=(("accelfn", 1.03),),
        rounds=60,
        quick_rounds=8,
        nproc=2,
    ),
    Benchmark(
        name="front_page",
        module="front_page",
        title="A step with the setup of the README, on two processes",
        how=(
            "The network of the README's first program, in bfloat16 with four micro-batches and "
            "clipped gradients, AdamW, 96 rows per update, two processes with Gloo. All "
            "contestants run in the same two processes. One block is 50 updates, between two "
            "barriers."
        ),
        targets=(("accelfn", 0.98),),
        rounds=40,
        quick_rounds=8,
        nproc=2,
    ),
    Benchmark(
        name="program",
        module="program",
        title="A whole program on two processes",
        how=(
            "The README's first program: three epochs of 18 updates on the digits, with the "
            "setup of the benchmark above. All programs run under the same launcher, each round "
            "in new processes. The time begins after the imports and ends with the first update, "
            "or with the last one."
        ),
        targets=(("first update: accelfn", 1.5), ("three epochs: accelfn", 1.05)),
        rounds=8,
        quick_rounds=4,
    ),
    Benchmark(
        name="first_update",
        module="first_update",
        title="The start of training on two processes",
        how=(
            "Six transformer layers of width 128 over 16 tokens, 1.2 million parameters, AdamW, "
            "two processes with Gloo, 8 rows per rank. All contestants run under the same "
            "launcher, each round in new processes. The time begins after the imports and ends "
            "with the first update. In the plain loops, DistributedDataParallel wraps the model, "
            "or fully_shard shards each layer and the model."
        ),
        targets=(("DDP: accelfn", 1.5), ("FSDP: accelfn", 1.3)),
        rounds=12,
        quick_rounds=4,
    ),
    Benchmark(
        name="fsdp",
        module="fsdp",
        title="A step of a model that is sharded over two processes",
        how=(
            "Six transformer layers of width 128 over 16 tokens, 1.2 million parameters, "
            "AdamW, two processes with Gloo, 8 rows per rank. Each layer is a unit of torch's "
            "fully_shard. In the plain loop, the optimizer updates DTensors, as in torch's "
            "tutorial, or plain parameters that share memory with a rank's shards. The time is "
            "the CPU time of rank 0. One block is 10 steps."
        ),
        targets=(("accelfn", 0.75),),
        rounds=40,
        quick_rounds=8,
        nproc=2,
    ),
    Benchmark(
        name="fsdp_memory",
        module="fsdp_memory",
        title="Peak memory of a model that is sharded over two processes",
        how=(
            "Three updates of a model with 42 million parameters, batch size 32, AdamW, two "
            "processes with Gloo. Its ten layers are units of torch's fully_shard. In the "
            "plain loop, the optimizer updates DTensors, as in torch's tutorial. MiB at the "
            "peak of rank 0, minus its memory before the model was created."
        ),
        targets=(("accelfn", 1.02), ('accelfn, init="shard"', 1.02)),
        rounds=4,
        quick_rounds=2,
        unit="MiB",
    ),
    Benchmark(
        name="zero",
        module="zero",
        title="A step under DeepSpeed's ZeRO on two processes",
        how=(
            "The transformer layers of the benchmark of fully_shard, AdamW, two processes with "
            "Gloo, 8 rows per rank. The plain loop calls DeepSpeed's engine as in its "
            "tutorial, without clipping. Each ratio is to the plain loop at the same stage. "
            "The time is the CPU time of rank 0. One block is 10 steps."
        ),
        targets=tuple((f"stage {stage}, accelfn", 1.05) for stage in (1, 2, 3)),
        rounds=30,
        quick_rounds=6,
        nproc=2,
    ),
    Benchmark(
        name="zero_memory",
        module="zero_memory",
        title="Peak memory under DeepSpeed's ZeRO on two processes",
        how=(
            "Three updates of a model with 42 million parameters, batch size 32, AdamW, two "
            "processes with Gloo. Each ratio is to a plain DeepSpeed loop at the same stage. "
            "MiB at the peak of rank 0, minus its memory before the model was created. With "
            "MALLOC_MMAP_THRESHOLD_, freed memory returns to the system at once."
        ),
        targets=tuple((f"stage {stage}, accelfn", 1.05) for stage in (1, 2, 3)),
        rounds=4,
        quick_rounds=2,
        unit="MiB",
    ),
    Benchmark(
        name="local_sgd",
        module="local_sgd",
        title="Local SGD compared with DistributedDataParallel on two processes",
        how=(
            "Six linear layers 256 to 256 with ReLU, AdamW(fused=True), two processes with "
            "Gloo, 32 rows per rank. Local SGD averages every 8 updates. In the plain loop, an "
            "average is one all-reduce of all parameters as one vector. One block is 96 steps, "
            "between two barriers. All-reduces are those of an update, which torch's profiler "
            "counts in a separate run."
        ),
        targets=(("accelfn local_sgd", 0.36),),
        rounds=40,
        quick_rounds=6,
        nproc=2,
    ),
    _over_a_link(1, rounds=8),
    _over_a_link(4, rounds=16),
    Benchmark(
        name="streaming",
        module="streaming",
        title="Exchanges during computation, over a link of 4 Mbit per second",
        how=(
            "The same two network namespaces and cable, and the four transformer layers of the "
            "first benchmark: 134,858 parameters, AdamW(fused=True), 32 rows per rank. DiLoCo "
            "sends 8 bits per number every 100 updates, all parameters at once or a quarter at "
            "a time. With delay=20, ranks run 20 more updates before they use the result. "
            '"Without communication" is local_sgd that never averages. One block is 400 '
            "updates, between two barriers."
        ),
        targets=(("diloco in fragments, with delay", 1.10),),
        rounds=12,
        quick_rounds=4,
        nproc=2,
        megabits=4,
    ),
    Benchmark(
        name="collectives",
        module="collectives",
        title="The sum of 100 small tensors over two processes",
        how=(
            "A dict of 100 tensors of 8 x 8, two processes with Gloo. The plain loop "
            "concatenates them to one vector, reduces the vector, and splits it. accelfn uses "
            'af.all_reduce, and Accelerate its reduce(reduction="sum"). One block is 10 sums, '
            "between two barriers. All-reduces are those of a sum, which torch's profiler "
            "counts in a separate run."
        ),
        targets=(("accelfn", 1.3),),
        rounds=60,
        quick_rounds=6,
        nproc=2,
    ),
    Benchmark(
        name="import",
        module="import_time",
        title="Import time that accelfn adds to torch",
        how=(
            'Processes in turn, from start to end: `python -c "import torch"` and `python -c '
            '"import torch, accelfn"`.'
        ),
        targets=(("import torch, accelfn", 35),),
        rounds=24,
        quick_rounds=4,
        figure="added",
    ),
    Benchmark(
        name="simulation",
        module="simulation",
        title="A test of DistributedDataParallel on simulated ranks",
        how=(
            "A test creates a world of simulated ranks, and closes it at the end. Every rank "
            "wraps a two-layer network in torch's DistributedDataParallel and runs three "
            "steps. Processes run the same with Gloo. They are started for this test by "
            "torch.multiprocessing.spawn, and import torch again, or an earlier test has "
            "started them. A collective is one of 100 all-reduces of three numbers on 4 ranks, "
            "including the creation of the world."
        ),
        targets=(
            ("simulated, 2 ranks", 10),
            ("simulated, 4 ranks", 20),
            ("simulated, 8 ranks", 50),
            ("a simulated collective, 4 ranks", 0.3),
        ),
        rounds=12,
        quick_rounds=3,
        figure="itself",
    ),
)
