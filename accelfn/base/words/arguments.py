# SPDX-License-Identifier: Apache-2.0
"""What others call arguments of calls."""

from collections.abc import Mapping

from accelfn.base.words.foreign import Words
from accelfn.base.words.foreign import each_word as _each
from accelfn.base.words.records import MAKE_DATA, MAKE_SCHEDULE

_EPOCHS = "num_epochs max_epochs epoch n_epochs num_train_epochs"
_MICRO_BATCHES = (
    "gradient_accumulation_steps accumulation_steps accumulate_grad_batches num_steps"
    " steps"
)
_DATA_WORDS = (
    "dataset train_dataset train_data dataloader train_dataloader train_loader loader"
)
_SCHEDULE = {
    "num_training_steps total_steps num_steps T_max total_iters max_steps": "num_updates=",
    "eta_min end_factor min_lr": "end=",
}
_CREATE = "af.TrainState.create(model=..., optimizer=...)"
MADE_BY: Mapping[str, str] = {"af.TrainState": _CREATE}
"""Calls for records that another call makes."""
AT = 'write at="train" in place of raw=True, at="eval" of raw=False'
ARGUMENTS: Mapping[str, Words] = {
    name: _each(words)
    for name, words in {
        "af.Data": {
            "collate_fn": "collate=",
            "bs": "batch_size=",
            "drop_last": 'write remainder="drop"',
            "sampler": "write order=, or af.Data.from_loader of a DataLoader with the sampler",
            "pin_memory pin_memory_device": "batches go to pinned memory wherever there is a"
            " GPU; leave it out",
            "prefetch_factor persistent_workers multiprocessing_context in_order": "workers"
            " live, and read ahead, as long as batches are read; leave it out",
            "generator seed": "the order is a function of the state's seed; write"
            " TrainState.create(seed=...)",
            "worker_init_fn": "workers draw each its own numbers; leave it out, or seed in"
            " the dataset",
            "num_replicas rank world world_size": "put af.shard_data() into the setup",
        },
        "af.batches": {
            _EPOCHS: "epochs=",
            "max_steps num_steps steps num_updates": "stop where state.step says so, or let"
            " af.run(state, step, until=...) do it",
            "batch_size shuffle": "write af.Data(dataset, batch_size=..., shuffle=...)",
            "data": "the state's own are read; write TrainState.create(data=...)",
        },
        "af.run": {
            "every": "write actions={period: action}",
            _EPOCHS: "write until=af.epochs(n)",
            "max_steps num_steps num_updates": "until=",
            "callbacks": "actions=",
            "tracker logger": "track=",
            "checkpoint checkpoints": "store=",
        },
        "af.TrainState.create": {
            "scheduler lr_scheduler": MAKE_SCHEDULE,
            _DATA_WORDS: MAKE_DATA,
            "batch_size shuffle": MAKE_DATA,
            "optim opt optimizers tx": "optimizer=",
            "lr learning_rate": "write optimizer=functools.partial(torch.optim.AdamW, lr=...)",
            "params parameters": "it takes the parameters of model=",
            "loss_fn loss criterion": "write step = af.make_step(loss_fn)",
            "apply_fn": "write loss_fn(model, batch), and af.make_step(loss_fn)",
            "device device_placement cpu": "write world=af.World.from_env(device=...)",
            "mixed_precision precision": 'write setup=af.chain(af.autocast("bf16"), ...)',
            "gradient_accumulation_steps accumulate_grad_batches": "write"
            " setup=af.chain(af.accumulate(num_micro_batches=...), ...)",
            "transforms chain plugins callbacks": "setup=",
        },
        "af.TrainState": {
            "model optimizer schedule data world": f"a state is made by {_CREATE}",
        },
        "af.make_step": {
            "optimizer scheduler model": "the state has it; write TrainState.create(...)",
        },
        "af.evaluate": {"loss_fn metric metrics metric_fn function": "fn="},
        "af.accumulate": {_MICRO_BATCHES: "num_micro_batches="},
        "af.clip_grad_norm": {"norm p": "norm_type="},
        "af.autocast": {"dtype mixed_precision": 'write af.autocast("bf16")'},
        "af.local_sgd": {
            "steps local_sgd_steps every sync_steps num_steps": "sync_every=",
        },
        "af.wrap_ddp": {
            "module model": "the state has it; write setup(state)",
            "device_ids output_device": "the world has a device; leave it out",
            "process_group": "the world has it; leave it out",
        },
        "af.launch": {
            "nproc num_processes nprocs nproc_per_node world_size": "the number of ranks"
            " comes first; write af.launch(2, fn, *args)"
        },
        "af.CheckpointStore": {
            "keep_last save_total_limit total_limit max_to_keep save_top_k": "keep=",
        },
        "af.bind": {"raw": AT},
        "af.frozen": {"raw": AT},
        "af.export_model": {"raw": AT},
        "af.full_params": {"raw": AT},
        "af.load": {
            "only missing extra cast": "write af.load_part(state, directory, only, ...), which"
            " returns a report",
        },
        "af.save": {"step": "the state has it; leave it out"},
        "af.profile": {
            "schedule": "write wait=, warmup= and active=",
            "experimental_config execution_trace_observer acc_events use_cuda"
            " custom_trace_id_callback post_processing_timeout_s": "use"
            " torch.profiler.profile itself, in whose traces accelfn's spans stand, too",
            "on_trace_ready": "the trace is written to the directory; leave it out",
        },
        "af.schedules.warmup_cosine": {
            "num_warmup_steps warmup_steps warmup_iters": "num_warmup=",
            **_SCHEDULE,
        },
        "af.schedules.linear": _SCHEDULE,
    }.items()
}
"""What to write, by a call and an argument that it has not."""
