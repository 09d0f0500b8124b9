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
            "Two processes joined by Gloo, each in a network namespace of its own; the cable "
            f"between, a veth pair, lets {megabits} Mbit a second pass in each direction (tc "
            "tbf). A network of 21,450 parameters, AdamW(fused=True), 32 rows a rank. Local "
            "SGD averages, and DiLoCo exchanges, every 8 updates. One block is 8 updates, from "
            "one barrier to the "
            "next. Bytes are those of an update that both ends have sent, headers included, as the "
            "kernel counts them in a run of its own; what is foreseen is what "
            "accelfn.testing.communication says for a link of that bandwidth, a latency of "
            "1 ms and an overhead of 0.068, and of the seconds in which two simulated ranks "
            "compute it."
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
        title="A step on batches that are there already",
        how=(
            "Three models: five layers 64 to 64 with ReLU and one 64 to 10; two convolutions "
            "with batch normalisation over images of 3 times 16 times 16; four transformer "
            "layers of width 64 over 16 tokens. Batch 32, AdamW(fused=True), 16 batches made "
            "beforehand and used in turn. One block is 100 steps of the first, 20 of the "
            "others. accelfn gets plain values and an empty setup."
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
        title="Memory at the peak",
        how=(
            "Three updates of a model of 42 million parameters, batch 32, AdamW(fused=True), "
            "in a process of its own; all import the same libraries. MiB that it had at most."
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
            "The three models of the first benchmark, each beside its own hand-written loop, "
            "which is not compiled; compiling is not timed. Accelerate compiles the model by "
            'dynamo_backend="inductor", as a loop by hand does with torch.compile; accelfn '
            "compiles the loss with its gradients."
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
            "The same network and optimizer on a TensorDataset of 16,000 rows of 64 floats, "
            "batch 32, shuffled. One block is an epoch of 500 steps. All but accelfn "
            "read through torch's DataLoader without workers, as they stand or prepared."
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
            "16,000 rows of 64 floats and a class, batch 32, shuffled, one process; nothing "
            "is trained, and a step is a batch read. Tensors are a TensorDataset; arrays are a "
            "pair of numpy's, which accelfn is given as they are, and the others as a dataset "
            "of rows. One block is an epoch of 500 batches. A ratio of 0.125 is eight times "
            "the samples per second."
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
            "1,600 samples, each of which sleeps for a millisecond, batch 32, shuffled, two "
            "worker processes; a step is a batch read. One block is three epochs of 50 "
            "batches. accelfn starts its workers once a block; torch's DataLoader once an "
            "epoch, or, with persistent_workers, once for all blocks."
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
            "A process that has imported accelfn and made its data and state reads a first "
            "batch of 32 of a shuffled dataset whose samples are their indices: from the "
            "start, or from sample 9·10^11 of the epoch on. Beside it, a process in which "
            "torch's RandomSampler draws its first index of 10^8."
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
            "The same starts: the peak of the process's memory, over what it had before."
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
        title="How long a save keeps training waiting",
        how=(
            "Ten layers 2048 to 2048 with AdamW: 42 million parameters, 504 MB with the "
            "optimizer's moments, on the CPU. The base copies the tensors into memory that is "
            "there already. Of accelfn's asynchronous store, until `save` returns; of the "
            "others, which do not flush to the disk, until all is written."
        ),
        targets=(("accelfn CheckpointStore", 1.5),),
        rounds=12,
        quick_rounds=3,
    ),
    Benchmark(
        name="checkpoint_save",
        module="checkpoint_save",
        title="A save as a whole",
        how=(
            "The same state, until the call returns. accelfn's `af.save` has then hashed "
            "all and flushed it to the disk; the others have done neither."
        ),
        targets=(("accelfn save", 1.0),),
        rounds=12,
        quick_rounds=3,
    ),
    Benchmark(
        name="checkpoint_load",
        module="checkpoint_load",
        title="Loading, verified",
        how=(
            "The same state from files that the system holds in memory. The base reads the "
            "file for its BLAKE3, and loads it with safetensors, which maps it and "
            "copies nothing."
        ),
        targets=(("accelfn load", 1.2),),
        rounds=12,
        quick_rounds=3,
    ),
    Benchmark(
        name="load_model",
        module="load_model",
        title="Making a model and giving it the weights of a file",
        how=(
            "A Llama of 136 million parameters, 542 MB, on the CPU, in a file that the system "
            "holds in memory and save_pretrained wrote; in the last line export_model did. Time "
            "is the processor's, for other programs ran beside, until the model is there, whose "
            "output is compared before, "
            "bitwise. Transformers maps the file and reads nothing yet; so does accelfn with "
            "mapped=True, as far as tensors begin at multiples of 64 bytes in the file. Accelerate "
            "maps it too, and collects garbage."
        ),
        targets=(("accelfn, mapped=True, of export_model", 1.0),),
        rounds=12,
        quick_rounds=4,
    ),
    Benchmark(
        name="load_model_used",
        module="load_model_used",
        title="The same, with a first forward pass",
        how=(
            "The models of the benchmark before, with a forward pass over 16 tokens, for which "
            "all weights are read. Time is the processor's: other programs ran beside."
        ),
        targets=(("accelfn, mapped=True, of export_model", 1.0),),
        rounds=12,
        quick_rounds=4,
    ),
    Benchmark(
        name="load_model_memory",
        module="load_model_memory",
        title="Memory at the peak of loading a model",
        how=(
            "The same loads, each with a forward pass over 16 tokens and in a process of its own: "
            "MiB that it had at most, beyond what it had before. The base is a model that was "
            "built in memory, and the bytes of its largest tensor."
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
            "The same model, all of whose layers lie on the disk, or on the host, and compute on "
            "the CPU; 16 tokens. Accelerate's disk_offload writes files of its own, and its "
            "cpu_offload is the base of the second half; accelfn's af.on_devices maps what "
            "save_pretrained or export_model wrote. Outputs are compared before, bitwise. Time is "
            "the processor's: other programs ran beside."
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
            "The same network and optimizer on two processes joined by Gloo, 64 rows an "
            "update, 32 a rank. All contestants wrap it in torch's DistributedDataParallel "
            "and live side by side in these two processes. One block is 100 steps, from one "
            "barrier to the next. All-reduces are those of an update, as torch's profiler sees "
            "them in a run of its own."
        ),
        targets=(("accelfn", 1.03),),
        rounds=60,
        quick_rounds=8,
        nproc=2,
    ),
    Benchmark(
        name="fsdp",
        module="fsdp",
        title="A step of a model that is split over two processes",
        how=(
            "Six transformer layers of width 128 over 16 tokens, 1.2 million parameters, "
            "AdamW, two processes joined by Gloo, 8 rows a rank. Each layer is a unit of "
            "torch's fully_shard. By hand the optimizer steps DTensors, as torch's tutorial "
            "has it, or plain parameters that share a rank's parts. Time is the processor's, "
            "of rank 0. One block is 10 steps."
        ),
        targets=(("accelfn", 0.75),),
        rounds=40,
        quick_rounds=8,
        nproc=2,
    ),
    Benchmark(
        name="fsdp_memory",
        module="fsdp_memory",
        title="Memory at the peak of a model that is split over two processes",
        how=(
            "Three updates of a model of 42 million parameters, batch 32, AdamW, two processes "
            "joined by Gloo. Each of its ten layers is a unit of torch's fully_shard. By hand "
            "the optimizer steps DTensors, as torch's tutorial has it. MiB that rank 0 had at "
            "most, beyond what it had before the model was made."
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
            "The transformer layers of the benchmark before last, AdamW, two processes joined by "
            "Gloo, 8 rows a rank. By hand, DeepSpeed's engine is called as its tutorial has it, "
            "without clipping; each ratio is to that of the same stage. Time is the processor's, "
            "of rank 0. One block is 10 steps."
        ),
        targets=tuple((f"stage {stage}, accelfn", 1.05) for stage in (1, 2, 3)),
        rounds=30,
        quick_rounds=6,
        nproc=2,
    ),
    Benchmark(
        name="zero_memory",
        module="zero_memory",
        title="Memory at the peak under DeepSpeed's ZeRO on two processes",
        how=(
            "Three updates of a model of 42 million parameters, batch 32, AdamW, two processes "
            "joined by Gloo. Each ratio is to DeepSpeed by hand at the same stage. MiB that rank "
            "0 had at most, beyond what it had before the model was made; what is freed goes back "
            "to the system at once, by MALLOC_MMAP_THRESHOLD_."
        ),
        targets=tuple((f"stage {stage}, accelfn", 1.05) for stage in (1, 2, 3)),
        rounds=4,
        quick_rounds=2,
        unit="MiB",
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
        title="Exchanges beside computation, over a link of 4 Mbit per second",
        how=(
            "The same two hosts and cable, and the four transformer layers of the first "
            "benchmark, 134,858 parameters, AdamW(fused=True), 32 rows a rank. DiLoCo sends 8 "
            "bits a number every 100 updates, whole or a quarter at a time; with delay=20 ranks "
            "go on for 20 updates before they use what came. Without communication is "
            "local_sgd that never averages. One block is 400 updates, from one barrier to "
            "the next."
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
            "A dict of 100 tensors of 8 times 8, two processes joined by Gloo. By hand they are "
            "joined into one vector, which is reduced and cut; accelfn is af.all_reduce, "
            'Accelerate its reduce(reduction="sum"). One block is 10 sums, from one barrier to the '
            "next. "
            "All-reduces are those of a sum, as torch's profiler sees them in a run of its own."
        ),
        targets=(("accelfn", 1.3),),
        rounds=60,
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
        targets=(("import torch, accelfn", 60),),
        rounds=24,
        quick_rounds=4,
        figure="added",
    ),
    Benchmark(
        name="simulation",
        module="simulation",
        title="A test of DistributedDataParallel on simulated ranks",
        how=(
            "A world of that many ranks is made, every rank wraps a two-layer network in "
            "torch's DistributedDataParallel and takes three steps, and the world is gone. "
            "Processes run the same over Gloo: started for this test by "
            "torch.multiprocessing.spawn, which imports torch anew, or kept from an earlier "
            "one. A collective is one of 100 all-reduces of three numbers on 4 ranks, the "
            "making of the world included."
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
