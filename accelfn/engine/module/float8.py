# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose matrix products are in float8, by torchao."""

import importlib.util
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from accelfn.errors import ArgumentError, ModelError

Chosen: TypeAlias = Callable[[str, nn.Module], bool]

_MULTIPLE = 16
_CAPABILITY = (8, 9)
_CONVERTED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def check_installed(call: str) -> None:
    """Refuse float8 without torchao.

    Raises:
        ArgumentError: it is not installed.
    """
    if importlib.util.find_spec("torchao") is None:
        msg = f"{call}: float8 is torchao's. Install it: pip install 'accelfn[fp8]'."
        raise ArgumentError(msg)


def to_float8(model: nn.Module, layers: Chosen | None, call: str) -> None:
    """Let the linear layers of a module multiply in float8; its structure stays.

    Done once a module. Both sizes of a layer are multiples of 16, on every device, for
    that is what a GPU can multiply.

    Raises:
        ModelError: a layer's size is no multiple of 16, or no layer is meant.
        ArgumentError: the device cannot multiply in float8.
    """
    if model in _CONVERTED:
        return
    named = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (layers is None or layers(name, module))
    ]
    _check_layers(named, call)
    _check_device(named[0][1].weight.device, call)
    float8 = cast("Any", importlib.import_module("torchao.float8.float8_linear"))
    for _, module in named:
        # a layer over the very same parameters, of which only the forward is used
        twin = float8.Float8Linear.from_float(module)
        vars(module)["forward"] = partial(_forward, twin)
    _CONVERTED.add(model)


def _forward(twin: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        inputs = inputs.to(torch.get_autocast_dtype(kind))
    # torchao would cast them too, on CUDA alone, by a call that torch warns of
    with torch.autocast("cuda", enabled=False):
        return twin.forward(inputs)


def _check_layers(named: list[tuple[str, nn.Linear]], call: str) -> None:
    if not named:
        msg = f"{call}: no torch.nn.Linear is meant, and only they multiply in float8."
        raise ModelError(msg)
    odd = [
        f"{name} ({module.in_features} to {module.out_features})"
        for name, module in named
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    ]
    if odd:
        msg = (
            f"{call}: the sizes of {len(odd)} linear layers are no multiples of"
            f" {_MULTIPLE}, which float8 needs: {', '.join(odd[:5])}. Leave them in"
            " bfloat16: layers=lambda name, layer: layer.out_features % 16 == 0."
        )
        raise ModelError(msg)


def _check_device(device: torch.device, call: str) -> None:
    if device.type == "cpu":
        return
    if device.type == "cuda":
        have = torch.cuda.get_device_capability(device)
        if have >= _CAPABILITY:
            return
        found = f"this GPU's is {have[0]}.{have[1]}"
    else:
        found = f"this is a device of type {device.type!r}"
    msg = (
        f"{call}: products in float8 need a GPU of compute capability 8.9 or more; {found}."
        " Use af.autocast('bf16')."
    )
    raise ArgumentError(msg)
