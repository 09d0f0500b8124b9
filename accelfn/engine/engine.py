# SPDX-License-Identifier: Apache-2.0
"""The engine runs losses and optimizer steps. All side effects of training are here.

An engine binds a state's tensors to a module and an optimizer, and runs backward passes and
updates on them. An engine is a cache: it can be dropped and rebuilt at any time, and its results
depend only on the state.

In the steady loop, each state is the result of the last update, and its tensors are bound
already. To bind another state, the engine changes pointers and copies nothing but buffers.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.autograd import profiler

from accelfn.base import draws, tree
from accelfn.base.devices import is_set_to
from accelfn.base.draws import NOTHING, span
from accelfn.base.tree import is_shard, local, with_local
from accelfn.definition.transform import check_returned
from accelfn.engine import doctor
from accelfn.engine.ddp import Compression
from accelfn.engine.doctor import (
    Doctor,
    compare_ranks,
    is_one_training,
    reject_device_mismatch,
    untracked_leaves,
)
from accelfn.engine.modules import apply_module_transforms, norm_buffers, order_norms
from accelfn.engine.optimizer import LiveOptimizer, LiveUpdate, TakesUpdates
from accelfn.engine.runner import (
    LocalRunner,
    LossFunction,
    ParamBinding,
    ReadLoss,
    Runner,
    Samples,
    binding_of,
)
from accelfn.errors import GradsError, LossError, ModelError
from accelfn.model.optimizer import Assignments
from accelfn.schedules.factors import advise_of_rates
from accelfn.state.results import GradInfo, Grads, Metrics, Number
from accelfn.state.state import OptState, TrainState

# Buffers that a forward pass changes (BatchNorm statistics). A pass must not change the state.
#
# A forward pass uses copies of the buffers. The state's buffers are written only when the
# update is applied. Large buffers (masks, tables) are copied too, twice per update. Only a
# comparison of values shows whether a pass changed them, because neither BatchNorm nor a write
# to `.data` increments the version. Comparing two tensors takes as long as a copy (64 MiB
# on a CPU: 10 ms if bits are compared, 40 ms if numbers are).


Table: TypeAlias = dict[str, torch.Tensor | None]


@attrs.frozen(eq=False)
class _Buffer:
    """A buffer's place in the module, and the tensor object that stays in this place."""

    name: str
    table: Table
    key: str
    tensor: torch.Tensor


