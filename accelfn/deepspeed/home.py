# SPDX-License-Identifier: Apache-2.0
"""`ZeroBinding`: connect the tensors of a state, one state at a time, to DeepSpeed's engine."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn, Self, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accelfn import Grads, TrainState, World
from accelfn.deepspeed.engine import Zero
from accelfn.deepspeed.flats import (
    Flat,
    OptState,
    flat_key,
    flat_opt_state,
    flat_params,
    flatten_opt_state,
    redistribute,
    row_runs,
)
from accelfn.deepspeed.settings import release_group
from accelfn.errors import GradsError, LossError, UnusedParametersError, WorldError
from accelfn.plug import (
    LiveOptimizer,
    ReadLoss,
    RootModule,
    Samples,
    arguments,
    collectives,
    draws,
    tree,
)

_HELD = (
    "These gradients cannot be read: under af.wrap_deepspeed, DeepSpeed keeps them from the"
    " backward pass to the update. To clip them, add af.clip_grad_norm(max_norm) to the setup. To"
    " read gradients, use af.wrap_fsdp() instead."
)


Lend: TypeAlias = Callable[..., Callable[..., Any]]
"""A function of parameters and buffers. It returns a callable that runs functions `fn(model,
...)` on a model with these parameters and buffers."""
LossFunction: TypeAlias = Callable[..., Any]
Hyper: TypeAlias = dict[tuple[int, str], Any]
"""Values of hyperparameters, by the index of the parameter group and the name."""


class HeldGradients(Mapping[str, torch.Tensor]):
    """A placeholder for gradients that only DeepSpeed has; reading it raises an error."""

    def __getitem__(self, name: str) -> NoReturn:
        """Raise an error: the gradients cannot be read.

        Raises:
            GradsError: always.
        """
        raise GradsError(_HELD)

    def __iter__(self) -> Iterator[str]:
        """Raise an error: the gradients cannot be read."""
        raise GradsError(_HELD)

    def __len__(self) -> int:
        """Return 0, because no gradient can be read."""
        return 0


class ZeroBinding:
    """Connects a state's tensors to DeepSpeed's module and flat tensors (binds the state).

    If an engine of the same definition has already updated the state, its values are in flat
    tensors, and DeepSpeed's tensors only have to point to them. The values of other states are
    converted to flat tensors, which is a collective.

    Attributes:
        bound: the parameters of the state that is bound now.
    """

    def __init__(
        self, state: TrainState, lend: Lend, config: Mapping[str, Any], ranks: World
    ) -> None:
        """Build the module; its parameters have memory, but no values yet."""
        assert state.definition.layout is not None  # noqa: S101 - the transform has a layout
        self._definition, self.lend = state.definition, lend
        self._layout, self._config, self._ranks = state.definition.layout, config, ranks
        skeleton = state.definition.skeleton
        device = state.definition.world.device
        empty = {
            name: torch.zeros(meta.shape, dtype=meta.dtype, device=device)
            for name, meta in skeleton.module.named_parameters()
        }
        self.module = skeleton.build(empty, state.buffers)
        self.params = dict(self.module.named_parameters())
        self.trained = {name: self.params[name] for name in skeleton.trainable}
        self.names = {id(param): name for name, param in self.params.items()}
        self._frozen = {n: p for n, p in self.params.items() if n not in self.trained}
        self._kept: dict[str, torch.Tensor] = {}
        # the optimizer state of frozen parameters, to use if they are trained again
        self._at_rest: OptState = {}
        self._used: list[torch.Tensor] = []
        self._held: HeldGradients | None = None

    def wrap(self, root: nn.Module) -> Zero:
        """Create DeepSpeed's engine for `root`, a wrapper of this binding's module."""
        optimizer = self._definition.optimizer_over(self.params)
        self.zero = Zero(root, optimizer, self._config, self._ranks)
        self.zero.align(self.names)
        self.where = self.zero.where(self.names, self._layout)
        for param in self.trained.values():
            # `list.append` is a C function: a Python function would cost a call per parameter
            param.register_post_accumulate_grad_hook(self._used.append)
        weakref.finalize(self, self.zero.free)
        return self.zero

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Make DeepSpeed use a state's parameters; convert them if they are not flat."""
        with torch.no_grad():
            frozen = {name: params[name] for name in self._frozen}
            flat = self._flat_here(params)
            if flat is None:
                values = {name: params[name] for name in self.trained}
                flats = self.where.to_flats(values)
                flat = flat_params(params, self.where, flats, frozen)
            self.bound = flat
            self._keep(frozen)
            self.zero.point_at(flat.content)

    def _flat_here(self, values: object) -> Flat | None:
        """Return values if they are flat tensors with the layout of this binding."""
        if not isinstance(values, Flat):
            return None
        theirs, ours = values.where, self.where
        is_same = theirs.places == ours.places and theirs.sizes == ours.sizes
        return values if is_same else None

    def _keep(self, frozen: Mapping[str, torch.Tensor]) -> None:
        """Copy a state's frozen parameters to DeepSpeed; a collective if they changed."""
        new = {n: v for n, v in frozen.items() if self._kept.get(n) is not v}
        if not new:
            return
        pieces = {n: tree.local(v).detach().reshape(-1) for n, v in new.items()}
        have = {
            name: row_runs(value.shape, self._ranks.size, is_cut=tree.is_shard(value))
            for name, value in new.items()
        }
        want = {name: self.zero.runs_of(self._frozen[name]) for name in new}
        label = "ZeRO: frozen parameters"
        parts = redistribute(pieces, have, want, self._ranks, label=label)
        for name, part in parts.items():
            self.zero.keep(self._frozen[name], part)
        self._kept = dict(frozen)

    @property
    def opt_state_view(self) -> Self:
        """The object that converts optimizer state: this binding."""
        return self

    @property
    def holder(self) -> Self:
        """The object that has the gradients: this binding."""
        return self

    def reports(self) -> dict[str, float]:
        """Return the metrics of an update: `grad_norm`, if gradients are clipped."""
        clips = self._config["gradient_clipping"] > 0
        return {"grad_norm": float(self.zero.norm)} if clips else {}

    def hidden(self) -> HeldGradients:
        """Return a placeholder for the gradients that DeepSpeed has now."""
        self._held = HeldGradients()
        return self._held

    def has_gradients(self) -> bool:
        """Return False: DeepSpeed hides gradients that a user's own backward pass left."""
        return False

    def note_none(self) -> None:
        """Start an update: no parameter has a gradient yet."""
        self._used.clear()
        self.zero.begin()

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the parameters that have a gradient in DeepSpeed, by name."""
        names = {*self.unused_params()}
        return {n: param for n, param in self.trained.items() if n not in names}

    def unused_params(self) -> list[str]:
        """Return the names of the parameters without a gradient on this rank."""
        ids = {*map(id, self._used)}
        if len(ids) == len(self.trained):  # the usual case
            return []
        return [name for name, param in self.trained.items() if id(param) not in ids]

    def put_gradients(self, grads: Grads) -> None:
        """Check that `grads` are the gradients that DeepSpeed has now.

        Raises:
            GradsError: DeepSpeed does not have these gradients.
        """
        if grads.as_taken is self._held:
            return
        msg = (
            "DeepSpeed no longer has these gradients: it keeps only those of the last backward"
            " pass. Since then, other gradients were computed, or these were changed. Pass"
            " gradients to apply_grads, or to into=, before you compute the next ones."
        )
        raise GradsError(msg)

    def clear_gradients(self) -> None:
        """Drop all gradients in DeepSpeed."""
        self.zero.drop_gradients()
        self._used.clear()
        self._held = None

    def to_state(self, opt_state: OptState) -> Any:
        """Return DeepSpeed's optimizer state as a mapping by name, converted when read."""
        return flat_opt_state(self.where, {**self._at_rest, **opt_state})

    def from_state(self, opt_state: Any) -> OptState:
        """Convert the optimizer state of a `TrainState` for DeepSpeed's optimizer."""
        self._at_rest = {n: opt_state[n] for n in self._frozen if n in opt_state}
        flat = self._flat_here(opt_state)
        if flat is None:
            return flatten_opt_state(self.where, opt_state)
        return flat.content


