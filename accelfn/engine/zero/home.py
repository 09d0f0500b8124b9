# SPDX-License-Identifier: Apache-2.0
"""`ZeroHome`: the tensors of one state at a time live in DeepSpeed's."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import nn

from accelfn.base import shards
from accelfn.engine.home import built
from accelfn.engine.shard_home import Splitter, lent_in_parts
from accelfn.engine.zero.flats import FlatOptState, FlatParams, flat_key, flattened
from accelfn.engine.zero.places import evenly, moved
from accelfn.engine.zero.zero import Zero
from accelfn.errors import GradsError
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.state.values import OptState
from accelfn.structure.prototype import rebuilt
from accelfn.world import World

_HELD = (
    "DeepSpeed holds these gradients, from the backward pass to the update, and nobody sees them:"
    " af.clip_grad_norm says how it clips them. Take af.wrap_fsdp() for what looks at gradients."
)


class HeldGradients(Mapping[str, torch.Tensor]):
    """In the place of gradients that DeepSpeed holds: whoever looks at them is told so."""

    def __getitem__(self, name: str) -> NoReturn:
        """Refuse.

        Raises:
            GradsError: always.
        """
        raise GradsError(_HELD)

    def __iter__(self) -> Iterator[str]:
        """Refuse."""
        raise GradsError(_HELD)

    def __len__(self) -> int:
        """Return 0, for none are there to be seen."""
        return 0


class ZeroHome:
    """A module whose parameters DeepSpeed has taken over, and the flat tensors of a state.

    A state is bound by pointers if its elements lie in such flat tensors already, as those of
    all states do that an engine of the same definition has stepped; or they are brought there,
    which is a collective.
    """

    def __init__(
        self,
        state: TrainState,
        splitter: Splitter,
        config: Mapping[str, Any],
        ranks: World,
    ) -> None:
        """Build the module, whose parameters have memory and no values."""
        assert state.definition.layout is not None  # noqa: S101 - of a transform that cuts
        self._definition, self._splitter = state.definition, splitter
        self._layout, self._config, self._ranks = state.definition.layout, config, ranks
        skeleton = state.definition.skeleton
        device = state.definition.world.device
        empty = {
            name: torch.zeros(meta.shape, dtype=meta.dtype, device=device)
            for name, meta in skeleton.module.named_parameters()
        }
        self.module = built(state.definition, empty, state.buffers)
        self.params = dict(self.module.named_parameters())
        self.trained = {name: self.params[name] for name in skeleton.trainable}
        self.names = {id(param): name for name, param in self.params.items()}
        self._frozen = {n: p for n, p in self.params.items() if n not in self.trained}
        self._kept: dict[str, torch.Tensor] = {}
        # what the optimizer has of them, which it goes on with when they are thawed
        self._at_rest: OptState = {}
        self._bound: FlatParams | None = None
        self._used: list[torch.Tensor] = []
        self._held: HeldGradients | None = None

    def wrap(self, root: nn.Module) -> Zero:
        """Let DeepSpeed take over a module that runs this home's, and an optimizer of it."""
        prototype, skeleton = self._definition.optimizer, self._definition.skeleton
        metas = skeleton.module.named_parameters()
        memo: dict[int, Any] = {id(meta): self.params[name] for name, meta in metas}
        self.zero = Zero(root, rebuilt(prototype, memo), self._config, self._ranks)
        self.zero.align(self.names)
        self.where = self.zero.where(self.names, self._layout)
        for param in self.trained.values():
            # the list's own method, for a function would be a call of Python's for each
            param.register_post_accumulate_grad_hook(self._used.append)
        weakref.finalize(self, self.zero.free)
        return self.zero

    @property
    def bound(self) -> FlatParams:
        """The parameters that are bound, as long as they are."""
        assert self._bound is not None  # noqa: S101 - a step binds first
        return self._bound

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Step a state's flat tensors; one that has none is brought into such."""
        with torch.no_grad():
            kept = {name: params[name] for name in self._frozen}
            if isinstance(params, FlatParams) and self._lies_alike(params):
                self._bound = params
            else:
                values = {name: params[name] for name in self.trained}
                flats = self.where.gathered(values)
                self._bound = FlatParams(params, self.where, flats, kept)
            self._keep(kept)
            self.zero.point_at(self._bound.flats)

    def _lies_alike(self, params: FlatParams) -> bool:
        """Whether flat tensors are those of this home, or of one before it."""
        return (params.where.places, params.where.sizes) == (
            self.where.places,
            self.where.sizes,
        )

    def _keep(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Let parameters that are not trained have a state's values; a collective for others."""
        new = {n: v for n, v in kept.items() if self._kept.get(n) is not v}
        if not new:
            return
        pieces = {n: shards.local(v).detach().reshape(-1) for n, v in new.items()}
        have = {name: self._rows_of(name, value) for name, value in new.items()}
        want = {name: self.zero.runs_of(self._frozen[name]) for name in new}
        parts = moved(pieces, have, want, self._ranks, label="ZeRO: frozen parameters")
        for name, part in parts.items():
            self.zero.keep(self._frozen[name], part)
        self._kept = dict(kept)

    def _rows_of(self, name: str, value: torch.Tensor) -> list[tuple[int, int]]:
        count, ranks = value.numel(), self._ranks.size
        if not shards.is_shard(value):
            return [(0, count)] * ranks
        rows = -(-value.shape[0] // ranks)
        return evenly(count, rows * (count // value.shape[0]), ranks)

    @property
    def shows(self) -> Self:
        """What knows a state's values of the optimizer's."""
        return self

    @property
    def holder(self) -> Self:
        """Who holds the gradients."""
        return self

    def reports(self) -> dict[str, float]:
        """Return the norm of the gradients, where they are clipped."""
        clips = self._config["gradient_clipping"] > 0
        return {"grad_norm": float(self.zero.norm)} if clips else {}

    def hidden(self) -> HeldGradients:
        """Return what stands for the gradients that DeepSpeed holds now."""
        self._held = HeldGradients()
        return self._held

    def has_gradients(self) -> bool:
        """Whether some are where a backward pass of somebody else's would put them."""
        return False

    def note_none(self) -> None:
        """Begin an update, whose backward passes have come by no parameter yet."""
        self._used.clear()
        self.zero.begin()

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the parameters of which DeepSpeed has a gradient."""
        unused = {*self.unused()}
        return {n: param for n, param in self.trained.items() if n not in unused}

    def unused(self) -> list[str]:
        """Return the parameters of which there is no gradient on this rank."""
        used = {*map(id, self._used)}
        if len(used) == len(self.trained):  # as in nearly every pass
            return []
        return [name for name, param in self.trained.items() if id(param) not in used]

    def put_gradients(self, grads: Grads) -> None:
        """Leave the gradients that DeepSpeed holds where they are.

        Raises:
            GradsError: these are others.
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
        """Leave none."""
        self.zero.drop_gradients()
        self._used.clear()
        self._held = None

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return what calls functions of a model of these values, gathered unit by unit."""
        return lent_in_parts(self._definition, self._splitter, dict(params), buffers)

    def shown(self, opt_state: OptState) -> Any:
        """Return what DeepSpeed's optimizer has as a state's values, which are read later."""
        return FlatOptState(self.where, {**self._at_rest, **opt_state})

    def raw(self, opt_state: Any) -> OptState:
        """Return what DeepSpeed's optimizer has of a state's values."""
        where = self.where
        self._at_rest = {n: opt_state[n] for n in self._frozen if n in opt_state}
        if isinstance(opt_state, FlatOptState) and (
            (opt_state.where.places, opt_state.where.sizes)
            == (where.places, where.sizes)
        ):
            return opt_state.held
        return flattened(where, opt_state)

    def flats_by_name(self) -> dict[torch.Tensor, str]:
        """Return the flat tensors, and what their state is called by."""
        return {flat: flat_key(i) for i, flat in enumerate(self.zero.flats)}
