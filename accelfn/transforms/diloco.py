# SPDX-License-Identifier: Apache-2.0
"""DiLoCo: train ranks independently, and step an outer optimizer by how far they moved."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeAlias

import attrs
import torch
from torch import nn

from accelfn.base import tree
from accelfn.base.arguments import (
    Number,
    integer,
    is_number,
    mebibytes,
    one_of,
    option,
    satisfies,
)
from accelfn.base.devices import is_positive
from accelfn.base.tree import Pending, cut_axes, is_shard, local, wide, with_local
from accelfn.collectives.few_bits import (
    mean_of,
    reduce_quantized,
    start_mean,
    start_parts,
)
from accelfn.collectives.packed import average_
from accelfn.collectives.trees import start_all_reduce
from accelfn.definition.transform import transform
from accelfn.engine.optimizer import (
    LiveOptimizer,
    check_elements,
    counts_by_group,
)
from accelfn.errors import ArgumentError, CompositionError, OptimizerError, StateError
from accelfn.model.optimizer import owned_names, prototype_of
from accelfn.state.state import OptState, TrainState
from accelfn.state.update import Update
from accelfn.world import World

# Exchanging a fragment: ranks average how far they moved away from the anchor.
#
# # Uncompressed values need one all-reduce. Quantized values need two halves; the second starts
# half-way through the delay. Each rank keeps the rounding errors for its next exchange.


Tensors: TypeAlias = dict[str, torch.Tensor]
Flight: TypeAlias = dict[str, Any]
"""A fragment in flight: `sent` (the update), `names` and pending `values`; if quantized also
`half` (1 or 2), and in the second half the total `weight` of all ranks.
"""


def param_deltas(
    params: Mapping[str, Any], anchor: Mapping[str, Any], names: Iterable[str]
) -> Tensors:
    """Return anchor minus parameters of this rank's shards, in float32 or wider."""
    return {name: wide(local(anchor[name])) - local(params[name]) for name in names}


@attrs.frozen(kw_only=True)
class Exchange:
    """Exchanges fragments between ranks.

    Attributes:
        ranks: the ranks.
        bits: bits per number; 32 means no quantization.
        label: the name of the collective in error messages.
    """

    ranks: World
    bits: int
    label: str

    @property
    def is_whole(self) -> bool:
        """Whether values are sent without quantization; one rank sends nothing."""
        return self.bits == 32 or self.ranks.size == 1

    def send(
        self,
        deltas: Tensors,
        error: Mapping[str, Any],
        weight: Number,
        step: int,
        *,
        like: Mapping[str, Any],
    ) -> tuple[Flight, Mapping[str, Any]]:
        """Start to send a fragment; return its flight and this rank's new errors.

        Args:
            deltas: how far each parameter of the fragment moved.
            error: this rank's rounding errors, sharded as the parameters.
            weight: the weight of this rank's samples.
            step: the number of the update after which the fragment is sent.
            like: tensors sharded as the parameters, by name.
        """
        flight: Flight = {"sent": step, "names": list(deltas)}
        totals = {n: d + local(error[n]) if error else d for n, d in deltas.items()}
        if self.is_whole:
            sums = {name: value * weight for name, value in totals.items()}
            weight_sum = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
            weight_sum += weight
            values = {"sums": sums, "weight": weight_sum}
            pending = start_all_reduce(values, self.ranks, label=self.label)
            pending = pending.then(partial(_shard_sums, like=like))
            return {**flight, "values": pending}, without(error, deltas)
        pending, residual = start_parts(
            _flat(totals), weight, self.ranks, self.bits, label=self.label
        )
        parts = dict(zip(totals, _split_flat(residual, totals), strict=True))
        new = {
            name: _like(error[name], _if_seen(weight, parts[name], local(error[name])))
            for name in totals
        }
        return {**flight, "half": 1, "values": pending}, {**error, **new}

    def start_second_half(
        self, flight: Flight, error: Mapping[str, Any]
    ) -> tuple[Flight, Mapping[str, Any]]:
        """Start the second half of a quantized flight; return flight and errors."""
        if flight.get("half") != 1:
            return flight, error
        names: Sequence[str] = flight["names"]
        parts = {name: local(error[name]) for name in names}
        flat = _flat(parts)
        pending, residual, total = start_mean(
            flight["values"].wait(), self.ranks, self.bits, flat.dtype, label=self.label
        )
        # this rank contributes its share of the mean over all ranks
        size = residual.numel()
        begin = self.ranks.rank * size
        rest = residual[: max(0, min(size, flat.numel() - begin))] * self.ranks.size
        flat[begin : begin + rest.numel()] += torch.where(total > 0, rest, 0)
        new = {
            name: _like(error[name], part.clone())
            for name, part in zip(names, _split_flat(flat, parts), strict=True)
        }
        flight = {**flight, "half": 2, "values": pending, "weight": total}
        return flight, {**error, **new}

    def receive_mean(self, flight: Flight, like: Mapping[str, Any]) -> Tensors | None:
        """Return the mean of this rank's shards, by name; None if no rank saw a sample.

        Args:
            flight: the flight; if quantized, in its second half.
            like: tensors with this rank's shards, by name.
        """
        names: Sequence[str] = flight["names"]
        result = flight["values"].wait()
        if "half" not in flight:
            sums, total = result["sums"], result["weight"][0]
            if not is_positive(total):
                return None
            return {n: local(sums[n]) / total.to(sums[n].dtype) for n in names}
        if not is_positive(flight["weight"]):
            return None
        parts = {name: local(like[name]) for name in names}
        flat = mean_of(result, self.bits, _dtype_of(parts))
        return dict(zip(names, _split_flat(flat, parts), strict=True))