# `GatherCheck`: raise an error if a loss uses parameters that stage 3 has not gathered.


NOT_GATHERED = (
    "The loss used {which} that DeepSpeed had not gathered. At stage 3 it gathers the parameters"
    " of a module that you call, and parameters that you access by name, such as"
    " model.head.weight. Access parameters by name, not from model.parameters() or state_dict();"
    " use the optimizer's weight_decay to penalize weights; or use stage 2."
)
_ASKED = frozenset(
    {
        *("__get__", "__set__", "__delete__", "__hash__", "__repr__", "__eq__"),
        *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size"),
        *("is_floating_point", "is_complex", "register_hook", "requires_grad_"),
        *("data_ptr", "type", "__format__", "get_device", "is_contiguous"),
    }
)
"""Functions that do not use values, so that they are allowed; DeepSpeed's hooks call them, too."""


class GatherCheck(TorchFunctionMode):
    """A torch function mode that raises an error for parameters that are not gathered.

    Such parameters are empty on the rank, so their sum, for example, would silently be 0. The
    mode costs microseconds for each torch call, so it is active only in the first pass of a loss
    function.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        """Create the mode; `names` has the names of parameters by `id`."""
        super().__init__()
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, after checking its arguments.

        Raises:
            LossError: an argument is a parameter that is not gathered.
        """
        options = kwargs or {}
        if getattr(func, "__name__", "") not in _ASKED:
            values = (*args, *options.values())
            lists = (v if isinstance(v, (list, tuple)) else (v,) for v in values)
            for value in chain.from_iterable(lists):
                name = self._names.get(id(value))
                if name is not None and value.ds_status.name == "NOT_AVAILABLE":
                    msg = NOT_GATHERED.format(which=f"the parameter {name!r}")
                    raise LossError(msg)
        return func(*args, **options)


