# SPDX-License-Identifier: Apache-2.0
"""The commands `accelfn env`, for bug reports, and `accelfn checkpoint`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
from torch.utils.collect_env import get_env_info, pretty_str

from accelfn.errors import CheckpointCorruptError, CheckpointError, LaunchError
from accelfn.launching.settings import Settings, read
from accelfn.plug import Source, arguments, checkpoints_in, commit, files
from accelfn.weights.torch_files import write_distributed

_PACKAGES = (
    *("accelfn", "torch", "torchdata", "numpy", "safetensors", "cloudpickle"),
    *("rich", "matplotlib", "tensorboard", "wandb", "comet_ml", "mlflow"),
    *("mlflow-skinny", "attrs", "accelerate", "transformers", "datasets", "deepspeed"),
)
# prefixes of the environment variables to show; other variables may be private
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_", "ACCELFN_AXES", "TORCH", "PYTORCH_", "GLOO_", "NCCL_", "CUDA_LAUNCH"),
    *("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE", "OMP_", "MKL_", "KMP_", "PMI"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_"),
    *("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "OMPI_COMM_WORLD_", "MPI_LOCAL"),
    "MV2_COMM_WORLD_",
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


def describe(file: Path | None, *, as_json: bool) -> str:
    """Return a text about this machine, its packages and the current settings.

    Args:
        file: the settings file. If the file has an error, the text shows the error instead of
            the settings.
        as_json: whether to return JSON.
    """
    machine = get_env_info()
    sections: dict[str, dict[str, Any]] = {
        "packages": _packages(),
        "variables": _variables(),
        "settings": _settings(file),
    }
    if as_json:
        return json.dumps({"machine": machine._asdict(), **sections}, indent=2) + "\n"
    lines = [pretty_str(machine)]
    for title, rows in sections.items():
        lines.append(title)
        lines += [f"  {name:24}{value}" for name, value in rows.items()] or ["  none"]
    return "\n".join(lines) + "\n"


def _settings(file: Path | None) -> dict[str, str]:
    try:
        table = {} if file is None else read(file)
        settings = Settings.of({}, table, str(file), is_whole=False)
    except LaunchError as error:
        return {"error": str(error)}
    rows = {name: s for name, s in settings.by_name.items() if s.value is not None}
    return {name: f"{s.value} ({s.source})" for name, s in rows.items()}


def _packages() -> dict[str, str]:
    versions: dict[str, str] = {"imported from": str(Path(__file__).parents[1])}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _variables() -> dict[str, str]:
    return {
        name: "(hidden)" if any(word in name for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES)
    }


# `accelfn checkpoint`: inspect, verify and export checkpoints without a model.


_MODEL = "model.safetensors"
_MANIFEST = "manifest.json"
Bar: TypeAlias = Callable[[str, int], AbstractContextManager[files.OnRead]]
"""Shows a progress bar in a `with` block; call the yielded function with the bytes read."""


def ls(directory: str) -> tuple[list[str], int]:
    """Return table rows for a store's checkpoints and interrupted saves, and exit code 0."""
    store = Path(directory)
    checkpoints = checkpoints_in(store)
    if not checkpoints:
        msg = f"{store} has no checkpoints (folders such as step-00000000)."
        raise CheckpointError(msg)
    table = [("step", "size", "age", "whole", "metrics")]
    for step, folder in checkpoints.items():
        with suppress(FileNotFoundError):
            row = _row(folder, step)
            if files.is_there(folder):  # a running job may have removed it
                table.append(row)
    *widths, _ = (max(map(len, column)) for column in zip(*table, strict=True))
    rows = ["  ".join(map(str.rjust, row, [*widths, 0])).rstrip() for row in table]
    names = sorted(path.name for path in store.glob(".tmp-*"))
    reason = "is being written, or was left by an interrupted save"
    rows += [f"{name} {reason}" for name in names]
    return rows, 0


def _row(folder: Path, step: int) -> tuple[str, str, str, str, str]:
    age = _age(time.time() - (folder / _MANIFEST).stat().st_mtime)
    files_in = filter(arguments.is_file, folder.rglob("*"))
    size = _bytes(sum(path.stat().st_size for path in files_in))
    try:
        sources = Source.all_at(folder)
        _check_lengths(folder, sources)
    except CheckpointError as error:
        return str(step), size, age, "no", str(error)
    metrics = next(iter(sources.values())).manifest.metrics
    short = (f"{name} {value:.6g}" for name, value in metrics.items())
    columns = (", ".join(short), ", ".join(sources))
    return str(step), size, age, "yes", "  ".join(filter(None, columns))


def _check_lengths(folder: Path, sources: Mapping[str, Source]) -> None:
    for state, source in sources.items():
        for name, file in source.manifest.files.items():
            length = (folder / state / name).stat().st_size
            if length != file.size:
                msg = f"{Path(state, name)} has {length} bytes, but should have {file.size}"
                raise CheckpointError(msg)


