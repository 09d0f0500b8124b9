# SPDX-License-Identifier: Apache-2.0
"""The engine: the one place with side effects.

It binds a state's tensors to real PyTorch machinery, a module and an optimizer, and runs
backward passes and updates on them. It is a cache, not a state: it can be dropped and made
again at any time, and what it does depends on the state it is given alone.

In the steady loop the state is the one that the last update returned, and nothing is
bound anew; another state is bound by swapping pointers.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

from accelfn import foreach, streams
from accelfn.collectives import check_replicas
from accelfn.cursor import Cursor
from accelfn.engine.buffers import Buffers
from accelfn.engine.read_loss import ReadLoss, Samples
from accelfn.engine.runner import LocalRunner, LossFunction, Runner
from accelfn.errors import GradsError, UnusedParametersError
from accelfn.grads import Grads
from accelfn.loss import Metrics
from accelfn.optimizer import Hyper, LiveOptimizer
from accelfn.state import OptState, TrainState

MakeRunner: TypeAlias = Callable[[nn.Module], Runner]


class Engine:
    """Live machinery for the states of one definition."""

    def __init__(self, state: TrainState, make_runner: MakeRunner) -> None:
        """Build a module and an optimizer around the state's tensors."""
        definition = state.definition
        skeleton = definition.skeleton
        self._device = definition.world.device
        self._world_size = definition.world.size
        self._bound: tuple[object, object, object] = (None, None, None)
        self._stream_of: tuple[int | None, int] = (None, 0)
        module = skeleton.build(state.params, state.buffers)
        named = dict(module.named_parameters())
        self._all = named
        self._trained = {name: named[name] for name in skeleton.trainable}
        self._pairs = list(self._trained.items())
        metas = dict(skeleton.module.named_parameters())
        self._optimizer = LiveOptimizer(
            definition.optimizer,
            {metas[name]: param for name, param in named.items()},
            {param: name for name, param in named.items()},
        )
        self._buffers = Buffers(module)
        self._runner = make_runner(module)
        # gradients that lie in `param.grad` now, not yet applied
        self._live: dict[str, torch.Tensor] | None = None
        self._live_buffers: dict[str, torch.Tensor] = {}

    def bind(self, state: TrainState) -> None:
        """Point the machinery at the state's tensors, unless it does already."""
        params = state._params  # pyright: ignore[reportPrivateUsage]
        buffers = state._buffers  # pyright: ignore[reportPrivateUsage]
        opt_state = state._opt_state  # pyright: ignore[reportPrivateUsage]
        bound = self._bound
        if bound[0] is params and bound[1] is buffers and bound[2] is opt_state:
            return
        self._move_out()
        for name, param in self._all.items():
            param.data = params[name]
        if self._buffers:
            self._buffers.bind(buffers)
        self._optimizer.load(opt_state)
        self._bound = (params, buffers, opt_state)

    def value_and_grad(
        self,
        state: TrainState,
        loss_fn: LossFunction,
        extras: tuple[Any, ...],
        *,
        samples: Samples,
        into: Grads | None,
        sync: bool,
        cursor: Cursor | None,
    ) -> tuple[Metrics, Grads]:
        """Run the loss forward and backward, adding to `into`; the state stays as it was."""
        self.bind(state)
        self._take_in(into)
        buffers = self._buffers
        if buffers:
            buffers.begin({} if into is None else into.buffers)
        seed = self._seed(state, 0 if into is None else into.num_micro_batches)
        try:
            with _own_modes(self._device), streams.stream(seed, self._device):
                read = self._runner.forward(
                    loss_fn, samples.value, extras, samples, sync=sync
                )
                averaged = self._backward(read, into, lone=samples.lone)
        except BaseException:
            self._abandon(state)
            raise
        written = buffers.end() if buffers else {}
        if written and _is_nothing(
            read.weight
        ):  # an empty share's stand-in is not counted
            written = {} if into is None else dict(into.buffers)
        found = [(name, param.grad) for name, param in self._pairs]
        tensors = {name: grad for name, grad in found if grad is not None}
        if averaged is not None and len(tensors) < len(self._trained):
            self._refuse_unused(tensors)
        self._live, self._live_buffers = tensors, written
        lone = samples.lone and read.is_mean
        grads = Grads(
            tensors=tensors,
            weight=read.weight if into is None else into.weight + read.weight,
            unit=_unit(read) if lone else 1,
            buffers=written,
            reduced=averaged is not None or self._world_size == 1,
            cursor=cursor,
            num_micro_batches=1 if into is None else into.num_micro_batches + 1,
            update=state.step,
        )
        if averaged is not None:
            size = self._world_size
            grads = attrs.evolve(grads, weight=averaged * size, unit=size)
        return Metrics(read.sums), grads

    def update(
        self, state: TrainState, grads: Grads, hyper: "tuple[float | None, Hyper]"
    ) -> OptState:
        """Step the optimizer on the state's tensors, in place; return its state by name."""
        self.bind(state)
        if grads.tensors is not self._live:
            self._check_names(grads)
            for name, param in self._pairs:
                param.grad = grads.tensors.get(name)
        self._optimizer.set_hyper(*hyper)
        opt_state = self._optimizer.update()
        for _, param in self._pairs:
            param.grad = None
        if grads.buffers:
            self._buffers.commit(grads.buffers)
        self._live, self._live_buffers = None, {}
        self._bound = (self._bound[0], self._bound[1], opt_state)
        return opt_state

    def _backward(
        self, read: ReadLoss, into: Grads | None, *, lone: bool
    ) -> torch.Tensor | None:
        """Run the backward pass; gradients of totals, or of a lone mean."""
        weight = read.weight if into is None else into.weight + read.weight
        scale = read.weight if read.is_mean else None
        if lone and scale:
            scale = None
        return self._runner.backward(read.scalar, scale, weight)

    def _seed(self, state: TrainState, micro_batch: int) -> int:
        if self._stream_of[0] != state.seed:
            world, name = state.definition.world, state.definition.name
            self._stream_of = (
                state.seed,
                streams.key(state.seed, name, "loss", world.rank),
            )
        return streams.fold(streams.fold(self._stream_of[1], state.step), micro_batch)

    def _take_in(self, into: Grads | None) -> None:
        """Put the gradients that are to be added to where a backward pass adds."""
        if into is None or into.tensors is not self._live:
            self._move_out()
        if into is None:
            return
        if into.unit != 1:
            foreach.mul_(into.tensors.values(), into.unit)
        for name, grad in into.tensors.items():
            self._trained[name].grad = grad

    def _move_out(self) -> None:
        """Let gradients that nobody applied be their holder's own."""
        if self._live is None:
            return
        for name, grad in self._live.items():
            if (
                grad._base is not None
            ):  # a view into a DDP bucket, which the next pass writes
                self._live[name] = grad.clone()
        for name, buffer in self._live_buffers.items():
            self._live_buffers[name] = buffer.clone()
        self._live, self._live_buffers = None, {}
        for param in self._trained.values():
            param.grad = None

    def _abandon(self, state: TrainState) -> None:
        """Leave nothing of a pass that raised; after one, a DDP reducer is unusable."""
        for param in self._trained.values():
            param.grad = None
        self._live, self._live_buffers = None, {}
        self._buffers.abandon()
        if self._runner.reduces:
            state.definition.cache.pop("engine", None)

    def _check_names(self, grads: Grads) -> None:
        strangers = grads.tensors.keys() - self._trained.keys()
        if strangers:
            msg = f"Gradients for {sorted(strangers)}, which the model does not train."
            raise GradsError(msg)

    def _refuse_unused(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._runner.expects_unused:
            return
        unused = [name for name in self._trained if name not in tensors]
        msg = (
            f"{len(unused)} parameters took no part in the loss:"
            f" {', '.join(unused[:5])}. DistributedDataParallel waits for all: use"
            " af.wrap_ddp(find_unused_parameters=True), or freeze them with"
            " requires_grad_(False)."
        )
        raise UnusedParametersError(msg)


def local_engine(state: TrainState) -> Engine:
    """Return an engine in which nothing crosses ranks."""
    return Engine(state, LocalRunner)


def engine_of(state: TrainState) -> Engine:
    """Return the engine of the state's definition, building it at first use."""
    cache = state.definition.cache
    if "engine" not in cache:
        state.lease.check()
        setup, world = state.definition.setup, state.definition.world
        chosen = setup.having("engine")
        if world.size > 1 and (chosen or setup.having("reduce")):
            values = "replicas_agree" not in setup.gives_up() or state.step == 0
            check_replicas(state.params, world, label="compare replicas", values=values)
        if chosen and world.size > 1:
            cache["engine"] = chosen[0].engine(state)
        else:
            cache["engine"] = local_engine(state)
    return cache["engine"]


def _unit(read: ReadLoss) -> float:
    return read.weight if isinstance(read.weight, (int, float)) and read.weight else 1


def _is_nothing(weight: Any) -> bool:
    return isinstance(weight, (int, float)) and weight == 0


def _own_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the caller's modes do not touch the step; mostly none."""
    inference = torch.is_inference_mode_enabled()
    no_grad = not torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled(device.type)
    if not (inference or no_grad or autocast):
        return _NOTHING
    stack = ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.enable_grad())
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *error: object) -> None:
        return None


_NOTHING = _Nothing()
