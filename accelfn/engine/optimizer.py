# SPDX-License-Identifier: Apache-2.0
"""Run a torch optimizer on the tensors of a state."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import nn
from torch.autograd import profiler
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from accelfn.base import tree
from accelfn.base.tree import is_wrapper
from accelfn.errors import OptimizerError
from accelfn.model.model import Skeleton
from accelfn.model.optimizer import (
    OTHERS,
    STRUCTURE,
    Assignments,
    bare_step,
    group_key,
    is_torchs,
    named_state,
    parts_of,
    rebuilt,
    wrapper_error,
)
from accelfn.state.results import Number, divide_, never_zero
from accelfn.state.state import OptState, TrainState

# Call Adam's fused kernel with lists of tensors that are built only once.
#
# At every step, torch's Adam collects gradients and state from each parameter before it calls
# its kernel. For a small network this takes as long as the kernel. In the steady loop the
# tensors do not change, so here they are collected once. Each parameter also has a step count,
# which is a tensor, and adding 1 to each count takes as long again. Here the counts are views
# of one tensor, which is incremented once.


_set_grad_enabled = torch._C._set_grad_enabled  # pyright: ignore[reportPrivateUsage]
_READ = frozenset({"lr", "betas", "eps", "weight_decay", "maximize"})
"""Options of a parameter group that the kernel reads at each step."""
_OTHERS = ("amsgrad", "capturable", "differentiable")
Group: TypeAlias = tuple[
    dict[str, Any], Any, tuple[list[torch.Tensor], ...], torch.Tensor
]
"""A parameter group's options, kernel, parameters with their state, and step counts."""
FusedStep: TypeAlias = Callable[[torch.Tensor | None, torch.Tensor | None], bool]


def fused_step(optimizer: Optimizer) -> FusedStep | None:
    """Return a function that steps a fused Adam by its kernel; None for another optimizer.

    You can use the function while the optimizer's state consists of the same tensors.
    """
    if type(optimizer) not in (Adam, AdamW):
        return None
    groups: list[Group] = []
    for group in optimizer.param_groups:
        params = cast("list[torch.Tensor]", group["params"])
        entries = [cast("Any", optimizer.state).get(param) for param in params]
        if not group["fused"] or any(group[name] for name in _OTHERS):
            return None
        if not all(entries) or len({(p.device, p.dtype) for p in params}) != 1:
            return None
        steps = [entry["step"] for entry in entries]
        if len({(n.shape, n.dtype, n.device) for n in steps}) != 1:
            return None
        with torch.no_grad():
            counts = torch.stack(steps)  # each entry gets a view of this tensor
        for entry, step in zip(entries, counts.unbind(), strict=True):
            entry["step"] = step
        names = ("exp_avg", "exp_avg_sq", "step")
        state = tuple([entry[name] for entry in entries] for name in names)
        adamw = group["decoupled_weight_decay"]
        kernel = tree.fused_adamw_ if adamw else tree.fused_adam_
        groups.append((group, kernel, (params, *state), counts))
    return partial(_step_groups, groups)


