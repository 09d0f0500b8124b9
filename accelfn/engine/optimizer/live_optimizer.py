# SPDX-License-Identifier: Apache-2.0
"""A torch optimizer at work on the tensors of a state."""

import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from accelfn.base.shards import is_wrapper
from accelfn.engine.counters import Counters
from accelfn.engine.optimizer.fused_adam import FusedAdam
from accelfn.engine.optimizer.versions import Versions
from accelfn.errors import OptimizerError
from accelfn.state.metrics import Number
from accelfn.structure.partition import bare_step, is_torchs, parts_of
from accelfn.structure.prototype import (
    OTHERS,
    STRUCTURE,
    Assignments,
    group_key,
    named_state,
    wrapper_error,
)

State: TypeAlias = dict[str, dict[str, Any]]
_MODE = "train_mode"
"""What schedule-free optimizers keep in their groups; a transform sets it."""


class Shows(Protocol):
    """Knows a state's values of what an optimizer has of parts of its parameters."""

    def shown(self, opt_state: State) -> State:
        """Return a state's values."""
        ...

    def raw(self, opt_state: State) -> State:
        """Return what the optimizer has of them."""
        ...


class LiveOptimizer:
    """A torch optimizer over the parameters of an engine, with its state by name.

    Of a parameter group, state is what is a tensor and what the optimizer itself changes;
    the rest are hyperparameters, which belong to the definition.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[Any, str],
        shows: "Shows | None" = None,
    ) -> None:
        """Take an optimizer over live parameters, which is nobody else's, and their names.

        Where parameters are parts of those of a state, `shows` knows its values of parts.
        """
        self._shows, self._torch = shows, optimizer
        self._step = bare_step(self._torch)
        others = [each for each in parts_of(optimizer) if not is_torchs(each)]
        self._counters = Counters.of_optimizers(others) if others else None
        self._fused = bool(getattr(self._torch, "_step_supports_amp_scaling", False))
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
        self._kernel: FusedAdam | None = None
        self._versions: Versions | None = None
        self._has_begun = self._is_watched = False
        self._num_entries = -1
        self._state: State = {}
        self._found: list[dict[str, Any]] = []
        self._waiting: set[int] = set()
        places = {id(group): i for i, group in enumerate(self._torch.param_groups)}
        self._parts = {
            places[id(group)]: part
            for part in parts_of(self._torch)
            for group in part.param_groups
        }
        self._places = {
            id(param): (i, self._parts[i])
            for i, group in enumerate(self._torch.param_groups)
            for param in group["params"]
        }

    def load(self, state: State) -> None:
        """Take over a state's entries; tensors are shared, not copied."""
        live = cast("dict[Any, Any]", self._torch.state)
        live.clear()
        given, state = state, state if self._shows is None else self._shows.raw(state)
        for param, name in self._params.items():
            if name in state:
                live[param] = dict(state[name])
        live.update(state.get(OTHERS, {}))
        for i, group in enumerate(self._torch.param_groups):
            saved = state.get(group_key(i), {})
            for key in group.keys() - self._base[i].keys() - STRUCTURE:
                del group[key]  # a number that another state's steps added
            for key, value in self._base[i].items():
                group[key] = _value(value)
            group.update(saved)
            self._changed[i] = dict(saved)
            self._expected[i] = dict(group)
        self._assigned = {}
        self._kernel = None
        self._versions = None
        self._state = given
        self._num_entries = -1  # the entries are copies: name them again after the step

    def expect(self, planned: Assignments) -> None:
        """Expect an update, of which nothing has been done.

        Raises:
            OptimizerError: a schedule-free optimizer is to train, and nobody set its mode.
        """
        self._has_begun = False
        for i in self._modal:
            if not planned.get((i, _MODE)):
                msg = (
                    f"The optimizer's parameter group {i} has a {_MODE!r}: it is"
                    " schedule-free, trains at one point and is evaluated at another. Add"
                    " af.schedule_free() to the setup."
                )
                raise OptimizerError(msg)

    def divides(self, divisor: Number) -> bool:
        """Whether the optimizer's own kernel divides gradients by this.

        torch's fused optimizers do, which is how a GradScaler uses them; it spares a pass.
        """
        return (
            self._fused
            and isinstance(divisor, torch.Tensor)
            and divisor.dtype is torch.float32
        )

    @property
    def skips(self) -> bool:
        """Whether the optimizer's own kernel leaves an update out by a flag."""
        return self._fused

    def update(
        self,
        hyper: Assignments,
        divisor: Number | None = None,
        skip: torch.Tensor | None = None,
    ) -> State:
        """Step, and return the optimizer's state by name.

        Gradients are divided by `divisor`, if the optimizer `divides` by it, and where `skip`
        is 1 nothing is changed, if it `skips`.

        In the steady loop that is the mapping it returned before: entries are changed in
        place. A new one is made when the optimizer adds entries or changes a number
        of a parameter group, as schedule-free optimizers do.
        """
        everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        self._begin(hyper, watched=self._kernel is None and not everywhere)
        profiled = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
        step = self._torch.step if everywhere or profiled else self._step
        scale = divisor if isinstance(divisor, torch.Tensor) else None
        skip = skip if self._fused else None
        kernel = self._kernel if step is self._step else None
        if kernel is None or not kernel.step(scale, skip):
            self._stepped(self._torch, step, grad_scale=scale, found_inf=skip)
        return self.finish()

    def begin(self, hyper: Assignments) -> None:
        """Begin an update of parameters one by one."""
        self._begin(hyper, watched=True)
        self._kernel = None
        self._found = [dict(group) for group in self._torch.param_groups]
        self._waiting = set(range(len(self._found)))

    def step_alone(self, param: torch.Tensor, divisor: Number | None = None) -> None:
        """Step one parameter as a step of all would.

        Each finds the numbers of its group as they were before the update.
        """
        index, part = self._places[id(param)]
        self._waiting.discard(index)
        group, found = self._torch.param_groups[index], self._found[index]
        for key in group.keys() - found.keys():
            del group[key]
        group.update(found)
        groups, part.param_groups, group["params"] = part.param_groups, [group], [param]
        scale = divisor if isinstance(divisor, torch.Tensor) else None
        try:
            self._stepped(part, bare_step(part), grad_scale=scale)
        finally:
            part.param_groups, group["params"] = groups, found["params"]

    def end(self) -> State:
        """End an update of parameters one by one; return the optimizer's state by name.

        Groups of which no parameter had a gradient are stepped so, for they may count.
        """
        for index in sorted(self._waiting):
            part, group = self._parts[index], self._torch.param_groups[index]
            groups, part.param_groups = part.param_groups, [group]
            try:
                bare_step(part)()
            finally:
                part.param_groups = groups
        return self.finish()

    def finish(self) -> State:
        """Return the optimizer's state by name, after a step."""
        self._is_watched = False
        self._put_back()
        if self._counters is not None and not self._counters.look():
            self._counters = None
        entries = len(self._torch.state)
        if (
            self._note_changes()
            or entries != self._num_entries
            or OTHERS in self._state
        ):
            if entries != self._num_entries:
                self._check_entries()
            self._state = self._named()
            self._num_entries = entries
            self._versions = None  # it knows not all of them
            # one that has hooks of its own is stepped by torch
            bare = isinstance(self._step, partial)
            self._kernel = FusedAdam.of(self._torch) if bare else None
        return self._state

    @property
    def is_untouched(self) -> bool:
        """Whether an update that raised has, for sure, changed nothing of the state."""
        if not self._has_begun:
            return True
        return (
            self._is_watched
            and self._versions is not None
            and self._versions.is_untouched
        )

    def _begin(self, hyper: Assignments, *, watched: bool) -> None:
        """Begin an update; watched it costs 60 ns a tensor, which a lone kernel would feel."""
        if watched:
            self._versions = self._versions or Versions(self._torch)
            self._versions.begin()
        self._has_begun, self._is_watched = True, watched
        if hyper or self._assigned:
            self._assign(hyper)

    @staticmethod
    def _stepped(
        optimizer: Optimizer,
        step: Callable[[], object],
        **handed: torch.Tensor | None,
    ) -> None:
        """Step as torch does, handing tensors to fused kernels as a GradScaler does."""
        told = {name: each for name, each in handed.items() if each is not None}
        vars(optimizer).update(told)
        try:
            step()
        except KeyError as error:
            if not _is_of(optimizer, error):
                raise
            kind = type(optimizer).__name__
            msg = (
                f"{kind} lacks {error} among what the state keeps of its parameters. A state that"
                " was loaded has what the optimizer kept that was saved: one of other options,"
                " as amsgrad or centered, keeps other things. Create it with those, or leave"
                ' the optimizer\'s out: af.load_part(state, directory, ["params", "buffers"]).'
            )
            raise OptimizerError(msg) from error
        finally:
            for name in told:
                del vars(optimizer)[name]

    def _assign(self, hyper: Assignments) -> None:
        """Set hyperparameters; those of the last update alone go back to their base."""
        over = {
            at: self._base[at[0]][at[1]] for at in self._assigned if at not in hyper
        }
        for (i, key), value in {**over, **hyper}.items():
            group = self._torch.param_groups[i]
            if not FusedAdam.reads(key):
                self._kernel = None
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = self._expected[i][key] = value
        self._assigned = hyper

    def _put_back(self) -> None:
        """Let tensors that were set for this update have their own values in the state.

        They are the state's, so nothing else knows of a copy, or of what was loaded, that
        they were set.
        """
        if not self._assigned:
            return
        left: Assignments = {}
        for (i, key), value in self._assigned.items():
            own = self._base[i][key]
            if isinstance(own, torch.Tensor):
                self._torch.param_groups[i][key].fill_(own)
            else:
                left[i, key] = value
        self._assigned = left

    def _note_changes(self) -> bool:
        """Note what the step itself changed in the parameter groups."""
        found = False
        for i, group in enumerate(self._torch.param_groups):
            expected = self._expected[i]
            for key, value in group.items():
                if expected.get(key, self) is not value and key not in STRUCTURE:
                    self._changed[i][key] = expected[key] = value
                    found = True
        return found

    def _check_entries(self) -> None:
        """Raise if an entry cannot be saved, at the update that makes it.

        Raises:
            OptimizerError: it is of a tensor class whose values no checkpoint can hold.
        """
        for entry in cast("dict[Any, Any]", self._torch.state).values():
            # what is of no parameter may be a lone value
            values = entry.values() if isinstance(entry, dict) else (entry,)
            if any(isinstance(v, torch.Tensor) and is_wrapper(v) for v in values):
                raise OptimizerError(wrapper_error(type(self._torch).__name__))

    def _named(self) -> State:
        named = named_state(self._torch, self._names)
        for i, group in enumerate(self._torch.param_groups):
            tensors = {
                k: v
                for k, v in group.items()
                if isinstance(v, torch.Tensor) and k not in STRUCTURE
            }
            entry = {**self._changed[i], **tensors}
            if entry:
                named[group_key(i)] = entry
        return named if self._shows is None else self._shows.shown(named)


def _value(entry: Any) -> Any:
    """Return a hyperparameter as a value that no update can change."""
    if isinstance(entry, torch.Tensor):
        return entry.clone()
    return entry


def _is_of(optimizer: Optimizer, error: BaseException) -> bool:
    """Whether an error was raised by an optimizer's own code, and not by a hook, say."""
    frames = traceback.walk_tb(error.__traceback__)
    *_, (last, _) = frames
    module = str(last.f_globals.get("__name__"))
    return module == type(optimizer).__module__ or module.startswith("torch.optim.")
