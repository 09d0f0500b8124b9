# SPDX-License-Identifier: Apache-2.0
"""What lies at a path that is not what was asked for, and which function reads it."""

from pathlib import Path

from accelfn.base import paths

_SAFE = "It has weights of a model; af.import_model(model, {path}) reads them."
_TORCH = (
    "It has what torch.save wrote; af.import_torch_weights(model, {path}) reads it."
)
_OURS = (
    "It is a checkpoint of accelfn; af.load(state, {path}) reads it, and of it the weights"
    ' alone af.load_part(state, {path}, "params").'
)
_STATE = "It has a training that another library saved; af.import_state(state, {path}) reads it."
_ZERO = (
    "It is a checkpoint of DeepSpeed; af.import_state(state, {path}) reads what ZeRO saves of"
    " plain models, with the folder of a tag in it."
)
_IN_FOLDERS = {
    "manifest.json": _OURS,
    ".metadata": _STATE,
    "optimizer.bin": _STATE,
    "zero_to_fp32.py": _ZERO,
    "model.safetensors": _SAFE,
    "model.safetensors.index.json": _SAFE,
    "pytorch_model.bin": _TORCH,
    "pytorch_model.bin.index.json": _TORCH,
}
_ENDINGS = {
    ".safetensors": _SAFE,
    ".safetensors.index.json": _SAFE,
    ".bin": _TORCH,
    ".bin.index.json": _TORCH,
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".ckpt": _TORCH,
}


def reader_of(path: Path) -> str:
    """Return sentences that say what reads a file or folder, behind a space; or nothing."""
    found: list[str] = []
    if paths.is_directory(path):
        found = [
            text for name, text in _IN_FOLDERS.items() if paths.exists(path / name)
        ]
    elif paths.is_file(path):
        found = [t for ending, t in _ENDINGS.items() if path.name.endswith(ending)]
    said = dict.fromkeys(text.format(path=repr(str(path))) for text in found)
    return "".join(f" {text}" for text in said)


def checkpoints_near(path: Path, name: str) -> str:
    """Return a sentence that names checkpoints in a folder, or beside it, behind a space.

    Args:
        path: where there is none.
        name: of the file that a checkpoint has.
    """
    inside = paths.is_directory(path)
    folder = path if inside else path.parent
    try:
        found = sorted(
            each.name for each in folder.iterdir() if paths.is_file(each / name)
        )
    except OSError:  # it is not there, or not ours to read
        found = []
    if not found:
        return " af.save(state, directory) writes one."
    shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    return f" {'In' if inside else 'Beside'} it there are {len(found)}: {shown}."
