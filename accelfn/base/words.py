# SPDX-License-Identifier: Apache-2.0
"""Hints for names from PyTorch, Accelerate, Lightning, Transformers and Flax.

Tables map foreign attributes of records, arguments of calls and names of the package to the
accelfn code to write. A record under `@hint_attributes` raises an error with the hint. For
typing slips Python suggests the nearest name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from accelfn.errors import CallError, RecordError

# Errors with hints for foreign attribute names.


T = TypeVar("T", bound=type)
Hints = Mapping[str, str]


def split_keys(words: Mapping[str, str]) -> dict[str, str]:
    """Split keys of several words into one entry per word."""
    return {word: advice for key, advice in words.items() for word in key.split()}


class Hint:
    """A missing attribute of a record, with the code to write instead.

    Its error is an AttributeError, so `hasattr`, `getattr` with a default, copy and pickle
    work. Other attributes cost nothing, unlike with a `__getattr__`.
    """

    def __init__(self, name: str, advice: str) -> None:
        """Take the attribute's name and the code to write."""
        self._name, self._advice = name, advice

    def __get__(self, record: object, owner: type) -> NoReturn:
        """Raise an error with the hint."""
        msg = f"A {owner.__name__} has no {self._name}: {self._advice}."
        raise RecordError(msg, obj=owner)  # `obj` stops Python from suggesting a name


def hint_attributes(
    attributes: Hints, *, changes: str | None = None, **operations: str
) -> Callable[[T], T]:
    """Make a record raise errors with hints for foreign attributes and operations.

    Args:
        attributes: the code to write, by missing attribute.
        changes: the code to write instead of setting an attribute.
        **operations: the code to write, by operation: `getitem`, `iter`.
    """

    def decorate(cls: T) -> T:
        kind: Any = cls
        for name, advice in attributes.items():
            setattr(kind, name, Hint(name, advice))
        kind.__dir__ = _hide_names(attributes)
        if hasattr(kind, "__getattr__"):  # Python calls it after the hint has raised
            kind.__getattr__ = _hint_getattr(kind.__getattr__, attributes)
        for name, advice in operations.items():
            setattr(kind, f"__{name}__", _raise_hint(kind.__name__, advice))
        if changes is not None:
            kind.__setattr__ = kind.__delattr__ = readonly(kind.__name__, changes)
        return cls

    return decorate


def _hide_names(attributes: Hints) -> Callable[[object], list[str]]:
    def names(self: object) -> list[str]:
        return [name for name in object.__dir__(self) if name not in attributes]

    return names


def _hint_getattr(
    inner: Callable[[Any, str], Any], attributes: Hints
) -> Callable[[Any, str], Any]:
    def getattr_(self: Any, name: str) -> Any:
        if name in attributes:
            Hint(name, attributes[name]).__get__(self, type(self))
        return inner(self, name)

    return getattr_


