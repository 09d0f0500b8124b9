# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's settings: those that you can pass, and those that accelfn controls."""

import difflib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.nn import functional

from accelfn import World
from accelfn.errors import ArgumentError

_CALL = "af.wrap_deepspeed"
_OURS: Mapping[str, str] = {
    "activation_checkpointing": "use af.checkpoint_activations()",
    "amp": 'use af.autocast("bf16")',
    "autotuning": "pass af.Data(global_batch_size=...)",
    "bf16": 'use af.autocast("bf16"), which keeps the weights in float32',
    "checkpoint": "use af.save or af.CheckpointStore",
    "csv_monitor": "use af.track.jsonl",
    "data_types": "accelfn accumulates gradients in their own dtype",
    "dataloader_drop_last": "pass af.Data(remainder=...)",
    "fp16": 'use af.autocast("bf16"), or af.wrap_fsdp() with af.autocast("fp16")',
    "gradient_accumulation_steps": "use af.accumulate(...)",
    "gradient_clipping": "use af.clip_grad_norm(max_norm)",
    "optimizer": "pass TrainState.create(optimizer=...)",
    "scheduler": "pass TrainState.create(schedule=...)",
    "seed": "pass TrainState.create(seed=...)",
    "stage": "pass stage= instead",
    "tensorboard": "use af.track.tensorboard",
    "torch_autocast": 'use af.autocast("bf16")',
    "train_batch_size": "pass af.Data(global_batch_size=...)",
    "train_micro_batch_size_per_gpu": "use af.accumulate(micro_batch_size=...)",
    "wandb": "use af.track.wandb",
}
"""DeepSpeed settings that accelfn controls, each with accelfn's replacement."""

_FLAGS = "memory_breakdown", "wall_clock_breakdown"
_THEIRS = ("comms_logger", "communication_data_type", *_FLAGS, "zero_optimization")
"""The settings that you can pass."""

