# SPDX-License-Identifier: Apache-2.0
"""What a run gives to its trackers, as the plain values that every backend takes."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from accelfn.base.arguments import is_integer
from accelfn.errors import ArgumentError
from accelfn.state.metrics import Metrics
from accelfn.world import World

Number: TypeAlias = float | torch.Tensor | np.generic
"""One number, wherever it is: its conversion waits for the device."""
Pixels: TypeAlias = NDArray[np.uint8]
"""(height, width, channels), with 1, 3 or 4 channels."""
"""One axis."""
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

MOST_STEPS = 2**63
"""What no backend's number of updates reaches."""

_NUMBERS = (int, float, np.number, np.bool_)
_NO_REAL_NUMBERS = (np.complexfloating, np.timedelta64)  # though numpy's class says so


def check_step(step: object) -> None:
    """Refuse what is no count of updates."""
    if not is_integer(step, 0) or step >= MOST_STEPS:
        msg = f"step={step!r}: expected the number of updates so far, state.step."
        raise ArgumentError(msg)


def check_names(what: str, values: object) -> None:
    """Refuse what is no mapping by name.

    Raises:
        ArgumentError: it is none, or a name is empty, no text that can be written, or
            `step`.
    """
    if not isinstance(values, Mapping):
        msg = f"{what}: expected a mapping by name, got {type(values).__name__}."
        raise ArgumentError(msg)
    for name in cast("Mapping[Any, Any]", values):
        if not isinstance(name, str) or not name or not _is_whole(name):
            msg = f"{what}: the name {name!r} is no text; give {what} by name."
            raise ArgumentError(msg)
        if name == "step":
            msg = f"{what}: 'step' is the tracker's second argument; take another name."
            raise ArgumentError(msg)


def _is_whole(text: str) -> bool:
    """Return whether a text has no half of a letter, which no file of text can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_metrics(metrics: object, worlds: tuple[World, ...]) -> None:
    """Refuse what are no numbers by name; nothing is read from a device.

    Raises:
        ArgumentError: a value is not one number; or the metrics are this rank's alone.
    """
    check_names("metrics", metrics)
    if isinstance(metrics, Metrics) and any(world.loss.size > 1 for world in worlds):
        msg = (
            "These Metrics are what this rank alone saw: track af.mean(metrics, world),"
            " or dict(metrics) if rank 0's part is what you want."
        )
        raise ArgumentError(msg)
    for name, value in cast("Mapping[str, Any]", metrics).items():
        if not _is_one_number(value):
            msg = f"metrics: {name!r} is {_shown(value)}; expected one real number."
            raise ArgumentError(msg)


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        where = " on meta" if value.is_meta else ""
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}{where}"
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return f"an array of shape {array.shape}, {array.dtype}"
    if isinstance(value, int):  # one that no float holds, and Python may not spell
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _is_one_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta)
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return array.size == 1 and np.can_cast(array.dtype, np.float64, "same_kind")
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            return False
    return isinstance(value, _NUMBERS) and not isinstance(value, _NO_REAL_NUMBERS)


def floats(metrics: Mapping[str, Number]) -> dict[str, float]:
    """Return numbers on the host: the one wait for the device, however many there are."""
    away = {
        name: value.detach().reshape(()).to(torch.float64)
        for name, value in metrics.items()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
    read = torch.stack(list(away.values())).tolist() if away else []
    fetched = dict(zip(away, read, strict=True))
    return {
        name: fetched[name] if name in fetched else _float(value)
        for name, value in metrics.items()
    }


def _float(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    return float(value.item() if isinstance(value, np.ndarray) else value)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, and on a device that keeps values."""
    return tensor.layout == torch.strided and not tensor.is_meta


def check_image(name: str, image: object) -> None:
    """Refuse what is no image.

    Raises:
        ArgumentError: it is no tensor (channels, height, width) of uint8, or of numbers.
    """
    if (
        not isinstance(image, torch.Tensor)
        or image.ndim != 3
        or image.shape[0] not in (1, 3, 4)
        or not image.numel()
        or not has_values(image)
        or not (image.dtype == torch.uint8 or image.is_floating_point())
    ):
        is_tensor = isinstance(image, torch.Tensor)
        shown = _shown(image) if is_tensor else type(image).__name__
        msg = (
            f"images: {name!r} is {shown}; expected a tensor (channels, height, width)"
            " with 1, 3 or 4 channels, uint8 or floating-point from 0 to 1."
        )
        raise ArgumentError(msg)


def pixels(name: str, image: torch.Tensor) -> Pixels:
    """Return an image as bytes.

    Raises:
        ArgumentError: a floating-point image is not from 0 to 1.
    """
    image = image.detach().cpu()
    if image.is_floating_point():
        image = image.double()
        low, high = float(image.min()), float(image.max())
        if not (low >= 0 and high <= 1):
            msg = (
                f"images: {name!r} is from {low:.6g} to {high:.6g}; floating-point images"
                " are from 0, black, to 1."
            )
            raise ArgumentError(msg)
        image = (image * 255).round().to(torch.uint8)
    return image.permute(1, 2, 0).contiguous().numpy()


def settings(given: object) -> dict[str, Plain]:
    """Return hyperparameters as plain data: nested, by name.

    Raises:
        ArgumentError: it is no mapping, it has itself in it, or two names in it are one.
    """
    if not isinstance(given, Mapping):
        msg = (
            f"hyperparameters: expected a mapping by name, got {type(given).__name__}."
        )
        raise ArgumentError(msg)
    try:
        told = _plain_mapping(cast("Mapping[Any, Any]", given))
        flat(told)
    except RecursionError:
        msg = "hyperparameters: they are nested too deeply, or have themselves in them."
        raise ArgumentError(msg) from None
    return told


def _plain_mapping(given: Mapping[Any, Any]) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    for name, value in given.items():
        if str(name) in found:
            raise _twice(str(name))
        found[str(name)] = plain(value)
    return found


def _twice(name: str) -> ArgumentError:
    return ArgumentError(
        f"hyperparameters: two of them are named {name!r}, of which one would be lost;"
        " rename one. Backends write nested names with dots, and numbers as text."
    )


def plain(value: object) -> Plain:
    """Return a setting as plain data: what is no number, text or container as its repr."""
    value = _in_python(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(cast("Mapping[Any, Any]", value))
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in cast("list[Any]", value)]
    return repr(value)


def _in_python(value: Any) -> Any:
    """Return a number of numpy's, or of a tensor without a dimension, as Python's own."""
    kinds = (np.generic, np.ndarray, torch.Tensor)
    if not isinstance(value, kinds) or value.ndim or not _is_one_number(value):
        return value
    number = value.item()
    return float(number) if isinstance(number, np.floating) else number


def flat(values: Mapping[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Return settings by names with dots, for backends without nested ones; lists as text.

    Raises:
        ArgumentError: two would have one name.
    """
    found: dict[str, Plain] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            added = flat(value, f"{prefix}{name}.")
        else:
            is_text = value is None or isinstance(value, (list, dict))
            added = {prefix + name: str(value) if is_text else value}
        twice = found.keys() & added.keys()
        if twice:
            raise _twice(min(twice))
        found |= added
    return found


def spelt(value: Plain) -> Any:
    """Return plain data as JSON has it: "NaN", "Infinity" and "-Infinity" are texts there."""
    if isinstance(value, dict):
        return {name: spelt(each) for name, each in value.items()}
    if isinstance(value, list):
        return [spelt(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value