def verify(directory: str, *, bar: Bar) -> tuple[list[str], int]:
    """Verify the digests of a checkpoint or a store; return table rows and an exit code."""
    store = Path(directory)
    folders = list(checkpoints_in(store).values()) or [store]
    rows, code = list[str](), 0
    for folder in folders:
        results = [*_verify_files(folder, bar)]
        if folder != store and not files.is_there(folder):
            results = [(f"{folder} was removed by its run during this check", True)]
        rows += [row for row, _ in results]
        code = code if all(is_whole for _, is_whole in results) else 1
    return rows, code


def _verify_files(folder: Path, bar: Bar) -> Iterator[tuple[str, bool]]:
    try:
        sources = Source.all_at(folder)
    except CheckpointCorruptError as error:
        yield str(error), False
        return
    yield f"{folder / _MANIFEST}: whole", True  # the manifest has the digests
    with bar(folder.name, sum(map(_size, sources.values()))) as advance:
        for state, source in sources.items():
            for name, file in source.manifest.files.items():
                path = folder / state / name
                try:
                    files.read_tensors(path, file, frozenset(), on_read=advance)
                except CheckpointCorruptError as error:
                    yield str(error), False
                else:
                    yield f"{path}: whole", True


def _size(source: Source) -> int:
    return sum(file.size for file in source.manifest.files.values())


def export(
    directory: str,
    out: str,
    slot: str | None = None,
    kind: str = "safetensors",
    *,
    bar: Bar,
) -> tuple[list[str], int]:
    """Write a checkpoint's model to a new directory, as `af.export_model` does.

    With `kind="dcp"`, write the model and the optimizer's state as a torch distributed
    checkpoint.
    """
    folder = _folder(directory)
    source = Source.at(folder)
    manifest, names = source.manifest, _model_tensors(source, slot)
    read_from = {manifest.file_of(name, 0) for name in names.values()}
    size = sum(manifest.files[file].size for file in read_from)
    with bar(folder.name, size) as advance:
        source = attrs.evolve(source, on_read=advance)
        tensors = source.tensors(set(names.values()))
    model = {name: tensors[tensor] for name, tensor in names.items()}
    with commit.new_directory(Path(out)) as partial:
        if kind == "dcp":
            opt_state, target = source.fields()["opt_state"], ""
            size = write_distributed(partial, model, opt_state, manifest.step)
        else:
            target = _MODEL
            size = files.write_tensors(partial / _MODEL, model, {"format": "pt"}).size
    return [f"{Path(out) / target}: {len(names)} tensors, {_bytes(size)}"], 0


def _model_tensors(source: Source, slot: str | None) -> dict[str, str]:
    """Return a dict from each exported name to the name of the tensor in the checkpoint.

    Raises:
        CheckpointError: ranks saved different models, some parameters were not saved, or the
            slot does not contain parameters.
    """
    folder, manifest = source.folder, source.manifest
    fields = {field: _tensors_of(source, field) for field in ("params", "buffers")}
    params, unit = fields["params"], "params"
    if slot is not None:
        unit = f"slots.{slot.removeprefix('slots.')}"
        tensors = _tensors_of(source, unit)
        if not tensors or tensors.keys() - params.keys():
            slots = [tree for tree in manifest.trees if tree.startswith("slots.")]
            msg = (
                f"{folder}: {unit} is not a copy of the model's parameters. Slots of the"
                f" checkpoint: {arguments.list_names(slots) or 'none'}."
            )
            raise CheckpointError(msg)
        params |= tensors
    names = sorted(set(params.values()) & manifest.differing)
    if names or manifest.kept.keys() - params.keys():
        reason = f"ranks have different values of {arguments.list_names(names)}"
        if not names:
            reason = f"{arguments.list_names(sorted(manifest.kept))} were not saved"
        msg = f"{folder}: {reason}. Load the checkpoint with af.load, then af.export_model."
        raise CheckpointError(msg)
    buffers = {n: t for n, t in fields["buffers"].items() if n in manifest.persistent}
    return {**params, **buffers}


def _tensors_of(source: Source, unit: str) -> dict[str, str]:
    """Return the tensor name for each key of a field or slot; {} if other values are in it."""
    tree = source.manifest.trees.get(unit)
    table: Any = tree.get("dict") if isinstance(tree, dict) else None
    tensors = {
        name: value["tensor"]
        for name, value in cast("dict[str, Any]", table or {}).items()
        if isinstance(value, dict) and "tensor" in value
    }
    return tensors if len(tensors) == len(table or {}) else {}


def _folder(directory: str) -> Path:
    """Return the directory of a checkpoint; for a store, of its newest checkpoint."""
    folder = Path(directory)
    return [folder, *checkpoints_in(folder).values()][-1]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
