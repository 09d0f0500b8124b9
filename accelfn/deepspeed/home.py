# SPDX-License-Identifier: Apache-2.0
"""`ZeroBinding`: bind the tensors of one state at a time to DeepSpeed's."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Self, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accelfn import Grads, TrainState, World
from accelfn.deepspeed.engine import Zero
from accelfn.deepspeed.flats import (
    FlatOptState,
    FlatParams,
    OptState,
    evenly,
    flat_key,
    flatten_opt_state,
    redistribute,
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
    tree,
)

_HELD = (
    "DeepSpeed holds these gradients, from the backward pass to the update, and nobody sees them:"
    " af.clip_grad_norm says how it clips them. Take af.wrap_fsdp() for what looks at gradients."
)


Lend: TypeAlias = Callable[
    [Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Callable[..., Any]
]
"""Returns a callable that runs functions of a model with these parameters and buffers."""
LossFunction: TypeAlias = Callable[..., Any]
Hyper: TypeAlias = dict[tuple[int, str], Any]
"""Values of hyperparameters by group index and name."""


class HeldGradients(Mapping[str, torch.Tensor]):
    """A placeholder for gradients that DeepSpeed holds; reading them raises an error."""

    def __getitem__(self, name: str) -> NoReturn:
        """Raise an error.

        Raises:
            GradsError: always.
        """
        raise GradsError(_HELD)

    def __iter__(self) -> Iterator[str]:
        """Raise an error."""
        raise GradsError(_HELD)

    def __len__(self) -> int:
        """Return 0, because no gradient is visible."""
        return 0


class ZeroBinding:
    """Binds a state to DeepSpeed's module and flat tensors.

    A state that an engine of the same definition has stepped is in flat tensors already, and is
    bound by pointers. Other states are converted, which is a collective.
    """

    def __init__(
        self,
        state: TrainState,
        lend: Lend,
        config: Mapping[str, Any],
        ranks: World,
    ) -> None:
        """Build the module; its parameters have memory but no values."""
        assert state.definition.layout is not None  # noqa: S101 - the transform has a layout
        self._definition, self._lend = state.definition, lend
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
        # their optimizer state, for when they are trained again
        self._at_rest: OptState = {}
        self._bound: FlatParams | None = None
        self._used: list[torch.Tensor] = []
        self._held: HeldGradients | None = None

    def wrap(self, root: nn.Module) -> Zero:
        """Let DeepSpeed take over a root around this binding's module, and its optimizer."""
        optimizer = self._definition.optimizer_over(self.params)
        self.zero = Zero(root, optimizer, self._config, self._ranks)
        self.zero.align(self.names)
        self.where = self.zero.where(self.names, self._layout)
        for param in self.trained.values():
            # the list's own method, because a function would cost a Python call per parameter
            param.register_post_accumulate_grad_hook(self._used.append)
        weakref.finalize(self, self.zero.free)
        return self.zero

    @property
    def bound(self) -> FlatParams:
        """The bound parameters."""
        assert self._bound is not None  # noqa: S101 - a step binds first
        return self._bound

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Bind a state's flat tensors; convert a state without them."""
        with torch.no_grad():
            frozen = {name: params[name] for name in self._frozen}
            if isinstance(params, FlatParams) and self._lies_alike(params):
                self._bound = params
            else:
                values = {name: params[name] for name in self.trained}
                flats = self.where.to_flats(values)
                self._bound = FlatParams(params, self.where, flats, frozen)
            self._keep(frozen)
            self.zero.point_at(self._bound.flats)

    def _lies_alike(self, params: FlatParams) -> bool:
        """Whether flat tensors have the places and sizes of this binding."""
        return (params.where.places, params.where.sizes) == (
            self.where.places,
            self.where.sizes,
        )

    def _keep(self, frozen: Mapping[str, torch.Tensor]) -> None:
        """Set frozen parameters to a state's values; a collective if they changed."""
        new = {n: v for n, v in frozen.items() if self._kept.get(n) is not v}
        if not new:
            return
        pieces = {n: tree.local(v).detach().reshape(-1) for n, v in new.items()}
        have = {name: self._rows_of(name, value) for name, value in new.items()}
        want = {name: self.zero.runs_of(self._frozen[name]) for name in new}
        parts = redistribute(
            pieces, have, want, self._ranks, label="ZeRO: frozen parameters"
        )
        for name, part in parts.items():
            self.zero.keep(self._frozen[name], part)
        self._kept = dict(frozen)

    def _rows_of(self, name: str, value: torch.Tensor) -> list[tuple[int, int]]:
        count, ranks = value.numel(), self._ranks.size
        if not tree.is_shard(value):
            return [(0, count)] * ranks
        rows = -(-value.shape[0] // ranks)
        return evenly(count, rows * (count // value.shape[0]), ranks)

    @property
    def opt_state_view(self) -> Self:
        """Converts optimizer state; this binding does."""
        return self

    @property
    def holder(self) -> Self:
        """The holder of gradients; this binding is."""
        return self

    def reports(self) -> dict[str, float]:
        """Return the gradient norm, if gradients are clipped."""
        clips = self._config["gradient_clipping"] > 0
        return {"grad_norm": float(self.zero.norm)} if clips else {}

    def hidden(self) -> HeldGradients:
        """Return a placeholder for the gradients that DeepSpeed holds now."""
        self._held = HeldGradients()
        return self._held

    def has_gradients(self) -> bool:
        """Whether a foreign backward pass left gradients; not known here."""
        return False

    def note_none(self) -> None:
        """Begin an update, without used parameters."""
        self._used.clear()
        self.zero.begin()

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the parameters with a gradient in DeepSpeed."""
        names = {*self.unused_params()}
        return {n: param for n, param in self.trained.items() if n not in names}

    def unused_params(self) -> list[str]:
        """Return the parameters without a gradient on this rank."""
        ids = {*map(id, self._used)}
        if len(ids) == len(self.trained):  # as in nearly every pass
            return []
        return [name for name, param in self.trained.items() if id(param) not in ids]

    def put_gradients(self, grads: Grads) -> None:
        """Accept the gradients that DeepSpeed holds; do nothing.

        Raises:
            GradsError: DeepSpeed does not hold these gradients.
        """
        if grads.as_taken is self._held:
            return
        msg = (
            "These gradients are not those that DeepSpeed holds: it holds those of the last"
            " backward pass, and others were taken since, or these were changed. Give each to"
            " apply_grads, or to into=, before the next are taken."
        )
        raise GradsError(msg)

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        self.zero.drop_gradients()
        self._used.clear()
        self._held = None

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return a callable that runs functions of a model with these values."""
        return self._lend(params, buffers)

    def to_state(self, opt_state: OptState) -> Any:
        """Return a lazy view of DeepSpeed's optimizer state as a state's values."""
        return FlatOptState(self.where, {**self._at_rest, **opt_state})

    def from_state(self, opt_state: Any) -> OptState:
        """Return a state's values as DeepSpeed's optimizer state."""
        where = self.where
        self._at_rest = {n: opt_state[n] for n in self._frozen if n in opt_state}
        if isinstance(opt_state, FlatOptState) and (
            (opt_state.where.places, opt_state.where.sizes)
            == (where.places, where.sizes)
        ):
            return opt_state.held
        return flatten_opt_state(where, opt_state)

    def flats_by_name(self) -> dict[torch.Tensor, str]:
        """Return the flat tensors with the keys of their optimizer state."""
        return {flat: flat_key(i) for i, flat in enumerate(self.zero.flats)}


# `GatherCheck`: reject losses that use parameters that stage 3 has not gathered.


NOT_GATHERED = (
    "The loss used {which} that DeepSpeed had not gathered, of which this rank has a part and"
    " no values: at stage 3 it gathers the parameters of a module that is called, and those that"
    " are taken by name, as model.head.weight. Take them by name, not from model.parameters() or"
    " state_dict(); a penalty of weights is the optimizer's weight_decay; or take stage 2."
)
_ASKED = frozenset(
    {
        *("__get__", "__set__", "__delete__", "__hash__", "__repr__", "__eq__"),
        *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size"),
        *("is_floating_point", "is_complex", "register_hook", "requires_grad_"),
        *("data_ptr", "type", "__format__", "get_device", "is_contiguous"),
    }
)
"""Functions that do not compute: models read dtypes and devices, DeepSpeed's hooks more."""


class GatherCheck(TorchFunctionMode):
    """A mode that rejects computing with parameters that are not gathered.

    Their sum would silently be 0. The mode costs microseconds per torch call, so it only checks
    a loss's first pass.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        """Take the parameters' names by their ids."""
        super().__init__()
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch.

        Raises:
            LossError: the function uses a parameter that is not gathered.
        """
        options = kwargs or {}
        if getattr(func, "__name__", "") not in _ASKED:
            for value in _leaves((*args, *options.values())):
                name = self._names.get(id(value))
                if name is not None and value.ds_status.name == "NOT_AVAILABLE":
                    msg = NOT_GATHERED.format(which=f"the parameter {name!r}")
                    raise LossError(msg)
        return func(*args, **options)


def _leaves(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield arguments and the members of lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


# The runner: the loss inside DeepSpeed's engine.


_UNUSED = (
    "Some parameters took no part in the loss of some ranks: {lines}. Ranks wait for the gradients"
    " of all. The state is as it was. Let all ranks use them, if only by 0, as in"
    " `+ 0 * net.head.weight.sum()`, freeze them with requires_grad_(False), or take"
    " af.wrap_fsdp(find_unused_parameters=True)."
)


class _Sums:
    """All-reduces the weight of the loss, and the number of unused parameters.

    The all-reduce overlaps with DeepSpeed's last reduction of gradients.
    """

    def __init__(
        self, home: ZeroBinding, ranks: World, weight: arguments.Number
    ) -> None:
        self._home, self._ranks, self._weight = home, ranks, weight

    def start(self) -> None:
        """Start to sum, when all gradients are complete."""
        counts, ranks = [0.0, len(self._home.unused_params())], self._ranks
        self._flat = torch.tensor(counts, dtype=torch.float64, device=ranks.device)
        self._flat[0] = self._weight
        self._wait = collectives.start_sum_(
            self._flat, ranks, label="weight of the loss"
        )

    def wait(self) -> torch.Tensor:
        """Wait, and return both sums."""
        self._wait()
        return self._flat


class ZeroRunner:
    """Runs the loss inside DeepSpeed's engine."""

    reduces = True
    expects_unused = False
    lone_module = None

    def __init__(
        self, module: nn.Module, home: ZeroBinding, ranks: World, *, in_parts: bool
    ) -> None:
        """Let DeepSpeed take over the module, which transforms may have changed."""
        self._ranks, self._home, self._in_parts = ranks, home, in_parts
        self._root = RootModule(module)
        with collectives.naming("build DeepSpeed's engine", ranks):
            self._zero = home.wrap(self._root)
        self._forward = collectives.naming("DeepSpeed forward", ranks)
        self._backward = collectives.naming("DeepSpeed backward", ranks)
        self._sync, self._is_over = True, False
        self._known = deque[LossFunction](maxlen=8)  # losses that had a first pass
        ranks.connection.hold(self.let_go)

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss.

        The first micro-batch of an update begins with rank 0's buffers, as DDP's does.
        """
        if self._is_over:
            msg = "The world is closed: a step needs its ranks. Step inside its `with` block."
            raise WorldError(msg)
        if samples.begins:
            self._home.bound.check_read()
            self._root.share_buffers(self._ranks)
            self._home.note_none()
        self._sync = sync
        reduces = sync or self._in_parts
        with self._forward, self._gather_check(loss_fn):
            self._scalar = self._zero.forward(
                loss_fn, samples, reduces=reduces, ends=sync
            )
        if not self._is_known(loss_fn):
            self._known.append(loss_fn)
        return self._root.take_read()

    def backward(
        self,
        scalar: torch.Tensor,
        scale: arguments.Number | None,
        weight: arguments.Number,
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`; with sync, average all and the weight."""
        scalar = self._scalar
        del self._scalar
        if scale is not None:
            scale = torch.as_tensor(scale, dtype=scalar.dtype, device=scalar.device)
        loss = scalar if scale is None else scalar * scale
        sums = _Sums(self._home, self._ranks, weight)
        try:
            with self._backward:
                self._zero.backward(loss, ends=self._sync, when_all_came=sums.start)
        except RuntimeError as error:
            if any(sign in str(error) for sign in ("got [0]", "tensor b (0)")):
                msg = NOT_GATHERED.format(which="a parameter")
                raise LossError(msg) from error
            raise
        if not self._sync:
            return None
        total, num_unused = sums.wait()
        if num_unused:
            self._check_alike(self._home.unused_params())
        return total / self._ranks.size

    def _check_alike(self, names: list[str]) -> None:
        """Raise unless the same parameters are unused on all ranks.

        Raises:
            UnusedParametersError: on all ranks, names the parameters of each rank.
        """
        text = "\n".join(names)
        texts = collectives.gather_text(
            text, self._ranks, label="parameters without a gradient"
        )
        if len({*texts}) > 1:
            rows = [", ".join(text.split("\n")[:5]) or "none" for text in texts]
            lines = "; ".join(f"of rank {rank} {row}" for rank, row in enumerate(rows))
            raise UnusedParametersError(_UNUSED.format(lines=lines))

    def _gather_check(self, loss_fn: LossFunction) -> AbstractContextManager[object]:
        """Return a check of a loss's first pass at stage 3."""
        if self._zero.stage < 3 or self._is_known(loss_fn):
            return nullcontext()
        return GatherCheck(self._home.names)

    def _is_known(self, loss_fn: LossFunction) -> bool:
        return any(fn is loss_fn for fn in self._known)

    def let_go(self) -> None:
        """Let DeepSpeed forget the process group."""
        self._is_over = True
        release_group(self._ranks)


# `ZeroOptimizer`: updates in DeepSpeed, with a state's hyperparameters and counts.


class ZeroOptimizer:
    """Takes updates in DeepSpeed, which divides, clips, and skips non-finite gradients."""

    skips = is_untouched = False

    def __init__(self, home: ZeroBinding) -> None:
        """Take the binding; DeepSpeed's engine does not exist yet."""
        self._home = home
        self._live: LiveOptimizer | None = None
        self._shown: Any = None

    def load(self, state: OptState) -> None:
        """Load a state's entries."""
        if self._live is None:
            base, names = self._home.zero.base, self._home.flats_by_name()
            self._live = LiveOptimizer(base, names, self._home)
        self._live.load(state)
        self._shown = state

    def expect(self, hyper: Hyper) -> None:
        """Prepare for an update; raise if it cannot be taken.

        Raises:
            OptimizerError: a schedule-free optimizer is not in training mode.
            StateError: a value read from the state was written in place.
        """
        self._bound_optimizer.expect(hyper)
        if isinstance(self._shown, FlatOptState):
            self._shown.check_read()

    def divides(self, divisor: arguments.Number) -> bool:
        """Whether DeepSpeed divides gradients: always."""
        return True

    def update(
        self,
        hyper: Hyper,
        divisor: arguments.Number | None = None,
        skip: torch.Tensor | None = None,
    ) -> OptState | None:
        """Step, and return the optimizer's state by name; None for a skipped update."""
        live, home = self._bound_optimizer, self._home
        live.begin(hyper)
        home.bound.mark_changed()
        if isinstance(self._shown, FlatOptState):
            self._shown.mark_changed()
        is_finite = home.zero.step(1.0 if divisor is None else float(divisor))
        state = live.finish()
        if not is_finite:
            return None
        self._shown = state
        return state

    @property
    def _bound_optimizer(self) -> LiveOptimizer:
        assert self._live is not None  # noqa: S101 - a state is bound first
        return self._live