class Buffers:
    """The buffers of an engine's module: copies for forward passes, and the state's tensors."""

    def __init__(self, module: nn.Module) -> None:
        """Find the module's buffers; a shared buffer counts once."""
        self._tables: list[tuple[str, Table, Table]] = []
        by_id: dict[int, _Buffer] = {}
        self._fixed: list[tuple[str, Table, str, torch.Tensor | None]] = []
        for path, owner in module.named_modules():
            table = owner._buffers  # pyright: ignore[reportPrivateUsage]
            self._tables.append((path, table, dict(table)))
            for key, tensor in table.items():
                name = _join_path(path, key)
                if tensor is None or id(tensor) in by_id:
                    self._fixed.append((name, table, key, tensor))
                else:
                    by_id[id(tensor)] = _Buffer(name, table, key, tensor)
        self._found = list(by_id.values())
        self._assigned: dict[str, _Buffer] = {}
        self._home: dict[str, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def bind(self, home: Mapping[str, torch.Tensor]) -> None:
        """Use the buffers of a state from now on."""
        self._home = dict(home)
        for buffer in self._found:
            self._place(buffer, home[buffer.name].clone())

    def begin(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the buffers' values for a forward pass.

        A buffer gets its value in `values`, from an earlier pass, or the state's value.
        """
        if not self._home:
            return
        sources = {name: values.get(name, home) for name, home in self._home.items()}
        for name, buffer in self._assigned.items():
            if self._scratch[name].shape != sources[name].shape:
                self._place(buffer, sources[name].clone())
        stale = [n for n, source in sources.items() if source is not self._scratch[n]]
        if stale:
            tree.copy_([self._scratch[n] for n in stale], [sources[n] for n in stale])

    def end(self) -> dict[str, torch.Tensor]:
        """Return the buffers after forward passes, by name.

        The next pass overwrites these tensors, unless `leave` is called.

        Raises:
            ModelError: a pass registered or removed a buffer, or changed a dtype or device.
        """
        for path, table, before in self._tables:
            if len(table) != len(before):
                key = min(table.keys() ^ before.keys())
                problem = "was removed" if key in before else "was registered"
                raise ModelError(_buffer_error(_join_path(path, key), problem))
        for name, table, key, tensor in self._fixed:
            if table.get(key) is not tensor:
                shared = "is shared, and was replaced under one of its names"
                problem = "was None, and was set" if tensor is None else shared
                raise ModelError(_buffer_error(name, problem))
        for buffer in self._found:
            current, base = buffer.table.get(buffer.key), buffer.tensor
            if current is not base or not is_set_to(base, self._scratch[buffer.name]):
                self._take(buffer, current)
        return dict(self._scratch)

    def leave(self) -> None:
        """Keep the last pass's buffers as they are: the next pass writes to new memory."""
        for buffer in self._found:
            self._place(buffer, torch.empty_like(self._scratch[buffer.name]))

    def abandon(self) -> None:
        """Restore the buffers of the module after a forward pass that raised an error."""
        for _, table, before in self._tables:
            table.clear()
            table.update(before)
        for buffer in self._found:
            self._place(buffer, self._scratch[buffer.name])

    def commit(
        self, values: Mapping[str, torch.Tensor], skip: torch.Tensor | None = None
    ) -> None:
        """Write these values into the state's buffers, unless `skip` is 1."""
        for name, value in values.items():
            if self._home[name].shape != value.shape:
                self._home[name].data = value.clone()
        homes, new = [self._home[name] for name in values], [*values.values()]
        if skip is not None:
            new = [
                torch.where(skip != 0, *pair) for pair in zip(homes, new, strict=True)
            ]
        tree.copy_(homes, new)

    def keep_shapes(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Return whether all shapes are unchanged, so that the device can skip the write."""
        return all(self._home[n].shape == value.shape for n, value in values.items())

    def _place(self, buffer: _Buffer, values: torch.Tensor) -> None:
        """Point the module's buffer to these values."""
        self._scratch[buffer.name] = values
        buffer.tensor.data = values

    def _take(self, buffer: _Buffer, current: torch.Tensor | None) -> None:
        """Copy a buffer that the pass replaced by a new tensor; put back the old object."""
        if current is None:
            raise ModelError(_buffer_error(buffer.name, "was set to None"))
        home = self._home[buffer.name]
        for attribute in ("dtype", "device"):
            old, new = getattr(home, attribute), getattr(current, attribute)
            if old != new:
                problem = f"changed its {attribute} from {old} to {new}"
                raise ModelError(_buffer_error(buffer.name, problem))
        buffer.table[buffer.key] = buffer.tensor
        self._assigned[buffer.name] = buffer
        self._place(buffer, current.detach().clone())


def _join_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _buffer_error(name: str, problem: str) -> str:
    return (
        f"The buffer {name!r} {problem} in the forward pass. The buffers of a state cannot"
        " change their names, dtypes or devices. Register the buffer in __init__, with a"
        " tensor of the final dtype, and write into that tensor in forward."
    )


MakeRunner: TypeAlias = Callable[[nn.Module], Runner]
Innermost: TypeAlias = Callable[[nn.Module, LiveUpdate | None], Runner]


class Engine:
    """Runs losses and optimizer steps for the states of one definition."""

    def __init__(
        self,
        state: TrainState,
        binding: ParamBinding,
        innermost: Innermost,
        *,
        compression: Compression | None = None,
        optimizer: TakesUpdates | None = None,
    ) -> None:
        """Initialize with a binding of the state's tensors.

        `innermost` is the function that creates the runner. The default of `optimizer` is the
        state's optimizer.
        """
        definition, parts = state.definition, ()
        live: LiveUpdate | None = None
        if optimizer is None:
            names = {param: name for name, param in binding.params.items()}
            torchs = definition.optimizer_over(binding.params)
            optimizer = LiveOptimizer(torchs, names, binding.opt_state_view)
            parts = optimizer.parts
            if "steps_in_backward" in definition.setup.facts:
                live = LiveUpdate(optimizer, binding.trained)
        module = apply_module_transforms(binding.module, state)

        def make_runner(module: nn.Module) -> Runner:
            return innermost(module, live)

        for compile_runner in definition.setup.facts.get("compiles", ()):
            make_runner = compile_runner(make_runner, state)
        runner = make_runner(module)
        if live is not None and not live.by_buckets:
            live.hook()
        self.binding, self._runner, self._optimizer = binding, runner, optimizer
        self._holder, self._compression = binding.holder, compression
        self.live_update = live
        # the parameters after an update, or None if they are the previous state's tensors
        self.params: Mapping[str, torch.Tensor] | None = None
        self._device = definition.world.device
        self._num_losses = definition.copy.size
        self._is_alone = self._num_losses == 1 and not definition.setup.reduces
        self._activity = definition.world.connection.activity
        self._bound: tuple[object, object, object] = (None, None, None)
        self._seed: int | None = None
        self._key = 0
        self._buffers = Buffers(module)
        self._of_all_ranks = norm_buffers(module, is_synced=True)
        self._of_this_rank = norm_buffers(module, is_synced=False)
        # gradients that are set in the binding, but not yet applied
        self._live: Mapping[str, torch.Tensor] | None = None
        self._handed_out: frozenset[str] = frozenset()
        self._is_whole = definition.layout is None
        self._forward = runner.forward
        if self._is_whole:
            self._forward = order_norms(module, runner.forward)
        # for each loss function's code, the leaves of its graph that are not in the state
        self._untracked: dict[Any, list[Any]] = {}
        # the divisor that the optimizer's kernel applies to the gradients of the prepared
        # update
        self._divisor: Number | None = None
        self._doctor: Doctor | None = Doctor(state, module, parts)

    def bind(self, state: TrainState) -> None:
        """Point module and optimizer to the state's tensors, unless they already do."""
        # with a holder (DeepSpeed), the user gets only copies of the tensors
        if state.definition.cache.has_shown and self._holder is None:
            _reset_autograd(state)
        params = state._params  # pyright: ignore[reportPrivateUsage]
        buffers = state._buffers  # pyright: ignore[reportPrivateUsage]
        opt_state = state._opt_state  # pyright: ignore[reportPrivateUsage]
        current = self._bound
        if current[0] is params and current[1] is buffers and current[2] is opt_state:
            return
        self._detach_exported_grads()
        self.binding.bind(params)
        self._buffers.bind(buffers)
        self._optimizer.load(opt_state)
        self._bound = (params, buffers, opt_state)

    def value_and_grad(
        self, state: TrainState, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> tuple[Metrics, Grads]:
        """Run loss and backward pass; add to gradients of earlier samples. No state is changed."""
        into, loss_scale = samples.into, samples.loss_scale
        self.bind(state)
        update, activity = state.num_tried, self._activity
        activity.step, activity.is_between = update, False
        if activity.on_update is not None:
            activity.on_update(update)
        if into is not None or self._live is not None:
            self._load_partial_grads(into, loss_scale)
        before = None if into is None else into.taken
        num_before = 0 if before is None else before.num_micro_batches
        compression = self._compression if sync else None
        buffers = {} if into is None else into.buffers
        try:
            if samples.known == 0:  # a filler's pass may write into `buffers`
                buffers = tree.clone(dict(buffers))
            self._buffers.begin(buffers)
            if compression is not None:
                slot = state.slots.get(compression.name)
                compression.begin(slot, state.seed, loss_scale)
            if self._seed != state.seed:  # compute the key of random numbers again
                loss, name = state.definition.world.loss, state.definition.name
                self._key = draws.key(state.seed, name, "loss", loss.rank)
                self._seed = state.seed
            with draws.seeded(self._key, self._device, update, num_before):
                read, mean_weight = self._run(state, loss_fn, samples, sync=sync)
            tensors = self._collect_gradients(is_reduced=mean_weight is not None)
            self._live, new_buffers = tensors, self._buffers.end()
        except BaseException as error:
            self._abandon(state)
            if type(error) is RuntimeError:  # an error of torch, but not out of memory
                reject_device_mismatch(samples, self._device, error)
            raise
        if samples.known == 0:
            new_buffers = self._of_others(new_buffers, buffers)
        weight = read.weight if before is None else before.divisor + read.weight
        grad_info = GradInfo(
            divisor=weight if mean_weight is None else mean_weight,
            num_averaged=1 if mean_weight is None else self._num_losses,
            # weights are never negative, so their sum is not 0 if this rank's weight is not
            has_weight=not isinstance(weight, torch.Tensor) and weight >= 1,
            loss_scale=loss_scale,
            cursor=samples.cursor,
            num_micro_batches=num_before + 1,
            update=update,
            trained=state.definition.skeleton.trainable,
            finite_loss=read.is_finite and (before is None or before.finite_loss),
            owned_by_engine=self._holder is not None,
            slots={} if compression is None else compression.end(),
        )
        grad_info.lease.is_mean = samples.lone and read.is_mean and loss_scale is None
        grads = Grads(
            tensors=tensors,
            buffers=new_buffers,
            reduced=mean_weight is not None or self._is_alone,
            taken=grad_info,
        )
        # a transform may compute several gradients, and use them after the next pass
        if self._runner.reduces and state.definition.setup.owners["value_and_grad"]:
            self.hand_out()
        return Metrics(read.sums), grads

    def _run(
        self, state: TrainState, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> tuple[ReadLoss, torch.Tensor | None]:
        """Run forward and backward; return the loss, and after a reduction the mean weight."""
        activity, outer = self._activity, self._activity.samples
        activity.samples, activity.has_coupled = samples, False
        has_profiler = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
        try:
            with span("accelfn forward") if has_profiler else NOTHING:
                read = self._forward(loss_fn, samples, sync=sync)
            if samples.into is None and self.binding.has_gradients():
                raise LossError(doctor.OWN_BACKWARD)
            if self._doctor is not None:
                self._doctor.examine_loss(state, samples, read)
            with span("accelfn backward") if has_profiler else NOTHING:
                return read, self._backward(read, loss_fn, samples)
        finally:
            activity.samples = outer

    def _of_others(
        self, new_buffers: dict[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the buffers after the filler of an empty share.

        Only buffers that depend on all ranks, such as synchronized statistics, get their values
        from the filler's pass.
        """
        names = self._of_all_ranks
        if self._activity.has_coupled:  # such as a loss that averages a center
            names = new_buffers.keys() - self._of_this_rank
        return {**buffers, **{n: new_buffers[n] for n in new_buffers.keys() & names}}

    def hand_out(self) -> None:
        """Let the caller keep the gradients that were just computed.

        The next pass overwrites DDP's buckets. So gradients that are in buckets now get their
        own memory.
        """
        live = self._live if isinstance(self._live, dict) else {}
        buckets = {n: g for n, g in live.items() if local(g)._base is not None}
        self._handed_out |= buckets.keys()
        for name, grad in buckets.items():
            part = local(grad).detach()
            live[name] = with_local(grad, part) if is_shard(grad) else part

    def prepare(self, state: TrainState, grads: Grads, hyper: Assignments) -> None:
        """Set the gradients for the optimizer; divide them unless the kernel divides.

        Raises:
            GradsError: the gradients do not fit the parameters.
            OptimizerError: the optimizer is schedule-free, and nothing set its training mode.
        """
        self.bind(state)
        self._optimizer.expect(hyper)
        self._divisor = grads.divide(self._optimizer.divides)
        if grads.as_taken is not self._live:
            self.binding.put_gradients(grads)

    def can_skip(self, grads: Grads) -> bool:
        """Return whether a flag on the device can skip the update and its buffer writes."""
        return self._optimizer.skips and self._buffers.keep_shapes(grads.buffers)

    def update(
        self, grads: Grads, hyper: Assignments, skip: torch.Tensor | None = None
    ) -> OptState | None:
        """Step the optimizer on the state's tensors; return its state by parameter name.

        If the flag `skip` is 1 on the device, nothing changes. If the optimizer itself skips an
        update with infinite or NaN gradients, nothing changes and the result is None.
        """
        opt_state = self._optimizer.update(hyper, self._divisor, skip)
        return None if opt_state is None else self.finish(grads, opt_state, skip)

    def finish(
        self, grads: Grads, opt_state: OptState, skip: torch.Tensor | None = None
    ) -> OptState:
        """Clear gradients, write the buffers, and bind the state after the update."""
        self.binding.clear_gradients()
        self._live, self._handed_out = None, frozenset()
        if grads.buffers:
            self._buffers.commit(grads.buffers, skip)
        params = self._bound[0]
        if self._holder is not None:
            params = self.params = self._holder.bound
        self._bound = (params, self._bound[1], opt_state)
        if self._doctor is not None and not self._doctor.examine_update():
            self._doctor = None
        return opt_state

    def discard(self) -> None:
        """Drop gradients that no update will use."""
        self.binding.clear_gradients()
        self._live, self._handed_out = None, frozenset()

    def is_undone(self) -> bool:
        """Clean up after an update that raised; return whether it certainly changed nothing."""
        self.discard()
        self._bound = (None, None, None)  # bind again, which resets the optimizer
        return self._optimizer.is_untouched

    def _backward(
        self, read: ReadLoss, loss_fn: LossFunction, samples: Samples
    ) -> torch.Tensor | None:
        """Run the backward pass of a total, or of a single mean.

        Leaves of the loss's graph that do not belong to the state keep their `.grad`.
        """
        into, loss_scale = samples.into, samples.loss_scale
        mean = samples.lone and read.is_mean
        weight = read.weight if into is None else into.taken.divisor + read.weight
        if read.is_mean:
            needs_no_scale = mean and read.weight and loss_scale is None
            scale = None if needs_no_scale else read.weight
        elif isinstance(read.weight, torch.Tensor):
            scale = read.weight != 0  # a total with weight 0 does not count
        else:
            scale = None if read.weight else 0
        if loss_scale is not None:
            scale = loss_scale if scale is None else loss_scale * scale
        if self.live_update is not None:
            self.live_update.divide_by(1 if mean else weight)
            self.live_update.hold()
        code = getattr(loss_fn, "__code__", None) or type(loss_fn)
        if code not in self._untracked:
            param_ids = {id(p) for p in self.binding.params.values()}
            leaves = untracked_leaves(read.scalar, param_ids) if self._is_whole else []
            self._untracked[code] = leaves
        leaf_grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for leaf_ref in self._untracked[code]:
            if (leaf := leaf_ref()) is not None:
                leaf_grads.append((leaf, leaf.grad))
                leaf.grad = None
        try:
            return self._runner.backward(read.scalar, scale, weight)
        finally:
            for leaf, grad in leaf_grads:
                leaf.grad = grad

    def _collect_gradients(self, *, is_reduced: bool) -> Mapping[str, torch.Tensor]:
        """Return the gradients of the backward pass.

        If a holder (DeepSpeed) hides the gradients, return its placeholder. If parameters were
        already stepped, return an empty dict.
        """
        live, holder = self.live_update, self._holder
        stepped_params = {} if live is None else live.stepped_params()
        gradients = stepped_params or self.binding.take_gradients()
        params = self.binding.trained
        if len(gradients) < len(params):
            doctor.reject_frozen(params, gradients)
            if is_reduced and not self._runner.expects_unused:
                missing = [name for name in params if name not in gradients]
                doctor.reject_unused(missing, are_held=holder is not None)
        if not gradients:
            raise LossError(doctor.DISCONNECTED)
        if self._doctor is not None:
            self._doctor.examine_gradients(params, gradients)
        if live is not None:  # the gradients are already used and freed
            return {}
        return gradients if holder is None else holder.hidden()

    def _load_partial_grads(
        self, into: Grads | None, loss_scale: torch.Tensor | None
    ) -> None:
        """Load earlier micro-batches' gradients, so that the backward pass adds to them."""
        if self._live is not None and (into is None or into.as_taken is not self._live):
            self._detach_exported_grads()
        if into is None:
            return
        if (into.taken.loss_scale is None) != (loss_scale is None):
            msg = (
                "value_and_grad(into=grads): these gradients were computed with another setup,"
                " which scales losses differently. Compute them again with the current setup."
            )
            raise GradsError(msg)
        try:
            self.binding.put_gradients(into)
            into.give_away()
            into.multiply_back()
        except BaseException:
            self._detach_exported_grads()
            self.binding.clear_gradients()
            raise

    def _detach_exported_grads(self) -> None:
        """Move the caller's gradients out of DDP's buckets; drop the engine's gradients."""
        if self._live is None:
            return
        for name in self._handed_out:
            part = local(self._live[name])
            part.data = part.clone()
        self._buffers.leave()
        self.discard()

    def _abandon(self, state: TrainState) -> None:
        """Clean up after a pass that raised. A DDP reducer cannot be used after that."""
        self.discard()
        self._buffers.abandon()
        if self.live_update is not None:
            self.live_update.forget()
        if self._runner.reduces or self.live_update is not None:
            state.definition.cache.engine = None


def _reset_autograd(state: TrainState) -> None:
    """Undo changes of `requires_grad` and `grad` that a user made on a state's tensors."""
    state.definition.cache.has_shown = False
    params, buffers = state._params, state._buffers  # pyright: ignore[reportPrivateUsage]
    for tensor in (*params.values(), *buffers.values()):
        tensor.requires_grad, tensor.grad = False, None


build_engine = Engine
"""The constructor's name for authors of engines."""


# The engine of a state: it is built at first use, after ranks have compared their definitions.


def engine_of(state: TrainState) -> Engine:
    """Return the engine of the state's definition; build it at first use."""
    cache, world = state.definition.cache, state.definition.world
    if cache.engine is None or cache.is_to_compare:
        state.lease.check()
        schedule = state.definition.schedule
        if world.is_main and cache.engine is None and schedule is not None:
            advise_of_rates(schedule)
        if is_one_training(state):
            compare_ranks(state)
        cache.is_to_compare = False
        if cache.engine is None:
            cache.engine = _build_engine(state)
    return cache.engine


def _build_engine(state: TrainState) -> Engine:
    """Return the engine that a transform builds, or a local engine without collectives."""
    chosen = state.setup.owners["engine"]
    if not (chosen and state.definition.copy.size > 1):
        return Engine(state, binding_of(state), lambda module, _: LocalRunner(module))
    engine = chosen[0].engine(state)
    check_returned(chosen[0], "engine", engine, Engine)
    return engine
