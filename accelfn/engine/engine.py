# SPDX-License-Identifier: Apache-2.0
"""The engine: runs losses and optimizer steps. All side effects of training are here.

An engine binds a state's tensors to a module and an optimizer, and runs backward passes and
updates on them. It is a cache: it can be dropped and rebuilt at any time, and its results
depend only on the state.

In the steady loop the state is the result of the last update, and nothing is rebound. Binding
another state swaps pointers.
"""

from collections.abc import Callable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import nn
from torch.autograd import profiler

from accelfn.base import draws, tree
from accelfn.base.arguments import advise
from accelfn.base.devices import is_set_to
from accelfn.base.draws import NOTHING, own_modes, span
from accelfn.base.tree import is_shard, local, with_local
from accelfn.collectives import all_gather, check_replicas, checksum
from accelfn.data import Batch
from accelfn.data.consistency import LeftOut
from accelfn.data.plan import Cursor
from accelfn.definition.definition import Definition
from accelfn.definition.transform import check_returned
from accelfn.engine import doctor
from accelfn.engine.binding import ParamBinding, binding_of
from accelfn.engine.doctor import (
    Counters,
    UntrackedLeaves,
    check_definitions,
    check_gradients,
    reject_device_mismatch,
)
from accelfn.engine.loss import (
    LocalRunner,
    LossFunction,
    ReadLoss,
    Runner,
    Samples,
    advise_token_weights,
)
from accelfn.engine.modules import apply_module_transforms, norm_buffers, norm_order
from accelfn.engine.optimizer import LiveOptimizer, LiveUpdate, TakesUpdates
from accelfn.errors import GradsError, ModelError
from accelfn.model.optimizer import Assignments
from accelfn.schedules.factors import advise_of_rates
from accelfn.state.grads import GradInfo, Grads, never_zero
from accelfn.state.metrics import Metrics, Number
from accelfn.state.state import OptState, TrainState

if TYPE_CHECKING:
    from accelfn.engine.ddp import Compression

# Buffers that a forward pass writes (BatchNorm statistics): passes stay pure.
#
# A forward pass uses copies; the state's buffers are written only when the update is applied.
# Large buffers (masks, tables) are copied too, twice per update: only their values show whether
# a pass wrote to them, because neither BatchNorm nor a write to `.data` increments the version,
# and comparing two tensors takes as long as copying one (64 MiB on a CPU: 10 ms by bits, 40 by
# numbers).


Table: TypeAlias = dict[str, torch.Tensor | None]


@attrs.frozen(eq=False)
class _Buffer:
    """A buffer's place in the module, and the tensor object that stays there."""

    name: str
    table: Table
    key: str
    tensor: torch.Tensor


