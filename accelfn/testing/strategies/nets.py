# SPDX-License-Identifier: Apache-2.0
"""Small models with what training stumbles over: ties, frozen and unused parts, buffers."""

from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

from accelfn.base.arguments import integer
from accelfn.errors import ArgumentError
from accelfn.testing.strategies.code import as_code, print_code
from accelfn.testing.strategies.lift import lifted

_FEATURES = integer(1, "a number of features", within="")
_LAYERS = integer(0, "a number of hidden layers", within="")


def _is_floating(_owner: object, _field: object, value: object) -> None:
    dtype = getattr(torch, str(value), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        msg = (
            f'Net(dtype={value!r}): expected a floating-point dtype, such as "float32".'
        )
        raise ArgumentError(msg)


@attrs.frozen(kw_only=True, repr=False)
class Net:
    """A recipe of a small model, and its factory: `Net(depth=1)()` is a module.

    Attributes:
        depth: how many hidden layers.
        width: how many features each of them gives.
        bias: whether layers add one.
        tied: two more hidden layers that share one weight.
        frozen: a layer in front that is not trained.
        unused: a parameter that takes no part in the output.
        norm: batch normalisation, and its buffers. Its one channel is the features, so a
            batch of one sample has statistics too.
        dropout: draws random numbers in training.
        dyadic: weights are -1, 1 and 2, and sums of dyadic data are exact.
        dtype: of parameters and buffers; inputs are converted.
        inputs: features of a sample.
        outputs: numbers that the model gives for each.

    Example:
        >>> Net(depth=1, width=2)().head
        Linear(in_features=2, out_features=2, bias=True)
    """

    depth: int = attrs.field(default=0, validator=_LAYERS)
    width: int = attrs.field(default=1, validator=_FEATURES)
    bias: bool = True
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    norm: bool = False
    dropout: bool = False
    dyadic: bool = False
    dtype: str = attrs.field(default="float64", validator=_is_floating)
    inputs: int = attrs.field(default=3, validator=_FEATURES)
    outputs: int = attrs.field(default=2, validator=_FEATURES)

    __repr__ = as_code
    _repr_pretty_ = print_code

    def __attrs_post_init__(self) -> None:
        """Refuse statistics of one number."""
        if self.norm and self.inputs < 2:
            msg = f"{self!r}: norm=True takes the statistics of 2 inputs or more."
            raise ArgumentError(msg)

    @property
    def per_sample(self) -> bool:
        """Whether an output depends on its own sample alone, however a batch is split."""
        return not (self.norm or self.dropout)

    def __call__(self) -> nn.Module:
        """Return the model, its weights drawn from torch's generator unless dyadic."""
        return _Module(self)


class _Module(nn.Module):
    """What a recipe makes."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        wide = net.inputs
        self.features = nn.ModuleList()
        if net.frozen:
            self.features.append(nn.Linear(wide, wide, bias=net.bias))
        self.norm = nn.BatchNorm1d(1) if net.norm else nn.Identity()
        self.hidden = nn.ModuleList()
        for _ in range(net.depth):
            self.hidden.append(nn.Linear(wide, net.width, bias=net.bias))
            wide = net.width
        if net.tied:
            first, again = (nn.Linear(wide, wide, bias=net.bias) for _ in range(2))
            again.weight = first.weight
            self.hidden.extend([first, again])
        if net.unused:
            self.unused = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(0.5) if net.dropout else nn.Identity()
        self.head = nn.Linear(wide, net.outputs, bias=net.bias)
        if net.dyadic:
            _set_dyadic(self)
        self.features.requires_grad_(requires_grad=False)
        self.to(getattr(torch, net.dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a batch."""
        features = inputs.to(self.head.weight.dtype)
        for layer in self.features:
            features = layer(features)
        features = self.norm(features.unsqueeze(1)).squeeze(1)
        for layer in self.hidden:
            # leaky, so that no drawn weights cut off all gradients; 0.5 is dyadic
            features = nn.functional.leaky_relu(layer(features), 0.5)
        return self.head(self.dropout(features))


def _set_dyadic(module: nn.Module) -> None:
    """Set the weights to -1, 1 and 2 in turn."""
    values = torch.tensor([-1.0, 1.0, 2.0])
    for shift, param in enumerate(module.parameters()):
        turn = (torch.arange(param.numel()) + shift) % len(values)
        param.data = values[turn].view_as(param)


def models(**fields: Any) -> st.SearchStrategy[Net]:
    """Draw recipes of small models.

    Args:
        fields: fields of `Net` that are given: a value, or a strategy of values.

    Example:
        >>> for_any_split = models(norm=False, dropout=False)
    """
    return st.builds(Net, **lifted(fields, _DRAWN))


_DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "depth": st.integers(0, 2),
    "width": st.integers(1, 4),
    "bias": st.sampled_from([True, False]),
    "tied": st.booleans(),
    "frozen": st.booleans(),
    "unused": st.booleans(),
    "norm": st.booleans(),
    "dropout": st.booleans(),
}
