# SPDX-License-Identifier: Apache-2.0
"""Train ranks apart, and let an outer optimizer step by how far they moved."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeAlias

import attrs
import torch
from torch import nn

from accelfn.base import tree
from accelfn.base.arguments import Number, integer, is_number, mebibytes
from accelfn.base.devices import is_positive
from accelfn.base.tree import Pending, cut_axes, is_shard, local, with_local
from accelfn.collectives import average_, start_reduce
from accelfn.collectives.few_bits import (
    mean_of,
    start_mean,
    start_parts,
    summed,
)
from accelfn.definition.transform import transform
from accelfn.engine.optimizer import (
    LiveOptimizer,
    State,
    check_elements,
    counts_by_group,
)
from accelfn.errors import (
    ArgumentError,
    CompositionError,
    OptimizerError,
    StateError,
)
from accelfn.model.optimizer import owned_names, prototype_of
from accelfn.state.state import TrainState
from accelfn.state.update import Update
from accelfn.world import World

# What ranks send each other of a fragment: by how much they moved away from the anchor.
#
# Whole numbers cross in one sum. In few bits they cross in two halves, of which the second
# begins half-way to when the mean is used; what rounding left out is remembered.


Tensors: TypeAlias = dict[str, torch.Tensor]
Flight: TypeAlias = dict[str, Any]
"""A fragment on its way: `sent`, the update; `names`; `values`, pending; in few bits also
`half`, 1 or 2, and in the second `weight`, that of all ranks."""


def param_deltas(params: Mapping[str, Any], anchor: Mapping[str, Any]) -> Tensors:
    """Return by how much this rank's parts moved, in float32 at least: a gradient's sign."""
    return {name: _wide(local(a)) - local(params[name]) for name, a in anchor.items()}


@attrs.frozen(kw_only=True)
class Exchange:
    """How fragments cross the ranks.

    Attributes:
        ranks: which.
        bits: of a number; 32 stands for all that it has.
        label: what the ranks are doing.
    """

    ranks: World
    bits: int
    label: str

    @property
    def is_whole(self) -> bool:
        """Whether numbers cross as they are: to itself a rank sends nothing."""
        return self.bits == 32 or self.ranks.size == 1

    def send(
        self,
        deltas: Tensors,
        error: Mapping[str, Any],
        weight: Number,
        sent: int,
        *,
        like: Mapping[str, Any],
    ) -> tuple[Flight, Mapping[str, Any]]:
        """Begin to send a fragment; return its flight, and what this rank remembers of it.

        Args:
            deltas: by how much each parameter of it moved.
            error: what this rank remembers, laid over the ranks as parameters are.
            weight: what this rank saw.
            sent: the update after which it is sent.
            like: what lies over the ranks as parameters do, by name.
        """
        flight: Flight = {"sent": sent, "names": list(deltas)}
        owed = {n: d + local(error[n]) if error else d for n, d in deltas.items()}
        if self.is_whole:
            sums = {name: each * weight for name, each in owed.items()}
            told = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
            told += weight
            values = {"sums": sums, "weight": told}
            pending = start_reduce(values, self.ranks, label=self.label)
            pending = pending.then(partial(_shard_sums, like=like))
            return {**flight, "values": pending}, without(error, deltas)
        pending, left = start_parts(
            _flat(owed), weight, self.ranks, self.bits, label=self.label
        )
        kept = dict(zip(owed, _split_flat(left, owed), strict=True))
        new = {
            name: _like(error[name], _if_seen(weight, kept[name], local(error[name])))
            for name in owed
        }
        return {**flight, "half": 1, "values": pending}, {**error, **new}

    def start_second_half(
        self, flight: Flight, error: Mapping[str, Any]
    ) -> tuple[Flight, Mapping[str, Any]]:
        """Begin the second half of a flight in few bits; return what is remembered, too."""
        if flight.get("half") != 1:
            return flight, error
        names: Sequence[str] = flight["names"]
        parts = {name: local(error[name]) for name in names}
        flat = _flat(parts)
        pending, left, total = start_mean(
            flight["values"].wait(), self.ranks, self.bits, flat.dtype, label=self.label
        )
        # to a mean over all ranks it is one rank's share that this rank gives
        size = left.numel()
        begin = self.ranks.rank * size
        rest = left[: max(0, min(size, flat.numel() - begin))] * self.ranks.size
        flat[begin : begin + rest.numel()] += torch.where(total > 0, rest, 0)
        new = {
            name: _like(error[name], each.clone())
            for name, each in zip(names, _split_flat(flat, parts), strict=True)
        }
        flight = {**flight, "half": 2, "values": pending, "weight": total}
        return flight, {**error, **new}

    def receive_mean(self, flight: Flight, like: Mapping[str, Any]) -> Tensors | None:
        """Return the mean by name, of this rank's parts; None where no rank saw anything.

        Args:
            flight: in few bits, in its second half.
            like: tensors of this rank's parts, by name.
        """
        names: Sequence[str] = flight["names"]
        found = flight["values"].wait()
        if "half" not in flight:
            sums, total = found["sums"], found["weight"][0]
            if not is_positive(total):
                return None
            return {n: local(sums[n]) / total.to(sums[n].dtype) for n in names}
        if not is_positive(flight["weight"]):
            return None
        parts = {name: local(like[name]) for name in names}
        flat = mean_of(found, self.bits, _dtype_of(parts))
        return dict(zip(names, _split_flat(flat, parts), strict=True))


def merge_flights(
    flights: Sequence[Flight], bits: int, like: Mapping[str, Any]
) -> tuple[Flight, Tensors]:
    """Return the flight that all ranks would have had, and what rounding leaves out of it."""
    first = flights[0]
    if first.get("half") != 1:
        return first, {}
    parts = {name: like[name] for name in first["names"]}
    sums = [summed(f["values"].wait(), bits, _dtype_of(parts)) for f in flights]
    whole, total = torch.cat([coded for coded, _, _ in sums]), sums[0][2]
    left = torch.where(total > 0, torch.cat([each for _, each, _ in sums]), 0)
    flight = {**first, "half": 2, "values": Pending.of(whole), "weight": total}
    return flight, dict(zip(parts, _split_flat(left, parts), strict=True))


def without(error: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return what is remembered, once that of some parameters has been sent."""
    if not error:
        return error
    return {**error, **{name: torch.zeros_like(error[name]) for name in names}}