def merge_flights(
    flights: Sequence[Flight], bits: int, like: Mapping[str, Any]
) -> tuple[Flight, Tensors]:
    """Merge flights of several ranks; return the flight and the rounding errors."""
    first = flights[0]
    if first.get("half") != 1:
        return first, {}
    parts = {name: like[name] for name in first["names"]}
    sums = [
        reduce_quantized(f["values"].wait(), bits, _dtype_of(parts)) for f in flights
    ]
    codes, total = torch.cat([code for code, _, _ in sums]), sums[0][2]
    residual = torch.where(total > 0, torch.cat([part for _, part, _ in sums]), 0)
    flight = {**first, "half": 2, "values": Pending.of(codes), "weight": total}
    return flight, dict(zip(parts, _split_flat(residual, parts), strict=True))


def without(error: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return the errors with zeros for parameters that were sent."""
    if not error:
        return error
    return {**error, **{name: torch.zeros_like(error[name]) for name in names}}


def _if_seen(weight: Number, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the new errors, or the old ones if this rank's weight is 0."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, new, old)
    return new.clone() if weight else old


def _dtype_of(parts: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype in which quantized values are added up."""
    wide = any(part.dtype in _DOUBLE for part in parts.values())
    return torch.float64 if wide else torch.float32


_DOUBLE = (torch.float64, torch.complex128)


def _reals(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part) if part.is_complex() else part


def _flat(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Flatten tensors into one vector, in order."""
    dtype = _dtype_of(parts)
    return torch.cat([_reals(part).reshape(-1).to(dtype) for part in parts.values()])


def _split_flat(
    flat: torch.Tensor, like: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Split a vector into tensors of the shapes in `like`."""
    begin = 0
    for part in like.values():
        shape = _reals(part).shape
        piece = flat[begin : begin + shape.numel()].view(shape)
        # pairs of numbers must begin at an even place
        yield torch.view_as_complex(piece.clone()) if part.is_complex() else piece
        begin += shape.numel()


def _shard_sums(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return sums sharded as the parameters, so that checkpoints can store them."""
    sums = {name: _like(like[name], part) for name, part in values["sums"].items()}
    return {**values, "sums": sums}


def _like(like: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a shard as a tensor in the layout of `like`."""
    return with_local(like, part) if is_shard(like) else part


# Fragments of a model: runs of parameters of about equal size, exchanged in turn.


_MIB = 1 << 20


def cut_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Cut parameters, given by their sizes, into `count` runs; some may be empty."""
    total = max(1, sum(sizes.values()))
    ends = accumulate(sizes.values())
    # by the middle, so that one large parameter does not drag its neighbors along
    middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
    names: list[list[str]] = [[] for _ in range(count)]
    for name, middle in zip(sizes, middles, strict=True):
        names[min(count - 1, int(middle * count / total))].append(name)
    return names


def bucket_names(
    names: Collection[str], params: Mapping[str, torch.Tensor], most: float
) -> Iterator[list[str]]:
    """Yield buckets of parameter names, each of at most `most` MiB or one parameter.

    Parameters of one bucket are sharded along the same axes: values that several ranks of a
    copy hold must not be rounded with others, or ranks would drift.
    """
    bucket: list[str] = []
    size, axes = 0, None
    for name in names:
        part = local(params[name])
        more, splits = part.numel() * part.element_size(), cut_axes(params[name])
        if bucket and (size + more > most * _MIB or splits != axes):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size, axes = size + more, splits
    if bucket:
        yield bucket


# The outer optimizer: a torch optimizer over the anchor, with its state as a value.


OuterTensors = Mapping[str, torch.Tensor]

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the DiLoCo paper."""


def as_value(factory: Any) -> Any:
    """Return a comparable value of a factory; of a partial, function and arguments."""
    if not isinstance(factory, partial):
        return factory
    call: partial[Any] = factory
    return call.func, call.args, tuple(sorted(call.keywords.items()))


@attrs.frozen(eq=False)
class Outer:
    """An outer optimizer and its anchor.

    Attributes:
        factory: makes the optimizer from a list of (name, parameter).
        anchor: the tensors to step in place, by name; shards if the model is split.
    """

    factory: Any
    anchor: OuterTensors

    def step(self, state: OptState, gradients: OuterTensors) -> OptState:
        """Step the parameters that have a gradient; return the optimizer's next state.

        Args:
            state: the optimizer's state by name; its tensors are overwritten.
            gradients: gradients of this rank's shards, of any floating-point dtype.
        """
        params = {name: nn.Parameter(local(part)) for name, part in self.anchor.items()}
        for name, gradient in gradients.items():
            params[name].grad = gradient.to(params[name].dtype)
        named = list(params.items())
        optimizer = self.factory(named)
        live = LiveOptimizer(optimizer, {p: n for n, p in named}, self)
        live.load(state)
        return {name: dict(entry) for name, entry in live.update({}).items()}

    def to_state(self, opt_state: OptState) -> OptState:
        """Return the state in the layout of the anchor."""
        return _map_tensors(opt_state, self._shard_like)

    def from_state(self, opt_state: OptState) -> OptState:
        """Return the state with local shards."""
        return _map_tensors(opt_state, lambda _, part: local(part))

    def _shard_like(self, name: str, part: torch.Tensor) -> torch.Tensor:
        anchor = self.anchor.get(name)
        if anchor is None or not is_shard(anchor) or part.shape != local(anchor).shape:
            return part
        return with_local(anchor, part)


def _map_tensors(
    state: OptState, fn: Callable[[str, torch.Tensor], torch.Tensor]
) -> OptState:
    return {
        name: {
            key: fn(name, value) if isinstance(value, torch.Tensor) else value
            for key, value in entry.items()
        }
        for name, entry in state.items()
    }


Slot: TypeAlias = dict[str, Any]

_LABEL = "diloco"


_is_factory = satisfies(
    lambda value: (
        value is None
        or (callable(value) and not isinstance(value, torch.optim.Optimizer))
    ),
    "a factory of a torch optimizer, such as functools.partial(torch.optim.SGD, lr=0.7)",
)
_is_share = satisfies(
    lambda value: is_number(value) and 0 <= value < 1, "a number from 0, less than 1"
)


@transform
class diloco:
    """Train ranks independently for `sync_every` updates, then step an outer optimizer.

    All ranks hold the same anchor. Each rank trains from the anchor on its own shares, with its
    own optimizer state and without communicating gradients. Every `sync_every` updates the
    ranks average how far they moved away from the anchor, weighted by the samples that each has
    seen. The outer optimizer steps the anchor by that mean, as if it were a gradient, and all
    ranks continue from there. Evaluation and export use the anchor, without communication.
    `af.finalize` makes a last exchange, without quantization.

    Three options reduce or hide communication. `fragments` cuts the model into runs of
    parameters that are exchanged in turn: as many bytes, but fewer at once. `delay` overlaps an
    exchange with updates; its result is then mixed with the rank's own progress: a share `mix`
    of the rank's parameters, the rest of the anchor. `bits` sends 16, 8 or 4 bits per number;
    each rank keeps its rounding errors and sends them with the next exchange.

    With `wrap_fsdp`, in a world with "dp_replicate", the copies of the model train
    independently, and each rank exchanges its shard with the same shard of the other copies.

    Acts on: init, reduce, after_update, eval_params, finalize, merge.

    Args:
        sync_every: updates between exchanges, at least 1.
        outer: makes the outer optimizer from a list of (name, parameter); None is SGD with a
        rate of 0.7 and Nesterov momentum of 0.9, as in the DiLoCo paper.
        fragments: the number of parts in which the model is exchanged, at most `sync_every`.
        delay: updates between the start of an exchange and the use of its result, less than
        `sync_every`.
        mix: the share of a rank's own parameters when an exchange arrives; 0 drops the rank's
        progress on that fragment during `delay`.
        bits: the bits per number that ranks send.
        bucket_cap_mb: the size of one exchange in MiB, at least one parameter; with `delay` an
        exchange is a fragment.

    Law:
        With an outer optimizer `SGD(lr=1.0)` it equals `local_sgd`, up to rounding. A delay
        changes when a mean is used, never its value. If ranks have equal weights, applied means
        plus kept errors equal the ranks' moves, bit by bit. Replicas differ between exchanges.

    Cost:
        Memory for the anchor and the outer optimizer's state; with `bits` also for the errors.
        Every `sync_every` updates one all-reduce of the trained parameters. With `bits` instead
        an all-to-all and an all-gather, each of `bits / 32` of the bytes; a rank of N sends
        (N-1)/N of both. If no rank saw a sample, an exchange with `delay` or `bits` is skipped;
        otherwise ranks have equal weights.

    Raises:
        ArgumentError: an invalid option, or fewer parameters than fragments.
        CompositionError: with a transform that evaluates other parameters, such as `ema`; when
        the state is created, a split model with both `delay` and `bits`.
        StateError: at an update, `fragments` or `bits` changed while updates since the last
        exchange are not exchanged yet.
        OptimizerError: when the state is created, the outer optimizer cannot be kept in a
        state; or the model is split and the outer optimizer is not elementwise.

    References:
        Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
        Models"; Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"
        (fragments, delay, mix, 4 bits); Karimireddy et al. 2019, "Error Feedback Fixes
        SignSGD" (the kept errors).

    Example:
        >>> diloco(sync_every=500)
        af.diloco(sync_every=500)
    """

    gives_up: ClassVar[Mapping[str, str]] = {"replicas_agree": "between exchanges"}
    reduce: ClassVar[None] = None
    refuses: ClassVar[Mapping[str, str]] = {
        "eval_params": "has its anchor evaluated, and {other!r} something else. Leave out one of"
        " the two."
    }

    sync_every: int = attrs.field(
        validator=integer(1, "a number of updates"), kw_only=True
    )
    outer: Callable[..., torch.optim.Optimizer] | None = option(
        None, _is_factory, eq=as_value
    )
    fragments: int = option(1, integer(1))
    delay: int = option(0, integer(0, "a number of updates"))
    mix: float = option(0.0, _is_share)
    bits: Literal[32, 16, 8, 4] = option(32, one_of(32, 16, 8, 4))
    bucket_cap_mb: float = option(25.0, mebibytes())

    def __attrs_post_init__(self) -> None:
        """Raise if options contradict each other."""
        if self.fragments > self.sync_every:
            msg = (
                f"{self!r}: {self.fragments} fragments in {self.sync_every} updates; at most one"
                " is exchanged after each, so give fragments no more than sync_every."
            )
            raise ArgumentError(msg)
        if self.delay >= self.sync_every:
            msg = (
                f"{self!r}: a fragment would be sent again before the last exchange is used."
                " Give a delay that is less than sync_every."
            )
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Which slot entries differ by rank."""
        keys = ("weights",) if self.bits == 32 else ("weights", "error", "flights")
        return {"draws_nothing": True, "by_rank": keys, "owes": self._owes}

    def _owes(self, state: TrainState, slot: Slot) -> bool:
        """Return whether ranks have moved away from the anchor."""
        mixes = self.mix > 0 and state.step > slot["since"]
        return mixes or bool(slot["flights"]) or state.step > min(slot["sent"])

    def init(self, state: TrainState) -> Slot:
        """Set the anchor to the initial parameters."""
        self._check(state)
        definition = state.definition
        names = owned_names(definition.optimizer, definition.skeleton)
        anchor = tree.clone({name: state.params[name] for name in names})
        return self._new_slot(anchor, {}, state.step)

    def after_update(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Add up this rank's weight; send and apply the fragments that are due."""
        slot = self._fit_slot(slot, state.step - 1)
        slot = {**slot, "weights": [w + update.weight for w in slot["weights"]]}
        updates = state.step - slot["since"]
        for i in range(self.fragments):
            first = i * self.sync_every // self.fragments
            if (updates - first) % self.sync_every == 0:
                names = self._fragments(state)[i]
                slot = self._exchange_fragment(state, slot, i, names)
        for key, flight in list(slot["flights"].items()):
            flown = state.step - flight["sent"]
            if flown == -(-self.delay // 2):  # half-way
                slot = self._continue_flight(state, slot, key)
            if flown == self.delay:
                slot = self._apply_flight(state, slot, key)
        return state, slot

    def finalize(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Apply fragments in flight, exchange the rest, and move to the anchor."""
        slot = self._fit_slot(slot, state.step)
        for key in list(slot["flights"]):
            slot = self._apply_flight(
                state, self._continue_flight(state, slot, key), key
            )
        for i, names in enumerate(self._fragments(state)):
            if state.step > slot["sent"][i]:
                slot = self._exchange_fragment(state, slot, i, names, at_once=True)
        for name, anchor in slot["anchor"].items():
            local(state.params[name]).copy_(local(anchor))
        return state, {**slot, "since": state.step}

    def merge(self, slots: Sequence[Slot], _: World) -> tuple[list[float], Slot]:
        """Average the ranks' parameters, weights and errors."""
        first, count = slots[0], len(slots)
        weights = [[float(w) for w in slot["weights"]] for slot in slots]
        error = {
            name: torch.stack([slot["error"][name] for slot in slots]).sum(0) / count
            for name in first["error"]
        }
        flights: dict[str, Any] = {}
        for key in first["flights"]:
            flown = [slot["flights"][key] for slot in slots]
            flights[key], rest = merge_flights(flown, self.bits, first["anchor"])
            error = {**error, **{name: error[name] + rest[name] for name in rest}}
        mean = [sum(column) / count for column in zip(*weights, strict=True)]
        result = {**first, "weights": mean, "error": error, "flights": flights}
        return [sum(row) for row in weights], result

    def eval_params(
        self, params: Mapping[str, torch.Tensor], slot: Slot, update: Update
    ) -> tuple[Mapping[str, torch.Tensor], Slot]:
        """Return the anchor."""
        return {**params, **slot["anchor"]}, slot

    def _fit_slot(self, slot: Slot, step: int) -> Slot:
        """Return a slot that fits these options.

        Raises:
            StateError: the slot was started with other options that are in use.
        """
        same, has_error = len(slot["sent"]) == self.fragments, bool(slot["error"])
        if same and has_error is (self.bits != 32):
            return slot
        if step > slot["since"]:
            msg = (
                f"{self!r}: what ranks have done since the last exchange was begun with other"
                " fragments or bits. Call af.finalize with the setup that there was, then"
                " state.with_setup."
            )
            raise StateError(msg)
        return self._new_slot(slot["anchor"], slot["outer"], step)

    def _new_slot(self, anchor: Any, outer: Any, step: int) -> Slot:
        """Return the slot of ranks at the anchor."""
        error = {} if self.bits == 32 else tree.tree_map(torch.zeros_like, anchor)
        return {
            "since": step,
            "sent": [step] * self.fragments,
            "weights": [0] * self.fragments,
            "anchor": anchor,
            "outer": outer,
            "error": error,
            "flights": {},
        }

    def _check(self, state: TrainState) -> None:
        skeleton, layout = state.definition.skeleton, state.definition.layout
        prototype, _ = prototype_of(self.outer or NESTEROV, skeleton.module, skeleton)
        if any("train_mode" in group for group in prototype.param_groups):
            msg = (
                f"{self!r}: {type(prototype).__name__} is schedule-free, and evaluated at"
                " another point than where it trains. Give an outer optimizer that is not."
            )
            raise OptimizerError(msg)
        if layout is not None:
            if self.delay and self.bits != 32:
                msg = (
                    f"{self!r}: parts of a split model do not cross in few bits while ranks go"
                    " on. Leave out delay, or bits."
                )
                raise CompositionError(msg)
            dims = {dim for cuts in layout.cuts.values() for dim in cuts.values()}
            check_elements(state, f"{self!r}", dims=dims, optimizer=prototype)
        if self.fragments > 1 and counts_by_group(state, optimizer=prototype):
            msg = (
                f"{self!r}: {type(prototype).__name__} counts updates for all parameters"
                " together, of which each fragment would be one. Leave out fragments."
            )
            raise OptimizerError(msg)
        empty = sum(not names for names in self._fragments(state))
        if empty:
            msg = (
                f"{self!r}: the model has too few parameters of a like size: {empty} fragments"
                " would be empty. Give fewer."
            )
            raise ArgumentError(msg)

    def _fragments(self, state: TrainState) -> list[list[str]]:
        skeleton = state.definition.skeleton
        sizes = {
            name: meta.numel()
            for name, meta in skeleton.module.named_parameters()
            if name in skeleton.once_trained
        }
        return cut_fragments(sizes, self.fragments)

    def _exchange_fragment(
        self,
        state: TrainState,
        slot: Slot,
        i: int,
        names: Sequence[str],
        *,
        at_once: bool = False,
    ) -> Slot:
        """Send a fragment, and apply its mean unless there is a delay.

        `at_once` sends without quantization, including the kept errors.
        """
        is_whole = self._exchange(state).is_whole
        if self.delay and not at_once:
            slot = self._send_fragment(state, slot, i, names)
        else:
            for some in bucket_names(names, state.params, self.bucket_cap_mb):
                if is_whole or at_once:
                    slot = self._average_fragment(state, slot, i, some)
                else:
                    slot = self._continue_flight(
                        state, self._send_fragment(state, slot, i, some), f"{i}"
                    )
                    slot = self._apply_flight(state, slot, f"{i}")
        fresh = {"weights": 0, "sent": state.step}
        new = {n: [*slot[n][:i], v, *slot[n][i + 1 :]] for n, v in fresh.items()}
        return {**slot, **new}

    def _average_fragment(
        self, state: TrainState, slot: Slot, i: int, names: Sequence[str]
    ) -> Slot:
        """Average parameters without quantization, and step the anchor."""
        deltas = param_deltas(state.params, slot["anchor"], names)
        for name in names if slot["error"] else ():
            deltas[name] += local(slot["error"][name])
        slot = {**slot, "error": without(slot["error"], names)}
        average_(
            [*deltas.values()],
            slot["weights"][i],
            state.definition.copies,
            label=_LABEL,
            bucket_cap_mb=self.bucket_cap_mb,
        )
        return self._step_anchor(state, slot, deltas)

    def _send_fragment(
        self, state: TrainState, slot: Slot, i: int, names: Sequence[str]
    ) -> Slot:
        """Start to send parameters of a fragment."""
        weight, error, anchor = slot["weights"][i], slot["error"], slot["anchor"]
        deltas = param_deltas(state.params, anchor, names)
        flight, error = self._exchange(state).send(
            deltas, error, weight, state.step, like=anchor
        )
        return {**slot, "error": error, "flights": {**slot["flights"], f"{i}": flight}}

    def _continue_flight(self, state: TrainState, slot: Slot, key: str) -> Slot:
        """Start the second half of a flight, if it has one."""
        flight, error = slot["flights"][key], slot["error"]
        flight, error = self._exchange(state).start_second_half(flight, error)
        return {**slot, "error": error, "flights": {**slot["flights"], key: flight}}

    def _apply_flight(self, state: TrainState, slot: Slot, key: str) -> Slot:
        """Step the anchor by a fragment's mean."""
        flights = dict(slot["flights"])
        means = self._exchange(state).receive_mean(flights.pop(key), slot["anchor"])
        slot = {**slot, "flights": flights}
        return slot if means is None else self._step_anchor(state, slot, means)

    def _step_anchor(self, state: TrainState, slot: Slot, means: Tensors) -> Slot:
        """Step the anchor, and move this rank's parameters there.

        Parameters that were frozen meanwhile move to the mean, without momentum.
        """
        anchor, trainable = slot["anchor"], state.trainable
        gradients = {name: mean for name, mean in means.items() if name in trainable}
        after = Outer(self.outer or NESTEROV, anchor).step(slot["outer"], gradients)
        for name in means.keys() - gradients.keys():
            local(anchor[name]).sub_(means[name])
        for name in means:
            param, target = local(state.params[name]), local(anchor[name])
            if self.mix:
                param.lerp_(target, 1 - self.mix)
            else:
                param.copy_(target)
        return {**slot, "outer": after}

    def _exchange(self, state: TrainState) -> Exchange:
        return Exchange(ranks=state.definition.copies, bits=self.bits, label=_LABEL)
