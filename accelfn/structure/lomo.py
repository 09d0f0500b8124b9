# SPDX-License-Identifier: Apache-2.0
"""The optimizers of the package lomo-optim, which update parameters from hooks of their own.

Theirs run in the backward pass before gradients are divided or cross the ranks. Here the
package's update of one parameter is called when its gradient is complete.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.base.calling import called
from accelfn.errors import OptimizerError
from accelfn.structure.partition import NamedParameters

_OURS = {
    "clip_grad_norm": "af.clip_grad_norm, which sees all gradients",
    "loss_scale": "af.autocast('fp16')",
    "loss_scale_args": "af.autocast('fp16')",
}
_MOMENTS = {1: ("exp_avg_sq",), 2: ("exp_avg_sq_row", "exp_avg_sq_col")}


class _Model:
    """What the package takes for a model: the one parameter that is to be updated."""

    def __init__(self) -> None:
        self.named: NamedParameters = []

    def named_parameters(self) -> NamedParameters:
        """Return the parameter; none while the package would hang hooks on it."""
        return self.named

    def parameters(self) -> list[torch.Tensor]:
        """Return something to make a torch optimizer of."""
        return [torch.zeros(1)]


class PerParameter(Optimizer):
    """A torch optimizer whose step calls the package's update, parameter by parameter."""

    def __init__(
        self, named: NamedParameters, kind: type, options: dict[str, Any]
    ) -> None:
        """Take named parameters, a class of the package, and its options."""
        made = _made(kind, options)[0]
        hyper = {"lr": made.lr, "weight_decay": made.weight_decay}
        super().__init__([param for _, param in named], hyper)
        self.kind, self.options = kind, options
        self.adapts = hasattr(made, "exp_avg_sq")
        for name, param in named:
            if self.adapts and param.ndim not in _MOMENTS:
                msg = (
                    f"{kind.__name__} keeps moments of vectors and matrices, and {name!r} has"
                    f" the shape {tuple(param.shape)}. Give it those, and the rest to another"
                    " optimizer, with af.partition."
                )
                raise OptimizerError(msg)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient, and free that."""
        del closure
        if self not in _inner_of:
            _inner_of[self] = _made(self.kind, self.options)
        inner, model = _inner_of[self]
        for group in self.param_groups:
            inner.lr, inner.weight_decay = group["lr"], group["weight_decay"]
            inner.do_weight_decay = group["weight_decay"] > 0
            for param in group["params"]:
                if param.grad is not None:
                    model.named = [("", param)]
                    if self.adapts:
                        self._lend_moments(inner, param)
                    inner.grad_func(None)

    def _lend_moments(self, inner: Any, param: nn.Parameter) -> None:
        """Let the package use moments that are kept, and saved, here."""
        entry, names = self.state[param], _MOMENTS[param.ndim]
        if not entry:
            entry["step"] = torch.zeros(())
            for name, length in zip(names, param.shape, strict=True):
                entry[name] = torch.zeros(length, device=param.device)
        entry["step"] += 1
        inner.step_num = int(entry["step"])
        for name in names:
            getattr(inner, name)[""] = entry[name]


# not its attributes: a copy's would update the parameters of the first
_inner_of: "weakref.WeakKeyDictionary[PerParameter, tuple[Any, _Model]]"
_inner_of = weakref.WeakKeyDictionary()


def _made(kind: type, options: dict[str, Any]) -> tuple[Any, _Model]:
    model = _Model()
    made: Any = kind(model, **options)
    made.loss_scale = made.loss_scaler = None
    return made, model


@called
def lomo(kind: type, **options: Any) -> Callable[[NamedParameters], Optimizer]:
    """Return a factory of an optimizer of the package lomo-optim, for `TrainState.create`.

    With `af.optimizer_in_backward()` each gradient is freed as soon as it is complete, as
    the package means it; without, it is an optimizer like any other. Schedules, ranks,
    checkpoints and `af.partition` work as with torch's own.

    Acts on: nothing; it is part of the definition.

    Args:
        kind: `lomo_optim.Lomo` or `lomo_optim.AdaLomo`.
        options: the package's own, but those that accelfn's transforms stand for.

    Law: an update is the package's; `Lomo` is plain SGD in float32.

    Cost: the package's update, a parameter at a time.

    Raises:
        OptimizerError: an option that a transform stands for; or, when the state is
            created, a parameter that `AdaLomo` keeps no moments of.

    References:
        Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited
        Resources"; Lv et al. 2023, "AdaLomo: Low-memory Optimization with Adaptive Learning
        Rate".
    """
    for name in options.keys() & _OURS.keys():
        msg = f"af.lomo({kind.__name__}, {name}=...): use {_OURS[name]}."
        raise OptimizerError(msg)
    return partial(PerParameter, kind=kind, options=options)