_OF_ZERO = (
    *("allgather_bucket_size", "allgather_partitions", "contiguous_gradients"),
    *("ignore_unused_parameters", "offload_optimizer", "overlap_comm"),
    *("reduce_bucket_size", "reduce_scatter", "round_robin_gradients"),
    *("stage3_allgather_sequential", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_model_persistence_threshold"),
    *("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"),
    *("stage3_use_all_reduce_for_fetch_params", "sub_group_size"),
    "use_multi_rank_bucket_allreduce",
)
"""The settings of `zero_optimization` that you can pass. They change results only by rounding."""


def check_settings(config: Mapping[str, Any]) -> None:
    """Check the settings that a user passed.

    Raises:
        ArgumentError: accelfn controls a setting, a setting is unknown or not supported, DeepSpeed
            is not installed, or a value is invalid.
    """
    for problem in _problems(config):
        msg = f"{_CALL}: {problem}"
        raise ArgumentError(msg)
    if config:  # otherwise DeepSpeed need not be imported
        _check_values(config)


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each setting that a user cannot pass."""
    yield from _key_problems("config", config, _THEIRS)
    zero: Any = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        yield f'config["zero_optimization"] is {zero!r}; expected a dict.'
    yield from _key_problems('config["zero_optimization"]', zero, _OF_ZERO)
    offload: Any = zero.get("offload_optimizer", {"device": "cpu"})
    if not isinstance(offload, Mapping) or offload.get("device") != "cpu":
        yield (
            f"offload_optimizer is {offload!r}; expected {{'device': 'cpu'}}, because a state"
            " cannot contain values that are only on a disk."
        )
    yield from _key_problems("offload_optimizer", offload, ("device", "pin_memory"))
    if importlib.util.find_spec("deepspeed") is None:
        yield _MISSING
    for key in _FLAGS:
        value = config.get(key, False)
        if not isinstance(value, bool):
            yield f"config[{key!r}] is {value!r}; expected True or False."


def _key_problems(
    where: str, settings: Mapping[str, Any], choices: Sequence[str]
) -> Iterator[str]:
    for key in settings:
        if key in _OURS:
            yield f"remove {where}[{key!r}], which accelfn controls: {_OURS[key]}."
        elif key not in choices:
            matches = difflib.get_close_matches(str(key), choices, n=1, cutoff=0.7)
            hint = f" Did you mean {matches[0]!r}?" if matches else ""
            names = ", ".join(choices)
            yield f"you cannot pass {where}[{key!r}]. You can pass {names}.{hint}"


def _check_values(config: Mapping[str, Any]) -> None:
    """Check the values of settings with DeepSpeed's own validation.

    Raises:
        ArgumentError: a value is invalid; the message names the first invalid value.
    """
    runtime: Any = importlib.import_module("deepspeed.runtime.config")
    zero: Any = importlib.import_module("deepspeed.runtime.zero.config")
    where = "config"
    try:
        runtime.DeepSpeedCommsConfig(dict(config))
        where = 'config["communication_data_type"]'
        dtype = config.get("communication_data_type")
        named = {} if dtype is None else {"communication_data_type": str(dtype)}
        runtime.get_communication_data_type(named)
        where = 'config["zero_optimization"]'
        zero.DeepSpeedZeroConfig(**config.get("zero_optimization", {}))
    except ValueError as error:
        details: Any = getattr(error, "errors", list[Any])()
        reason = str(error)
        if details:
            where += "".join(f"[{key!r}]" for key in details[0]["loc"])
            reason = f"{details[0]['msg']}, got {details[0]['input']!r}"
        msg = f"{_CALL}: DeepSpeed rejects {where}: {reason}."
        raise ArgumentError(msg) from error


def settings_of(
    config: Mapping[str, Any], *, stage: int, max_norm: float | None
) -> dict[str, Any]:
    """Return the complete config for DeepSpeed, from the user's settings."""
    return {
        **config,
        "gradient_clipping": max_norm or 0.0,  # DeepSpeed's default is 1
        "zero_optimization": {**config.get("zero_optimization", {}), "stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed requires this
        "gradient_accumulation_steps": 1,
        "steps_per_print": sys.maxsize,
    }


# Import and patch the package DeepSpeed, so that it uses only the world's process group.


Patch: TypeAlias = tuple[Any, str, Any]
"""A module or class, the name of its attribute, and a temporary value for the attribute."""
_MISSING = (
    "DeepSpeed is not installed. Install it after torch: pip install setuptools wheel"
    " ninja py-cpuinfo, then DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed."
)


@contextmanager
def use_deepspeed(ranks: World) -> Generator[Any, None, None]:
    """Yield the package DeepSpeed, which uses the world's process group and logs only errors.

    At stage 3, DeepSpeed replaces `torch.nn.functional.linear` in the whole process, so that
    autograd does not keep gathered weights. Torch's function is restored afterwards.

    Unnecessary work at DeepSpeed's start is skipped. DeepSpeed would compile C++ code for shared
    memory, and a process that is killed meanwhile leaves a lock that blocks all later processes.
    DeepSpeed would also broadcast rank 0's parameters, which have no values yet, and this fails
    for scalars.
    """
    package: Any = importlib.import_module("deepspeed")
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    # import_module, because the attribute `deepspeed.comm.torch` is the package torch
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    engine: Any = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    parts: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    patches = [
        (groups, "_WORLD_GROUP", ranks.group),
        (functional, "linear", functional.linear),
        (backend, "build_shm_op", _nothing),
        (engine, "_broadcast_model", _nothing),
        (parts.Init, "_zero_init_param", _part),
    ]
    logger: logging.Logger = package.utils.logger
    level = logger.level
    # DeepSpeed warns about optimizers that it has not tested
    logger.setLevel(logging.ERROR)
    try:
        with patch_attributes(patches):
            yield package
    finally:
        logger.setLevel(level)


def running_patches() -> list[Patch]:
    """Return the patches that are active while an engine of stage 3 runs.

    Call this inside `use_deepspeed`. The patches are DeepSpeed's linear function, and a cached
    list of the host's cores. Otherwise DeepSpeed starts a process that lists the cores at each
    reduction.
    """
    numa: Any = importlib.import_module("deepspeed.utils.numa")
    cores = numa.get_numa_cores()
    return [
        (functional, "linear", functional.linear),
        (numa, "get_numa_cores", lambda: cores),
    ]


def note_signatures(root: nn.Module) -> None:
    """Cache the signatures of the autograd functions that stage 3 adds to each module.

    Otherwise torch inspects the signatures at each call. For six layers, this was 1 of the 70 ms
    of an update.
    """
    for module in root.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            fn: Any = vars(module).get(name)
            if fn is not None:
                fn.forward.__signature__ = inspect.signature(fn.forward)


@contextmanager
def patch_attributes(patches: Sequence[Patch]) -> Generator[None]:
    """Patch attributes of modules and classes inside a `with` block."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, other in patches:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _part(init: Any, param: Any) -> None:
    init._convert_to_deepspeed_param(param)
    param.partition()


def release_group(ranks: World) -> None:
    """Remove DeepSpeed's references to a world's process group before the group is closed."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    is_whole = ranks.group is dist.group.WORLD
    if is_whole:
        comm.cdb = None
    groups._release_process_group_references(None if is_whole else ranks.group)


def _nothing(*_: object, **__: object) -> None: ...
