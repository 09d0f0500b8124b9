# SPDX-License-Identifier: Apache-2.0
"""What others call parts of records, and names of the package."""

from accelfn.base.words.foreign import each_word as _each

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

STATE = _each(
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
BATCH = _each(
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
DATA = _each(
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
GRADS = _each(
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
METRICS = _each(
    {
        "item": 'one has an item: metrics["loss"].item()',
        "mean": "af.mean(metrics, world) has the means over all ranks as floats",
        "backward": "the step has run the backward pass",
        "detach cpu to": "they hold no graph; a name gives a mean, as a tensor",
    }
)
WORLD = _each(
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
CHAIN = _each(
    {
        "append add insert extend compose": "write af.chain(setup, another)",
        "apply": "call it: state = setup(state)",
    }
)
CHAIN_IS_NO_LIST = (
    "its transforms are setup.transforms, and af.chain(setup, another) adds"
)

BATCHES = _each(
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
STORE = _each(
    {
        "load load_state load_state_dict": "write state = store.restore(state)",
        "save_state save_checkpoint": "write store.save(state)",
        "best_model_path": "it is store.best",
        "last_checkpoint": "it is store.latest",
    }
)
TRACKER = _each(
    {
        "log add_scalar add_scalars log_metrics": "call it: tracker(values, state.step)",
        "log_images add_image log_image": "write tracker.images(images, state.step)",
        "add_histogram": "it is tracker.backends['tensorboard'].add_histogram, on rank 0",
        "config store_init_configuration add_hparams log_params": "write"
        " tracker.hyperparameters(values)",
        "finish end_training": "write tracker.close(), or use it as a context manager",
    }
)
SCHEDULES = _each(
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
"""What there is not in `af.schedules`."""

NAMES = _each(
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
"""What there is not in the package."""