def _raise_hint(kind: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        msg = f"A {kind} is a record: {advice}."
        raise CallError(msg)

    return refuse


def readonly(kind: str, advice: str) -> Callable[..., NoReturn]:
    """Return a `__setattr__` that raises an error with the code to write instead."""

    def refuse(self: object, name: str, *_: object) -> NoReturn:
        msg = f"A {kind} is a value, whose {name} is not set: {advice}."
        raise RecordError(msg, obj=type(self))

    return refuse


# Hints by attribute of a record, and by name in the package.


_BIND = "`with af.bind(state) as model:` lends it, af.frozen(state) is one of its own"
_STEP = (
    "state, metrics = step(state, batch) takes a whole update, with step ="
    " af.make_step(loss_fn)"
)
MAKE_DATA = "write TrainState.create(data=af.Data(dataset, batch_size=...))"
MAKE_SCHEDULE = (
    "write schedule=, a function of the update number; af.schedules.from_torch(factory) makes"
    " one of torch's schedulers"
)

STATE = split_keys(
    {
        "model module net unwrap_model": _BIND,
        "parameters named_parameters": "its parameters by name are state.params",
        "state_dict": "state.params has the parameters by name, af.save(state, directory) saves"
        " all, af.export_model(state, directory) the model",
        "load restore load_state_dict load_from_checkpoint from_pretrained": "write"
        " state = af.load(state, directory)",
        "save save_state save_checkpoint": "write af.save(state, directory), or"
        " af.CheckpointStore(directory).save(state)",
        "optimizer optimizers optim tx": "its state is state.opt_state, its rates are"
        " state.lrs; TrainState.create takes the optimizer",
        "scheduler lr_scheduler": "the schedule is state.schedule, a function of the update"
        " number; the rates are state.lrs",
        "lr learning_rate get_last_lr": "the rates, one a parameter group, are state.lrs",
        "epoch current_epoch": "it is state.cursor.epoch",
        "global_step iteration num_updates completed_steps": "it is state.step",
        "device": "it is state.world.device",
        "to cuda cpu": "its device is its world's; give af.World.from_env(device=...)",
        "train fit": _STEP,
        "eval evaluate": "write af.evaluate(state, data, fn), or take af.frozen(state)",
        "grad grads gradients": "write metrics, grads ="
        " af.value_and_grad(loss_fn)(state, batch)",
        "loss metrics": _STEP,
        "zero_grad backward": _STEP,
        "apply_gradients apply_grads": "write state = af.apply_grads(state, grads)",
        "with_data with_optimizer with_schedule with_world": "that belongs to its definition;"
        " create another state, and af.load into it what af.save wrote of this one",
        "config": "it has a definition: state.setup, state.data, state.schedule, state.world",
        "replace evolve": "write state.with_params(...), with_setup, with_slot or"
        " with_trainable",
        "dataset dataloader train_dataloader loader": "its data are state.data;"
        " af.batches(state) reads them",
        "transforms transform": "they are state.setup",
        "rank size": "it is state.world's",
    }
)
_VALUE = (
    "the collated value is batch.value (under af.accumulate, batch.micro_batches); a step takes"
    " the batch itself"
)
BATCH = split_keys(
    {
        "keys values items get pop update to cuda cpu pin_memory size shape dim dtype device": (
            _VALUE
        ),
        "input_ids attention_mask labels label inputs targets target x y data image images"
        " pixel_values": _VALUE,
    }
)
BATCH_IS_NO_VALUE = f"{_VALUE}. Write inputs, targets = batch.value, or batch.value[0]"
STATE_IS_NO_PAIR = (
    "a step returns two things, state, metrics = step(state, batch), and other functions the"
    " state alone; its entries are attributes, such as state.params[name]"
)
STATE_WRITES = {
    "params": "write state = state.with_params({**state.params, name: value}), or change what"
    " is in a tensor, state.params[name].copy_(value)",
    "buffers": "change what is in a tensor, state.buffers[name].copy_(value)",
    "opt_state": "change what is in a tensor, state.opt_state[name][key].copy_(value)",
    "slots": "write state = state.with_slot(name, value) for an entry of your own; a"
    " transform's are what its functions return",
}
DATA = split_keys(
    {
        "sampler": "its order is data.ordering",
        "loader dataloader batches": "af.batches(state) reads the data of a state",
        "num_samples": "it is len(data)",
        "num_batches": "it is data.updates_per_epoch",
        "collate_fn": "it is data.collate",
        "drop_last": "it is data.remainder",
    }
)
DATA_IS_NO_LOADER = (
    "for batch in af.batches(state, epochs=...) reads the data of a state,"
    " af.evaluate(state, data, fn) others; one sample is data.dataset[i]"
)
GRADS = split_keys(
    {
        "keys values items get": "they are in grads.tensors, by parameter name",
        "norm clip clip_grad_norm clip_grad_norm_": "put af.clip_grad_norm(max_norm) into the"
        " setup, whose metrics have grad_norm; the gradients are in grads.tensors",
        "step backward zero_grad": "write state = af.apply_grads(state, grads)",
    }
)
GRADS_ARE_NO_DICT = (
    "gradients are in grads.tensors, by parameter name. value_and_grad(loss_fn)(state, batch)"
    " returns metrics, grads"
)
METRICS = split_keys(
    {
        "item": 'one has an item: metrics["loss"].item()',
        "mean": "af.mean(metrics, world) has the means over all ranks as floats",
        "backward": "the step has run the backward pass",
        "detach cpu to": "they hold no graph; a name gives a mean, as a tensor",
    }
)
WORLD = split_keys(
    {
        "is_main_process": "it is world.is_main",
        "is_local_main_process": "it is world.local_rank == 0",
        "is_last_process": "it is world.rank == world.size - 1",
        "process_index": "it is world.rank",
        "local_process_index": "it is world.local_rank",
        "num_processes world_size": "it is world.size",
        "process_group": "it is world.group",
        "print": "write af.print_once(world, ...)",
        "wait_for_everyone barrier": "write af.barrier(world)",
        "gather": "write af.gather(values, world)",
        "gather_for_metrics": "af.evaluate(state, data, fn) counts each sample once, and"
        " af.gather_valid(values, batch, world) drops what is filler",
        "reduce": "write af.reduce(values, world)",
        "broadcast": "write af.broadcast(values, world)",
        "all_reduce": 'write af.reduce(values, world, "sum")',
        "all_gather": "write af.gather(values, world)",
        "split_between_processes": "write af.split(values, world)",
        "main_process_first local_main_process_first": "write `with af.main_first(world):`",
        "on_main_process on_process": "write @af.on_main(world), or @af.on_rank(world, rank)",
        "prepare": "write TrainState.create(model=..., optimizer=..., data=..., setup=...,"
        " world=world)",
        "backward clip_grad_norm_ accumulate autocast no_sync": _STEP,
        "unwrap_model": _BIND,
        "save_state": "write af.save(state, directory)",
        "load_state": "write state = af.load(state, directory)",
        "log init_trackers end_training": "see af.track, as in track ="
        " af.track.jsonl(path, world=world)",
    }
)
CHAIN = split_keys(
    {
        "append add insert extend compose": "write af.chain(setup, another)",
        "apply": "call it: state = setup(state)",
    }
)
CHAIN_IS_NO_LIST = (
    "its transforms are setup.transforms, and af.chain(setup, another) adds"
)

BATCHES = split_keys(
    {
        "dataset": "it is batches.data.dataset",
        "batch_size sampler set_epoch": "batches are as the state's data and cursor say; make"
        " another af.Data",
    }
)
BATCHES_ARE_NO_LIST = (
    "for batch in af.batches(state, epochs=...) reads them; the first is"
    " next(iter(af.batches(state)))"
)
STORE = split_keys(
    {
        "load load_state load_state_dict": "write state = store.restore(state)",
        "save_state save_checkpoint": "write store.save(state)",
        "best_model_path": "it is store.best",
        "last_checkpoint": "it is store.latest",
    }
)
TRACKER = split_keys(
    {
        "log add_scalar add_scalars log_metrics": "call it: tracker(values, state.step)",
        "log_images add_image log_image": "write tracker.images(images, state.step)",
        "add_histogram": "it is tracker.backends['tensorboard'].add_histogram, on rank 0",
        "config store_init_configuration add_hparams log_params": "write"
        " tracker.hyperparameters(values)",
        "finish end_training": "write tracker.close(), or use it as a context manager",
    }
)
SCHEDULES = split_keys(
    {
        "cosine cosine_with_warmup get_cosine_schedule_with_warmup": "write"
        " af.schedules.warmup_cosine(num_warmup, num_updates)",
        "warmup_linear linear_with_warmup get_linear_schedule_with_warmup": "write"
        " af.schedules.join((n, af.schedules.linear(n, start=0.0, end=1.0)),"
        " af.schedules.linear(rest))",
        "get_constant_schedule": "write af.schedules.constant()",
        "OneCycleLR StepLR MultiStepLR ExponentialLR CosineAnnealingLR LinearLR LambdaLR"
        " PolynomialLR CosineAnnealingWarmRestarts CyclicLR SequentialLR ConstantLR step"
        " exponential polynomial": "write af.schedules.from_torch(factory), with factory ="
        " functools.partial(torch.optim.lr_scheduler.StepLR, step_size=...) or another",
        "get_scheduler": "write af.schedules.from_torch(factory), where factory(optimizer)"
        " returns a scheduler",
    }
)
"""Foreign names that `af.schedules` does not have."""

NAMES = split_keys(
    {
        "Accelerator PartialState AcceleratorState": "world = af.World.from_env() joins the"
        " ranks, and a setup says the rest: af.chain(af.shard_data(), af.wrap_ddp(), ...)",
        "Trainer LightningModule Fabric fit train": "write step = af.make_step(loss_fn), and"
        " loop over af.batches(state, epochs=...), or af.run(state, step, until=...)",
        "prepare prepare_model prepare_data_loader setup": "write TrainState.create(model=...,"
        " optimizer=..., data=..., setup=..., world=world)",
        "set_seed seed_everything": "write TrainState.create(seed=...), from which all draws"
        " are made",
        "skip_first_batches": "af.batches(state) goes on from state.cursor; af.seek(state,"
        " samples) moves it",
        "gather_for_metrics": WORLD["gather_for_metrics"],
        "gather_object": "write af.gather_objects",
        "broadcast_object_list": "write af.broadcast_object",
        "pad_across_processes": "write af.pad_across",
        "split_between_processes": "write af.split(values, world)",
        "wait_for_everyone": "write af.barrier(world)",
        "all_reduce": WORLD["all_reduce"],
        "all_gather": WORLD["all_gather"],
        "unwrap_model extract_model_from_parallel": _BIND,
        "notebook_launcher": "write af.launch(size, fn, *args)",
        "debug_launcher": "write accelfn.testing.simulate(size, fn)",
        "find_executable_batch_size": "write af.find_batch_size(fn, start, world)",
        "load_checkpoint_in_model load_checkpoint_and_dispatch from_pretrained": "write"
        " af.import_model(model, directory, device_map=...)",
        "init_empty_weights": "write with af.empty_weights(): model = Net(...), then"
        " af.import_model(model, directory)",
        "save_state save_checkpoint save_model": "write af.save(state, directory), or"
        " af.export_model(state, directory)",
        "load_state load_checkpoint": "write state = af.load(state, directory)",
        "DataLoader Dataset dataloader": "write af.Data(dataset, batch_size=...)",
        "clip_grad_norm_": "put af.clip_grad_norm(max_norm) into the setup",
        "clip_grad_value_": "put af.clip_grad_value(max_value) into the setup",
        "LocalSGD": "put af.local_sgd(sync_every=...) into the setup",
        "DistributedDataParallel DDP": "put af.wrap_ddp() into the setup",
        "GradScaler mixed_precision": 'put af.autocast("fp16") into the setup',
        "gradient_accumulation no_sync": "put af.accumulate(num_micro_batches=...) into the"
        " setup",
        "zero_grad": _STEP,
        "log": "see af.track",
        "sgd adam adamw SGD Adam AdamW": "write functools.partial(torch.optim.AdamW, lr=...)",
        "grad": "write af.value_and_grad(loss_fn)",
        "fused": "torch's optimizers have it as an option: write"
        " functools.partial(torch.optim.AdamW, fused=True)",
    }
)
"""Foreign names that the package does not have."""


# Hints by argument of a call.


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
"""Constructors to call, by record."""
AT = 'write at="train" in place of raw=True, at="eval" of raw=False'
ARGUMENTS: Mapping[str, Hints] = {
    name: split_keys(words)
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
"""The code to write, by call and unknown argument."""
