# SPDX-License-Identifier: Apache-2.0
"""The package DeepSpeed: imported when it is asked for, and kept to the world's own group."""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.nn import functional

from accelfn.errors import ArgumentError
from accelfn.world import World

Exchange: TypeAlias = tuple[Any, str, Any]
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
def joined(ranks: World) -> Generator[Any, None, None]:
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
        with _left_out():
            yield deepspeed
    finally:
        logger.setLevel(level)
        groups._WORLD_GROUP = before
        functional.linear = linear


@contextmanager
def _left_out() -> Generator[None]:
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
    with exchanged(left):
        yield


def of_running() -> list[Exchange]:
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
def exchanged(others: Sequence[Exchange]) -> Generator[None]:
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


def parted(ranks: World) -> None:
    """Let DeepSpeed forget a world's group, which is about to be closed."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    is_whole = ranks.group is dist.group.WORLD
    if is_whole:
        comm.cdb = None
    groups._release_process_group_references(None if is_whole else ranks.group)


def _nothing(*_: object, **__: object) -> None: ...