class Buffers:
    """The buffers of an engine's module."""

    def __init__(self, module: nn.Module) -> None:
        """Find the buffers; a shared buffer counts once."""
        self._tables: list[tuple[str, Table, Table]] = []
        found: dict[int, _Buffer] = {}
        self._fixed: list[tuple[str, Table, str, torch.Tensor | None]] = []
        for path, owner in module.named_modules():
            table = owner._buffers  # pyright: ignore[reportPrivateUsage]
            self._tables.append((path, table, dict(table)))
            for key, tensor in table.items():
                name = _join_path(path, key)
                if tensor is None or id(tensor) in found:
                    self._fixed.append((name, table, key, tensor))
                else:
                    found[id(tensor)] = _Buffer(name, table, key, tensor)
        self._found = list(found.values())
        self._num_keys = [len(before) for _, _, before in self._tables]
        self._assigned: dict[str, _Buffer] = {}
        self._home: dict[str, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def bind(self, home: Mapping[str, torch.Tensor]) -> None:
        """Take over a state's buffers."""
        self._home = dict(home)
        for each in self._found:
            self._place(each, home[each.name].clone())

    def begin(self, written: Mapping[str, torch.Tensor]) -> None:
        """Set values for a forward pass: the state's, or the `written` ones of earlier passes."""
        sources = {name: written.get(name, own) for name, own in self._home.items()}
        for name, each in self._assigned.items():
            if self._scratch[name].shape != sources[name].shape:
                self._place(each, sources[name].clone())
        stale = [n for n, source in sources.items() if source is not self._scratch[n]]
        if stale:
            tree.copy_([self._scratch[n] for n in stale], [sources[n] for n in stale])

    def end(self) -> dict[str, torch.Tensor]:
        """Return the buffers after forward passes, by name.

        The next pass overwrites them, unless `leave` is called.

        Raises:
            ModelError: a pass registered or removed a buffer, or changed a dtype or device.
        """
        self._check_places()
        for each in self._found:
            current, own = each.table.get(each.key), each.tensor
            if current is not own or not is_set_to(own, self._scratch[each.name]):
                self._take(each, current)
        return dict(self._scratch)

    def leave(self) -> None:
        """Give the last pass's buffers to their owner; the next pass writes to new memory."""
        for each in self._found:
            self._place(each, torch.empty_like(self._scratch[each.name]))

    def abandon(self) -> None:
        """Forget a forward pass that raised."""
        for _, table, before in self._tables:
            table.clear()
            table.update(before)
        for each in self._found:
            self._place(each, self._scratch[each.name])

    def commit(
        self, written: Mapping[str, torch.Tensor], skip: torch.Tensor | None = None
    ) -> None:
        """Write the values into the state's buffers, unless `skip` is 1."""
        for name, value in written.items():
            if self._home[name].shape != value.shape:
                self._home[name].data = value.clone()
        own = [self._home[name] for name in written]
        new = [*written.values()]
        if skip is not None:
            pairs = zip(own, new, strict=True)
            new = [torch.where(skip != 0, old, value) for old, value in pairs]
        tree.copy_(own, new)

    def keep_shapes(self, written: Mapping[str, torch.Tensor]) -> bool:
        """Whether no shape changed, so that a flag on the device can skip the write."""
        return all(self._home[n].shape == value.shape for n, value in written.items())

    def _place(self, each: _Buffer, values: torch.Tensor) -> None:
        """Point the module's buffer at these values."""
        self._scratch[each.name] = values
        each.tensor.data = values

    def _take(self, each: _Buffer, current: torch.Tensor | None) -> None:
        """Copy the values of a buffer that the pass assigned instead of writing in place."""
        if current is None:
            raise ModelError(_buffer_error(each.name, "was set to None"))
        home = self._home[each.name]
        for what in ("dtype", "device"):
            old, new = getattr(home, what), getattr(current, what)
            if old != new:
                changed = f"had the {what} {old}, and was given {new}"
                raise ModelError(_buffer_error(each.name, changed))
        each.table[each.key] = each.tensor
        self._assigned[each.name] = each
        self._place(each, current.detach().clone())

    def _check_places(self) -> None:
        """Reject buffers that are not the state's."""
        if [len(table) for _, table, _ in self._tables] != self._num_keys:
            for path, table, before in self._tables:
                for key in table.keys() ^ before.keys():
                    what = "removed" if key in before else "registered"
                    raise ModelError(
                        _buffer_error(_join_path(path, key), f"was {what}")
                    )
        for name, table, key, tensor in self._fixed:
            if table.get(key) is not tensor:
                shared = "is shared, and was assigned under one of its names"
                what = "was None, and was set" if tensor is None else shared
                raise ModelError(_buffer_error(name, what))


def _join_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _buffer_error(name: str, what: str) -> str:
    return (
        f"The buffer {name!r} {what} in the forward pass. A state has the buffers that its"
        " model was made with, in their dtypes and on their devices: register it with a"
        " tensor of the dtype that it is to have, and write into that one."
    )


class Engine:
    """Live machinery for the states of one definition."""

    def __init__(
        self,
        state: TrainState,
        binding: ParamBinding,
        runner: Runner,
        *,
        module: nn.Module,
        optimizer: TakesUpdates,
        live_update: LiveUpdate | None = None,
        compression: "Compression | None" = None,
    ) -> None:
        """Take the binding, the runner of losses and the optimizer; see `build`.

        `module` is the module that the runner runs.
        """
        self._binding, self._runner, self._optimizer = binding, runner, optimizer
        self._holder, self._compression = binding.holder, compression
        self.live_update = live_update
        # parameters after an update, if they are not those of the state before
        self.params: Mapping[str, torch.Tensor] | None = None
        definition = state.definition
        self._device = definition.world.device
        self._num_losses = definition.copy.size
        self._is_alone = self._num_losses == 1 and not definition.setup.reduces
        self._layer_ranks = definition.world.along("tp")
        self._activity = definition.world.connection.activity
        self._bound: tuple[object, object, object] = (None, None, None)
        self._key_of: tuple[int | None, int] = (None, 0)
        self._buffers = Buffers(module)
        self._of_all_ranks = norm_buffers(module, synced=True)
        self._of_this_rank = norm_buffers(module, synced=False)
        # gradients in the binding that are not yet applied
        self._live: Mapping[str, torch.Tensor] | None = None
        self._live_buffers: dict[str, torch.Tensor] = {}
        self._handed_out: frozenset[str] = frozenset()
        self._has_compared = self._layer_ranks.size == 1
        self._is_whole = definition.layout is None
        norms = norm_order(module) if self._is_whole else None
        self._forward = runner.forward if norms is None else norms.wrap(runner.forward)
        self._strangers: dict[Any, UntrackedLeaves] = {}
        self._aside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        collate = None if state.data is None else state.data.collate
        # None where no collate function can leave samples out
        self._left_out = None if collate is None else LeftOut()
        self._counters: Counters | None = Counters.of_modules(module)
        kinds = {kind.__name__ for m in module.modules() for kind in type(m).__mro__}
        self._token_looks = 4 if "PreTrainedModel" in kinds else 0

    def bind(self, state: TrainState) -> None:
        """Point module and optimizer at the state's tensors, unless they already do."""
        # a holder returns copies
        if state.definition.cache.has_shown and self._holder is None:
            _reset_autograd(state)
        params = state._params  # pyright: ignore[reportPrivateUsage]
        buffers = state._buffers  # pyright: ignore[reportPrivateUsage]
        opt_state = state._opt_state  # pyright: ignore[reportPrivateUsage]
        bound = self._bound
        if bound[0] is params and bound[1] is buffers and bound[2] is opt_state:
            return
        self._detach_exported_grads()
        self._binding.bind(params)
        self._buffers.bind(buffers)
        self._optimizer.load(opt_state)
        self._bound = (params, buffers, opt_state)

    def _look(self, loss_fn: LossFunction, samples: Samples, read: ReadLoss) -> None:
        """Check a loss function's graph, the samples of a mean, and counters in modules."""
        code = getattr(loss_fn, "__code__", None) or type(loss_fn)
        strangers = self._strangers.get(code)
        if strangers is None and self._is_whole:
            known = {id(p) for p in self._binding.params.values()}
            strangers = self._strangers[code] = UntrackedLeaves(read.scalar, known)
        if read.is_mean and not samples.lone:
            if self._left_out is not None:
                self._left_out.look(samples.value, samples.known, "The loss")
            if self._token_looks:
                self._token_looks -= 1
                advise_token_weights(samples.value)
        if self._counters is not None and not self._counters.look():
            self._counters = None
        if strangers is not None and strangers.leaves:
            self._aside = strangers.set_aside()

    def _report_step(self, update: int) -> None:
        """Report the update number to callbacks and error messages."""
        activity = self._activity
        activity.step, activity.is_between = update, False
        if activity.on_update is not None:
            activity.on_update(update)

    def value_and_grad(
        self,
        state: TrainState,
        loss_fn: LossFunction,
        samples: Samples,
        *,
        into: Grads | None,
        sync: bool,
        cursor: Cursor | None,
        loss_scale: torch.Tensor | None,
        may_be_kept: bool,
    ) -> tuple[Metrics, Grads]:
        """Run the loss forward and backward, adding to `into`; the state stays as it was.

        With `may_be_kept`, the caller may keep the gradients after the next pass.
        """
        self.bind(state)
        self._report_step(tried := state.num_tried)
        outer = self._activity.samples
        self._load_partial_grads(into, loss_scale)
        before = None if into is None else into.taken
        num_before = 0 if before is None else before.num_micro_batches
        compression = self._compression if sync else None
        profiled = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
        try:
            self._activity.samples, self._activity.has_coupled = samples, False
            key, kept = self._key(state), _buffers_of(into, samples)
            self._buffers.begin(kept)
            if compression is not None:
                slot = state.slots.get(compression.name)
                compression.begin(slot, state.seed, loss_scale)
            with draws.seeded(key, self._device, tried, num_before):
                with span("accelfn forward") if profiled else NOTHING:
                    read = self._forward(loss_fn, samples, sync=sync)
                if into is None and self._binding.has_gradients():
                    doctor.reject_own_backward()
                self._look(loss_fn, samples, read)
                with span("accelfn backward") if profiled else NOTHING:
                    averaged = self._backward(read, into, samples.lone, loss_scale)
            live = self.live_update
            stepped = {} if live is None else live.stepped_params()
            tensors = self._collect_gradients(stepped, reduced=averaged is not None)
            if live is not None:  # already stepped and freed
                tensors = {}
            elif self._holder is not None:
                tensors = self._holder.hidden()
            self._live, written = tensors, self._buffers.end()
        except BaseException as error:
            self._abandon(state)
            if type(error) is RuntimeError:  # from torch, and not out of memory
                reject_device_mismatch(samples, self._device, error)
            raise
        finally:
            self._activity.samples = outer
        if samples.known == 0:
            written = self._of_others(written, kept)
        self._live_buffers = written
        weight = read.weight if before is None else before.divisor + read.weight
        taken = GradInfo(
            divisor=weight if averaged is None else averaged,
            num_averaged=1 if averaged is None else self._num_losses,
            # weights are never negative, so one rank's weight is enough
            has_weight=not isinstance(weight, torch.Tensor) and weight >= 1,
            loss_scale=loss_scale,
            cursor=cursor,
            num_micro_batches=num_before + 1,
            update=tried,
            trained=state.definition.skeleton.trainable,
            finite_loss=read.is_finite and (before is None or before.finite_loss),
            owned_by_engine=self._holder is not None,
            slots={} if compression is None else compression.end(),
        )
        taken.lease.is_mean = samples.lone and read.is_mean and loss_scale is None
        grads = Grads(
            tensors=tensors,
            buffers=self._live_buffers,
            reduced=averaged is not None or self._is_alone,
            taken=taken,
        )
        if may_be_kept:
            self.hand_out()
        return Metrics(read.sums), grads

    def _of_others(
        self, written: dict[str, torch.Tensor], kept: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return buffers after an empty share's placeholder: keep statistics of all ranks."""
        names = self._of_all_ranks
        if self._activity.has_coupled:  # such as a center that the loss moves
            names = written.keys() - self._of_this_rank
        return {**kept, **{n: written[n] for n in written.keys() & names}}

    def hand_out(self) -> None:
        """Let the caller keep the gradients that were just computed.

        The next pass overwrites DDP's buckets. Gradients in buckets then get memory of their
        own.
        """
        live = self._live if isinstance(self._live, dict) else {}
        buckets = {name: grad for name, grad in live.items() if _is_in_bucket(grad)}
        self._handed_out |= buckets.keys()
        for name, grad in buckets.items():
            part = local(grad).detach()
            live[name] = with_local(grad, part) if is_shard(grad) else part

    def prepare(self, state: TrainState, grads: Grads, planned: Assignments) -> Grads:
        """Set gradients for the optimizer, divided unless its kernel divides.

        Raises:
            GradsError: the gradients do not fit the parameters.
            OptimizerError: nobody set a schedule-free optimizer's mode.
        """
        self.bind(state)
        self._optimizer.expect(planned)
        taken = grads.taken
        is_scaled = taken.loss_scale is not None
        if not taken.lease.is_mean and (
            is_scaled or not self._optimizer.divides(taken.divisor)
        ):
            grads = grads.divided()
        if grads.as_taken is not self._live:
            self._binding.put_gradients(grads)
        return grads

    def finish(self, grads: Grads) -> OptState:
        """End an update taken by the backward pass; return the optimizer's state by name."""
        assert self.live_update is not None  # noqa: S101 - the update was planned
        return self._end_update(grads, self.live_update.end())

    def can_skip(self, grads: Grads) -> bool:
        """Whether a flag on the device can skip the update and its buffer writes."""
        return self._optimizer.skips and self._buffers.keep_shapes(grads.buffers)

    def update(
        self, grads: Grads, hyper: Assignments, skip: torch.Tensor | None = None
    ) -> OptState | None:
        """Step the optimizer on the state's tensors, in place; return its state by name.

        If `skip` is 1 on the device, nothing changes. If the optimizer itself skips an update
        that is not finite, nothing changes and the result is None.
        """
        taken = grads.taken
        divisor = None if taken.lease.is_mean else taken.denominator
        opt_state = self._optimizer.update(hyper, divisor, skip)
        if opt_state is None:
            return None
        return self._end_update(grads, opt_state, skip)

    def reports(self) -> Mapping[str, Number]:
        """Return the gradient holder's metrics of the last update."""
        return {} if self._holder is None else self._holder.reports()

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return a callable that runs `fn(model, ...)` in evaluation mode on these tensors."""
        return self._binding.lend(params, buffers)

    def _end_update(
        self, grads: Grads, opt_state: OptState, skip: torch.Tensor | None = None
    ) -> OptState:
        """Clear gradients, commit buffers and bind the state after the update."""
        self._binding.clear_gradients()
        if grads.buffers:
            self._buffers.commit(grads.buffers, skip)
        self._live, self._live_buffers = None, {}
        params = self._bound[0]
        if self._holder is not None:
            params = self.params = self._holder.bound
        self._bound = (params, self._bound[1], opt_state)
        return opt_state

    def discard(self) -> None:
        """Drop gradients that no update will apply."""
        self._binding.clear_gradients()
        self._live, self._live_buffers = None, {}

    def is_undone(self) -> bool:
        """Drop an update that raised; return whether it certainly changed nothing."""
        self.discard()
        self._bound = (None, None, None)  # rebind, which resets the optimizer
        return self._optimizer.is_untouched

    def _backward(
        self,
        read: ReadLoss,
        into: Grads | None,
        lone: bool,  # noqa: FBT001 - of samples
        loss_scale: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run the backward pass of a total, or of a single mean."""
        weight = read.weight if into is None else into.taken.divisor + read.weight
        if read.is_mean:
            whole = lone and read.weight and loss_scale is None
            scale = None if whole else read.weight
        elif isinstance(read.weight, torch.Tensor):
            scale = read.weight != 0  # a total without weight counts for nothing
        else:
            scale = None if read.weight else 0
        if loss_scale is not None:
            scale = loss_scale if scale is None else loss_scale * scale
        if self.live_update is not None:
            mean = lone and read.is_mean
            self.live_update.divide_by(None if mean else never_zero(weight))
            self.live_update.hold()
        try:
            return self._runner.backward(read.scalar, scale, weight)
        finally:
            for leaf, grad in self._aside:
                leaf.grad = grad
            self._aside = []

    def _collect_gradients(
        self, stepped: Mapping[str, torch.Tensor], *, reduced: bool
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of the backward pass, or the parameters that it stepped."""
        found = dict(stepped) or self._binding.take_gradients()
        trained = self._binding.trained
        if len(found) < len(trained):
            doctor.reject_frozen(trained, found)
        if reduced and len(found) < len(trained) and not self._runner.expects_unused:
            unused = [name for name in trained if name not in found]
            doctor.reject_unused(unused, are_held=self._holder is not None)
        if not found:
            doctor.reject_disconnected()
        if not self._has_compared:
            check_gradients(self._binding.trained, found, self._layer_ranks)
            self._has_compared = True
        return found

    def _key(self, state: TrainState) -> int:
        """Return the RNG key of this rank's losses."""
        if self._key_of[0] != state.seed:
            loss, name = state.definition.world.loss, state.definition.name
            self._key_of = (state.seed, draws.key(state.seed, name, "loss", loss.rank))
        return self._key_of[1]

    def _load_partial_grads(
        self, into: Grads | None, loss_scale: torch.Tensor | None
    ) -> None:
        """Load partial gradients, so that the backward pass adds to them."""
        if into is None or into.as_taken is not self._live:
            self._detach_exported_grads()
        if into is None:
            return
        if (into.taken.loss_scale is None) != (loss_scale is None):
            msg = (
                "value_and_grad(into=grads): these gradients were taken under another"
                " setup, which scales losses otherwise."
            )
            raise GradsError(msg)
        try:
            self._binding.put_gradients(into)
            into.give_away()
            if into.taken.lease.is_mean:
                into.multiplied()
        except BaseException:
            self._detach_exported_grads()
            self._binding.clear_gradients()
            raise

    def _detach_exported_grads(self) -> None:
        """Copy exported gradients out of DDP's buckets, then drop unapplied gradients."""
        handed_out, self._handed_out = self._handed_out, frozenset()
        if self._live is None:
            return
        live = self._live if isinstance(self._live, dict) else {}
        for part in (local(live[name]) for name in handed_out):
            part.data = part.clone()
        self._buffers.leave()
        self.discard()

    def _abandon(self, state: TrainState) -> None:
        """Clean up after a pass that raised; a DDP reducer is then unusable."""
        self.discard()
        self._buffers.abandon()
        if self.live_update is not None:
            self.live_update.forget()
        if self._runner.reduces or self.live_update is not None:
            state.definition.cache.engine = None


def _reset_autograd(state: TrainState) -> None:
    """Reset `requires_grad` and `grad` that a user set on a state's tensors."""
    state.definition.cache.has_shown = False
    params, buffers = state._params, state._buffers  # pyright: ignore[reportPrivateUsage]
    for each in (*params.values(), *buffers.values()):
        each.requires_grad, each.grad = False, None


def _is_in_bucket(grad: torch.Tensor) -> bool:
    return (grad if type(grad) is torch.Tensor else local(grad))._base is not None


def _buffers_of(into: Grads | None, samples: Samples) -> Mapping[str, torch.Tensor]:
    """Return the buffers that a pass starts from; copies for an empty share's placeholder."""
    kept = {} if into is None else into.buffers
    return tree.clone(dict(kept)) if samples.known == 0 else kept


# The engine of a state, built at first use after ranks have compared their definitions.


MakeRunner: TypeAlias = Callable[[nn.Module], Runner]
Innermost: TypeAlias = Callable[[nn.Module, LiveUpdate | None], Runner]


def engine_of(state: TrainState) -> Engine:
    """Return the engine of the state's definition, building it at first use."""
    cache, world = state.definition.cache, state.definition.world
    if cache.engine is None or cache.is_to_compare:
        state.lease.check()
        if world.is_main and cache.engine is None:
            advise_of_rates(state.definition.schedule)
        _compare(state)
        cache.is_to_compare = False
        if cache.engine is None:
            cache.engine = _build_engine(state)
    return cache.engine


def build_engine(
    state: TrainState,
    home: ParamBinding,
    innermost: Innermost,
    *,
    compression: "Compression | None" = None,
    optimizer: TakesUpdates | None = None,
) -> Engine:
    """Return an engine over a binding of the state's tensors.

    `optimizer` defaults to the state's optimizer. Transforms wrap the innermost runner, the
    leftmost outside.
    """
    definition, live = state.definition, None
    if optimizer is None:
        optimizer = _over_params(definition, home)
        if "steps_in_backward" in definition.setup.facts:
            live = LiveUpdate(optimizer, home.trained)
    module = apply_module_transforms(home.module, state)

    def make_runner(module: nn.Module) -> Runner:
        return innermost(module, live)

    for each in reversed(definition.setup.owners["runner"]):
        make_runner = each.runner(make_runner, state)
        ok, what = callable(make_runner), "a function that makes a runner"
        check_returned(each, "runner", ok=ok, returned=make_runner, expected=what)
    runner = make_runner(module)
    if live is not None and not live.by_buckets:
        live.hook()
    return Engine(
        state,
        home,
        runner,
        module=module,
        optimizer=optimizer,
        live_update=live,
        compression=compression,
    )


def _compare(state: TrainState) -> None:
    """Compare the ranks' states, if the setup says that they train one model.

    Raises:
        ReplicaMismatchError: definitions or parameters differ between ranks.
    """
    if _is_one_training(state):
        compare(state)


def _is_one_training(state: TrainState) -> bool:
    """Whether the setup reduces gradients over ranks, or splits the model."""
    owners = state.setup.owners
    reduces = owners["engine"] or owners["reduce"]
    return bool(reduces) or state.definition.layout is not None


def compare(state: TrainState) -> None:
    """Raise unless ranks have the same definition and parameters; once per definition.

    Ranks that train independently may hold different parameters after the first update.

    Cost: some small all-reduces (see `check_definitions` and `check_replicas`), once.

    Raises:
        ReplicaMismatchError: definitions or parameters differ between ranks.
    """
    definition, setup, world = state.definition, state.setup, state.world
    cache = definition.cache
    if world.size == 1 or (cache.is_compared and not cache.is_to_compare):
        return
    check_definitions(state)
    is_apart = "apart" in setup.facts or not _is_one_training(state)
    values = not is_apart or state.step == 0
    whole = {n: p for n, p in state.params.items() if not is_shard(p)}
    has_copies = world.axes.get("dp_replicate", 1) > 1
    check_replicas(
        state.params if has_copies else whole,
        world,
        label="compare replicas",
        values=values,
        trained=set(definition.skeleton.trainable),
    )
    if not values and definition.trains_apart:
        copy = definition.copy  # whose ranks agree at any time
        check_replicas(whole, copy, label="compare replicas", values=True)
    cache.is_compared = True


def _build_engine(state: TrainState) -> Engine:
    """Return the engine of a transform, or a local engine without collectives."""
    chosen = state.setup.owners["engine"]
    if not (chosen and state.definition.copy.size > 1):
        return build_engine(
            state, binding_of(state), lambda module, _: LocalRunner(module)
        )
    engine = chosen[0].engine(state)
    is_one = isinstance(engine, Engine)
    check_returned(
        chosen[0], "engine", ok=is_one, returned=engine, expected="an Engine"
    )
    return engine


def _over_params(definition: Definition, home: ParamBinding) -> LiveOptimizer:
    """Return a state's optimizer over the parameters of a binding."""
    names = {param: name for name, param in home.params.items()}
    optimizer = definition.optimizer_over(home.params)
    return LiveOptimizer(optimizer, names, home.opt_state_view)


# Advice about data, at the first batch of a definition.
#
# Replicas that all train on the same samples stay equal, so only a check of the batch shows
# that each rank does all the work.


def check_loaded(state: TrainState) -> None:
    """Warn if a state was loaded and its result was dropped."""
    loaded = state.definition.cache.loaded
    if loaded is None or not state.world.is_main:
        return
    given, made = loaded
    if given() is state.lease and made() is None:
        advise(
            "af.load and CheckpointStore.restore return the saved state, and nothing keeps"
            " what the last one returned; this step takes the state that it was given, which"
            f" stands at update {state.step}. Write state = af.load(state, directory). If this"
            " state is meant, all is well."
        )


def check_first_batch(state: TrainState, batch: Any) -> None:
    """Warn if every rank is about to train on all samples.

    Cost: at the first batch of a definition, an all-gather of 8 bytes if the batch is a plain
    value under `shard_data` and the state has no data; otherwise none.
    """
    definition = state.definition
    if definition.world.batch.size == 1 or definition.cache.saw_a_batch:
        return
    with own_modes(definition.world.device):
        engine_of(state)
    definition.cache.saw_a_batch = True
    is_sharded = definition.plan.num_shares > 1
    if not isinstance(batch, Batch):
        said = _value_advice(state, batch) if is_sharded else None
    elif batch.start is None or not _is_whole(batch) or _has_own_stream(state):
        said = None
    elif is_sharded:
        said = _uncut_advice(state, batch)
    else:
        said = _unsharded_advice(state)
    if said is not None and definition.world.is_main:
        advise(said)


def warn_of_values(state: TrainState, value: Any) -> None:
    """Warn at the second update on plain values: the loop does not advance the state's data.

    Values between batches (a replay of samples) and one repeated value (overfitting) do not
    warn.
    """
    cache, cursor = state.definition.cache, state.cursor
    if cache.saw_values or cursor.epoch or cursor.samples:
        return
    before, cache.last_value = cache.last_value, tree.tensor_leaves(value)
    if not (state.num_tried and before) or all(map(is_, before, cache.last_value)):
        return
    cache.last_value = []
    cache.saw_values = True
    if state.world.is_main:
        advise(
            "step(state, batch) gets values that are no batches of af.batches(state), so the"
            " state stays at the beginning of its data, and a resumed run reads them again;"
            " nor does af.shard_data() cut them. Write `for batch in af.batches(state,"
            " epochs=...):` and step(state, batch, noise) with the batch itself and anything"
            " else behind it. If a loader of your own is meant, leave out data=."
        )


def _is_whole(batch: Batch) -> bool:
    """Whether this rank has all samples of an update that ranks could share."""
    counted = sum(weight or 0 for weight in batch.weights)
    return counted == batch.num_samples > 1


def _has_own_stream(state: TrainState) -> bool:
    """Whether each rank reads a data stream of its own."""
    return state.data is not None and state.data.sharded


def _value_advice(state: TrainState, value: Any) -> str | None:
    """Return advice about a plain value under `shard_data`, or None."""
    size = state.world.batch.size
    if state.data is not None or not _is_alike(value, state):
        return None  # `warn_of_values` warns of a value where the state has data
    return (
        f"step(state, batch) got the same value on all {size} ranks: af.shard_data() cuts"
        " batches of af.batches alone, so each rank trains on all samples, which is"
        f" {size} times the work for the result of one rank. Give the dataset to the state,"
        " TrainState.create(data=af.Data(dataset, batch_size=...)), and write `for batch in"
        " af.batches(state, epochs=...):`; or give each rank its part, af.split(value,"
        " world)."
    )


def _is_alike(value: Any, state: TrainState) -> bool:
    """Whether the value's tensors are equal on all ranks."""
    batch = state.world.batch
    sums = [checksum(t) for t in tree.tensor_leaves(value) if _has_words(t)]
    # without tensors to compare, use the rank, so that ranks differ
    mine = checksum(torch.stack(sums)) if sums else torch.tensor(batch.rank)
    told = all_gather(mine.to(batch.device), batch, label="first batch")
    return len({int(each) for each in told}) == 1


def _has_words(tensor: torch.Tensor) -> bool:
    """Whether a tensor's checksum can be compared: not sparse, nested or a scalar."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    return plain and tensor.numel() > 1


def _uncut_advice(state: TrainState, batch: Batch) -> str:
    size = state.world.batch.size
    return (
        f"This batch is not cut: its {batch.num_samples} samples are all on this rank, one"
        f" of {size} that af.shard_data() gives a part each. It is of another state, or was"
        " begun before this setup was given: write `for batch in af.batches(state):` with"
        " the state that is trained, made with world= and its setup."
    )


def _unsharded_advice(state: TrainState) -> str | None:
    """Return advice if ranks have the same data and nothing shards it, or None."""
    if not state.definition.cache.has_same_data:
        return None
    size = state.world.batch.size
    return (
        f"Nothing in the setup gives ranks their part: each of the {size} ranks trains on all"
        f" samples of every batch, which is {size} times the work for the result of one."
        " Write af.shard_data() into the setup, as in af.chain(af.shard_data(),"
        " af.wrap_ddp())."
    )
