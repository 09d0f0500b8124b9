# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state of parameters of which a rank has parts, as a state's values."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accelfn.base import shards
from accelfn.state.values import OptState

# torch's DTensors have no public way to be made of parts without an operator
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false


class Parts:
    """Knows the values of a state, which are DTensors, of the parts that are stepped."""

    def __init__(
        self,
        split: Collection[str],
        params: Mapping[str, torch.nn.Parameter],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        """Take the names of those that are split, what is stepped, and a state's values."""
        self._split, self._params, self.state = split, params, state

    def shown(self, opt_state: OptState) -> OptState:
        """Return the optimizer's state as a state's values: what is a part, as a DTensor."""
        return {n: self._entry(n, e) for n, e in opt_state.items()}

    def _entry(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        if name not in self._split:
            return entry
        value, param = self.state[name], self._params[name]
        return {
            key: part_like(value, part) if _fits(part, param) else part
            for key, part in entry.items()
        }

    def raw(self, opt_state: OptState) -> OptState:
        """Return the parts of a state's values."""
        return {
            name: {key: _local(value) for key, value in entry.items()}
            for name, entry in opt_state.items()
        }


def parameter(value: torch.Tensor, like: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return what is stepped in the place of a state's value: the part, in its memory."""
    return torch.nn.Parameter(shards.local(value), requires_grad=like.requires_grad)


def part_like(value: Any, part: torch.Tensor) -> torch.Tensor:
    """Return what has a parameter's shape as it lies; of its own dtype."""
    spec = value._spec
    meta = spec.tensor_meta._replace(dtype=part.dtype)
    spec = dataclasses.replace(spec, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def _fits(part: Any, param: torch.Tensor) -> bool:
    return (
        isinstance(part, torch.Tensor) and part.ndim > 0 and part.shape == param.shape
    )


def _local(value: Any) -> Any:
    return shards.local(value) if isinstance(value, torch.Tensor) else value