def _step_groups(
    groups: list[Group], grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
) -> bool:
    """Update the parameters. If some have no gradient, do nothing and return False."""
    grads = [[p.grad for p in params] for _, _, (params, *_), _ in groups]
    if [grad for group_grads in grads for grad in group_grads if grad is None]:
        return False
    # a call of this C function takes a tenth of the time of a `no_grad` block
    before = torch.is_grad_enabled()
    _set_grad_enabled(False)  # noqa: FBT003 - the C function has no keywords
    try:
        for group, group_grads in zip(groups, grads, strict=True):
            options, kernel, (params, exp_avgs, exp_avg_sqs, steps), counts = group
            counts.add_(1)
            beta1, beta2 = options["betas"]
            kernel(
                *(params, group_grads, exp_avgs, exp_avg_sqs, [], steps),
                amsgrad=False,
                lr=options["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=options["weight_decay"],
                eps=options["eps"],
                maximize=options["maximize"],
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            if found_inf is not None:  # the kernel skipped the update
                counts.sub_(found_inf)
    finally:
        _set_grad_enabled(before)
    return True


# Tensor versions show whether an update that raised an error had changed anything.
#
# torch increments a tensor's version at each in-place operation, so no copy is needed to detect
# a change. But torch does not count writes by kernels on lists of tensors, through
# `param.data`, or by custom kernels. Therefore only torch's own optimizers are trusted, and
# only without such kernels.


_version = attrgetter("_version")


class Versions:
    """Detects whether an optimizer's parameters and state have changed."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Initialize with the optimizer.

        Nothing is recorded of an optimizer that is not trusted.
        """
        is_known = all(map(_is_known, parts_of(optimizer)))
        states = list(cast("Any", optimizer.state).values()) if is_known else []
        groups = optimizer.param_groups if is_known else []
        params = [param for group in groups for param in group["params"]]
        values = [value for state in (*states, *groups) for value in state.values()]
        self._tensors = params + [v for v in values if isinstance(v, torch.Tensor)]
        self._is_sure = is_known and all(map(_counts, self._tensors))
        self._entries: list[tuple[dict[str, Any], dict[str, Any]]]
        self._entries = [(entry, dict(entry)) for entry in states]
        # the entries with numbers, which a step may replace
        self._counting = [
            i
            for i, entry in enumerate(states)
            if not all(isinstance(value, torch.Tensor) for value in entry.values())
        ]
        self._count = -1

    def begin(self) -> None:
        """Record versions before an update."""
        if not self._is_sure:
            return
        self._count = sum(map(_version, self._tensors))
        for i in self._counting:
            entry = self._entries[i][0]
            self._entries[i] = (entry, dict(entry))

    @property
    def is_untouched(self) -> bool:
        """Whether it is certain that the update changed nothing."""
        if not self._is_sure or self._count != sum(map(_version, self._tensors)):
            return False
        return all(_is_same(entry, old) for entry, old in self._entries)


def _counts(tensor: torch.Tensor) -> bool:
    """Return whether torch counts the changes of a tensor in its version."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_inference()


def _is_known(optimizer: Optimizer) -> bool:
    """Return whether the step is torch's own, and updates one tensor after the other."""
    return is_torchs(optimizer) and not any(map(_goes_by_lists, optimizer.param_groups))


def _goes_by_lists(group: dict[str, Any]) -> bool:
    """Return whether torch updates a group by kernels on lists (not by default on the CPU)."""
    if group.get("foreach") or group.get("fused"):
        return True
    is_open = group.get("foreach", False) is None
    return is_open and any(param.device.type != "cpu" for param in group["params"])


def _is_same(entry: dict[str, Any], old: dict[str, Any]) -> bool:
    same = entry.keys() == old.keys()
    return same and all(entry[key] is value for key, value in old.items())


_MODE = "train_mode"
"""The key in the parameter groups of schedule-free optimizers that `af.schedule_free` sets."""


class OptStateView(Protocol):
    """Converts optimizer state between local shards and the form in a `TrainState`."""

    def to_state(self, opt_state: OptState) -> OptState:
        """Convert optimizer state from local shards to the form in a `TrainState`."""
        ...

    def from_state(self, opt_state: OptState) -> OptState:
        """Convert optimizer state from the form in a `TrainState` to local shards."""
        ...


class LiveOptimizer:
    """A torch optimizer over the parameters of an engine, with its state by parameter name.

    Tensors in a parameter group, and numbers in a group that the optimizer itself changes, are
    state. All other values in a group are hyperparameters, which belong to the definition.

    Attributes:
        parts: the torch optimizers that a combined optimizer consists of.
        skips: whether the kernel can skip an update by a flag on the device.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[Any, str],
        opt_state_view: "OptStateView | None" = None,
    ) -> None:
        """Take ownership of an optimizer, with the names of the engine's parameters.

        If the parameters are shards, `opt_state_view` converts their optimizer state.
        """
        self._opt_state_view, self._torch = opt_state_view, optimizer
        self._step, self.parts = bare_step(optimizer), parts_of(optimizer)
        self.skips = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._params = names
        self._names = {id(param): name for param, name in names.items()}
        self._base = [
            {k: _value(v) for k, v in group.items() if k not in STRUCTURE}
            for group in self._torch.param_groups
        ]
        self._modal = [i for i, base in enumerate(self._base) if _MODE in base]
        self._expected = [dict(group) for group in self._torch.param_groups]
        self._changed: list[dict[str, Any]] = [{} for _ in self._base]
        self._assigned: Assignments = {}
        self._kernel: FusedStep | None = None
        self._versions: Versions | None = None
        self._has_begun = self._is_watched = False
        self._num_entries = -1
        self._state: OptState = {}
        self._found: list[dict[str, Any]] = []
        self._waiting: set[int] = set()
        part_of = {
            id(group): part for part in self.parts for group in part.param_groups
        }
        groups = optimizer.param_groups
        self._parts = [part_of[id(group)] for group in groups]
        self._places = {
            id(param): i for i, group in enumerate(groups) for param in group["params"]
        }

    def load(self, state: OptState) -> None:
        """Load a state's optimizer entries; tensors are shared, not copied."""
        live = cast("dict[Any, Any]", self._torch.state)
        live.clear()
        source, view = state, self._opt_state_view
        state = state if view is None else view.from_state(state)
        for param, name in self._params.items():
            if name in state:
                live[param] = dict(state[name])
        live.update(state.get(OTHERS, {}))
        for i, group in enumerate(self._torch.param_groups):
            numbers = state.get(group_key(i), {})
            for key in group.keys() - self._base[i].keys() - STRUCTURE:
                del group[key]  # a number that the steps of another state have added
            for key, value in self._base[i].items():
                group[key] = _value(value)
            group.update(numbers)
            self._changed[i] = dict(numbers)
            self._expected[i] = dict(group)
        self._assigned, self._state = {}, source
        self._kernel = self._versions = None
        # the dicts are copies, so collect the state by parameter name again after the step
        self._num_entries = -1

    def expect(self, hyper: Assignments) -> None:
        """Prepare for an update with these hyperparameters.

        Raises:
            OptimizerError: the optimizer is schedule-free, and nothing set its training mode.
        """
        self._has_begun = False
        for i in self._modal:
            if not hyper.get((i, _MODE)):
                msg = (
                    f"The optimizer is schedule-free (its parameter group {i} has {_MODE!r}):"
                    " it evaluates other parameters than those that it trains. Add"
                    " af.schedule_free() to the setup."
                )
                raise OptimizerError(msg)

    def divides(self, divisor: Number) -> bool:
        """Return whether the optimizer's kernel divides gradients by `divisor` itself.

        torch's fused optimizers do this for a GradScaler. This saves a pass over the gradients.
        """
        is_tensor = isinstance(divisor, torch.Tensor)
        return self.skips and is_tensor and divisor.dtype is torch.float32

    def update(
        self,
        hyper: Assignments,
        divisor: Number | None = None,
        skip: torch.Tensor | None = None,
    ) -> OptState:
        """Step the optimizer, and return its state by parameter name.

        The optimizer divides gradients by `divisor`, if `divides(divisor)` is true. If `skip`
        is 1, the kernel changes nothing; this needs an optimizer that `skips`.

        In the steady loop the result is the same mapping each time, with entries that are
        changed in place. A new mapping is made when the optimizer adds entries, or changes a
        number of a parameter group, as schedule-free optimizers do.
        """
        everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        self._begin(hyper, watch=self._kernel is None and not everywhere)
        has_profiler = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
        step = self._torch.step if everywhere or has_profiler else self._step
        scale = divisor if isinstance(divisor, torch.Tensor) else None
        skip = skip if self.skips else None
        kernel = self._kernel if step is self._step else None
        if kernel is None or not kernel(scale, skip):
            self._step_with(self._torch, step, grad_scale=scale, found_inf=skip)
        return self.finish()

    def begin(self, hyper: Assignments) -> None:
        """Begin an update that steps the parameters one by one."""
        self._begin(hyper, watch=True)
        self._kernel = None
        self._found = [dict(group) for group in self._torch.param_groups]
        self._waiting = set(range(len(self._found)))

    def step_alone(self, param: torch.Tensor, divisor: Number | None = None) -> None:
        """Step one parameter with the same result as a step of all parameters.

        Each parameter sees its group's numbers from before the update.
        """
        index = self._places[id(param)]
        part = self._parts[index]
        self._waiting.discard(index)
        group, before = self._torch.param_groups[index], self._found[index]
        for key in group.keys() - before.keys():
            del group[key]
        group.update(before)
        groups, part.param_groups, group["params"] = part.param_groups, [group], [param]
        scale = divisor if isinstance(divisor, torch.Tensor) else None
        try:
            self._step_with(part, bare_step(part), grad_scale=scale)
        finally:
            part.param_groups, group["params"] = groups, before["params"]

    def end(self) -> OptState:
        """End an update that stepped parameters one by one; return the optimizer's state.

        Groups without any gradient are stepped too, because they may count steps.
        """
        for index in sorted(self._waiting):
            part, group = self._parts[index], self._torch.param_groups[index]
            groups, part.param_groups = part.param_groups, [group]
            try:
                bare_step(part)()
            finally:
                part.param_groups = groups
        return self.finish()

    def finish(self) -> OptState:
        """Complete an update after the optimizer step; return the state by parameter name."""
        self._is_watched = False
        if self._assigned:
            self._put_back()
        entries = len(self._torch.state)
        has_new = entries != self._num_entries
        if self._note_changes() or has_new or OTHERS in self._state:
            if has_new:
                self._check_entries()
            self._state = self._name_state()
            self._num_entries = entries
            self._versions = None  # created again for the new entries
            # an optimizer that has hooks is stepped by torch's own step
            has_no_hooks = isinstance(self._step, partial)
            self._kernel = fused_step(self._torch) if has_no_hooks else None
        return self._state

    @property
    def is_untouched(self) -> bool:
        """Whether it is certain that an update that raised an error changed nothing."""
        if not self._has_begun:
            return True
        versions = self._versions if self._is_watched else None
        return versions is not None and versions.is_untouched

    def _begin(self, hyper: Assignments, *, watch: bool) -> None:
        """Begin an update; `watch` records tensor versions, which takes 60 ns per tensor."""
        if watch:
            self._versions = self._versions or Versions(self._torch)
            self._versions.begin()
        self._has_begun, self._is_watched = True, watch
        if hyper or self._assigned:
            self._assign(hyper)

    @staticmethod
    def _step_with(
        optimizer: Optimizer, step: Callable[[], object], **tensors: torch.Tensor | None
    ) -> None:
        """Call `step`, and pass tensors to fused kernels like a GradScaler does."""
        attributes = vars(optimizer)
        for name, tensor in tensors.items():
            if tensor is not None:
                attributes[name] = tensor
        try:
            step()
        except KeyError as error:
            if not _is_of(optimizer, error):
                raise
            kind = type(optimizer).__name__
            msg = (
                f"{kind} needs the entry {error} in its state, but the state does not have it. If"
                " you loaded the state, it was saved with other options of the optimizer, such as"
                " amsgrad or centered: create the optimizer with the saved options. Or do not load"
                ' the optimizer state: af.load_part(state, directory, ["params", "buffers"]).'
            )
            raise OptimizerError(msg) from error
        finally:
            for name in tensors:
                attributes.pop(name, None)

    def _assign(self, hyper: Assignments) -> None:
        """Set this update's hyperparameters; reset others that the last update set."""
        before = {(i, key): self._base[i][key] for i, key in self._assigned}
        for (i, key), value in {**before, **hyper}.items():
            group = self._torch.param_groups[i]
            if key not in _READ:
                self._kernel = None
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = self._expected[i][key] = value
        self._assigned = hyper

    def _put_back(self) -> None:
        """Restore hyperparameters that are tensors to their values from before this update.

        These tensors are in the state, so a copy or checkpoint would otherwise have the
        temporary values.
        """
        rest: Assignments = {}
        for (i, key), value in self._assigned.items():
            base = self._base[i][key]
            if isinstance(base, torch.Tensor):
                self._torch.param_groups[i][key].fill_(base)
            else:
                rest[i, key] = value
        self._assigned = rest

    def _note_changes(self) -> bool:
        """Record numbers that a step changed in parameter groups; return whether any changed."""
        has_changed = False
        for i, group in enumerate(self._torch.param_groups):
            numbers = self._expected[i]
            for key, value in group.items():
                if numbers.get(key, self) is not value and key not in STRUCTURE:
                    self._changed[i][key] = numbers[key] = value
                    has_changed = True
        return has_changed

    def _check_entries(self) -> None:
        """Raise if an entry cannot be saved, in the update that creates the entry.

        Raises:
            OptimizerError: an entry has a tensor class that no checkpoint can store.
        """
        for entry in cast("dict[Any, Any]", self._torch.state).values():
            # an entry that belongs to no parameter may be a single value
            values = entry.values() if isinstance(entry, dict) else (entry,)
            if any(isinstance(v, torch.Tensor) and is_wrapper(v) for v in values):
                raise OptimizerError(wrapper_error(type(self._torch).__name__))

    def _name_state(self) -> OptState:
        named = named_state(self._torch, self._names)
        for i, group in enumerate(self._torch.param_groups):
            tensors = {k: v for k, v in group.items() if isinstance(v, torch.Tensor)}
            entry = {**self._changed[i], **tensors}
            if entry:
                named[group_key(i)] = entry
        view = self._opt_state_view
        return named if view is None else view.to_state(named)


def _value(entry: Any) -> Any:
    """Return a hyperparameter; clone a tensor, so that no update changes it."""
    return entry.clone() if isinstance(entry, torch.Tensor) else entry


def _is_of(optimizer: Optimizer, error: BaseException) -> bool:
    """Return whether an optimizer's own code raised the error, and not a hook."""
    frames = traceback.walk_tb(error.__traceback__)
    *_, (last, _) = frames
    module = str(last.f_globals.get("__name__"))
    return module == type(optimizer).__module__ or module.startswith("torch.optim.")


# The interface between the engine and an optimizer: a `LiveOptimizer`, or DeepSpeed's
# optimizer.


class TakesUpdates(Protocol):
    """Steps the parameters of an engine.

    Attributes:
        skips: whether the kernel can skip an update by a flag on the device.
    """

    skips: bool

    @property
    def is_untouched(self) -> bool:
        """Whether it is certain that an update that raised an error changed nothing."""
        ...

    def load(self, state: OptState) -> None:
        """Load a state's optimizer entries."""
        ...

    def expect(self, hyper: Assignments) -> None:
        """Prepare for an update; raise if the optimizer cannot make it."""
        ...

    def divides(self, divisor: Number) -> bool:
        """Return whether the optimizer divides gradients by `divisor` itself."""
        ...

    def update(
        self,
        hyper: Assignments,
        divisor: Number | None = None,
        skip: torch.Tensor | None = None,
    ) -> OptState | None:
        """Step; return the state by parameter name, or None if the update was skipped."""
        ...


# Test an optimizer with small parameters, to find out what each update depends on.


_MOST = 4
"""The size of a small parameter along each dim."""
_OF_A_KIND = 2
"""How many parameters of a small shape are tested per group: one may depend on another."""
_ON_HOST = {"train_mode": True, "capturable": False}
"""Options of the parameter groups in the test, which runs on the CPU."""
_HALVES = slice(None, 2), slice(2, None)
"""The shards of a parameter in the test."""


def check_elements(
    state: TrainState,
    caller: str,
    *,
    dims: Iterable[int],
    optimizer: Optimizer | None = None,
) -> None:
    """Raise unless the optimizer is elementwise.

    Args:
        state: the state; by default its optimizer is tested.
        caller: the call that needs an elementwise optimizer, for error messages.
        dims: the dims along which parameters are sharded.
        optimizer: a prototype of another optimizer to test.

    Raises:
        OptimizerError: the optimizer is not elementwise, or cannot be tested.
    """
    optimizer = optimizer or state.definition.optimizer
    kind = type(optimizer).__name__
    try:
        differ = [name for dim in dims for name in _differing(state, dim, optimizer)]
    except Exception as error:
        msg = (
            f"{caller}: accelfn tests with small parameters whether {kind} updates each element"
            f" independently, but in this test {kind} raised {error!r}. Use another optimizer, or"
            " af.wrap_ddp."
        )
        raise OptimizerError(msg) from error
    if differ:
        msg = (
            f"{caller}: {kind} does not update each element by its own gradient only, so it"
            " cannot update shards. In a test with small parameters, these changed differently"
            f" when they were sharded: {', '.join(dict.fromkeys(differ[:5]))}. Use an"
            " elementwise optimizer, such as AdamW, or af.wrap_ddp."
        )
        raise OptimizerError(msg)


def _differing(state: TrainState, dim: int, optimizer: Optimizer) -> list[str]:
    """Return the names of parameters that change differently if they are sharded."""
    full_params, _ = try_optimizer(state, optimizer, part=(dim, slice(None)))
    parts = [try_optimizer(state, optimizer, part=(dim, half))[0] for half in _HALVES]
    return [
        name
        for name, param in full_params.items()
        if param.ndim > dim
        and not _close(param, torch.cat([part[name] for part in parts], dim))
    ]


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether numbers are equal up to the rounding of a few operations."""
    few = 16 * torch.finfo(one.dtype).eps
    return bool(((one - other).abs() <= few * (1 + one.abs())).all())


def counts_by_group(state: TrainState, *, optimizer: Optimizer | None = None) -> bool:
    """Return whether an update changes numbers of the optimizer's parameter groups.

    This tests the state's optimizer, unless `optimizer` is given.
    """
    optimizer = optimizer or state.definition.optimizer
    _, opt_state = try_optimizer(state, optimizer)
    return any(
        not isinstance(value, torch.Tensor)
        for i in range(len(optimizer.param_groups))
        for value in opt_state.get(group_key(i), {}).values()
    )


def try_optimizer(
    state: TrainState,
    optimizer: Optimizer,
    *,
    alone: bool = False,
    part: tuple[int, slice] = (0, slice(None)),
) -> tuple[dict[str, torch.Tensor], OptState]:
    """Return small parameters, two of each kind, and the optimizer's state after two updates.

    Args:
        state: the state, which does not change.
        optimizer: a prototype of the optimizer.
        alone: whether parameters are updated one by one, in reverse order.
        part: a dim and a slice: the optimizer gets this slice of each parameter and its
        gradients.
    """
    (dim, within), skeleton = part, state.definition.skeleton
    metas = _two_of_a_kind(optimizer, skeleton, dim)
    generator = torch.Generator().manual_seed(0)

    def draw_tensor(meta: torch.Tensor) -> torch.Tensor:
        full = torch.randn(_small(meta, dim), generator=generator).to(meta.dtype)
        return full[(slice(None),) * dim + (within,)] if meta.ndim > dim else full

    params = {name: nn.Parameter(draw_tensor(meta)) for name, meta in metas.items()}
    memo: Any = {id(metas[name]): param for name, param in params.items()}
    small = rebuilt(optimizer, memo)
    names = {param: name for name, param in params.items()}
    for group in small.param_groups:
        group["params"][:] = [p for p in group["params"] if p in names]
    live = LiveOptimizer(small, names)
    trainable = {name: params[name] for name in skeleton.trainable if name in params}
    hyper = {
        (i, name): value
        for i, group in enumerate(optimizer.param_groups)
        for name, value in _ON_HOST.items()
        if name in group
    }
    opt_state: OptState = {}
    for _ in range(2):
        gradients = {name: draw_tensor(metas[name]) for name in trainable}
        if alone:
            live.begin(hyper)
            for name, param in reversed(trainable.items()):
                param.grad = gradients[name]
                live.step_alone(param)
                param.grad = None
            opt_state = live.end()
        else:
            for name, param in trainable.items():
                param.grad = gradients[name]
            opt_state = live.update(hyper)
    return {name: param.detach() for name, param in params.items()}, opt_state


def _small(meta: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Return a parameter's shape in the test: large enough to shard."""
    return tuple(_MOST if i == dim else min(n, _MOST) for i, n in enumerate(meta.shape))


def _two_of_a_kind(
    optimizer: Optimizer, skeleton: Skeleton, dim: int
) -> dict[str, torch.Tensor]:
    """Choose parameters for the test: only two of each kind, because layers repeat."""
    trainable, groups = frozenset(skeleton.trainable), optimizer.param_groups
    group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    counts = Counter[object]()
    chosen: dict[str, torch.Tensor] = {}
    for name, meta in skeleton.module.named_parameters():
        if id(meta) not in group_of:
            continue
        kind = group_of[id(meta)], _small(meta, dim), meta.dtype, name in trainable
        counts[kind] += 1
        if counts[kind] <= _OF_A_KIND:
            chosen[name] = meta
    return chosen


# Optimizer in backward: step each parameter during the backward pass.
#
# As soon as a parameter's gradient is complete, the optimizer steps this parameter and frees
# the gradient. Transforms that need several gradients cannot run in between.


class LiveUpdate:
    """Steps parameters during a backward pass.

    Attributes:
        is_planned: whether the next backward pass makes an update.
        by_buckets: whether a gradient is complete only after its bucket is reduced.
        hold: defers interrupts until the end of the planned update.
    """

    def __init__(
        self, optimizer: LiveOptimizer, named: Mapping[str, nn.Parameter]
    ) -> None:
        """Initialize with the optimizer, and the parameters that it trains."""
        self.is_planned = self.by_buckets = False
        self._optimizer = optimizer
        self._named = dict(named)
        self._names = {id(param): name for name, param in named.items()}
        self.hold: Callable[[], object] = tuple
        self._begin: Callable[[], None] | None = None
        self._hyper: Assignments = {}
        self._divisor: Number = 1
        self._done: list[str] = []

    def hook(self) -> None:
        """Register hooks that step each parameter as soon as its gradient is complete."""
        for param in self._named.values():
            param.register_post_accumulate_grad_hook(self.take)

    def plan(
        self, hyper: Assignments, hold: Callable[[], None], begin: Callable[[], None]
    ) -> None:
        """Let the next backward pass make an update.

        `begin` is called just before the first parameter is stepped, possibly in autograd's
        thread. `hold` is called earlier, in the thread of the step.

        Raises:
            OptimizerError: the optimizer is schedule-free, and nothing set its training mode.
        """
        self._optimizer.expect(hyper)
        self._hyper, self.hold, self._begin = hyper, hold, begin
        self._done = []
        self.is_planned = True

    def forget(self) -> None:
        """Cancel the planned update."""
        self.is_planned, self.hold, self._begin = False, tuple, None

    def divide_by(self, weight: Number) -> None:
        """Set the divisor of the gradients, before any gradient is computed.

        The divisor is the weight of the losses; see `divide_`.
        """
        self._divisor = never_zero(weight)

    @torch.no_grad()
    def take(self, param: torch.Tensor) -> None:
        """Step a parameter whose gradient is complete, and free the gradient."""
        if not self.is_planned or param.grad is None:
            return
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
            self._optimizer.begin(self._hyper)
        divisor = divide_([param.grad], self._divisor, self._optimizer.divides)
        self._optimizer.step_alone(param, divisor)
        param.grad = None
        self._done.append(self._names[id(param)])

    def end(self) -> OptState:
        """End an update; return the optimizer's state by parameter name."""
        self.forget()
        return self._optimizer.end()

    def stepped_params(self) -> dict[str, torch.Tensor]:
        """Return the parameters that were stepped, by name."""
        return {name: self._named[name] for name in self._done}