def _if_seen(weight: Number, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return what is remembered: nothing new by a rank of whose numbers none was taken."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, new, old)
    return new.clone() if weight else old


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def _dtype_of(parts: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return in what dtype numbers are added up that cross in few bits."""
    wide = any(part.dtype in _DOUBLE for part in parts.values())
    return torch.float64 if wide else torch.float32


_DOUBLE = (torch.float64, torch.complex128)


def _reals(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part) if part.is_complex() else part


def _flat(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the numbers of tensors, in order, as one vector."""
    dtype = _dtype_of(parts)
    return torch.cat([_reals(part).reshape(-1).to(dtype) for part in parts.values()])


def _split_flat(
    flat: torch.Tensor, like: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the parts of a vector, shaped as the tensors that it was made of."""
    begin = 0
    for part in like.values():
        shape = _reals(part).shape
        piece = flat[begin : begin + shape.numel()].view(shape)
        # pairs of numbers must begin at an even place
        yield torch.view_as_complex(piece.clone()) if part.is_complex() else piece
        begin += shape.numel()


def _shard_sums(found: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return sums that lie over the ranks as parameters do, so that files know them."""
    sums = {name: _like(like[name], each) for name, each in found["sums"].items()}
    return {**found, "sums": sums}


def _like(laid: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a part as a tensor that lies over the ranks as another."""
    return with_local(laid, part) if is_shard(laid) else part


# Fragments of a model: runs of parameters of about one size, each exchanged in its turn.


_MIB = 1 << 20


@attrs.frozen
class Timetable:
    """When each of some fragments is sent, and when what comes of it is used.

    Attributes:
        fragments: how many there are.
        sync_every: updates between two exchanges of a fragment.
        delay: updates between an exchange and its use.
    """

    fragments: int
    sync_every: int
    delay: int

    def leaving(self, updates: int) -> Iterator[int]:
        """Yield the fragments that are sent after so many updates."""
        for i in range(self.fragments):
            if updates and (updates - self._first(i)) % self.sync_every == 0:
                yield i

    def due(self, updates: int, sent: int) -> bool:
        """Whether what was sent after so many updates is used now."""
        return updates - sent == self.delay

    def half_way(self, updates: int, sent: int) -> bool:
        """Whether it has come so far that its second half begins."""
        return updates - sent == -(-self.delay // 2)

    def _first(self, i: int) -> int:
        return i * self.sync_every // self.fragments


def cut_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Cut parameters, given by their sizes, into so many runs; some may be empty."""
    whole = max(1, sum(sizes.values()))
    ends = accumulate(sizes.values())
    # by its middle, so that one large parameter does not take its neighbours with it
    middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
    names: list[list[str]] = [[] for _ in range(count)]
    for name, middle in zip(sizes, middles, strict=True):
        names[min(count - 1, int(middle * count / whole))].append(name)
    return names


def bucket_names(
    names: Collection[str], params: Mapping[str, torch.Tensor], most: float
) -> Iterator[list[str]]:
    """Yield names of parameters in order, as many at once as have so many MiB, or one.

    Those at once are cut along the same axes: numbers that several ranks of a copy hold must
    not be rounded beside others, or they would drift.
    """
    bucket: list[str] = []
    size, axes = 0, None
    for name in names:
        part = local(params[name])
        more, cut = part.numel() * part.element_size(), cut_axes(params[name])
        if bucket and (size + more > most * _MIB or cut != axes):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size, axes = size + more, cut
    if bucket:
        yield bucket


# A step of an outer optimizer: a torch optimizer over the anchor, with its state as a
# value.


OuterTensors = Mapping[str, torch.Tensor]

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""What DiLoCo has for an outer optimizer."""


def as_value(factory: Any) -> Any:
    """Return what two factories are compared by: of partials, function and arguments."""
    if not isinstance(factory, partial):
        return factory
    made: partial[Any] = factory
    return made.func, made.args, tuple(sorted(made.keywords.items()))


@attrs.frozen(eq=False)
class Outer:
    """An outer optimizer, and the anchor that it steps.

    Attributes:
        factory: makes it of a list of (name, parameter).
        anchor: what it steps in place, by name; parts, where the model is split.
    """

    factory: Any
    anchor: OuterTensors

    def step(self, state: State, gradients: OuterTensors) -> State:
        """Step the parameters that have a gradient; return the optimizer's next state.

        Args:
            state: of the optimizer, by name; its tensors are written.
            gradients: of this rank's parts, of any floating-point dtype.
        """
        params = {name: nn.Parameter(local(each)) for name, each in self.anchor.items()}
        for name, gradient in gradients.items():
            params[name].grad = gradient.to(params[name].dtype)
        named = list(params.items())
        optimizer = self.factory(named)
        live = LiveOptimizer(optimizer, {p: n for n, p in named}, self)
        live.load(state)
        return {name: dict(entry) for name, entry in live.update({}).items()}

    def to_state(self, opt_state: State) -> State:
        """Return values that lie over the ranks as the anchor does."""
        return _map_tensors(opt_state, self._shard_like)

    def from_state(self, opt_state: State) -> State:
        """Return what the optimizer has of them: parts."""
        return _map_tensors(opt_state, _part)

    def _shard_like(self, name: str, each: torch.Tensor) -> torch.Tensor:
        anchor = self.anchor.get(name)
        if anchor is None or not is_shard(anchor) or each.shape != local(anchor).shape:
            return each
        return with_local(anchor, each)


def _part(_name: str, each: torch.Tensor) -> torch.Tensor:
    return local(each)


def _map_tensors(
    state: State, fn: Callable[[str, torch.Tensor], torch.Tensor]
) -> State:
    return {
        name: {
            key: fn(name, each) if isinstance(each, torch.Tensor) else each
            for key, each in entry.items()
        }
        for name, entry in state.items()
    }


Slot: TypeAlias = dict[str, Any]

_LABEL = "diloco"


def _is_factory(_owner: object, _field: object, value: object) -> None:
    made = isinstance(value, torch.optim.Optimizer)
    if value is not None and (made or not callable(value)):
        msg = (
            f"af.diloco(outer={value!r}): expected what makes a torch optimizer of parameters,"
            " such as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
        )
        raise ArgumentError(msg)


def _is_share(_owner: object, _field: object, value: Any) -> None:
    if not is_number(value) or not 0 <= value < 1:
        msg = f"af.diloco(mix={value!r}): expected a number from 0, less than 1."
        raise ArgumentError(msg)


def _are_bits(_owner: object, _field: object, value: object) -> None:
    if isinstance(value, bool) or value not in (32, 16, 8, 4):
        msg = (
            f"af.diloco(bits={value!r}): expected 16, 8 or 4, or 32, which sends numbers as"
            " they are."
        )
        raise ArgumentError(msg)


@transform
class diloco:
    """Let ranks train apart for `sync_every` updates, then step an outer optimizer.

    All ranks hold an anchor. Each trains from there on its own shares, with its own optimizer
    state, and no gradient is communicated. Every `sync_every` updates ranks average by how
    much they moved away from the anchor, by the weight of the samples that each has seen, and
    the outer optimizer steps the anchor by that mean, as if it were a gradient; all go on from
    there. Evaluation and export see the anchor, and communicate nothing. `af.finalize` makes
    a last exchange of what was done since, in numbers as they are.

    Three ways to talk less, or later. `fragments` cuts the model into runs of parameters that
    are exchanged in turn: as many bytes, of which less crosses at once. `delay` lets an
    exchange go on while ranks take updates; what was found is then mixed with what a rank did
    meanwhile: `mix` of its own, the rest of the anchor. `bits` sends 16, 8 or 4 bits a number;
    each rank remembers what rounding left out, and sends it the next time.

    Beside `wrap_fsdp`, in a world with "dp_replicate", it is the copies of the model that
    train apart, and each rank exchanges the part that it has with the same part of the others.

    Acts on: init, reduce, after_update, eval_params, finalize, merge.

    Args:
        sync_every: updates between exchanges, at least 1.
        outer: makes the outer optimizer of a list of (name, parameter); None is SGD with a
            rate of 0.7 and Nesterov's momentum of 0.9, as DiLoCo has it.
        fragments: how many parts the model is exchanged in, at most `sync_every`.
        delay: updates between the beginning of an exchange and its use, less than
            `sync_every`.
        mix: the share of a rank's own parameters where an exchange arrives; 0 drops what a
            rank did in the time of `delay`, of that fragment.
        bits: of a number that crosses the ranks.
        bucket_cap_mb: the size of what is exchanged at once in MiB, or one parameter; with
            `delay` it is a fragment.

    Law:
        With an outer optimizer `SGD(lr=1.0)` it is `local_sgd`, up to rounding. A delay
        changes when a mean is used, never its value. What was used and what is remembered are
        together all that ranks moved by, bit by bit, where their weights are equal. It gives
        up that replicas agree between exchanges.

    Cost:
        Memory for the anchor and the outer optimizer's state; with `bits` for what is
        remembered. Every `sync_every` updates one all-reduce of the parameters that are
        trained; in `bits`, an all-to-all and an all-gather of `bits / 32` as many bytes
        each, of the (N-1)/N that a rank of N sends of both. An exchange for which no rank saw
        a sample is left out where there is a delay, or few bits; otherwise ranks count alike.

    Raises:
        ArgumentError: an option is none, or there are fewer parameters than fragments.
        CompositionError: beside what evaluates other parameters, as `ema` does; when the state
            is made, a split model beside both `delay` and `bits`.
        StateError: at an update, other `fragments` or `bits` than those with which what is not
            exchanged yet was begun.
        OptimizerError: when the state is made, the outer optimizer is none that can be kept in
            a state; or of a split model, it does not go element by element.

    References:
        Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
        Models"; Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"
        (fragments, delay, mix, 4 bits); Karimireddy et al. 2019, "Error Feedback Fixes
        SignSGD" (what is remembered).

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
    outer: Callable[..., torch.optim.Optimizer] | None = attrs.field(
        default=None, validator=_is_factory, eq=as_value, kw_only=True
    )
    fragments: int = attrs.field(default=1, validator=integer(1), kw_only=True)
    delay: int = attrs.field(
        default=0, validator=integer(0, "a number of updates"), kw_only=True
    )
    mix: float = attrs.field(default=0.0, validator=_is_share, kw_only=True)
    bits: Literal[32, 16, 8, 4] = attrs.field(
        default=32, validator=_are_bits, kw_only=True
    )
    bucket_cap_mb: float = attrs.field(
        default=25.0, validator=mebibytes(), kw_only=True
    )

    def __attrs_post_init__(self) -> None:
        """Raise where options contradict each other."""
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
        """What of its slot is each rank's own."""
        own = ("weights",) if self.bits == 32 else ("weights", "error", "flights")
        return {"draws_nothing": True, "by_rank": own, "owes": self._owes}

    def _owes(self, state: TrainState, slot: Slot) -> bool:
        """Return whether ranks are elsewhere than the anchor."""
        mixed = self.mix > 0 and state.step > slot["since"]
        return mixed or bool(slot["flights"]) or state.step > min(slot["sent"])

    def init(self, state: TrainState) -> Slot:
        """Let the anchor be where all ranks begin."""
        self._check(state)
        definition = state.definition
        names = owned_names(definition.optimizer, definition.skeleton)
        anchor = tree.clone({name: state.params[name] for name in names})
        return self._new_slot(anchor, {}, state.step)

    def after_update(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Count what this rank has seen; send, and use, the fragments whose turn it is."""
        slot = self._fit_slot(slot, state.step - 1)
        slot = {**slot, "weights": [each + update.weight for each in slot["weights"]]}
        timetable = Timetable(self.fragments, self.sync_every, self.delay)
        updates = state.step - slot["since"]
        for i in timetable.leaving(updates):
            slot = self._exchange_fragment(state, slot, i, self._fragments(state)[i])
        for key, flight in list(slot["flights"].items()):
            sent = flight["sent"] - slot["since"]
            if timetable.half_way(updates, sent):
                slot = self._continue_flight(state, slot, key)
            if timetable.due(updates, sent):
                slot = self._apply_flight(state, slot, key)
        return state, slot

    def finalize(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Use what is on its way, exchange what was done since, and go to the anchor."""
        slot = self._fit_slot(slot, state.step)
        for key in list(slot["flights"]):
            slot = self._apply_flight(
                state, self._continue_flight(state, slot, key), key
            )
        for i, names in enumerate(self._fragments(state)):
            if state.step > slot["sent"][i]:
                slot = self._exchange_fragment(state, slot, i, names, at_once=True)
        for name, each in slot["anchor"].items():
            local(state.params[name]).copy_(local(each))
        return state, {**slot, "since": state.step}

    def merge(self, slots: Sequence[Slot], _: World) -> tuple[list[float], Slot]:
        """Begin at the mean of ranks, with the mean of what they saw and what they remember."""
        first, count = slots[0], len(slots)
        seen = [[float(each) for each in slot["weights"]] for slot in slots]
        error = {
            name: torch.stack([slot["error"][name] for slot in slots]).sum(0) / count
            for name in first["error"]
        }
        flights: dict[str, Any] = {}
        for key in first["flights"]:
            flown = [slot["flights"][key] for slot in slots]
            flights[key], left = merge_flights(flown, self.bits, first["anchor"])
            error = {**error, **{name: error[name] + left[name] for name in left}}
        mean = [sum(each) / count for each in zip(*seen, strict=True)]
        merged = {**first, "weights": mean, "error": error, "flights": flights}
        return [sum(each) for each in seen], merged

    def eval_params(
        self, params: Mapping[str, torch.Tensor], slot: Slot, update: Update
    ) -> tuple[Mapping[str, torch.Tensor], Slot]:
        """Return the anchor."""
        return {**params, **slot["anchor"]}, slot

    def _fit_slot(self, slot: Slot, step: int) -> Slot:
        """Return a slot for these options, of one that may have been begun with others.

        Raises:
            StateError: it has them in use.
        """
        same, kept = len(slot["sent"]) == self.fragments, bool(slot["error"])
        if same and kept is (self.bits != 32):
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
        """Return the slot of ranks that are at the anchor."""
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
        """Send a fragment, and use what comes of it, unless there is a delay.

        At once means numbers as they are, what is remembered included.
        """
        whole = self._exchange(state).is_whole
        if self.delay and not at_once:
            slot = self._send_fragment(state, slot, i, names)
        else:
            for some in bucket_names(names, state.params, self.bucket_cap_mb):
                if whole or at_once:
                    slot = self._average_fragment(state, slot, i, some)
                else:
                    slot = self._continue_flight(
                        state, self._send_fragment(state, slot, i, some), f"{i}"
                    )
                    slot = self._apply_flight(state, slot, f"{i}")
        fresh = {"weights": 0, "sent": state.step}
        changed = {n: [*slot[n][:i], v, *slot[n][i + 1 :]] for n, v in fresh.items()}
        return {**slot, **changed}

    def _average_fragment(
        self, state: TrainState, slot: Slot, i: int, names: Sequence[str]
    ) -> Slot:
        """Step by the mean of numbers as they are."""
        deltas = self._deltas(state, slot, names)
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
        """Let parameters of a fragment fly."""
        deltas, weight = self._deltas(state, slot, names), slot["weights"][i]
        exchange, error = self._exchange(state), slot["error"]
        like = slot["anchor"]
        flight, error = exchange.send(deltas, error, weight, state.step, like=like)
        return {**slot, "error": error, "flights": {**slot["flights"], f"{i}": flight}}

    def _continue_flight(self, state: TrainState, slot: Slot, key: str) -> Slot:
        """Begin the second half of a flight, if it has one."""
        flight, error = slot["flights"][key], slot["error"]
        flight, error = self._exchange(state).start_second_half(flight, error)
        return {**slot, "error": error, "flights": {**slot["flights"], key: flight}}

    def _apply_flight(self, state: TrainState, slot: Slot, key: str) -> Slot:
        """Step by what has arrived."""
        flights = dict(slot["flights"])
        means = self._exchange(state).receive_mean(flights.pop(key), slot["anchor"])
        slot = {**slot, "flights": flights}
        return slot if means is None else self._step_anchor(state, slot, means)

    def _step_anchor(self, state: TrainState, slot: Slot, means: Tensors) -> Slot:
        """Step the anchor, and let this rank go on from there.

        What is frozen goes to the mean of what ranks had trained before, by no momentum.
        """
        anchor, trained = slot["anchor"], state.trainable
        stepped = {name: each for name, each in means.items() if name in trained}
        after = Outer(self.outer or NESTEROV, anchor).step(slot["outer"], stepped)
        for name in means.keys() - stepped.keys():
            local(anchor[name]).sub_(means[name])
        for name in means:
            param, target = local(state.params[name]), local(anchor[name])
            if self.mix:
                param.lerp_(target, 1 - self.mix)
            else:
                param.copy_(target)
        return {**slot, "outer": after}

    def _deltas(self, state: TrainState, slot: Slot, names: Sequence[str]) -> Tensors:
        return param_deltas(
            state.params, {name: slot["anchor"][name] for name in names}
        )

    def _exchange(self, state: TrainState) -> Exchange:
        return Exchange(ranks=state.definition.copies, bits=self.bits, label=_LABEL)
