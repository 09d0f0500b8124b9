# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's settings: which a user may give, and which of them accelfn says already."""

import difflib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch.distributed as dist
from torch import nn
from torch.nn import functional

from accelfn.errors import ArgumentError
from accelfn.world import World

_OURS: Mapping[str, str] = {
    "activation_checkpointing": "af.checkpoint_activations() recomputes activations",
    "amp": 'af.autocast("bf16") says in which precision a loss is computed',
    "autotuning": "af.Data(batch_size=...) says the size of a batch",
    "bf16": 'af.autocast("bf16") computes in it, and weights stay in float32',
    "checkpoint": "af.save and af.CheckpointStore save states",
    "csv_monitor": "af.CSVTracker tracks metrics",
    "data_types": "gradients are accumulated as they are",
    "dataloader_drop_last": "af.Data says how an epoch ends",
    "fp16": 'take af.autocast("bf16"), or af.wrap_fsdp() beside af.autocast("fp16")',
    "gradient_accumulation_steps": "af.accumulate(...) says how many micro-batches there are",
    "gradient_clipping": "af.clip_grad_norm(max_norm) says the bound",
    "optimizer": "TrainState.create(optimizer=...) makes it",
    "scheduler": "TrainState.create(schedule=...) says the rates",
    "seed": "TrainState.create(seed=...) says it",
    "tensorboard": "af.TensorBoardTracker tracks metrics",
    "torch_autocast": 'af.autocast("bf16") says in which precision a loss is computed',
    "train_batch_size": "af.Data(batch_size=...) counts the samples of an update",
    "train_micro_batch_size_per_gpu": "af.accumulate(micro_batch_size=...) says it",
    "wandb": "af.WandbTracker tracks metrics",
}
"""What accelfn says, and by what."""

_THEIRS = (
    "comms_logger",
    "communication_data_type",
    "memory_breakdown",
    "wall_clock_breakdown",
    "zero_optimization",
)
"""What DeepSpeed alone says."""

_DTYPE = "communication_data_type"
_FLAGS = "memory_breakdown", "wall_clock_breakdown"

_OF_ZERO = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "ignore_unused_parameters",
    "offload_optimizer",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_allgather_sequential",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
)
"""How ZeRO cuts, keeps and sends what it has; numbers change by no more than rounding."""


def check_settings(shown: str, config: Mapping[str, Any]) -> None:
    """Raise unless DeepSpeed's settings are ones that a user may give.

    Raises:
        ArgumentError: one is accelfn's, or unknown, or of what does not go on here.
    """
    for key in config:
        if key in _OURS:
            msg = f"{shown}: config[{key!r}] is said elsewhere: {_OURS[key]}. Leave it out."
            raise ArgumentError(msg)
        _check_known(shown, "config", key, _THEIRS)
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        msg = f'{shown}: config["zero_optimization"] is {zero!r}; expected a dict.'
        raise ArgumentError(msg)
    for key in cast("Mapping[str, Any]", zero):
        if key == "stage":
            msg = f'{shown}: config["zero_optimization"]["stage"] is stage=. Leave it out.'
            raise ArgumentError(msg)
        _check_known(shown, 'config["zero_optimization"]', key, _OF_ZERO)
    offload: Any = zero.get("offload_optimizer", {"device": "cpu"})
    if not isinstance(offload, Mapping) or offload.get("device") != "cpu":
        msg = (
            f"{shown}: offload_optimizer is {offload!r}; expected {{'device': 'cpu'}}, for what"
            " lies on a disk alone is in no state."
        )
        raise ArgumentError(msg)
    for key in cast("Mapping[str, Any]", offload):
        _check_known(shown, "offload_optimizer", key, ("device", "pin_memory"))


def check_values(shown: str, config: Mapping[str, Any]) -> None:
    """Raise unless DeepSpeed takes the values, as far as it looks at them.

    Raises:
        ArgumentError: it does not; the first is named.
    """
    if not config:
        return  # nor is it imported
    runtime: Any = importlib.import_module("deepspeed.runtime.config")
    zero: Any = importlib.import_module("deepspeed.runtime.zero.config")
    where = "config"
    try:
        runtime.DeepSpeedCommsConfig(dict(config))
        where = 'config["communication_data_type"]'
        runtime.get_communication_data_type(
            {
                key: str(v)
                for key, v in config.items()
                if key == _DTYPE and v is not None
            }
        )
        where = 'config["zero_optimization"]'
        zero.DeepSpeedZeroConfig(**config.get("zero_optimization", {}))
    except ValueError as error:
        details: Any = getattr(error, "errors", list[Any])()
        told = str(error)
        if details:
            where += "".join(f"[{key!r}]" for key in details[0]["loc"])
            told = f"{details[0]['msg']}, and was given {details[0]['input']!r}"
        msg = f"{shown}: DeepSpeed refuses {where}: {told}."
        raise ArgumentError(msg) from error
    for key in _FLAGS:
        if not isinstance(config.get(key, False), bool):
            msg = (
                f"{shown}: config[{key!r}] is {config[key]!r}; expected True or False."
            )
            raise ArgumentError(msg)


