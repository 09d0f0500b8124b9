# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: all that training is at one moment, as a value.

The record is frozen; its tensors are updated in place. A step is *given* its state, as
JAX's donated buffers are: after it, the old records raise, and the new one owns the tensors.
The lease belongs to the tensors, so all records that share them go together.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import NoneType
from typing import Any, Literal, NoReturn, Self, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.autograd import profiler

from accelfn.base import tree, words
from accelfn.base.arguments import explain_call_errors
from accelfn.base.codec import has_state
from accelfn.base.draws import NOTHING, own_modes, span
from accelfn.base.tree import Pending, ReadOnly, is_shard
from accelfn.base.words import hint_attributes
from accelfn.collectives import check_replicas, check_rows
from accelfn.collectives.failures import format_tensor
from accelfn.collectives.replicas import sums_of
from accelfn.data import Data
from accelfn.data.plan import Cursor
from accelfn.definition import transform as entries
from accelfn.definition.definition import Definition, check_setup, warn_of_batch_size
from accelfn.definition.transform import by_rank, chain, facts_of, pair
from accelfn.errors import ArgumentError, CallError
from accelfn.model.model import ModelSource, check_params, give_away, seal_optimizer
from accelfn.model.optimizer import OptimizerSource, place_opt_state, trained_names
from accelfn.schedules.factors import Schedule
from accelfn.state.beginning import begin, begin_slots, restart_slots
from accelfn.state.grads import Lease
from accelfn.state.update import (
    Skips,
    Update,
    next_rates,
    set_slot,
    shared_draws,
)
from accelfn.world import World

# Whether ranks hold the same state: what each says of it, a row a tensor or a number.


_LABEL = "replicas agree"


def check_same_values(
    fields: Mapping[str, Any], world: World, *, is_split: bool, advice: str
) -> None:
    """Raise, on all ranks, unless they hold the same fields of a state, bit by bit.

    Args:
        fields: in the order in which they are compared.
        world: whose ranks hold them.
        is_split: whether ranks hold parts, of which copies are compared.
        advice: how the error ends.

    Cost: a few passes over every tensor, and two gathers, of a line for each.

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    if world.size == 1:
        return
    rows = {name: row for field in fields for name, row in _rows(field, fields[field])}
    if is_split:  # parts are summed up together
        shapes = {n: format_tensor(r) if _is_tensor(r) else r for n, r in rows.items()}
        check_rows(shapes, world, label=_LABEL, advice=advice)
    check_rows(_add_checksums(rows, world), world, label=_LABEL, advice=advice)


def shared_slots(
    slots: Mapping[str, Any], own: Collection[tuple[str, str]]
) -> dict[str, Any]:
    """Return slots without the entries that are each rank's own, named by slot and in it."""
    return {name: _without_own(name, slot, own) for name, slot in slots.items()}


def _add_checksums(rows: Mapping[str, Any], world: World) -> dict[str, str]:
    """Return rows in which tensors are told by their shapes and checksums."""
    tensors = {name: row for name, row in rows.items() if _is_tensor(row)}
    if not tensors:
        return dict(rows)
    sums = sums_of(tensors.values(), world, label=_LABEL).tolist()
    named = dict(zip(tensors, sums, strict=True))
    return {
        name: f"{format_tensor(row)}, checksum {named[name]}" if name in named else row
        for name, row in rows.items()
    }


def _is_tensor(row: Any) -> bool:
    return isinstance(row, torch.Tensor)


def _without_own(name: str, slot: Any, own: Collection[tuple[str, str]]) -> Any:
    """Return a slot without the entries that are each rank's own."""
    if not isinstance(slot, Mapping) or not any(name == owner for owner, _ in own):
        return slot
    return {entry: each for entry, each in slot.items() if (name, entry) not in own}