# `ZeroRunner`: run the loss inside DeepSpeed's engine.


_UNUSED = (
    "The loss did not use the same parameters on all ranks. Unused: {lines}. Every rank needs the"
    " gradients of all parameters. The state is unchanged. Use the parameters on all ranks, at"
    " least times 0, as in `+ 0 * net.head.weight.sum()`, freeze them with requires_grad_(False),"
    " or use af.wrap_fsdp(find_unused_parameters=True)."
)


class ZeroRunner:
    """Runs the loss inside DeepSpeed's engine."""

    reduces = True
    expects_unused = False
    lone_module = None

    def __init__(
        self, module: nn.Module, home: ZeroBinding, ranks: World, *, in_parts: bool
    ) -> None:
        """Create DeepSpeed's engine for a module, which transforms may have changed.

        Args:
            module: the module of the state's model.
            home: the binding, which has the parameters.
            ranks: the ranks that train together.
            in_parts: whether each micro-batch reduces its gradients (`keep_grads="sharded"`).
        """
        self._ranks, self._home, self._in_parts = ranks, home, in_parts
        self._root = RootModule(module)
        with collectives.naming("build DeepSpeed's engine", ranks):
            self._zero = home.wrap(self._root)
        self._forward = collectives.naming("DeepSpeed forward", ranks)
        self._backward = collectives.naming("DeepSpeed backward", ranks)
        self._sync, self._is_over = True, False
        self._known = deque[LossFunction](maxlen=8)  # losses that were checked
        ranks.connection.hold(self.let_go)

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Run a loss function and return the loss.

        At the first micro-batch of an update, all ranks receive rank 0's buffers, as under DDP.
        """
        if self._is_over:
            msg = "The world is closed. Call the step inside the `with` block of the world."
            raise WorldError(msg)
        if samples.into is None:
            self._home.bound.check_read()
            self._root.share_buffers(self._ranks)
            self._home.note_none()
        self._sync = sync
        reduces = sync or self._in_parts
        is_known = any(fn is loss_fn for fn in self._known)
        checks = self._zero.stage == 3 and not is_known
        with self._forward, GatherCheck(self._home.names) if checks else draws.NOTHING:
            self._scalar = self._zero.forward(
                loss_fn, samples, reduces=reduces, ends=sync
            )
        if not is_known:
            self._known.append(loss_fn)
        return self._root.take_read()

    def backward(
        self,
        scalar: torch.Tensor,
        scale: arguments.Number | None,
        weight: arguments.Number,
    ) -> torch.Tensor | None:
        """Run the backward pass of `scalar * scale`.

        In the last micro-batch of an update, DeepSpeed reduces all gradients, and this returns
        the weight of the loss, averaged over the ranks.
        """
        loss = self._scalar
        del self._scalar
        if scale is not None:
            loss = loss * torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
        sums = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        waits: list[Callable[[], object]] = []

        def start_sums() -> None:  # runs at the same time as DeepSpeed's last reduction
            sums[0], sums[1] = weight, len(self._home.unused_params())
            label = "weight of the loss"
            waits.append(collectives.start_sum_(sums, self._ranks, label=label))

        try:
            with self._backward:
                self._zero.backward(loss, ends=self._sync, when_all_came=start_sums)
        except RuntimeError as error:
            if any(sign in str(error) for sign in ("got [0]", "tensor b (0)")):
                msg = NOT_GATHERED.format(which="a parameter")
                raise LossError(msg) from error
            raise
        if not self._sync:
            return None
        (wait,) = waits
        wait()
        total, num_unused = sums
        if num_unused:
            self._check_alike(self._home.unused_params())
        return total / self._ranks.size

    def _check_alike(self, names: list[str]) -> None:
        """Check that the same parameters are unused on all ranks.

        Raises:
            UnusedParametersError: the unused parameters differ between ranks. All ranks raise
                an error that names the unused parameters of each rank.
        """
        text, label = "\n".join(names), "parameters without a gradient"
        texts = collectives.gather_text(text, self._ranks, label=label)
        if len({*texts}) > 1:
            rows = [", ".join(text.split("\n")[:5]) or "none" for text in texts]
            lines = "; ".join(f"on rank {rank} {row}" for rank, row in enumerate(rows))
            raise UnusedParametersError(_UNUSED.format(lines=lines))

    def let_go(self) -> None:
        """Remove DeepSpeed's references to the process group, before the world is closed."""
        self._is_over = True
        release_group(self._ranks)


