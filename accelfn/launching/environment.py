# SPDX-License-Identifier: Apache-2.0
"""`accelfn env`: this machine, as whoever answers a bug report must know it."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelfn.base import accelerator
from accelfn.errors import LaunchError
from accelfn.launching.file import read
from accelfn.launching.settings import Settings

_PACKAGES = (
    *("accelfn", "torch", "torchdata", "numpy", "safetensors", "cloudpickle"),
    *("rich", "matplotlib", "tensorboard", "wandb", "comet_ml", "mlflow"),
    *("mlflow-skinny", "attrs", "accelerate", "transformers", "datasets", "deepspeed"),
)
# how names begin of variables that change what a run does; what else the environment has is
# nobody's business
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "axes": ("ACCELFN_AXES",),
    "meeting": ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", "GLOO_", "NCCL_"),
    "threads": ("OMP_", "MKL_", "KMP_"),
    "torch": ("TORCH_", "PYTORCH_", "CUBLAS_WORKSPACE"),
    "CUDA": ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH"),
    "SLURM's task": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
    "SLURM's job": ("SLURM_STEP_", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
    "Open MPI": ("OMPI_COMM_WORLD_", "PMIX_NAMESPACE"),
    "MPICH": ("PMI_", "MPI_LOCAL", "MV2_COMM_WORLD_"),
}
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


def describe(file: Path | None, *, as_json: bool) -> str:
    """Return this machine, and the settings in force, as text.

    Args:
        file: of the settings; what is wrong with it stands where they would.
        as_json: whether a program reads it.
    """
    found = _found(file)
    if as_json:
        return json.dumps(found, indent=2) + "\n"
    lines: list[str] = []
    for title, rows in found.items():
        lines.append(title)
        lines += [f"  {name:24}{value}" for name, value in rows.items()] or ["  none"]
    return "\n".join(lines) + "\n"


def _found(file: Path | None) -> dict[str, dict[str, Any]]:
    return {
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices(),
        "backends": {
            name: dist.is_backend_available(name)
            for name in ("gloo", "nccl", "mpi", "ucc")
        },
        "variables": _variables(),
        "settings": _settings(file),
    }


def _settings(file: Path | None) -> dict[str, str]:
    try:
        written = {} if file is None else read(file)
        settings = Settings.of({}, written, str(file), is_whole=False)
    except LaunchError as error:
        return {"error": str(error)}
    return {
        name: f"{each.value} ({each.source})"
        for name, each in settings.by_name.items()
        if each.value is not None
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "cuda": str(torch.version.cuda)}


def _machine() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "executable": sys.executable,
        "package": str(Path(__file__).parents[1]),
        "cores": str(len(os.sched_getaffinity(0))),
        "torch threads": str(torch.get_num_threads()),
    }


def _devices() -> dict[str, str]:
    kind, count = accelerator.kind(), accelerator.count()
    named: Any = getattr(torch.get_device_module(kind), "get_device_name", None)
    names = {f"{kind}:{i}": named(i) if named else kind for i in range(count)}
    return {"cpu": platform.processor() or platform.machine(), **names}


def _variables() -> dict[str, str]:
    shown = tuple(chain.from_iterable(_VARIABLES.values()))
    return {
        name: "(hidden)" if any(each in name for each in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(shown)
    }
