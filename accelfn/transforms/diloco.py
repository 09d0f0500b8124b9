# SPDX-License-Identifier: Apache-2.0
"""DiLoCo: train ranks independently, then step an outer optimizer by how far they moved."""

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
    mebibytes,
    number,
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
from accelfn.engine.optimizer import LiveOptimizer, check_elements, counts_by_group
from accelfn.engine.runner import ShardedParams
from accelfn.errors import ArgumentError, CompositionError, OptimizerError, StateError
from accelfn.model.optimizer import owned_names, prototype_of
from accelfn.state.state import OptState, TrainState
from accelfn.state.update import Update
from accelfn.world import World

# Exchange of a fragment (a group of parameters). The anchor has the values of all parameters
# after their last exchange. Ranks average how far the fragment's parameters have moved away from
# the anchor. A flight is an exchange that has started and is not complete.
#
# Uncompressed values need one all-reduce. Quantized values need two steps; the second starts
# half-way through the delay. Each rank keeps its rounding errors, and adds them in its next
# exchange.


Tensors: TypeAlias = dict[str, torch.Tensor]
Flight: TypeAlias = dict[str, Any]
"""An exchange that is not complete: `sent` is the update after which it started, `names` are
the parameters, `values` the pending results. If quantized, `half` is 1 or 2, and in the
second half `weight` is the total of all ranks.
"""


def param_deltas(
    params: Mapping[str, Any], anchor: Mapping[str, Any], names: Iterable[str]
) -> Tensors:
    """Return anchor minus parameters for this rank's shards, in float32 or wider."""
    return {name: wide(local(anchor[name])) - local(params[name]) for name in names}


def merge_flights(
    flights: Sequence[Flight], bits: int, like: Mapping[str, Any]
) -> tuple[Flight, Tensors]:
    """Merge the flights that several ranks have of one exchange; return flight and errors."""
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
    return flight, _split_flat(residual, parts)


