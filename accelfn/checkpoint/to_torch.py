# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as torch's distributed checkpoints (DCP) are, which its own tools read."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accelfn.checkpoint import disk
from accelfn.checkpoint.elastic import Source as SavedState


def write_distributed(
    folder: Path, model: Mapping[str, torch.Tensor], source: SavedState
) -> int:
    """Write a model, and what its optimizer keeps, to a folder; return the bytes of values.

    Keys are those of torch's `get_state_dict`: `model.<name>`, and
    `optim.state.<parameter>.<entry>`; `step` counts the updates.
    """
    opt_state: dict[str, dict[str, Any]] = source.fields()["opt_state"]
    kept = {name: entry for name, entry in opt_state.items() if name in model}
    step = torch.tensor(source.manifest.step)
    _save(folder, {"model": dict(model), "optim": {"state": kept}, "step": step})
    for path in folder.rglob("*"):
        disk.flush(path)
    entries = (each for entry in kept.values() for each in entry.values())
    tensors = (each for each in entries if isinstance(each, torch.Tensor))
    return sum(each.nbytes for each in (*model.values(), *tensors))


def _save(folder: Path, held: dict[str, Any]) -> None:
    # a second, that only this needs
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import StorageMeta  # noqa: PLC0415

    writer = dcp.FileSystemWriter(folder)
    # else it has the folder's name of now, and a random one
    writer.storage_meta = StorageMeta
    with warnings.catch_warnings():  # that it saves in one process, as it is told
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.save(held, storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:  # around what went wrong, Ctrl-C too
            raise next(iter(error.failures.values()))[0] from error
