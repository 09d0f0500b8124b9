# SPDX-License-Identifier: Apache-2.0
"""The engine: the one place with side effects.

It binds a state's tensors to real PyTorch machinery, a module and an optimizer, and runs
backward passes and updates on them. It is a cache, not a state: it can be dropped and made
again at any time, and what it does depends on the state it is given alone.

In the steady loop the state is the one that the last update returned, and nothing is
bound anew; another state is bound by swapping pointers.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import profiler

from accelfn.base import draws, tree
from accelfn.base.contexts import NOTHING, span
from accelfn.base.shards import is_shard, local, with_local
from accelfn.data.cursor import Cursor
from accelfn.data.left_out import LeftOut
from accelfn.engine import untaken
from accelfn.engine.agreement import check_gradients
from accelfn.engine.buffers import Buffers
from accelfn.engine.counters import Counters
from accelfn.engine.elsewhere import refuse_elsewhere
from accelfn.engine.home import Home
from accelfn.engine.module.synced_norm import norm_buffers, norm_order
from accelfn.engine.optimizer.in_backward import LiveUpdate
from accelfn.engine.optimizer.takes_updates import TakesUpdates
from accelfn.engine.read_loss import ReadLoss, Samples, say_what_tokens_weigh
from accelfn.engine.runner import LossFunction, Runner
from accelfn.engine.strangers import Strangers
from accelfn.errors import GradsError
from accelfn.state.grads import Grads, Taken, never_zero
from accelfn.state.metrics import Metrics, Number
from accelfn.state.state import TrainState
from accelfn.state.values import OptState
from accelfn.structure.prototype import Assignments

if TYPE_CHECKING:
    from accelfn.engine.compression import Compression


class Engine:
    """Live machinery for the states of one definition."""

    def __init__(
        self,
        state: TrainState,
        home: Home,
        runner: Runner,
        *,
        module: nn.Module,
        optimizer: TakesUpdates,
        live_update: LiveUpdate | None = None,
        compression: "Compression | None" = None,
    ) -> None:
        """Take where the state's tensors live, what runs losses there, and what takes updates.

        `build` makes these of a state. The module is the one that the runner runs.
        """
        self._home, self._runner, self._optimizer = home, runner, optimizer
        self._holder, self._compression = home.holder, compression
        self.live_update = live_update
        # of a state after an update, where they are not those of the state before it
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
        # gradients that lie in the home now, not yet applied
        self._live: Mapping[str, torch.Tensor] | None = None
        self._live_buffers: dict[str, torch.Tensor] = {}
        self._handed_out: frozenset[str] = frozenset()
        self._has_compared = self._layer_ranks.size == 1
        self._is_whole = definition.layout is None
        norms = norm_order(module) if self._is_whole else None
        self._forward = (
            runner.forward if norms is None else norms.around(runner.forward)
        )
        self._strangers: dict[Any, Strangers] = {}
        self._aside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        collate = None if state.data is None else state.data.collate
        # a step that asks nobody is the shorter
        self._left_out = None if collate is None else LeftOut()
        self._counters: Counters | None = Counters.of_modules(module)
        kinds = {kind.__name__ for m in module.modules() for kind in type(m).__mro__}
        self._token_looks = 4 if "PreTrainedModel" in kinds else 0

    def bind(self, state: TrainState) -> None:
        """Point the machinery at the state's tensors, unless it does already."""
        # what a holder shows is a copy
        if state.definition.cache.has_shown and self._holder is None:
            _reset_autograd(state)
        params = state._params  # pyright: ignore[reportPrivateUsage]
        buffers = state._buffers  # pyright: ignore[reportPrivateUsage]
        opt_state = state._opt_state  # pyright: ignore[reportPrivateUsage]
        bound = self._bound
        if bound[0] is params and bound[1] is buffers and bound[2] is opt_state:
            return
        self._move_out()
        self._home.bind(params)
        self._buffers.bind(buffers)
        self._optimizer.load(opt_state)
        self._bound = (params, buffers, opt_state)

    def _look(self, loss_fn: LossFunction, samples: Samples, read: ReadLoss) -> None:
        """Look through a function's first graph, at what a mean is of, and at what counts."""
        code = getattr(loss_fn, "__code__", None) or type(loss_fn)
        strangers = self._strangers.get(code)
        if strangers is None and self._is_whole:
            known = {id(p) for p in self._home.params.values()}
            strangers = self._strangers[code] = Strangers(read.scalar, known)
        if read.is_mean and not samples.lone:
            if self._left_out is not None:
                self._left_out.look(samples.value, samples.known, "The loss")
            if self._token_looks:
                self._token_looks -= 1
                say_what_tokens_weigh(samples.value)
        if self._counters is not None and not self._counters.look():
            self._counters = None
        if strangers is not None and strangers.leaves:
            self._aside = strangers.set_aside()

    def _begins(self, update: int) -> None:
        """Say at which update this rank is."""
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

        Gradients that may be kept are their holder's own when others are taken.
        """
        self.bind(state)
        self._begins(tried := state.num_tried)
        outer = self._activity.samples
        self._take_in(into, loss_scale)
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
                if into is None and self._home.has_gradients():
                    untaken.refuse_taken()
                self._look(loss_fn, samples, read)
                with span("accelfn backward") if profiled else NOTHING:
                    averaged = self._backward(read, into, samples.lone, loss_scale)
            live = self.live_update
            stepped = {} if live is None else live.done()
            tensors = self._found(stepped, reduced=averaged is not None)
            if live is not None:  # they are freed
                tensors = {}
            elif self._holder is not None:
                tensors = self._holder.hidden()
            self._live, written = tensors, self._buffers.end()
        except BaseException as error:
            self._abandon(state)
            if type(error) is RuntimeError:  # of torch, and no lack of memory
                refuse_elsewhere(samples, self._device, error)
            raise
        finally:
            self._activity.samples = outer
        if samples.known == 0:
            written = self._of_others(written, kept)
        self._live_buffers = written
        weight = read.weight if before is None else before.divisor + read.weight
        taken = Taken(
            divisor=weight if averaged is None else averaged,
            num_averaged=1 if averaged is None else self._num_losses,
            # of all ranks' weights, which are never negative, one is enough
            has_weight=not isinstance(weight, torch.Tensor) and weight >= 1,
            loss_scale=loss_scale,
            cursor=cursor,
            num_micro_batches=num_before + 1,
            update=tried,
            trained=state.definition.skeleton.trainable,
            finite_loss=read.is_finite and (before is None or before.finite_loss),
            is_held=self._holder is not None,
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
        """Return the buffers after a stand-in: those written that hold all ranks' samples."""
        names = self._of_all_ranks
        if self._activity.has_coupled:  # as a center that a loss moves
            names = written.keys() - self._of_this_rank
        return {**kept, **{n: written[n] for n in written.keys() & names}}

    def hand_out(self) -> None:
        """Let the gradients that were just taken be tensors that their holder may keep.

        What DDP has in its buckets, the next pass writes. The tensors that stand for it get
        memory of their own then, wherever they are held.
        """
        live = self._live if isinstance(self._live, dict) else {}
        buckets = {name: grad for name, grad in live.items() if _is_in_bucket(grad)}
        self._handed_out |= buckets.keys()
        for name, grad in buckets.items():
            part = local(grad).detach()
            live[name] = with_local(grad, part) if is_shard(grad) else part

    def prepare(self, state: TrainState, grads: Grads, planned: Assignments) -> Grads:
        """Put gradients before the optimizer, divided unless its kernel will do that.

        Raises:
            GradsError: they do not fit the parameters.
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
            self._home.put_gradients(grads)
        return grads

    def finish(self, grads: Grads) -> OptState:
        """End the update that a backward pass took; return the optimizer's state by name."""
        assert self.live_update is not None  # noqa: S101 - which was planned
        return self._ended(grads, self.live_update.end())

    def can_skip(self, grads: Grads) -> bool:
        """Whether a flag on the device can leave an update out, with what it has written."""
        return self._optimizer.skips and self._buffers.keep_shapes(grads.buffers)

    def update(
        self, grads: Grads, hyper: Assignments, skip: torch.Tensor | None = None
    ) -> OptState | None:
        """Step the optimizer on the state's tensors, in place; return its state by name.

        Where `skip` is 1 on the device, all is left as it is; so it is where None is returned,
        for the optimizer has left out an update that it found not finite.
        """
        taken = grads.taken
        divisor = None if taken.lease.is_mean else taken.denominator
        opt_state = self._optimizer.update(hyper, divisor, skip)
        if opt_state is None:
            return None
        return self._ended(grads, opt_state, skip)

    def reports(self) -> Mapping[str, Number]:
        """Return what is told of the last update by who holds its gradients."""
        return {} if self._holder is None else self._holder.reports()

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return what calls `fn(model, ...)`, on a model of these in evaluation mode."""
        return self._home.lend(params, buffers)

    def _ended(
        self, grads: Grads, opt_state: OptState, skip: torch.Tensor | None = None
    ) -> OptState:
        """Leave nothing of an update but the state after it."""
        self._home.clear_gradients()
        if grads.buffers:
            self._buffers.commit(grads.buffers, skip)
        self._live, self._live_buffers = None, {}
        params = self._bound[0]
        if self._holder is not None:
            params = self.params = self._holder.bound
        self._bound = (params, self._bound[1], opt_state)
        return opt_state

    def discard(self) -> None:
        """Drop gradients that are not to be applied."""
        self._home.clear_gradients()
        self._live, self._live_buffers = None, {}

    def is_undone(self) -> bool:
        """Drop an update that raised; return whether it has, for sure, changed nothing."""
        self.discard()
        self._bound = (None, None, None)  # what it left in the optimizer goes
        return self._optimizer.is_untouched

    def _backward(
        self,
        read: ReadLoss,
        into: Grads | None,
        lone: bool,  # noqa: FBT001 - of samples
        loss_scale: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run the backward pass; gradients of totals, or of a lone mean."""
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

    def _found(
        self, stepped: Mapping[str, torch.Tensor], *, reduced: bool
    ) -> dict[str, torch.Tensor]:
        """Return the gradients that a backward pass left, or what it stepped."""
        found = dict(stepped) or self._home.take_gradients()
        trained = self._home.trained
        if len(found) < len(trained):
            untaken.refuse_frozen(trained, found)
        if reduced and len(found) < len(trained) and not self._runner.expects_unused:
            unused = [name for name in trained if name not in found]
            untaken.refuse_unused(unused, are_held=self._holder is not None)
        if not found:
            untaken.refuse_apart()
        if not self._has_compared:
            check_gradients(self._home.trained, found, self._layer_ranks)
            self._has_compared = True
        return found

    def _key(self, state: TrainState) -> int:
        """Return the key of all that this rank's losses draw."""
        if self._key_of[0] != state.seed:
            loss, name = state.definition.world.loss, state.definition.name
            self._key_of = (state.seed, draws.key(state.seed, name, "loss", loss.rank))
        return self._key_of[1]

    def _take_in(self, into: Grads | None, loss_scale: torch.Tensor | None) -> None:
        """Put the gradients that are to be added to where a backward pass adds."""
        if into is None or into.as_taken is not self._live:
            self._move_out()
        if into is None:
            return
        if (into.taken.loss_scale is None) != (loss_scale is None):
            msg = (
                "value_and_grad(into=grads): these gradients were taken under another"
                " setup, which scales losses otherwise."
            )
            raise GradsError(msg)
        try:
            self._home.put_gradients(into)
            into.give_away()
            if into.taken.lease.is_mean:
                into.multiplied()
        except BaseException:
            self._move_out()
            self._home.clear_gradients()
            raise

    def _move_out(self) -> None:
        """Let gradients that nobody applied be their holder's own, if they can be seen."""
        handed_out, self._handed_out = self._handed_out, frozenset()
        if self._live is None:
            return
        live = self._live if isinstance(self._live, dict) else {}
        for part in (local(live[name]) for name in handed_out):
            part.data = part.clone()
        self._buffers.leave()
        self.discard()

    def _abandon(self, state: TrainState) -> None:
        """Leave nothing of a pass that raised; after one, a DDP reducer is unusable."""
        self.discard()
        self._buffers.abandon()
        if self.live_update is not None:
            self.live_update.forget()
        if self._runner.reduces or self.live_update is not None:
            state.definition.cache.engine = None


def _reset_autograd(state: TrainState) -> None:
    """Forget what a user had autograd note of a state's tensors, which the next state has too."""
    state.definition.cache.has_shown = False
    params, buffers = state._params, state._buffers  # pyright: ignore[reportPrivateUsage]
    for each in (*params.values(), *buffers.values()):
        each.requires_grad, each.grad = False, None


def _is_in_bucket(grad: torch.Tensor) -> bool:
    return (grad if type(grad) is torch.Tensor else local(grad))._base is not None


def _buffers_of(into: Grads | None, samples: Samples) -> Mapping[str, torch.Tensor]:
    """Return the buffers that a pass goes on from; they do not count an empty share's stand-in."""
    kept = {} if into is None else into.buffers
    return tree.clone(dict(kept)) if samples.known == 0 else kept
