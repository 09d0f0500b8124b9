# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: the complete state of training at one moment, as a value.

The record is frozen; its tensors are updated in place. A step takes ownership of its state,
like JAX's donated buffers: after the step, old records raise, and the new record owns the
tensors. The lease belongs to the tensors, so all records that share tensors end together.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import NoneType
from typing import Any, Literal, NoReturn, Self, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.autograd import profiler

from accelfn.base import tree
from accelfn.base.arguments import check_word, explain_call_errors, hint_attributes
from accelfn.base.codec import has_state
from accelfn.base.draws import NOTHING, own_modes, span
from accelfn.base.tree import Pending, ReadOnly, is_shard
from accelfn.collectives.failures import format_tensor
from accelfn.collectives.replicas import check_replicas, check_rows, sums_of
from accelfn.data import Data
from accelfn.data.plan import Cursor
from accelfn.definition import transform as entries
from accelfn.definition.definition import (
    Definition,
    as_data,
    check_seed,
    check_setup,
    warn_of_batch_size,
)
from accelfn.definition.transform import by_rank, chain, facts_of
from accelfn.errors import ArgumentError, CallError
from accelfn.model.model import ModelSource, check_params, give_away, seal_optimizer
from accelfn.model.optimizer import OptimizerSource, place_opt_state, trained_names
from accelfn.schedules.factors import Schedule
from accelfn.state.beginning import begin, begin_slots, restart_slots
from accelfn.state.results import Lease
from accelfn.state.update import (
    Skips,
    Update,
    next_rates,
    set_slot,
    shared_draws,
    split_result,
)
from accelfn.world import World

# Compare states over ranks: every rank sends a row per tensor or number.


_LABEL = "replicas agree"


def check_same_values(
    fields: Mapping[str, Any], world: World, *, is_split: bool, advice: str
) -> None:
    """Raise, on all ranks, unless fields of a state are bitwise equal on all of them.

    Args:
        fields: the values by field, compared in this order.
        world: the ranks to compare.
        is_split: whether ranks hold parts; then copies of the same part are compared.
        advice: the last sentences of the error.

    Cost: a few passes over every tensor, and two gathers of a line per tensor.

    Raises:
        ReplicaMismatchError: the first difference, with a row per rank.
    """
    if world.size == 1:
        return
    rows = {name: row for field in fields for name, row in _rows(field, fields[field])}
    if is_split:  # the checksum is of all parts together
        shapes = {
            name: format_tensor(row) if isinstance(row, torch.Tensor) else row
            for name, row in rows.items()
        }
        check_rows(shapes, world, label=_LABEL, advice=advice)
    check_rows(_add_checksums(rows, world), world, label=_LABEL, advice=advice)


def shared_slots(
    slots: Mapping[str, Any], entries_by_rank: Collection[tuple[str, str]]
) -> dict[str, Any]:
    """Return slots without per-rank entries, which `entries_by_rank` lists as (slot, entry)."""
    shared = dict(slots)
    for name, entry in entries_by_rank:
        if isinstance(shared.get(name), Mapping):
            shared[name] = {k: v for k, v in shared[name].items() if k != entry}
    return shared


def _add_checksums(rows: Mapping[str, Any], world: World) -> dict[str, str]:
    """Replace the tensors in rows by their shapes and checksums."""
    tensors = {name: row for name, row in rows.items() if isinstance(row, torch.Tensor)}
    if not tensors:
        return dict(rows)
    sums = sums_of(tensors.values(), world, label=_LABEL).tolist()
    named = dict(zip(tensors, sums, strict=True))
    return {
        name: f"{format_tensor(row)}, checksum {named[name]}" if name in named else row
        for name, row in rows.items()
    }