def settings_of(
    config: Mapping[str, Any], *, stage: int, max_norm: float | None
) -> dict[str, Any]:
    """Return all that DeepSpeed is told."""
    return {
        **config,
        "gradient_clipping": 0.0 if max_norm is None else max_norm,  # where not told, 1
        "zero_optimization": {**config.get("zero_optimization", {}), "stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 1,  # which DeepSpeed wants to be told
        "gradient_accumulation_steps": 1,
        "steps_per_print": sys.maxsize,
    }


def _check_known(shown: str, where: str, key: Any, known: tuple[str, ...]) -> None:
    if key not in known:
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.7)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        msg = (
            f"{shown}: {where}[{key!r}] is none of the settings that can be given"
            f" ({', '.join(known)}).{hint}"
        )
        raise ArgumentError(msg)


# The package DeepSpeed: imported when it is asked for, and kept to the world's own group.


Patch: TypeAlias = tuple[Any, str, Any]
"""A module or class, the name of an attribute of it, and what that is to be."""
_MISSING = (
    "{shown}: DeepSpeed is not installed. Install it beside torch: pip install setuptools wheel"
    " ninja py-cpuinfo, then DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed."
)


def check_installed(shown: str) -> None:
    """Raise unless DeepSpeed is there.

    Raises:
        ArgumentError: it is not.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ArgumentError(_MISSING.format(shown=shown))


@contextmanager
def use_deepspeed(ranks: World) -> Generator[Any, None, None]:
    """Lend DeepSpeed, which talks through the world's group, and tells errors alone.

    At stage 3 it has a linear layer of its own, which keeps no gathered weight, and leaves it
    in torch's place, for all models of the process: torch's is put back.
    """
    deepspeed: Any = importlib.import_module("deepspeed")
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    before, groups._WORLD_GROUP = groups._WORLD_GROUP, ranks.group
    linear = functional.linear
    logger: logging.Logger = deepspeed.utils.logger
    level = logger.level
    logger.setLevel(
        logging.ERROR
    )  # it warns of what was tried here, as of any optimizer
    try:
        with _skip_startup():
            yield deepspeed
    finally:
        logger.setLevel(level)
        groups._WORLD_GROUP = before
        functional.linear = linear


@contextmanager
def _skip_startup() -> Generator[None]:
    """Leave out what DeepSpeed does at its start and need not.

    It would compile C++ for the memory that a host's ranks share, and whoever is killed in that
    leaves a lock for which all later ones wait. And it would send rank 0's parameters around,
    which have no values yet, and of which it cannot send a lone number.
    """
    # the package has a name like the submodule's, which is torch's
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    engine: Any = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    parts: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    left = [
        (backend, "build_shm_op", _nothing),
        (engine, "_broadcast_model", _nothing),
        (parts.Init, "_zero_init_param", _part),
    ]
    with patch_attributes(left):
        yield


def running_patches() -> list[Patch]:
    """Return what is DeepSpeed's while an engine of stage 3 runs; asked where it was `joined`.

    Its linear layer. And the cores of the host, which it has a process list at each reduction
    of gradients: they are listed once.
    """
    numa: Any = importlib.import_module("deepspeed.utils.numa")
    cores = numa.get_numa_cores()
    return [
        (functional, "linear", functional.linear),
        (numa, "get_numa_cores", lambda: cores),
    ]


def note_signatures(root: nn.Module) -> None:
    """Note the signatures of the functions of autograd that stage 3 has around each module.

    torch reads them anew at each call, which took 1 of the 70 ms of an update of six layers.
    """
    for module in root.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            around: Any = vars(module).get(name)
            if around is not None:
                around.forward.__signature__ = inspect.signature(around.forward)


@contextmanager
def patch_attributes(others: Sequence[Patch]) -> Generator[None]:
    """Let attributes of modules and classes be others inside a block."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in others]
    for owner, name, other in others:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for owner, name, own in before:
            setattr(owner, name, own)


def _part(init: Any, param: Any) -> None:
    init._convert_to_deepspeed_param(param)
    param.partition()


def release_group(ranks: World) -> None:
    """Let DeepSpeed forget a world's group, which is about to be closed."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    is_whole = ranks.group is dist.group.WORLD
    if is_whole:
        comm.cdb = None
    groups._release_process_group_references(None if is_whole else ranks.group)


def _nothing(*_: object, **__: object) -> None: ...