def without(error: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return the rounding errors, with zeros for parameters that were sent exactly."""
    if not error:
        return error
    return {**error, **{name: torch.zeros_like(error[name]) for name in names}}


def _if_seen(weight: Number, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the new rounding errors, or the old ones if this rank saw no sample."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, new, old)
    return new.clone() if weight else old


def _dtype_of(parts: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype for summing quantized values."""
    dtypes = {part.dtype.to_real() for part in parts.values()}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _reals(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part) if part.is_complex() else part


def _flat(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Flatten tensors into one real vector, in order."""
    dtype = _dtype_of(parts)
    return torch.cat([_reals(part).reshape(-1).to(dtype) for part in parts.values()])


def _split_flat(flat: torch.Tensor, like: Mapping[str, torch.Tensor]) -> Tensors:
    """Split a vector into tensors with the names and shapes of `like`."""
    pieces, begin = Tensors(), 0
    for name, part in like.items():
        shape = _reals(part).shape
        piece = flat[begin : begin + shape.numel()].view(shape)
        # torch needs complex numbers to start at an even index, so copy them
        is_complex = part.is_complex()
        pieces[name] = torch.view_as_complex(piece.clone()) if is_complex else piece
        begin += shape.numel()
    return pieces


def _shard_sums(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums as DTensors like the parameters, so that checkpoints can store them."""
    sums = {name: _like(like[name], part) for name, part in values["sums"].items()}
    return {**values, "sums": sums}


def _like(like: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a local tensor as a shard in the layout of `like`, if `like` is sharded."""
    return with_local(like, part) if is_shard(like) else part


# Fragments of a model: groups of consecutive parameters, of about equal size, that are
# exchanged in turn.


_MIB = 1 << 20


def cut_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide parameters, given by their sizes, into `count` fragments; some may be empty."""
    total = max(1, sum(sizes.values()))
    ends = accumulate(sizes.values())
    # choose the fragment by a parameter's middle, so that a large parameter does not move its
    # neighbors to another fragment
    middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
    names: list[list[str]] = [[] for _ in range(count)]
    for name, middle in zip(sizes, middles, strict=True):
        names[min(count - 1, int(middle * count / total))].append(name)
    return names


def bucket_names(
    names: Collection[str], params: Mapping[str, torch.Tensor], most: float
) -> Iterator[list[str]]:
    """Yield groups of parameter names, each of at most `most` MiB or one parameter.

    The parameters of one group are sharded along the same axes. If several ranks of a copy hold
    the same values, these values are not quantized together with other values, because the ranks
    would round them differently.
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


# The outer optimizer: a torch optimizer that steps the anchor. Its state is passed in and
# returned, not kept in the optimizer.


NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the DiLoCo paper."""


def as_value(factory: Any) -> Any:
    """Return a value to compare factories of optimizers; equal factories have equal values.

    For a partial, the value consists of its function and arguments.
    """
    if not isinstance(factory, partial):
        return factory
    call: partial[Any] = factory
    return call.func, call.args, tuple(sorted(call.keywords.items()))


def step_outer(
    factory: Any, anchor: Mapping[str, Any], state: OptState, gradients: Tensors
) -> OptState:
    """Step the anchor's parameters that have a gradient; return the optimizer's next state.

    Args:
        factory: makes the optimizer from a list of (name, parameter).
        anchor: the tensors to step in place, by name; shards if the model is split.
        state: the optimizer's state by name; its tensors are overwritten.
        gradients: the gradients of this rank's shards, of any floating-point dtype.
    """
    params = {name: nn.Parameter(local(part)) for name, part in anchor.items()}
    for name, gradient in gradients.items():
        params[name].grad = gradient.to(params[name].dtype)
    split = [name for name, part in anchor.items() if is_shard(part)]
    names = {param: name for name, param in params.items()}
    view = ShardedParams(split, params, anchor)
    live = LiveOptimizer(factory(list(params.items())), names, view)
    live.load(state)
    return {name: dict(entry) for name, entry in live.update({}).items()}


Slot: TypeAlias = dict[str, Any]

_LABEL = "diloco"


_is_factory = satisfies(
    lambda value: (
        value is None
        or (callable(value) and not isinstance(value, torch.optim.Optimizer))
    ),
    "a function that makes a torch optimizer, such as functools.partial(torch.optim.SGD, lr=0.7)",
)
_is_share = number(lambda share: 0 <= share < 1, "a number of at least 0 and below 1")


@transform
class diloco:
    """Train ranks independently for `sync_every` updates, then step an outer optimizer.

    All ranks hold the same anchor, a copy of the parameters. Each rank trains from the anchor
    on its own shares, with its own optimizer state, and communicates no gradients. Every
    `sync_every` updates the ranks average how far they have moved away from the anchor,
    weighted by the samples that each rank has seen. The outer optimizer steps the anchor by
    that mean as if it were a gradient, and all ranks continue from the new anchor. Evaluation
    and export use the anchor, without communication. `af.finalize` makes a last exchange,
    without quantization.

    Three options reduce or hide communication. With `fragments`, the model is divided into
    groups of parameters that are exchanged in turn: as many bytes in total, but fewer at once.
    With `delay`, an exchange overlaps with updates. When its result arrives, a rank's
    parameters become a mixture of its own (a share `mix`) and the anchor's. With `bits`, ranks
    send 16, 8 or 4 bits per number. Each rank keeps its rounding errors, and adds them in the
    next exchange.

    With `wrap_fsdp` in a world with "dp_replicate", the copies of the model train
    independently. Each rank exchanges its shard with the same shard of the other copies.

    Acts on: init, reduce, after_update, eval_params, finalize, merge.

    Args:
        sync_every: the number of updates between exchanges, at least 1.
        outer: makes the outer optimizer from a list of (name, parameter). By default it is
        SGD with a learning rate of 0.7 and Nesterov momentum of 0.9, as in the DiLoCo paper.
        fragments: the number of groups of parameters that are exchanged in turn, at most
        `sync_every`.
        delay: the number of updates between the start of an exchange and the use of its result,
        less than `sync_every`.
        mix: the share of a rank's own parameters when the result of an exchange arrives. 0
        discards the rank's progress on that fragment during `delay`.
        bits: the bits per number that ranks send.
        bucket_cap_mb: the maximum size of one exchange in MiB, but at least one parameter. With
        `delay`, a fragment is always one exchange.

    Law:
        With the outer optimizer `SGD(lr=1.0)` it equals `local_sgd`, up to rounding. A delay
        changes when a mean is used, but not its value. If ranks have equal weights, the applied
        means plus the kept errors equal what the ranks have moved, bit by bit. Ranks have
        different parameters between exchanges.

    Cost:
        Memory for the anchor and the outer optimizer's state; with `bits` also for the errors.
        Every `sync_every` updates, one all-reduce of the trained parameters. With `bits`,
        instead an all-to-all and an all-gather, each of `bits / 32` of the bytes; a rank of N
        sends (N-1)/N of both. If no rank saw a sample, an exchange with `delay` or `bits` is
        skipped; other exchanges use equal weights.

    Raises:
        ArgumentError: an option is invalid, or there are fewer parameters than fragments.
        CompositionError: with a transform that evaluates other parameters, such as `ema`; when
        the state is created, a split model with both `delay` and `bits`.
        StateError: at an update, `fragments` or `bits` changed while updates since the last
        exchange are not exchanged yet.
        OptimizerError: when the state is created, the outer optimizer cannot be kept in a
        state; or the model is split and the outer optimizer is not elementwise.

    References:
        Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
        Models"; Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"
        (fragments, delay, mix, 4 bits); Karimireddy et al. 2019, "Error Feedback Fixes SignSGD"
        (the kept errors).

    Example:
        >>> diloco(sync_every=500)
        af.diloco(sync_every=500)
    """

    gives_up: ClassVar[Mapping[str, str]] = {"replicas_agree": "between exchanges"}
    reduce: ClassVar[None] = None
    refuses: ClassVar[Mapping[str, str]] = {
        "eval_params": "evaluates its anchor, but {other!r} sets other parameters to evaluate."
        " Leave out one of the two."
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
                f"{self!r}: at most one fragment is exchanged per update. Use at most"
                f" {self.sync_every} fragments, or a larger sync_every."
            )
            raise ArgumentError(msg)
        if self.delay >= self.sync_every:
            msg = (
                f"{self!r}: the next exchange of a fragment would start before the last one is"
                f" complete. Use a delay below sync_every={self.sync_every}."
            )
            raise ArgumentError(msg)

    @property
    def tells(self) -> Mapping[str, Any]:
        """Tell others which slot entries differ by rank, and when an exchange is still due."""
        keys = ("weights",) if self.bits == 32 else ("weights", "error", "flights")
        return {"draws_nothing": True, "by_rank": keys, "owes": self._owes}

    def _owes(self, state: TrainState, slot: Slot) -> bool:
        """Return whether ranks have moved away from the anchor since the last exchange."""
        mixes = self.mix > 0 and state.step > slot["since"]
        return mixes or bool(slot["flights"]) or state.step > min(slot["sent"])

    def init(self, state: TrainState) -> Slot:
        """Create a slot whose anchor is a copy of the initial parameters."""
        self._check(state)
        definition = state.definition
        names = owned_names(definition.optimizer, definition.skeleton)
        anchor = tree.clone({name: state.params[name] for name in names})
        return self._new_slot(anchor, {}, state.step)

    def after_update(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Add up this rank's weight, and send and apply the fragments that are due."""
        slot = self._fit_slot(slot, state.step - 1)
        slot = {**slot, "weights": [w + update.weight for w in slot["weights"]]}
        updates = state.step - slot["since"]
        for i in range(self.fragments):
            first = i * self.sync_every // self.fragments
            if (updates - first) % self.sync_every == 0:
                slot = self._exchange_fragment(state, slot, i)
        for key, flight in list(slot["flights"].items()):
            flown = state.step - flight["sent"]
            if flown == -(-self.delay // 2):  # half-way through the delay
                slot = self._continue_flight(state, slot, key)
            if flown == self.delay:
                slot = self._apply_flight(state, slot, key)
        return state, slot

    def finalize(
        self, state: TrainState, slot: Slot, update: Update
    ) -> tuple[TrainState, Slot]:
        """Complete all flights, exchange what moved since, and set parameters to the anchor."""
        slot = self._fit_slot(slot, state.step)
        for key in list(slot["flights"]):
            slot = self._apply_flight(state, slot, key)
        for i in range(self.fragments):
            if state.step > slot["sent"][i]:
                slot = self._exchange_fragment(state, slot, i, at_once=True)
        for name, anchor in slot["anchor"].items():
            local(state.params[name]).copy_(local(anchor))
        return state, {**slot, "since": state.step}

    def merge(self, slots: Sequence[Slot], _: World) -> tuple[list[float], Slot]:
        """Return the ranks' weights in an average, and the slot afterwards."""
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
        """Return a slot for the current options.

        Raises:
            StateError: the slot has other options, and updates since the last exchange used
            them.
        """
        same, has_error = len(slot["sent"]) == self.fragments, bool(slot["error"])
        if same and has_error is (self.bits != 32):
            return slot
        if step > slot["since"]:
            msg = (
                f"{self!r}: fragments= or bits= changed after updates that were not"
                " exchanged. With the old setup, first call state = af.finalize(state)."
            )
            raise StateError(msg)
        return self._new_slot(slot["anchor"], slot["outer"], step)

    def _new_slot(self, anchor: Any, outer: Any, step: int) -> Slot:
        """Return the slot of ranks whose parameters equal the anchor."""
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
                f"{self!r}: the outer optimizer {type(prototype).__name__} is schedule-free: it"
                " evaluates other parameters than the anchor. Use another, such as torch.optim.SGD."
            )
            raise OptimizerError(msg)
        if layout is not None:
            if self.delay and self.bits != 32:
                msg = (
                    f"{self!r}: if the model is split over ranks, delay= and bits= cannot be"
                    " combined. Leave out one of the two."
                )
                raise CompositionError(msg)
            dims = {dim for cuts in layout.cuts.values() for dim in cuts.values()}
            check_elements(state, f"{self!r}", dims=dims, optimizer=prototype)
        if self.fragments > 1 and counts_by_group(state, optimizer=prototype):
            msg = (
                f"{self!r}: {type(prototype).__name__} has one update count for all parameters,"
                " and every fragment would increase it. Leave out fragments=."
            )
            raise OptimizerError(msg)
        empty = sum(not names for names in self._fragments(state))
        if empty:
            msg = (
                f"{self!r}: the model's parameters cannot be divided into {self.fragments}"
                f" fragments of similar size: {empty} would be empty. Use fewer fragments."
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
        self, state: TrainState, slot: Slot, i: int, *, at_once: bool = False
    ) -> Slot:
        """Send a fragment, and apply its mean unless there is a delay.

        `at_once` sends without quantization or delay, and includes the kept errors.
        """
        is_whole, names = self._is_whole(state), self._fragments(state)[i]
        if self.delay and not at_once:
            slot = self._send_fragment(state, slot, i, names)
        else:
            for some in bucket_names(names, state.params, self.bucket_cap_mb):
                if is_whole or at_once:
                    slot = self._average_fragment(state, slot, i, some)
                else:
                    slot = self._send_fragment(state, slot, i, some)
                    slot = self._apply_flight(state, slot, f"{i}")
        fresh = {"weights": 0, "sent": state.step}
        new = {n: [*slot[n][:i], v, *slot[n][i + 1 :]] for n, v in fresh.items()}
        return {**slot, **new}

    def _average_fragment(
        self, state: TrainState, slot: Slot, i: int, names: Sequence[str]
    ) -> Slot:
        """Average how far parameters have moved, without quantization, and step the anchor."""
        deltas = self._deltas(state, slot, names)
        slot = {**slot, "error": without(slot["error"], names)}
        parts, weight = [*deltas.values()], slot["weights"][i]
        ranks, cap = state.definition.copies, self.bucket_cap_mb
        average_(parts, weight, ranks, label=_LABEL, bucket_cap_mb=cap)
        return self._step_anchor(state, slot, deltas)

    def _send_fragment(
        self, state: TrainState, slot: Slot, i: int, names: Sequence[str]
    ) -> Slot:
        """Start to send how far a fragment's parameters have moved."""
        weight, error = slot["weights"][i], slot["error"]
        ranks = state.definition.copies
        totals = self._deltas(state, slot, names)
        flight: Flight = {"sent": state.step, "names": list(names)}
        if self._is_whole(state):
            sums = {name: value * weight for name, value in totals.items()}
            weight_sum = torch.zeros(1, dtype=torch.float64, device=ranks.device)
            weight_sum += weight
            values = {"sums": sums, "weight": weight_sum}
            pending = start_all_reduce(values, ranks, label=_LABEL)
            flight["values"] = pending.then(partial(_shard_sums, like=slot["anchor"]))
            error = without(error, names)
        else:
            pending, residual = start_parts(
                _flat(totals), weight, ranks, self.bits, label=_LABEL
            )
            flight |= {"half": 1, "values": pending}
            error = {**error}
            for name, part in _split_flat(residual, totals).items():
                rest = _if_seen(weight, part, local(error[name]))
                error[name] = _like(error[name], rest)
        return {**slot, "error": error, "flights": {**slot["flights"], f"{i}": flight}}

    def _continue_flight(self, state: TrainState, slot: Slot, key: str) -> Slot:
        """Start the second half of an exchange, if the exchange is quantized."""
        flight, error = slot["flights"][key], slot["error"]
        ranks = state.definition.copies
        if flight.get("half") != 1:
            return slot
        parts = {name: local(error[name]) for name in flight["names"]}
        flat = _flat(parts)
        pending, residual, total = start_mean(
            flight["values"].wait(), ranks, self.bits, flat.dtype, label=_LABEL
        )
        # only this rank stores the rounding error of its part of the mean; times the number of
        # ranks, because the next mean divides by it
        size = residual.numel()
        begin = ranks.rank * size
        rest = residual[: max(0, min(size, flat.numel() - begin))] * ranks.size
        flat[begin : begin + rest.numel()] += torch.where(total > 0, rest, 0)
        new = {
            name: _like(error[name], part.clone())
            for name, part in _split_flat(flat, parts).items()
        }
        flight = {**flight, "half": 2, "values": pending, "weight": total}
        flights = {**slot["flights"], key: flight}
        return {**slot, "error": {**error, **new}, "flights": flights}

    def _apply_flight(self, state: TrainState, slot: Slot, key: str) -> Slot:
        """Complete an exchange, and step the anchor by its mean if any rank saw a sample."""
        slot = self._continue_flight(state, slot, key)
        flights = dict(slot["flights"])
        flight = flights.pop(key)
        slot, result = {**slot, "flights": flights}, flight["values"].wait()
        is_whole = "half" not in flight
        total = result["weight"][0] if is_whole else flight["weight"]
        if not is_positive(total):
            return slot
        if is_whole:
            sums = {name: local(part) for name, part in result["sums"].items()}
            means = {name: part / total.to(part.dtype) for name, part in sums.items()}
        else:
            parts = {name: local(slot["anchor"][name]) for name in flight["names"]}
            flat = mean_of(result, self.bits, _dtype_of(parts))
            means = _split_flat(flat, parts)
        return self._step_anchor(state, slot, means)

    def _step_anchor(self, state: TrainState, slot: Slot, means: Tensors) -> Slot:
        """Step the anchor by the ranks' means, and move this rank's parameters there.

        Parameters that were frozen since the last exchange move by the mean, without the outer
        optimizer.
        """
        anchor, trainable = slot["anchor"], state.trainable
        gradients = {name: mean for name, mean in means.items() if name in trainable}
        after = step_outer(self.outer or NESTEROV, anchor, slot["outer"], gradients)
        for name in means.keys() - gradients.keys():
            local(anchor[name]).sub_(means[name])
        for name in means:
            param, target = local(state.params[name]), local(anchor[name])
            if self.mix:
                param.lerp_(target, 1 - self.mix)
            else:
                param.copy_(target)
        return {**slot, "outer": after}

    def _deltas(self, state: TrainState, slot: Slot, names: Iterable[str]) -> Tensors:
        """Return how far this rank's parameters have moved, plus its kept errors."""
        deltas = param_deltas(state.params, slot["anchor"], names)
        for name in deltas if slot["error"] else ():
            deltas[name] += local(slot["error"][name])
        return deltas

    def _is_whole(self, state: TrainState) -> bool:
        """Return whether values are sent without quantization. One rank sends nothing."""
        return self.bits == 32 or state.definition.copies.size == 1