def _rows(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what there is at and below a place: a tensor, or what ranks say of it."""
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
    else:  # of an object of any other kind, which no checkpoint would have, its kind
        plain = isinstance(value, (str, int, float, complex, bytes, NoneType))
        yield path, repr(value) if plain else type(value).__name__


# The values of a state, field by field: where they lie, and whether ranks have the same.
#
# A setup that splits a model over ranks has them in parts; under another they lie
# otherwise.


OptState: TypeAlias = dict[str, dict[str, Any]]


@attrs.frozen
class Values:
    """What a state holds in tensors.

    Attributes:
        params: the parameters by name.
        buffers: the buffers by name.
        opt_state: what the optimizer keeps, by the name of the parameter.
        slots: what transforms and the user keep, by name.
    """

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    opt_state: OptState
    slots: dict[str, Any]

    @property
    def by_field(self) -> dict[str, Any]:
        """The fields by name, without a copy of anything in them."""
        return attrs.asdict(self, recurse=False)


def carry_over(values: Values, before: Definition, after: Definition) -> Values:
    """Return the values of one definition as another has them.

    Where ranks trained apart and now train together, they compare what is gone on with. Where
    either definition cuts, values are laid out anew. Both are collectives.

    Raises:
        ReplicaMismatchError: ranks that trained apart hold other values.
    """
    regrouped = after.copy_of_each not in ((), before.copy_of_each)
    if "apart" in before.setup.facts and (
        regrouped or "apart" not in after.setup.facts
    ):
        names = {each.name for each in after.setup}
        kept = {name: slot for name, slot in values.slots.items() if name in names}
        check_replicas_agree(
            attrs.evolve(values, slots=kept), before, by_rank(after.setup)
        )
    if before.layout or after.layout:
        values = move_to_device(move_layout(values, before, after), after)
    return values


def check_replicas_agree(
    values: Values, definition: Definition, own: Collection[tuple[str, str]]
) -> None:
    """Raise unless ranks that trained apart hold the same; their buffers may differ.

    Args:
        values: with those slots that are gone on with.
        definition: under which they trained apart.
        own: what each rank keeps for itself from now on, by slot and entry.

    Raises:
        ReplicaMismatchError: they do not.
    """
    (apart, *_) = (each for each in definition.setup if "apart" in facts_of(each))
    check_same_values(
        {
            "params": values.params,
            "opt_state": values.opt_state,
            "slots": shared_slots(values.slots, own),
        },
        definition.world,
        is_split=definition.layout is not None,
        advice=(
            f"Under {apart!r} ranks trained apart, and now they would drift. Bring them"
            " together first: state = af.finalize(state) averages parameters, and under"
            " af.local_sgd(opt_state=True) what the optimizer keeps of them."
        ),
    )


def cut_params(params: dict[str, torch.Tensor], layout: Any) -> dict[str, torch.Tensor]:
    """Return parameters as a layout has them, of which some may be whole; None cuts nothing."""
    if layout is None:
        return params
    return {n: p if is_shard(p) else layout.cut(n, p) for n, p in params.items()}


def move_layout(values: Values, before: Definition, definition: Definition) -> Values:
    """Return values as the layout of a definition has them, which lay as that of another.

    What was cut is gathered, which is a collective.
    """
    from accelfn.definition import layout  # noqa: PLC0415 - rarely needed

    wanted, world = definition.layout, definition.world
    if wanted is not None and wanted.same(before.layout):
        return values
    if before.layout is None:  # what is cut must have been the same on all ranks
        check_replicas(
            values.params,
            world,
            label="compare replicas",
            values="apart" not in before.setup.facts,
        )
    named = before.skeleton.module.named_parameters()
    shapes = {name: meta.shape for name, meta in named}
    with own_modes(world.device):
        moved = [
            layout.reshard_tree(each, wanted, shapes, world)
            for each in (values.params, values.opt_state, values.slots)
        ]
    params, opt_state, slots = moved
    return attrs.evolve(values, params=params, opt_state=opt_state, slots=slots)


def move_to_device(values: Values, definition: Definition) -> Values:
    """Return values of which what was not split is on the device, and parts where they were."""
    device = definition.world.device
    params = {n: p if is_shard(p) else p.to(device) for n, p in values.params.items()}
    buffers = {name: each.to(device) for name, each in values.buffers.items()}
    # dicts: an engine may have kept values in another order, which others do not know
    module = definition.skeleton.module
    opt_state = place_opt_state(values.opt_state, params, definition.optimizer, module)
    return attrs.evolve(values, params=params, buffers=buffers, opt_state=opt_state)


@explain_call_errors
@hint_attributes(
    words.STATE,
    changes="state.with_params(...), with_setup, with_slot and with_trainable return another",
    getitem=words.STATE_IS_NO_PAIR,
)
@attrs.frozen(kw_only=True, eq=False)
class TrainState:
    """A frozen record of all that training is at one moment.

    Saved: `params`, `buffers`, `opt_state`, `step`, `cursor`, `seed`, `slots`. Beside
    them the definition, which is not: `optimizer`, `schedule`, `data`, `setup`, `world`,
    `name`. Make one with `TrainState.create`; a step returns the next.

    Attributes:
        step: how many updates the optimizer has taken.
        cursor: which samples those updates have seen.
        seed: what every random draw is derived from.
        num_skipped: how many updates were skipped, by a transform's wish.
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
        """Return the state before the first update.

        With init="shard" no process ever holds the model whole. The factory runs with its
        parameters on the meta device, and its buffers as it makes them. Then module after
        module is drawn on the CPU, by its `reset_parameters()`, or by the `_init_weights(module)`
        of Transformers' models, and cut to this rank's part before the next one is. The values
        are the same on any number of ranks and in any layout, and others than init="whole"
        draws of the same seed: each module draws from a generator of its own name. A tied
        parameter is drawn once, under its first name.

        What the factory does to parameters beside that is looked for, for it would be lost: a
        parameter that it loads, or sets otherwise than the module's own method or that of one
        around it, is refused. So is one that nothing sets.

        Args:
            model: a factory, drawn from the seed on every rank alike, or an instance,
                which is given away.
            optimizer: a factory that takes a list of `(name, parameter)`, such as
                `partial(torch.optim.AdamW, lr=3e-4)`, or a ready torch optimizer over the
                parameters of a model instance, which is given away like that.
            schedule: update number -> factor of the learning rate; see `af.schedules`.
            data: `af.Data`, a torch DataLoader (see `Data.from_loader`), or None. A loader's
                batch size is that of an update: where the setup splits it, an `af.Warning`
                says so, and what to write.
            setup: transforms; the same as `setup(TrainState.create(...))`.
            world: default `World.single()`.
            seed: of parameters, sample order and every draw in a step.
            name: tells the draws of several states apart, as a GAN's two.
            init: "whole" draws the model as its factory does, on the host of each rank, and
                cuts it then if the setup splits it; "shard" draws and cuts it module by
                module.

        Law:
            With init="shard", what ranks hold together is bitwise the same for every number
            of ranks, axes and layout.

        Cost:
            With init="shard", a rank holds its parts and the parameters of one module, with
            those of modules inside that are set by the same call. Methods that set parameters
            run once more on meta.

        Raises:
            ArgumentError: `seed`, `name`, `schedule`, `world`, `data` or `init` is none.
            ModelError: no trainable parameter, meta tensors, or parameters that another
                state has taken. With init="shard": an instance, a parameter that no method
                sets, or that the factory sets otherwise.
            OptimizerError: it does not belong to the model, or needs a closure.
            WorldError: ranks along an axis would all do the same.
        """
        composed = chain() if setup is None else chain(setup)
        begun, definition = begin(
            model,
            optimizer,
            schedule=schedule,
            data=data,
            setup=composed,
            world=world,
            seed=seed,
            name=name,
            init=init,
        )
        state = cls(
            params=begun.params,
            buffers=begun.buffers,
            opt_state=begun.opt_state,
            step=0,
            cursor=Cursor(),
            seed=seed,
            slots={},
            definition=definition,
        ).with_setup(composed)
        warn_of_batch_size(data, state.definition)
        give_away(begun.module, name)
        seal_optimizer(optimizer, name)
        return state

    @property
    def params(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name; a tied one under its first name."""
        return self._shown("params")

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers by name, persistent or not."""
        return self._shown("buffers")

    @property
    def opt_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Tensors and changing numbers of the optimizer, by parameter name.

        Numbers that belong to a whole parameter group stand under `<group 0>` and so on.
        """
        return self._shown("opt_state")

    @property
    def slots(self) -> Mapping[str, Any]:
        """The transforms' entries and the user's own, by name."""
        return self._shown("slots")

    def _shown(self, field: str) -> Mapping[str, Any]:
        check, values = self.lease.check, getattr(self, f"_{field}")
        check()
        self.definition.cache.has_shown = True
        return ReadOnly(values, f"state.{field}", words.STATE_WRITES[field], check)

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
        """What it is trained on, if it knows."""
        return self.definition.data

    @property
    def schedule(self) -> Schedule | None:
        """The learning rate as a function of the update number; see `af.schedules`."""
        return self.definition.schedule

    @property
    def name(self) -> str:
        """What tells its random draws from those of other states."""
        return self.definition.name

    @property
    def step(self) -> int:
        """How many updates the optimizer has taken."""
        step = self._step
        return step.tried - step.read() if isinstance(step, Skips) else step

    @property
    def num_skipped(self) -> int:
        """How many updates were skipped, by a transform's wish."""
        step = self._step
        return step.read() if isinstance(step, Skips) else self._num_skipped

    @property
    def num_tried(self) -> int:
        """How many updates were taken or skipped; it tells the draws of each apart."""
        step = self._step
        return step.tried if isinstance(step, Skips) else step + self._num_skipped

    @property
    def skips(self) -> Skips | None:
        """The count that a device keeps of them, if one does."""
        return self._step if isinstance(self._step, Skips) else None

    @property
    def lrs(self) -> tuple[float, ...]:
        """The learning rates of the next update, one a parameter group.

        The schedule's; where a transform's `hyper` sets others, those. In a `hyper`, those that
        it is given: of the schedule, of transforms to its left, or else the optimizer's own.
        """
        return next_rates(self, self._slots)

    @explain_call_errors
    def copy(self) -> Self:
        """Return an equal state with tensors of its own; a step on one leaves the other.

        What is one tensor in this state is one in the copy. Cost: a copy of every tensor.
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
        """Return a copy with tensors of its own."""
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickle, and so torch.save: a definition holds functions."""
        msg = (
            "A TrainState is not pickled: write af.save(state, directory), which af.load"
            " reads, or torch.save(af.full_params(state), file) for parameters alone."
        )
        raise CallError(msg)

    @explain_call_errors
    def with_params(self, params: Mapping[str, torch.Tensor]) -> Self:
        """Return the state with copies of other parameters in place of its own.

        Copies, because they may be another state's, which a step would then change. Before the
        first update slots begin with them, as an average does; later on they stay.

        Raises:
            StateError: names, shapes, dtypes or devices are not the model's.
        """
        self.lease.check()
        check_params(params, self._params, self.definition.skeleton.aliases)
        with own_modes(self.world.device):
            copies = {n: tree.clone(params[n]) for n in self._params}
            copies = cut_params(copies, self.definition.layout)
        made = attrs.evolve(self, params=copies)
        return attrs.evolve(made, slots=restart_slots(self, made))

    @explain_call_errors
    def with_slot(self, name: str, value: Any) -> Self:
        """Return the state with an entry of the user's own, saved like all others.

        Args:
            name: of the entry; not that of a transform in the setup.
            value: a tree of tensors and plain data; the state's own follow the training.

        Raises:
            StateError: the name is a transform's.
        """
        self.lease.check()
        entries.check_own_name(name, [each.name for each in self.setup])
        own = [self._params, self._buffers, self._opt_state]
        entries.say_what_follows(name, value, own)
        return attrs.evolve(self, slots={**self._slots, name: value})

    @explain_call_errors
    def with_setup(self, setup: Any) -> Self:
        """Return the state with another setup; it shares this one's tensors.

        Slots of transforms with the same name are kept, new ones begin, those of
        transforms that are gone are dropped. The user's own entries stay. Where ranks trained
        apart, under `local_sgd`, and now train together, they compare what they hold, which
        is a collective; buffers are those of rank 0 from then on.

        Raises:
            ReplicaMismatchError: ranks that trained apart hold other parameters, optimizer
                state or slots.
            StateError: a new transform has the name of an entry of the user's own.
            CompositionError: a transform needs another that is not there.
            WorldError: ranks along an axis would all do the same.
            OptimizerError: a transform does not go with the optimizer.
        """
        self.lease.check()
        composed = chain(setup)
        check_setup(composed, self.world)
        old, new = ([each.name for each in named] for named in (self.setup, composed))
        slots = entries.carried_over(self._slots, old, new)
        definition = attrs.evolve(self.definition, setup=composed)
        values = Values(self._params, self._buffers, self._opt_state, slots)
        values = carry_over(values, self.definition, definition)
        state = attrs.evolve(self, **values.by_field, definition=definition)
        begin_slots(state, values.slots)
        return state

    @explain_call_errors
    def with_trainable(self, predicate: Callable[[str, torch.Tensor], object]) -> Self:
        """Return the state with other parameters trained; it shares this one's tensors.

        The others are frozen: no update changes a bit of them, weight decay and momentum
        included. Their optimizer state is kept, and gone on with when they are thawed. What
        is trained belongs to the definition: `load` takes the given state's, and warns if another
        set was trained.
        Modules stay in their modes, so batch statistics go on moving; `local_sgd` and
        `diloco` go on averaging what ranks had trained before.

        Args:
            predicate: a function of a parameter's name (the first, of a tied one) and the
                parameter: whether it is trained from now on. The same on all ranks.

        Law: what is not trained stays bitwise as it is, and the rest are updated as by a
        loop that sets `requires_grad`.

        Cost: an engine is built at the first step, as after `with_setup`.

        Raises:
            OptimizerError: a parameter would be trained that the optimizer does not have.
            ModelError: none would be trained.

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
        changed = attrs.evolve(definition, skeleton=skeleton.training(names))
        return attrs.evolve(self, definition=changed)

    def __repr__(self) -> str:
        """Show what can be said in a line, donated or not."""
        # of their definition, for an engine may have to bring values together first
        metas = self.definition.skeleton.module.parameters()
        count = sum(meta.numel() for meta in metas)
        donated = " donated" if self.lease.is_over else ""
        return (
            f"<TrainState {self.name!r}{donated}: step {self.step}, epoch"
            f" {self.cursor.epoch} sample {self.cursor.samples}, {count:,} parameters,"
            f" rank {self.world.rank} of {self.world.size}>"
        )


# A call's argument that is to be a state, looked at before anything is done with it.


def check_state(call: str, value: object) -> None:
    """Raise unless a call, as the user wrote it, was given a state.

    Raises:
        ArgumentError: it was given something else.
    """
    if isinstance(value, TrainState):
        return
    hint = ""
    if isinstance(value, tuple) and any(isinstance(each, TrainState) for each in value):
        hint = " A step returns two things: state, metrics = step(state, batch)."
    elif isinstance(value, (nn.Module, Mapping)):
        hint = (
            " A state is what TrainState.create(model=..., optimizer=...) returned; it holds"
            " the model and its parameters."
        )
    msg = f"{call}: expected a TrainState, got {type(value).__name__}.{hint}"
    raise ArgumentError(msg)


# The state after another: made by the step, which can do without a look at the call.


_fill: Callable[..., None] = inspect.unwrap(TrainState.__init__)
"""Set a new state's fields."""
_FIELDS = tuple((each.name, each.alias) for each in attrs.fields(TrainState))


def next_state(
    update: Update,
    state: TrainState,
    opt_state: OptState,
    flag: torch.Tensor | None,
    params: Any = None,
) -> TrainState:
    """Return the state after an update that the optimizer has taken, unless a flag says no.

    It has the tensors of the state before it, or the given parameters, and a lease of its own.
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
    """Return the state after an update that is left out: the same, after the batch."""
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
    made = object.__new__(TrainState)
    for name, alias in _FIELDS:
        if alias not in fields:
            fields[alias] = getattr(state, name)
    _fill(made, **fields)
    return made


def apply_to_state(field: str, state: TrainState, update: Update) -> TrainState:
    """Let a state flow through the transforms that have a say in it, with their slots.

    After an update that was skipped, only those are asked that see skips.
    """
    owners = update.state.definition.setup.owners[field]
    if update.skipped:
        owners = [each for each in owners if "sees_skips" in facts_of(each)]
    if not owners:
        return state
    profiled = profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    with shared_draws(state, field), torch.no_grad():
        for owner in owners:
            slot = update.slots.get(owner.name)
            with span("accelfn", field, owner.name) if profiled else NOTHING:
                returned = getattr(owner, field)(state, slot, update)
            after, kept = pair(owner, field, returned, TrainState)
            if update.skipped and after is not state:
                msg = (
                    f"{owner!r}.{field} returned another state after a skipped update, which"
                    " leaves all as it is. Return the state that was given."
                )
                raise ArgumentError(msg)
            state = after
            slots = state._slots  # pyright: ignore[reportPrivateUsage] - as they are shown, in less time
            if kept is not slots.get(owner.name):
                state = evolve_state(state, slots=set_slot(slots, owner.name, kept))
    return state


def _count_skips(state: TrainState, flag: torch.Tensor | None) -> Skips:
    """Return how many updates were skipped, after one of which a device knows."""
    skips = state.skips
    before = state.num_skipped if skips is None else skips.count
    count = before if flag is None else before + flag.long()
    return Skips.sent(state.num_tried + 1, torch.as_tensor(count))