def _rows(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and descriptions of plain values at and below a path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        for key, inner in items:
            yield from _rows(f"{path}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(cast("list[Any]", value)):
            yield from _rows(f"{path}[{place}]", inner)
    elif isinstance(value, Pending):
        yield from _rows(path, value.wait())
    elif has_state(value):
        yield from _rows(path, value.state_dict())
    else:  # any other object cannot be saved: compare its type
        plain = isinstance(value, (str, int, float, complex, bytes, NoneType))
        yield path, repr(value) if plain else type(value).__name__


# Values of a state under another setup: layouts over ranks, and agreement of replicas.


OptState: TypeAlias = dict[str, dict[str, Any]]


@attrs.frozen
class Values:
    """The values of a state.

    Attributes:
        params: the parameters by name.
        buffers: the buffers by name.
        opt_state: the optimizer's state by parameter name.
        slots: the entries of transforms and of the user, by name.
    """

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    opt_state: OptState
    slots: dict[str, Any]


def carry_over(values: Values, before: Definition, after: Definition) -> Values:
    """Convert values from one definition to another.

    If ranks trained independently and now train together, they compare their values. If a
    definition splits the model, values move to the new layout. Both steps are collectives.

    Raises:
        ReplicaMismatchError: ranks that trained independently hold different values.
    """
    has_new_copies = after.copy_of_each not in ((), before.copy_of_each)
    if "apart" in before.setup.facts and (
        has_new_copies or "apart" not in after.setup.facts
    ):
        names = {transform.name for transform in after.setup}
        kept_slots = {
            name: slot for name, slot in values.slots.items() if name in names
        }
        check_replicas_agree(
            attrs.evolve(values, slots=kept_slots), before, by_rank(after.setup)
        )
    if before.layout or after.layout:
        values = move_to_device(move_layout(values, before, after), after)
    return values


def check_replicas_agree(
    values: Values, definition: Definition, entries_by_rank: Collection[tuple[str, str]]
) -> None:
    """Raise unless independently trained ranks hold equal values, except buffers.

    Args:
        values: the values, with the slots that the new setup keeps.
        definition: the definition of the independent training.
        entries_by_rank: per-rank entries of the new setup, by slot and entry.

    Raises:
        ReplicaMismatchError: the values differ.
    """
    (transform, *_) = (t for t in definition.setup if "apart" in facts_of(t))
    check_same_values(
        {
            "params": values.params,
            "opt_state": values.opt_state,
            "slots": shared_slots(values.slots, entries_by_rank),
        },
        definition.world,
        is_split=definition.layout is not None,
        advice=(
            f"Under {transform!r} ranks trained independently, and now they would drift. Average"
            " them first: state = af.finalize(state) averages parameters, and under"
            " af.local_sgd(opt_state=True) the optimizer's state, too."
        ),
    )


def cut_params(params: dict[str, torch.Tensor], layout: Any) -> dict[str, torch.Tensor]:
    """Cut whole parameters to their parts in a layout; None cuts nothing."""
    if layout is None:
        return params
    return {n: p if is_shard(p) else layout.cut(n, p) for n, p in params.items()}


def move_layout(values: Values, before: Definition, definition: Definition) -> Values:
    """Move values from the layout of one definition to that of another.

    Shards are gathered, which is a collective.
    """
    from accelfn.definition import layout  # noqa: PLC0415 - rarely needed

    layout_after, world = definition.layout, definition.world
    if layout_after is not None and layout_after.same(before.layout):
        return values
    if before.layout is None:  # whole values must have been equal on all ranks
        check_replicas(
            values.params,
            world,
            label="compare replicas",
            values="apart" not in before.setup.facts,
        )
    named = before.skeleton.module.named_parameters()
    shapes = {name: meta.shape for name, meta in named}
    with own_modes(world.device):
        moved_fields = [
            layout.reshard_tree(part, layout_after, shapes, world)
            for part in (values.params, values.opt_state, values.slots)
        ]
    params, opt_state, slots = moved_fields
    return attrs.evolve(values, params=params, opt_state=opt_state, slots=slots)


def move_to_device(values: Values, definition: Definition) -> Values:
    """Move whole values to the device; parts stay on their devices."""
    device = definition.world.device
    params = {n: p if is_shard(p) else p.to(device) for n, p in values.params.items()}
    buffers = {name: buffer.to(device) for name, buffer in values.buffers.items()}
    # dicts: an engine may have kept values in another order
    module = definition.skeleton.module
    opt_state = place_opt_state(values.opt_state, params, definition.optimizer, module)
    return attrs.evolve(values, params=params, buffers=buffers, opt_state=opt_state)


@explain_call_errors
@hint_attributes("setattr", "getitem")
@attrs.frozen(kw_only=True, eq=False)
class TrainState:
    """A frozen record of the complete state of training at one moment.

    Checkpoints hold `params`, `buffers`, `opt_state`, `step`, `cursor`, `seed` and `slots`.
    They do not hold the definition: `optimizer`, `schedule`, `data`, `setup`, `world` and
    `name`. Create a state with `TrainState.create`; a step returns the next state.

    Attributes:
        step: number of updates that the optimizer has taken.
        cursor: the samples that those updates have seen.
        seed: the seed of all random numbers.
        num_skipped: number of updates that transforms have skipped.
    """

    _params: dict[str, torch.Tensor] = attrs.field(alias="params")
    _buffers: dict[str, torch.Tensor] = attrs.field(alias="buffers")
    _opt_state: OptState = attrs.field(alias="opt_state")
    _step: int | Skips = attrs.field(alias="step")
    cursor: Cursor
    seed: int
    _slots: dict[str, Any] = attrs.field(alias="slots")
    definition: Definition
    _num_skipped: int = attrs.field(default=0, alias="num_skipped")
    lease: Lease = attrs.field(factory=Lease)

    @classmethod
    @explain_call_errors
    def create(
        cls,
        *,
        model: ModelSource,
        optimizer: OptimizerSource,
        schedule: Schedule | None = None,
        data: "Data | torch.utils.data.DataLoader[Any] | None" = None,
        setup: Any = None,
        world: World | None = None,
        seed: int = 0,
        name: str = "state",
        init: Literal["whole", "shard"] = "whole",
    ) -> Self:
        """Create the initial state from a model, an optimizer and optional data and setup.

        With init="shard" no process ever holds the whole model. The factory runs with its
        parameters on the meta device. Then accelfn initializes module after module on the
        CPU, by `reset_parameters()`, or by `_init_weights(module)` of Transformers' models,
        and cuts each to this rank's part before the next. The values are the same on any
        number of ranks and in any layout. They differ from those of init="whole" with the
        same seed, because each module has a generator of its name. A tied parameter is
        initialized once, under its first name.

        With init="shard" other changes of parameters by the factory would be lost. So
        `create` raises if the factory loads a parameter, or sets it outside the method of its
        module or of a module around it, and if no method sets a parameter.

        Args:
            model: a factory, called with the same seed on every rank, or an instance, whose
                parameters the state takes over. The instance, and each parameter of it that you
                kept, is empty afterwards; clone what you need before.
            optimizer: a factory that takes a list of `(name, parameter)`, such as
                `partial(torch.optim.AdamW, lr=3e-4)`, or a ready torch optimizer over the
                parameters of a model instance; the state takes ownership of it.
            schedule: update number -> factor of the learning rate; see `af.schedules`.
            data: `af.Data`, a torch DataLoader (see `Data.from_loader`), or None. A loader's
                batch size is that of an update: if the setup splits it, an `AccelfnWarning`
                gives the code to write.
            setup: transforms; the same as `setup(TrainState.create(...))`.
            world: default `World.single()`.
            seed: the seed of parameters, sample order and all random numbers in a step.
            name: gives several states different random numbers, such as the two of a GAN.
            init: "whole" runs the factory on the host of each rank, and then cuts the model
                if the setup splits it; "shard" initializes and cuts module by module.

        Law:
            With init="shard", the values on all ranks together are bitwise the same for
            every number of ranks, axes and layout.

        Cost:
            With init="shard", a rank holds its parts and the parameters of one module, and of
            inner modules that the same call sets. Methods that set parameters run once more
            on meta.

        Raises:
            ArgumentError: `seed`, `name`, `schedule`, `world`, `data` or `init` is not valid.
            ModelError: no trainable parameter, meta tensors, or parameters that another
                state owns. With init="shard": an instance, a parameter that no method
                sets, or that the factory sets outside of one.
            OptimizerError: the optimizer does not belong to the model, or needs a closure.
            WorldError: ranks along an axis would all do the same.
        """
        new_setup = chain() if setup is None else chain(setup)
        beginning, definition = begin(
            model,
            optimizer,
            schedule=schedule,
            data=data,
            setup=new_setup,
            world=world,
            seed=seed,
            name=name,
            init=init,
        )
        state = cls(
            params=beginning.params,
            buffers=beginning.buffers,
            opt_state=beginning.opt_state,
            step=0,
            cursor=Cursor(),
            seed=seed,
            slots={},
            definition=definition,
        ).with_setup(new_setup)
        warn_of_batch_size(data, state.definition)
        give_away(beginning.module, name)
        seal_optimizer(optimizer, name)
        return state

    @property
    def params(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name; a tied one under its first name."""
        return self._readonly_view("params")

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers by name, persistent or not."""
        return self._readonly_view("buffers")

    @property
    def opt_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Tensors and changing numbers of the optimizer, by parameter name.

        Numbers of a whole parameter group are under `<group 0>` and so on.
        """
        return self._readonly_view("opt_state")

    @property
    def slots(self) -> Mapping[str, Any]:
        """The transforms' entries and the user's own, by name."""
        return self._readonly_view("slots")

    def _readonly_view(self, field: str) -> Mapping[str, Any]:
        check, values = self.lease.check, getattr(self, f"_{field}")
        check()
        self.definition.cache.has_shown = True
        return ReadOnly(values, f"state.{field}", check)

    @property
    def trainable(self) -> tuple[str, ...]:
        """The names of the parameters that are trained, in the model's order."""
        return self.definition.skeleton.trainable

    @property
    def setup(self) -> chain:
        """The transforms."""
        return self.definition.setup

    @property
    def world(self) -> World:
        """The world it trains in."""
        return self.definition.world

    @property
    def data(self) -> Data | None:
        """The training data, or None."""
        return self.definition.data

    @property
    def schedule(self) -> Schedule | None:
        """The learning rate as a function of the update number; see `af.schedules`."""
        return self.definition.schedule

    @property
    def name(self) -> str:
        """The name that gives this state other random numbers than other states."""
        return self.definition.name

    @property
    def step(self) -> int:
        """The number of updates that the optimizer has taken."""
        step = self._step
        return step.tried - step.read() if isinstance(step, Skips) else step

    @property
    def num_skipped(self) -> int:
        """The number of updates that transforms have skipped."""
        step = self._step
        return step.read() if isinstance(step, Skips) else self._num_skipped

    @property
    def num_tried(self) -> int:
        """The number of updates taken or skipped; random numbers depend on it."""
        step = self._step
        return step.tried if isinstance(step, Skips) else step + self._num_skipped

    @property
    def skips(self) -> Skips | None:
        """The count of skipped updates on a device, or None."""
        return self._step if isinstance(self._step, Skips) else None

    @property
    def lrs(self) -> tuple[float, ...]:
        """The learning rates of the next update, one per parameter group.

        A transform's `hyper` takes precedence over the schedule. Inside a `hyper`, the rates are
        those of transforms to its left, of the schedule, or of the optimizer.
        """
        return next_rates(self, self._slots)

    def copy(self) -> Self:
        """Copy the state and its tensors; a step on one does not change the other.

        Shared tensors stay shared in the copy. Cost: a copy of every tensor.
        """
        self.lease.check()
        with own_modes(self.world.device):
            # dicts: an engine may keep the values of a state in another order
            params, opt_state = dict(self._params), dict(self._opt_state)
            params, buffers, opt_state, slots = tree.clone(
                (params, self._buffers, opt_state, self._slots)
            )
            return attrs.evolve(
                self,
                params=params,
                buffers=buffers,
                opt_state=opt_state,
                slots={name: entries.own_objects(slot) for name, slot in slots.items()},
                lease=Lease(is_loaded=self.lease.is_loaded),
            )

    def __copy__(self) -> Self:
        """Return the state itself; `copy` copies tensors."""
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        """Return a copy of the state and its tensors."""
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise for pickle and torch.save, because a definition holds functions."""
        msg = (
            "A TrainState is not pickled: write af.save(state, directory), which af.load"
            " reads, or torch.save(af.full_params(state), file) for parameters alone."
        )
        raise CallError(msg)

    def with_params(self, params: Mapping[str, torch.Tensor]) -> Self:
        """Return the state with copies of the given parameters.

        The parameters are copied, because a step would otherwise change the tensors of another
        state. Before the first update, slots such as an average begin with the new
        parameters; later slots stay as they are.

        Raises:
            StateError: names, shapes, dtypes or devices do not match the model.
        """
        self.lease.check()
        check_params(params, self._params, self.definition.skeleton.aliases)
        with own_modes(self.world.device):
            copies = {n: tree.clone(params[n]) for n in self._params}
            copies = cut_params(copies, self.definition.layout)
        new_state = attrs.evolve(self, params=copies)
        return attrs.evolve(new_state, slots=restart_slots(self, new_state))

    def with_slot(self, name: str, value: Any) -> Self:
        """Return the state with a user entry, which checkpoints include.

        Args:
            name: the name of the entry; not the name of a transform in the setup.
            value: a tree of tensors and plain data; tensors of the state follow the training.

        Raises:
            StateError: the name belongs to a transform.
        """
        self.lease.check()
        entries.check_own_name(name, [transform.name for transform in self.setup])
        own_tensors = [self._params, self._buffers, self._opt_state]
        entries.say_what_follows(name, value, own_tensors)
        return attrs.evolve(self, slots={**self._slots, name: value})

    def with_setup(self, setup: Any) -> Self:
        """Return the state with another setup; it shares this one's tensors.

        Transforms with the same name keep their slots, new transforms get new slots, and slots
        of removed transforms are dropped. User entries stay. If ranks trained independently,
        under `local_sgd`, and now train together, they compare their values, which is a
        collective; buffers are those of rank 0 from then on.

        Raises:
            ReplicaMismatchError: ranks that trained independently hold different parameters,
                optimizer state or slots.
            StateError: a new transform has the name of a user entry.
            CompositionError: a transform needs another transform that is missing.
            WorldError: ranks along an axis would all do the same.
            OptimizerError: a transform does not go with the optimizer.
        """
        self.lease.check()
        new_setup = chain(setup)
        check_setup(new_setup, self.world)
        old, new = (
            [transform.name for transform in named] for named in (self.setup, new_setup)
        )
        slots = entries.carried_over(self._slots, old, new)
        definition = attrs.evolve(self.definition, setup=new_setup)
        values = Values(self._params, self._buffers, self._opt_state, slots)
        values = carry_over(values, self.definition, definition)
        state = attrs.evolve(
            self, **attrs.asdict(values, recurse=False), definition=definition
        )
        begin_slots(state, values.slots)
        return state

    def with_trainable(self, predicate: Callable[[str, torch.Tensor], object]) -> Self:
        """Return the state with other parameters trained; it shares this one's tensors.

        The other parameters are frozen: no update changes a bit of them, weight decay and
        momentum included. Their optimizer state is kept for when they are trained again. The
        trained set belongs to the definition: `load` uses that of the given state, and warns
        if the checkpoint trained another set.
        Modules stay in their modes, so batch statistics still change; `local_sgd` and
        `diloco` still average parameters that ranks had trained before.

        Args:
            predicate: a function of a parameter's name (the first name, if tied) and the
                parameter: whether to train it from now on. The same on all ranks.

        Law: frozen parameters stay bitwise as they are, and the rest are updated as by a
        loop that sets `requires_grad`.

        Cost: an engine is built at the first step, as after `with_setup`.

        Raises:
            OptimizerError: the optimizer does not have a parameter that would be trained.
            ModelError: no parameter would be trained.

        Example:
            >>> head_only = lambda name, parameter: name.startswith("head.")
            >>> state = state.with_trainable(head_only)  # doctest: +SKIP
        """
        self.lease.check()
        definition, skeleton = self.definition, self.definition.skeleton
        names = trained_names(predicate, self._params, definition.optimizer, skeleton)
        if names == set(skeleton.trainable):
            definition.cache.is_to_compare = True  # another rank may have other names
            return self
        new_definition = attrs.evolve(definition, skeleton=skeleton.training(names))
        return attrs.evolve(self, definition=new_definition)

    def with_data(self, data: "Data | torch.utils.data.DataLoader[Any] | None") -> Self:
        """Return the state with other training data; it shares this one's tensors.

        If both data have the same number of samples, the state keeps its place in the epoch, so
        `state.with_data(attrs.evolve(state.data, global_batch_size=n))` changes the batch size
        in mid-epoch. Otherwise, and for streams, the epoch begins anew.

        Law: while batch sizes change, each sample is read once an epoch.

        Cost: an engine is built at the first step, as after `with_setup`.

        Raises:
            ArgumentError: the data are not `af.Data`, a torch DataLoader or None.
        """
        self.lease.check()
        new_data, old_data = as_data(data), self.data
        definition = attrs.evolve(self.definition, data=new_data)
        warn_of_batch_size(data, definition)
        keeps_place = (
            new_data is not None
            and old_data is not None
            and not (new_data.is_stream or old_data.is_stream)
            and len(new_data) == len(old_data)
        )
        cursor = self.cursor if keeps_place else Cursor(self.cursor.epoch)
        return attrs.evolve(self, definition=definition, cursor=cursor)

    def with_seed(self, seed: int) -> Self:
        """Return the state with another seed; it shares this one's tensors.

        All random numbers from now on, and the order of the samples that are left in this
        epoch, are those of the new seed: `state.copy().with_seed(n)` is a member of a population.

        Cost: an engine is built at the first step, as after `with_setup`.

        Raises:
            ArgumentError: the seed is not an integer.
        """
        self.lease.check()
        check_seed("state.with_seed", seed)
        definition = attrs.evolve(self.definition)  # ranks compare seeds again
        return attrs.evolve(self, definition=definition, seed=seed)

    def with_name(self, name: str) -> Self:
        """Return the state with another name; it shares this one's tensors.

        States of one program that differ in name draw different random numbers.

        Cost: an engine is built at the first step, as after `with_setup`.

        Raises:
            ArgumentError: the name has other characters than letters, digits, - and _.
        """
        self.lease.check()
        check_word("state.with_name", "name", name, "which tells draws apart")
        definition = attrs.evolve(self.definition, name=name)
        return attrs.evolve(self, definition=definition)

    def __repr__(self) -> str:
        """Show a summary in one line, also of a donated state."""
        # from the definition, because an engine may have to gather values first
        metas = self.definition.skeleton.module.parameters()
        count = sum(meta.numel() for meta in metas)
        note = " donated" if self.lease.is_over else ""
        return (
            f"<TrainState {self.name!r}{note}: step {self.step}, epoch"
            f" {self.cursor.epoch} sample {self.cursor.samples}, {count:,} parameters,"
            f" rank {self.world.rank} of {self.world.size}>"
        )


def check_state(call: str, value: object) -> None:
    """Raise unless the argument of a call is a state; `call` is the user's code.

    Raises:
        ArgumentError: the argument is not a state.
    """
    if isinstance(value, TrainState):
        return
    hint = ""
    if isinstance(value, tuple) and any(isinstance(item, TrainState) for item in value):
        hint = " A step returns two things: state, metrics = step(state, batch)."
    elif isinstance(value, (nn.Module, Mapping)):
        hint = (
            " A state is what TrainState.create(model=..., optimizer=...) returned; it holds"
            " the model and its parameters."
        )
    msg = f"{call}: expected a TrainState, got {type(value).__name__}.{hint}"
    raise ArgumentError(msg)


# Next states, created without checks of arguments.


_fill: Callable[..., None] = inspect.unwrap(TrainState.__init__)
"""Set a new state's fields."""
_FIELDS = tuple((field.name, field.alias) for field in attrs.fields(TrainState))


def next_state(
    update: Update,
    state: TrainState,
    opt_state: OptState,
    flag: torch.Tensor | None,
    params: Any = None,
) -> TrainState:
    """Create the state after an optimizer step; a `flag` on the device may skip the step.

    The next state has the tensors of the state before, or the given parameters, and a new
    lease.
    """
    cursor, num_skipped = update.grads.taken.cursor, state._num_skipped  # pyright: ignore[reportPrivateUsage]
    step = state._step  # pyright: ignore[reportPrivateUsage]
    if flag is not None or isinstance(step, Skips):
        step, num_skipped = _count_skips(state, flag), 0
    else:
        step += 1
    after = object.__new__(TrainState)
    _fill(
        after,
        params=state._params if params is None else params,  # pyright: ignore[reportPrivateUsage]
        buffers=state._buffers,  # pyright: ignore[reportPrivateUsage]
        opt_state=opt_state,
        step=step,
        cursor=state.cursor if cursor is None else cursor,
        seed=state.seed,
        num_skipped=num_skipped,
        slots=update.slots,
        definition=state.definition,
        lease=Lease(),
    )
    return after


def skip_update(update: Update, state: TrainState) -> TrainState:
    """Create the state after a skipped update: unchanged, but after the batch."""
    cursor = update.grads.taken.cursor
    return evolve_state(
        state,
        cursor=state.cursor if cursor is None else cursor,
        step=state.step,
        num_skipped=state.num_skipped + 1,
        lease=Lease(),
    )


def evolve_state(state: TrainState, **fields: Any) -> TrainState:
    """Return the state with other fields, as `attrs.evolve` does."""
    new_state = object.__new__(TrainState)
    for name, alias in _FIELDS:
        if alias not in fields:
            fields[alias] = getattr(state, name)
    _fill(new_state, **fields)
    return new_state


def apply_to_state(field: str, state: TrainState, update: Update) -> TrainState:
    """Apply a method of all transforms to a state and their slots.

    After a skipped update, only transforms that see skips are called.
    """
    owners = update.state.definition.setup.owners[field]
    if update.skipped:
        owners = [owner for owner in owners if "sees_skips" in facts_of(owner)]
    if not owners:
        return state
    is_profiling = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    with shared_draws(state, field), torch.no_grad():
        for owner in owners:
            slot = update.slots.get(owner.name)
            with span("accelfn", field, owner.name) if is_profiling else NOTHING:
                result = getattr(owner, field)(state, slot, update)
            after, new_slot = split_result(owner, field, result, TrainState)
            if update.skipped and after is not state:
                msg = (
                    f"{owner!r}.{field} returned another state after a skipped update, which"
                    " leaves all as it is. Return the state that was given."
                )
                raise ArgumentError(msg)
            state = after
            slots = state._slots  # pyright: ignore[reportPrivateUsage] - as they are shown, in less time
            if new_slot is not slots.get(owner.name):
                state = evolve_state(state, slots=set_slot(slots, owner.name, new_slot))
    return state


def _count_skips(state: TrainState, flag: torch.Tensor | None) -> Skips:
    """Return the number of skipped updates, after an update that the device may skip."""
    skips = state.skips
    before = state.num_skipped if skips is None else skips.count
    count = before if flag is None else before + flag.long()
    return Skips.start_copy(state.num_tried + 1, torch.as_tensor(count))
