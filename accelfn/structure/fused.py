# SPDX-License-Identifier: Apache-2.0
"""An optimizer's fused implementation, chosen where the choice was left open."""

from collections.abc import Callable
from typing import Any, cast

import attrs
from torch import nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import (
    _get_fused_kernels_supported_devices,  # pyright: ignore[reportPrivateUsage]
)

from accelfn.base.calling import called
from accelfn.errors import OptimizerError


@called
@attrs.frozen(repr=False)
class fused:
    """Let torch update all parameters in one kernel, where the optimizer has such a one.

    A factory of optimizers around another, for `TrainState.create(optimizer=...)` and the
    parts of `partition`. torch itself leaves the fused kernels out unless asked, because
    they round otherwise; so does accelfn. What the user chose (`fused=` or `foreach=`
    with True or False) stays.

    Acts on: nothing; it is part of the definition.

    Args:
        factory: takes `(name, parameter)` pairs and keyword options, as torch's own
            optimizers and `functools.partial` of them do.

    Law: the same update up to rounding.

    Cost:
        On one CPU thread 0.2 to 0.7 of the time of torch's default, a loop over the
        parameters; `foreach=True` takes 0.8 to 2.2 of it, and is therefore not chosen.

    Raises:
        OptimizerError: when the state is created: the optimizer has no fused
            implementation, or none for these parameters; or the factory takes no `fused=`.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> fused(partial(torch.optim.AdamW, lr=3e-4))  # doctest: +ELLIPSIS
        af.fused(functools.partial(...))
    """

    factory: Callable[..., Optimizer]

    def __call__(self, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        """Return the factory's optimizer, fused unless it is decided already."""
        optimizer = cast("Any", self.factory(named))
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer) or "fused" not in optimizer.defaults:
            msg = f"{self!r}: {kind} has no fused implementation. Leave af.fused out."
            raise OptimizerError(msg)
        ways = ("fused", "foreach")
        chosen = [group.get(way) for group in optimizer.param_groups for way in ways]
        if any(choice is not None for choice in chosen):
            return optimizer
        devices = _get_fused_kernels_supported_devices()
        for name, param in named:  # torch asks at the first step, which is too late
            if param.device.type not in devices or not param.is_floating_point():
                msg = (
                    f"{self!r}: {kind} cannot be fused here: {name!r} is {param.dtype} on"
                    f" {param.device.type}; expected real floating-point numbers on one of"
                    f" {', '.join(devices)}. Leave af.fused out."
                )
                raise OptimizerError(msg)
        try:
            return self.factory(named, fused=True)
        except (RuntimeError, TypeError) as error:
            msg = f"{self!r}: {kind} cannot be fused here: {error}"
            raise OptimizerError(msg) from error

    def __repr__(self) -> str:
        """Show the factory."""
        return f"af.fused({self.factory!r})"
