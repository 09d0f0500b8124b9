# SPDX-License-Identifier: Apache-2.0
"""Optimizers as definitions: torch's own objects without the tensors they update.

A state's definition holds a *prototype*: the optimizer's class, options and parameter
groups, over meta parameters. `accelfn.engine.live_optimizer` makes copies over real ones.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.errors import OptimizerError
from accelfn.model import Skeleton

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
OptimizerSource: TypeAlias = Optimizer | Callable[[NamedParameters], Optimizer]
Hyper: TypeAlias = Mapping[str | tuple[int | str, str], Any]

OTHERS = "<optimizer>"
"""Where state of no parameter stands in `opt_state`; like group keys, no parameter's name."""


def prototype_of(
    source: OptimizerSource, module: nn.Module, skeleton: Skeleton
) -> tuple[Optimizer, dict[str, dict[str, Any]]]:
    """Return the prototype of an optimizer, and the state it already holds, by name.

    Raises:
        OptimizerError: parameters that are not the model's, none at all, one the model
            trains that is missing, or an optimizer whose step needs a closure.
    """
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not isinstance(source, Optimizer) and not callable(source):
        msg = (
            f"optimizer={source!r}: expected a torch optimizer, or a factory such as"
            " functools.partial(torch.optim.AdamW, lr=3e-4)."
        )
        raise OptimizerError(msg)
    optimizer = source if isinstance(source, Optimizer) else source(trainable)
    if not isinstance(optimizer, Optimizer):
        msg = (
            f"optimizer={source!r} gave {type(optimizer).__name__}; expected a torch"
            " optimizer, or a factory such as functools.partial(torch.optim.AdamW,"
            " lr=3e-4)."
        )
        raise OptimizerError(msg)
    _refuse_closure(optimizer)
    names = {id(param): name for name, param in module.named_parameters()}
    _check_owned(optimizer, names, trainable, given_ready=optimizer is source)
    held = named_state(optimizer, names)
    metas = dict(skeleton.module.named_parameters())
    memo = {id(p): metas[n] for n, p in module.named_parameters()}
    return rebuilt(optimizer, memo), held


def named_state(
    optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state by parameter name; the entries are its own.

    What some optimizers keep under other keys (MADGRAD's count) stands under `OTHERS`.
    """
    named: dict[str, dict[str, Any]] = {}
    for key, entry in cast("dict[Any, Any]", optimizer.state).items():
        if isinstance(key, torch.Tensor):
            named[names[id(key)]] = entry
        else:
            named.setdefault(OTHERS, {})[str(key)] = entry
    return named


def group_key(index: int) -> str:
    """Return where what changes in a parameter group stands in `opt_state`."""
    return f"<group {index}>"


def rebuilt(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return the optimizer over other parameters, without its per-parameter state.

    Not by deepcopy of the object: Optimizer.__getstate__ leaves subclass attributes out.
    An LRScheduler patches `step` on the instance; a copy starts unpatched.
    """
    made = object.__new__(type(optimizer))
    attributes = {
        k: v for k, v in vars(optimizer).items() if k not in {"state", "step"}
    }
    made.__dict__.update(copy.deepcopy(attributes, memo))
    made.state = type(optimizer.state)(optimizer.state.default_factory)  # type: ignore[attr-defined]
    return made


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        msg = (
            f"{type(optimizer).__name__} calls the loss from inside its step (a"
            " required closure), but gradients are taken before it. Use an optimizer"
            " that takes gradients."
        )
        raise OptimizerError(msg)


def _check_owned(
    optimizer: Optimizer,
    names: Mapping[int, str],
    trainable: Iterable[tuple[str, nn.Parameter]],
    *,
    given_ready: bool,
) -> None:
    owned = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [tuple(param.shape) for param in owned if id(param) not in names]
    if strangers:
        why = (
            " A ready optimizer goes with the very model instance whose parameters it"
            " was given; with a model factory, give an optimizer factory."
            if given_ready
            else ""
        )
        msg = (
            f"{type(optimizer).__name__} holds {len(strangers)} parameters that are not"
            f" the model's (shapes {strangers[:5]}).{why}"
        )
        raise OptimizerError(msg)
    have = {id(param) for param in owned}
    missing = [name for name, param in trainable if id(param) not in have]
    if missing:
        msg = (
            f"{type(optimizer).__name__} lacks {len(missing)} trainable parameters:"
            f" {', '.join(missing[:5])}. Give it all of them, or freeze these with"
            " requires_grad_(False)."
        )
        raise OptimizerError(msg)
