# SPDX-License-Identifier: Apache-2.0
"""`accelfn env`: this machine, as whoever answers a bug report must know it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from torch.utils.collect_env import get_env_info, pretty_str

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
_VARIABLES = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_",
        "ACCELFN_AXES",
    ),
    *("TORCH", "PYTORCH_", "GLOO_", "NCCL_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH"),
    *("CUBLAS_WORKSPACE", "OMP_", "MKL_", "KMP_", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_", "SLURM_JOB_ID"),
    *("SLURM_JOB_NUM_NODES", "OMPI_COMM_WORLD_", "PMI", "MPI_LOCAL"),
    *("MV2_COMM_WORLD_",),
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


def describe(file: Path | None, *, as_json: bool) -> str:
    """Return this machine as torch describes it, packages and the settings in force, as text.

    Args:
        file: of the settings; what is wrong with it stands where they would.
        as_json: whether a program reads it.
    """
    machine = get_env_info()
    found: dict[str, dict[str, Any]] = {
        "packages": _packages(),
        "variables": _variables(),
        "settings": _settings(file),
    }
    if as_json:
        return json.dumps({"machine": machine._asdict(), **found}, indent=2) + "\n"
    lines = [pretty_str(machine)]
    for title, rows in found.items():
        lines.append(title)
        lines += [f"  {name:24}{value}" for name, value in rows.items()] or ["  none"]
    return "\n".join(lines) + "\n"


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


def _packages() -> dict[str, str]:
    found: dict[str, str] = {"imported from": str(Path(__file__).parents[1])}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _variables() -> dict[str, str]:
    return {
        name: "(hidden)" if any(each in name for each in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES)
    }