# `ZeroOptimizer`: optimizer steps in DeepSpeed, with a state's hyperparameters and update counts.


class ZeroOptimizer:
    """Runs optimizer steps in DeepSpeed.

    DeepSpeed divides and clips the gradients, and skips an update if gradients are not finite.
    """

    skips = is_untouched = False

    def __init__(self, home: ZeroBinding) -> None:
        """Store the binding; DeepSpeed's engine does not exist yet."""
        self._home = home
        self._shown: Any = None

    def load(self, state: OptState) -> None:
        """Load optimizer state into DeepSpeed's optimizer."""
        self._live.load(state)
        self._shown = state

    def expect(self, hyper: Hyper) -> None:
        """Prepare an update, and check that it is possible.

        Raises:
            OptimizerError: a schedule-free optimizer is not in training mode.
            StateError: a value that was read from the state was changed in place.
        """
        self._live.expect(hyper)
        if isinstance(self._shown, Flat):
            self._shown.check_read()

    def divides(self, divisor: arguments.Number) -> bool:
        """Return True: DeepSpeed always divides the gradients itself."""
        return True

    def update(
        self,
        hyper: Hyper,
        divisor: arguments.Number | None = None,
        skip: torch.Tensor | None = None,
    ) -> OptState | None:
        """Run an optimizer step; return the new optimizer state, or None if it was skipped."""
        live, home = self._live, self._home
        live.begin(hyper)
        home.bound.mark_changed()
        if isinstance(self._shown, Flat):
            self._shown.mark_changed()
        is_finite = home.zero.step(1.0 if divisor is None else float(divisor))
        state = live.finish()
        if not is_finite:
            return None
        self._shown = state
        return state

    @cached_property
    def _live(self) -> LiveOptimizer:
        zero = self._home.zero
        names = {flat: flat_key(i) for i, flat in enumerate(zero.flats)}
        return LiveOptimizer(zero.base, names, self._home)
