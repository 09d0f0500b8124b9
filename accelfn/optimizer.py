# SPDX-License-Identifier: Apache-2.0
"""Optimizers: torch's own objects, bound to the tensors of a state.

A state's definition holds a *prototype*: the optimizer's class, options and parameter
groups, over meta parameters. A `LiveOptimizer` is a copy of it over real ones.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from accelfn.errors import OptimizerError
from accelfn.model import Skeleton

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
OptimizerSource: TypeAlias = Optimizer | Callable[[NamedParameters], Optimizer]
Hyper: TypeAlias = Mapping[str | tuple[int | str, str], Any]

_NOT_HYPER = frozenset({"params", "param_names", "name"})


def prototype_of(
    source: OptimizerSource, module: nn.Module, skeleton: Skeleton
) -> tuple[Optimizer, dict[str, dict[str, Any]]]:
    """Return the prototype of an optimizer, and the state it already holds, by name.

    Raises:
        OptimizerError: parameters that are not the model's, none at all, one the model
            trains that is missing, or an optimizer whose step needs a closure.
    """
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
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
    held = {
        names[id(param)]: dict(cast("dict[str, Any]", entry))
        for param, entry in optimizer.state.items()
    }
    metas = dict(skeleton.module.named_parameters())
    memo = {id(p): metas[n] for n, p in module.named_parameters()}
    return _rebuilt(optimizer, memo), held


class LiveOptimizer:
    """A torch optimizer over the parameters of an engine, with its state by name."""

    def __init__(
        self,
        prototype: Optimizer,
        params: Mapping[nn.Parameter, nn.Parameter],
        names: Mapping[nn.Parameter, str],
    ) -> None:
        """Copy the prototype, with each parameter replaced as `params` says."""
        memo = {id(old): new for old, new in params.items()}
        self.torch = _rebuilt(prototype, memo)
        self._names = names
        self._base = [
            {k: v for k, v in group.items() if k not in _NOT_HYPER}
            for group in self.torch.param_groups
        ]
        self._expected = [dict(base) for base in self._base]
        self._num_entries = -1
        self._step = _bare_step(self.torch)
        self.state: dict[str, dict[str, Any]] = {}

    def load(self, state: dict[str, dict[str, Any]]) -> None:
        """Take over a state's entries; tensors are shared, not copied."""
        self.torch.state.clear()
        for param, name in self._names.items():
            if name in state:
                self.torch.state[param] = dict(state[name])
        for i, group in enumerate(self.torch.param_groups):
            self._expected[i] = {**self._base[i], **state.get(group_key(i), {})}
            group.update(self._expected[i])
        self.state = state
        self._num_entries = -1  # the entries are copies: name them again after the step

    def set_hyper(self, factor: float | None, hyper: Hyper) -> None:
        """Set this update's hyperparameters: the base rate times `factor`, then `hyper`."""
        if factor is not None:
            for i, base in enumerate(self._base):
                self._assign(i, "lr", base["lr"] * factor)
        for where, value in hyper.items():
            for i in self._groups(where):
                self._assign(i, where if isinstance(where, str) else where[1], value)

    def update(self) -> dict[str, dict[str, Any]]:
        """Step, and return the optimizer's state by name.

        In the steady loop that is the mapping it returned before: entries are changed in
        place. A new one is made when the optimizer adds entries or changes a number
        of a parameter group, as schedule-free optimizers do.
        """
        everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        (self.torch.step if everywhere else self._step)()
        changed = self._changed_numbers()
        if changed or len(self.torch.state) != self._num_entries:
            self.state = self._named(changed)
            self._num_entries = len(self.torch.state)
        return self.state

    def _changed_numbers(self) -> dict[str, dict[str, Any]]:
        """Return what the step itself changed in the parameter groups."""
        changed: dict[str, dict[str, Any]] = {}
        for i, group in enumerate(self.torch.param_groups):
            for key, value in self._expected[i].items():
                if group[key] is not value:
                    changed.setdefault(group_key(i), {})[key] = group[key]
            self._expected[i].update(changed.get(group_key(i), {}))
        return changed

    def _named(self, numbers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        named = {
            self._names[cast("nn.Parameter", param)]: cast("dict[str, Any]", entry)
            for param, entry in self.torch.state.items()
        }
        for i in range(len(self._base)):
            key = group_key(i)
            entry = {**self.state.get(key, {}), **numbers.get(key, {})}
            if entry:
                named[key] = entry
        return named

    def _groups(self, where: str | tuple[int | str, str]) -> Iterable[int]:
        groups = self.torch.param_groups
        if isinstance(where, str):
            return range(len(groups))
        wanted = where[0]
        if isinstance(wanted, int) and 0 <= wanted < len(groups):
            return [wanted]
        found = [i for i, group in enumerate(groups) if group.get("name") == wanted]
        if not found:
            known = [group.get("name", i) for i, group in enumerate(groups)]
            msg = f"hyper {where!r}: no parameter group {wanted!r}; there are {known}."
            raise OptimizerError(msg)
        return found

    def _assign(self, index: int, key: str, value: Any) -> None:
        group = self.torch.param_groups[index]
        if key not in self._base[index]:
            msg = f"hyper {key!r}: the optimizer has {sorted(self._base[index])}."
            raise OptimizerError(msg)
        if isinstance(group[key], torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = self._expected[index][key] = value


def group_key(index: int) -> str:
    """Return where numbers of a parameter group stand in `opt_state`; no parameter's name."""
    return f"<group {index}>"


def _bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the optimizer's step without the profiler's record around it.

    torch wraps every `step` in a named record, 10 µs that no training loop needs. Step
    hooks run in that wrapper, so an optimizer that has any keeps it.
    """
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", None)
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
    if bare is None or own or not getattr(step, "hooked", False):
        return optimizer.step
    return partial(bare, optimizer)


def _rebuilt(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
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
