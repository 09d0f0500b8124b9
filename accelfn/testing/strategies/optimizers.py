# SPDX-License-Identifier: Apache-2.0
"""Torch's optimizers as values: a name and its options."""

from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from accelfn.errors import ArgumentError
from accelfn.testing.strategies.code import print_code


@attrs.frozen(init=False, repr=False)
class TorchOptimizer:
    """A factory of one of torch's optimizers, which compares and prints by its options.

    Attributes:
        name: of a class of `torch.optim`.
        options: by name, in order.

    Raises:
        ArgumentError: torch has no optimizer of that name.

    Example:
        >>> TorchOptimizer("SGD", lr=0.5)
        TorchOptimizer('SGD', lr=0.5)
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    _repr_pretty_ = print_code

    def __init__(self, name: str, **options: Any) -> None:
        """Take the name of the class, and what it is called with."""
        cls = getattr(torch.optim, name, None)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            msg = (
                f"TorchOptimizer({name!r}): torch.optim has no optimizer of that name;"
                ' expected one such as "SGD".'
            )
            raise ArgumentError(msg)
        self.__attrs_init__(name=name, options=tuple(sorted(options.items())))  # type: ignore[attr-defined]

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer of some parameters."""
        return getattr(torch.optim, self.name)(parameters, **dict(self.options))

    def __repr__(self) -> str:
        """Return the call that makes it."""
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"TorchOptimizer({self.name!r}{options})"


_DYADIC = (
    TorchOptimizer("SGD", lr=0.5),
    TorchOptimizer("SGD", lr=0.25, momentum=0.5),
    TorchOptimizer("SGD", lr=0.25, momentum=0.5, nesterov=True),
    TorchOptimizer("SGD", lr=0.5, weight_decay=0.5),
)
_OTHERS = (  # with a large eps: by a small one, a last bit of a gradient of 0 becomes a step
    TorchOptimizer("AdamW", lr=0.05, eps=1e-3),
    TorchOptimizer("Adam", lr=0.05, eps=1e-3, amsgrad=True),
    TorchOptimizer("RMSprop", lr=0.05, eps=1e-3),
    TorchOptimizer("Adagrad", lr=0.05, eps=1e-3),
)


def optimizers(*, dyadic: bool = False) -> st.SearchStrategy[TorchOptimizer]:
    """Draw optimizers: SGD, with momentum or decay, and adaptive ones.

    Args:
        dyadic: only those whose first update is exact where the gradients are.
    """
    return st.sampled_from(_DYADIC if dyadic else (*_DYADIC, *_OTHERS))
