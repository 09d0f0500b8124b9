# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: an immutable record of the complete training state at one moment.

A step updates the tensors of its state in place, and so takes ownership of the state, like
JAX's donated buffers. After the step the old record raises an error if you use it, and the new
record owns the tensors. Records that share tensors share a lease (a flag that says whether the
tensors may still be used), so all of them become invalid at the same time.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import NoneType
from typing import Any, Literal, NoReturn, Self, TypeAlias, cast

import attrs
import torch
from torch.autograd import profiler

from accelfn.base import tree
from accelfn.base.arguments import check_word, explain_call_errors, hint_attributes
from accelfn.base.codec import has_state
from accelfn.base.draws import NOTHING, own_modes, span
from accelfn.base.tree import Pending, ReadOnly, is_shard
from accelfn.collectives.failures import check_world, format_tensor
from accelfn.collectives.replicas import check_replicas, check_rows, sums_of
from accelfn.data import Data
from accelfn.data.plan import Cursor
from accelfn.definition import transform as entries
from accelfn.definition.definition import (
    Definition,
    as_data,
    check_device,
    check_schedule,
    check_seed,
    check_setup,
    warn_of_batch_size,
)
from accelfn.definition.transform import by_rank, chain, facts_of
from accelfn.errors import ArgumentError, CallError
from accelfn.model.model import ModelSource, check_params, give_away, seal_optimizer
from accelfn.model.optimizer import OptimizerSource, place_opt_state, trained_names
from accelfn.schedules.factors import Schedule, bind_rates
from accelfn.state.beginning import (
    begin_slots,
    create_in_parts,
    create_whole,
    restart_slots,
)
from accelfn.state.results import Lease, Metrics
from accelfn.state.update import (
    Skips,
    Update,
    next_rates,
    set_slot,
    shared_draws,
    split_result,
)
from accelfn.world import World

# Comparison of states over ranks: every rank sends one row per tensor or number.


_LABEL = "replicas agree"


def check_same_values(
    fields: Mapping[str, Any], world: World, *, is_split: bool, advice: str
) -> None:
    """Raise on all ranks if fields of a state are not bitwise equal on all ranks.

    Args:
        fields: the values by field name, compared in this order.
        world: the ranks to compare.
        is_split: whether tensors are sharded; then ranks with the same shard are compared.
        advice: the last sentences of the error message.

    Cost: a few passes over every tensor, and two gathers of one line per tensor.

    Raises:
        ReplicaMismatchError: the ranks differ; the message shows the first different row.
    """
    if world.size == 1:
        return
    rows = {name: row for field in fields for name, row in _rows(field, fields[field])}
    tensors = {name: row for name, row in rows.items() if isinstance(row, torch.Tensor)}
    texts = rows | {name: format_tensor(tensor) for name, tensor in tensors.items()}
    if is_split:  # compare local shapes first: a checksum covers all shards of a copy
        check_rows(texts, world, label=_LABEL, advice=advice)
    if tensors:
        sums = sums_of(tensors.values(), world, label=_LABEL).tolist()
        for name, checksum in zip(tensors, sums, strict=True):
            texts[name] += f", checksum {checksum}"
    check_rows(texts, world, label=_LABEL, advice=advice)


def shared_slots(
    slots: Mapping[str, Any], entries_by_rank: Collection[tuple[str, str]]
) -> dict[str, Any]:
    """Return slots without the entries that differ by rank, given as (slot, entry) pairs."""
    shared = dict(slots)
    for name, entry in entries_by_rank:
        if isinstance(shared.get(name), Mapping):
            shared[name] = {k: v for k, v in shared[name].items() if k != entry}
    return shared


def _rows(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor) for tensors in a value, and (path, text) for its other leaves."""
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


# Values of a state for another setup: shard them differently, and compare the ranks.


OptState: TypeAlias = dict[str, dict[str, Any]]


Values: TypeAlias = dict[str, dict[str, Any]]
"""A state's `params`, `buffers`, `opt_state` and `slots`, each by name."""


def carry_over(values: Values, before: Definition, after: Definition) -> Values:
    """Convert a state's values from one definition to another.

    If ranks trained independently before and train together now, they compare their values. If
    one of the definitions shards the model, values are moved to the new layout. Both steps are
    collectives.

    Raises:
        ReplicaMismatchError: ranks that trained independently have different values.
    """
    has_new_copies = after.copy_of_each not in ((), before.copy_of_each)
    if "apart" in before.setup.facts and (
        has_new_copies or "apart" not in after.setup.facts
    ):
        check_replicas_agree(values, before, after.setup)
    if before.layout or after.layout:
        values = move_to_device(move_layout(values, before, after), after)
    return values


def check_replicas_agree(values: Values, definition: Definition, setup: chain) -> None:
    """Raise unless ranks that trained independently have equal values.

    Buffers and the slots of the user may differ, and so may entries that differ by rank in the
    new setup.

    Args:
        values: the values.
        definition: the definition under which the ranks trained independently.
        setup: the setup under which they must have equal values.

    Raises:
        ReplicaMismatchError: the values differ.
    """
    (transform, *_) = (t for t in definition.setup if "apart" in facts_of(t))
    names = {new.name for new in setup}
    slots = {name: slot for name, slot in values["slots"].items() if name in names}
    check_same_values(
        {
            "params": values["params"],
            "opt_state": values["opt_state"],
            "slots": shared_slots(slots, by_rank(setup)),
        },
        definition.world,
        is_split=definition.layout is not None,
        advice=(
            f"Under {transform!r} the ranks trained independently, but the new setup needs equal"
            " values on all ranks. First write state = af.finalize(state), which averages the"
            " parameters, and under af.local_sgd(opt_state=True) also the optimizer's state."
        ),
    )


def move_layout(values: Values, before: Definition, definition: Definition) -> Values:
    """Reshard values from the layout of definition `before` to that of `definition`.

    Shards are gathered, which is a collective.
    """
    from accelfn.definition import layout  # noqa: PLC0415 - rarely needed

    layout_after, world = definition.layout, definition.world
    if layout_after is not None and layout_after == before.layout:
        return values
    if before.layout is None:  # the full values must be equal on all ranks
        check_replicas(
            values["params"],
            world,
            label="compare replicas",
            values="apart" not in before.setup.facts,
        )
    named = before.skeleton.module.named_parameters()
    shapes = {name: meta.shape for name, meta in named}
    with own_modes(world.device):
        fields = {
            field: layout.reshard_tree(values[field], layout_after, shapes, world)
            for field in ("params", "opt_state", "slots")
        }
    return values | fields


def move_to_device(values: Values, definition: Definition) -> Values:
    """Move unsharded values to the world's device; shards stay where they are."""
    device = definition.world.device
    params, buffers = values["params"], values["buffers"]
    params = {n: p if is_shard(p) else p.to(device) for n, p in params.items()}
    buffers = {name: buffer.to(device) for name, buffer in buffers.items()}
    # `params` is a plain dict here; an engine may keep values in another order
    opt_state = place_opt_state(
        values["opt_state"], params, definition.optimizer, definition.skeleton.module
    )
    return values | {"params": params, "buffers": buffers, "opt_state": opt_state}


@explain_call_errors
@hint_attributes("setattr", "getitem")
@attrs.frozen(kw_only=True, eq=False)
class TrainState:
    """An immutable record of the complete training state at one moment.

    Create a state with `TrainState.create`; a step returns the next state. Checkpoints contain
    `params`, `buffers`, `opt_state`, `step`, `cursor`, `seed` and `slots`. They do not contain
    the definition: `optimizer`, `schedule`, `data`, `setup`, `world` and `name`.

    Attributes:
        step: the number of optimizer steps so far.
        cursor: the position in the data: the epoch, and the number of its samples seen.
        seed: the seed of all random numbers.
        num_skipped: the number of updates that transforms have skipped.
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

        With init="shard" no process ever needs memory for the full model. The factory runs with
        parameters on the meta device. Then accelfn initializes one module after another on the
        CPU, and keeps only this rank's shards. It calls the module's `reset_parameters()`, or
        `_init_weights(module)` of a Transformers model. The values are the same for
        any number of ranks and any layout. They differ from the values of init="whole" with the
        same seed, because each module has its own random generator, seeded from its name. A
        tied parameter is initialized once, under its first name.

        With init="shard" other changes that the factory makes to parameters would be lost. So
        `create` raises in three cases: the factory loads a parameter; it sets a parameter
        outside of such a method of the parameter's module or of an enclosing module; or no such
        method sets a parameter.

        Args:
            model: a function that returns the model, such as a class; it is called with the
                same seed on every rank. Or a model instance: the state takes ownership of its
                parameters. The instance and its parameters are empty afterwards, so clone
                what you still need before.
            optimizer: a function of a list of pairs `(name, parameter)`, such as
                `partial(torch.optim.AdamW, lr=3e-4)`. Or a torch optimizer over the parameters
                of the model instance; the state takes ownership of the optimizer.
            schedule: a function from the update number to the factor of the learning rates;
                see `af.schedules`.
            data: `af.Data`, a torch DataLoader (see `Data.from_loader`), or None. A loader's
                batch size is used as the number of samples per update. If the setup splits
                batches, an `AccelfnWarning` shows the code for both meanings.
            setup: a transform or a chain of transforms, as in `setup(TrainState.create(...))`.
            world: the ranks that train; default `World.single()`.
            seed: the seed of the parameters, the sample order and all random numbers in steps.
            name: the name of the state. States with different names, such as the two of a
                GAN, have different random numbers.
            init: "whole" calls the factory on the CPU of each rank, and then shards the model
                if the setup does so. "shard" initializes and shards module by module.

        Law:
            With init="shard", the full parameters are bitwise the same for every number of
            ranks, all axes and every layout.

        Cost:
            With init="shard", a rank needs memory for its shards and for the parameters of one
            module, including inner modules that the same method sets. Methods that set
            parameters also run once on the meta device.

        Raises:
            ArgumentError: `seed`, `name`, `schedule`, `world`, `data` or `init` is invalid.
            ModelError: the model has no trainable parameter, has meta tensors, or has
                parameters that another state owns. With init="shard": `model` is an instance,
                or a parameter is not set by a method as above.
            OptimizerError: the optimizer does not belong to the model, or needs a closure.
            WorldError: ranks along an axis would all do the same work.
        """
        new_setup = chain() if setup is None else chain(setup)
        check_seed("TrainState.create", seed)
        check_word("af.TrainState.create", "name", name, "the name of the state")
        if init not in ("whole", "shard"):
            msg = f'TrainState.create(init={init!r}): expected "whole" or "shard".'
            raise ArgumentError(msg)
        check_schedule(schedule)
        world = World.single() if world is None else world
        check_world(f"TrainState.create(world={world!r})", world)
        check_device(new_setup, world)
        device = world.device
        if device.type != "meta" and world.size > 1 and new_setup.owners["layout"]:
            device = torch.device("cpu")  # the full model may not fit on the device
        with own_modes(device):
            if init == "shard" and device.type != "meta":
                beginning = create_in_parts(
                    model, optimizer, setup=new_setup, world=world, seed=seed, name=name
                )
            else:
                beginning = create_whole(
                    model, optimizer, device=device, seed=seed, name=name
                )
            rates = bind_rates(schedule, beginning.prototype)
        definition = Definition(
            skeleton=beginning.skeleton,
            optimizer=beginning.prototype,
            schedule=schedule,
            rates=rates,
            data=as_data(data),
            setup=beginning.setup,
            world=world,
            name=name,
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
        """The parameters by name; a tied parameter has only its first name."""
        return self._readonly_view("params")

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers by name, persistent or not."""
        return self._readonly_view("buffers")

    @property
    def opt_state(self) -> Mapping[str, Mapping[str, Any]]:
        """The optimizer's state by parameter name.

        Numbers that belong to a parameter group are under the names `<group 0>`, `<group 1>`, ...
        """
        return self._readonly_view("opt_state")

    @property
    def slots(self) -> Mapping[str, Any]:
        """The entries of transforms, and your own entries from `with_slot`, by name."""
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
        """The chain of transforms that the state is trained with."""
        return self.definition.setup

    @property
    def world(self) -> World:
        """The world: the ranks that train this state."""
        return self.definition.world

    @property
    def data(self) -> Data | None:
        """The training data, or None."""
        return self.definition.data

    @property
    def schedule(self) -> Schedule | None:
        """The function from the update number to the factor of the learning rates, or None."""
        return self.definition.schedule

    @property
    def name(self) -> str:
        """The name; states with different names have different random numbers."""
        return self.definition.name

    @property
    def step(self) -> int:
        """The number of optimizer steps so far."""
        step = self._step
        return step.tried - step.read() if isinstance(step, Skips) else step

    @property
    def num_skipped(self) -> int:
        """The number of updates that transforms have skipped."""
        step = self._step
        return step.read() if isinstance(step, Skips) else self._num_skipped

    @property
    def num_tried(self) -> int:
        """The number of updates, including skipped updates; random numbers depend on it."""
        step = self._step
        return step.tried if isinstance(step, Skips) else step + self._num_skipped

    @property
    def skips(self) -> Skips | None:
        """The count of skipped updates, if the count is on a device; otherwise None."""
        return self._step if isinstance(self._step, Skips) else None

    @property
    def lrs(self) -> tuple[float, ...]:
        """The learning rates of the next update, one per parameter group.

        A transform's `hyper` replaces the schedule's rates. Inside a `hyper`, the rates are those
        that were set so far by the optimizer, the schedule and the transforms to its left.
        """
        return next_rates(self, self._slots)

    def copy(self) -> Self:
        """Copy the state and its tensors; a step with one state does not change the other.

        A tensor that occurs twice in the state is copied once. Cost: a copy of every tensor.
        """
        self.lease.check()
        with own_modes(self.world.device):
            # plain dicts, because an engine may keep values in its own kind of mapping
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
        """Return the state itself; call `state.copy()` to copy the tensors."""
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        """Return a copy of the state and its tensors."""
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise for pickle and torch.save, because the definition contains functions."""
        msg = (
            "A TrainState cannot be pickled. Write af.save(state, directory), which af.load"
            " reads, or torch.save(af.full_params(state), file) for only the parameters."
        )
        raise CallError(msg)

    def with_params(self, params: Mapping[str, torch.Tensor]) -> Self:
        """Return the state with copies of the given parameters.

        The parameters are copied, so a step does not change the tensors that you pass. Before
        the first update, slots such as an average start with the new parameters. Later, slots
        do not change.

        Raises:
            StateError: names, shapes, dtypes or devices do not match the model.
        """
        self.lease.check()
        check_params(params, self._params, self.definition.skeleton.aliases)
        with own_modes(self.world.device):
            copies = {n: tree.clone(params[n]) for n in self._params}
            layout = self.definition.layout
            if layout is not None:
                full_params = {n: p for n, p in copies.items() if not is_shard(p)}
                copies |= {n: layout.cut(n, p) for n, p in full_params.items()}
        new_state = attrs.evolve(self, params=copies)
        return attrs.evolve(new_state, slots=restart_slots(self, new_state))

    def with_slot(self, name: str, value: Any) -> Self:
        """Return the state with an entry of your own, which checkpoints contain.

        Args:
            name: the name of the entry; not the name of a transform in the setup.
            value: a tree of tensors and plain data. Pass copies of the state's own tensors,
                because updates change these tensors in place.

        Raises:
            StateError: the name belongs to a transform.
        """
        self.lease.check()
        entries.check_own_name(name, [transform.name for transform in self.setup])
        own_tensors = [self._params, self._buffers, self._opt_state]
        entries.say_what_follows(name, value, own_tensors)
        return attrs.evolve(self, slots={**self._slots, name: value})

    def with_setup(self, setup: Any) -> Self:
        """Return the state with another setup; both states share their tensors.

        Transforms with the same name keep their slots, new transforms get new slots, and slots
        of removed transforms are dropped. Your own entries stay. If ranks trained independently,
        as under `local_sgd`, and now train together, they compare their values, which is a
        collective, and use the buffers of rank 0.

        Raises:
            ReplicaMismatchError: ranks that trained independently have different parameters,
                optimizer state or slots.
            StateError: a new transform has the name of an entry of your own.
            CompositionError: a transform needs another transform that is missing.
            WorldError: ranks along an axis would all do the same work.
            OptimizerError: a transform does not work with the optimizer.
        """
        self.lease.check()
        new_setup = chain(setup)
        check_setup(new_setup, self.world)
        old, new = (
            [transform.name for transform in named] for named in (self.setup, new_setup)
        )
        slots = entries.carried_over(self._slots, old, new)
        definition = attrs.evolve(self.definition, setup=new_setup)
        values = {
            "params": self._params,
            "buffers": self._buffers,
            "opt_state": self._opt_state,
            "slots": slots,
        }
        values = carry_over(values, self.definition, definition)
        state = attrs.evolve(self, **values, definition=definition)
        begin_slots(state, values["slots"])
        return state

    def with_trainable(self, predicate: Callable[[str, torch.Tensor], object]) -> Self:
        """Return the state with another choice of trained parameters; both share tensors.

        All other parameters are frozen: no update changes them, not even by weight decay or
        momentum. Their optimizer state is kept, in case you train them again. The choice is
        not saved in checkpoints: `af.load` uses the choice of the state that you pass, and
        warns if the checkpoint was trained with another choice.

        Frozen modules stay in training mode, so batch statistics still change. `local_sgd` and
        `diloco` still average parameters that were trained before.

        Args:
            predicate: a function of a parameter's name (for a tied parameter, the first name)
                and the parameter. It returns whether to train the parameter from now on, and
                must return the same on all ranks.

        Law: frozen parameters do not change. The other parameters are updated as in a loop that
        sets `requires_grad`.

        Cost: the first step builds an engine, as after `with_setup`.

        Raises:
            OptimizerError: the optimizer lacks a parameter that would be trained.
            ModelError: no parameter would be trained.

        Example:
            >>> head_only = lambda name, parameter: name.startswith("head.")
            >>> state = state.with_trainable(head_only)  # doctest: +SKIP
        """
        self.lease.check()
        definition, skeleton = self.definition, self.definition.skeleton
        names = trained_names(predicate, self._params, definition.optimizer, skeleton)
        if names == set(skeleton.trainable):
            # another rank may have chosen other names
            definition.cache.is_to_compare = True
            return self
        new_definition = attrs.evolve(definition, skeleton=skeleton.training(names))
        return attrs.evolve(self, definition=new_definition)

    def with_data(self, data: "Data | torch.utils.data.DataLoader[Any] | None") -> Self:
        """Return the state with other training data; both states share their tensors.

        If old and new data have the same number of samples, the position in the epoch is kept.
        So `state.with_data(attrs.evolve(state.data, global_batch_size=n))` changes the batch
        size in the middle of an epoch. Otherwise, and for streams, the epoch starts again.

        Law: even if batch sizes change, each sample is read once per epoch.

        Cost: the first step builds an engine, as after `with_setup`.

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
        """Return the state with another seed; both states share their tensors.

        From now on, all random numbers and the order of the epoch's remaining samples depend on
        the new seed. For population-based training, write `state.copy().with_seed(n)`.

        Cost: the first step builds an engine, as after `with_setup`.

        Raises:
            ArgumentError: the seed is not an integer.
        """
        self.lease.check()
        check_seed("state.with_seed", seed)
        definition = attrs.evolve(self.definition)  # ranks compare seeds again
        return attrs.evolve(self, definition=definition, seed=seed)

    def with_name(self, name: str) -> Self:
        """Return the state with another name; both states share their tensors.

        States with different names have different random numbers.

        Cost: the first step builds an engine, as after `with_setup`.

        Raises:
            ArgumentError: the name is not a non-empty string.
        """
        self.lease.check()
        check_word("state.with_name", "name", name, "the name of the state")
        definition = attrs.evolve(self.definition, name=name)
        return attrs.evolve(self, definition=definition)

    def __repr__(self) -> str:
        """Return a summary in one line; this also works for a donated state."""
        # counted on the definition's module, because an engine may have to gather parameters
        metas = self.definition.skeleton.module.parameters()
        count = sum(meta.numel() for meta in metas)
        note = " donated" if self.lease.is_over else ""
        return (
            f"<TrainState {self.name!r}{note}: step {self.step}, epoch"
            f" {self.cursor.epoch} sample {self.cursor.samples}, {count:,} parameters,"
            f" rank {self.world.rank} of {self.world.size}>"
        )


def check_state(call: str, value: object) -> None:
    """Raise unless the argument of a call is a state; `call` is the call as text, for errors.

    Raises:
        ArgumentError: the argument is not a state.
    """
    if isinstance(value, TrainState):
        return
    hint = (
        " Pass the state that TrainState.create(model=..., optimizer=...) returns, which contains"
        " the model and the data."
    )
    is_pair = isinstance(value, tuple) and any(isinstance(v, TrainState) for v in value)
    if is_pair or isinstance(value, Metrics):
        hint = " A step returns two values: state, metrics = step(state, batch)."
    msg = f"{call}: expected a TrainState, got {type(value).__name__}.{hint}"
    raise ArgumentError(msg)


# Next states. They are created without argument checks, to save time.


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
    """Create the state after an optimizer step.

    If `flag` is 1 on the device, the step was skipped. The next state has the tensors of the
    previous state, or `params` instead of the previous parameters. It has a new lease, which
    says that its tensors may be used.
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
    """Create the state after a skipped update: only its cursor is moved behind the batch."""
    cursor = update.grads.taken.cursor
    return evolve_state(
        state,
        cursor=state.cursor if cursor is None else cursor,
        step=state.step,
        num_skipped=state.num_skipped + 1,
        lease=Lease(),
    )


def evolve_state(state: TrainState, **fields: Any) -> TrainState:
    """Return a copy of the state with some fields replaced, as `attrs.evolve` does."""
    new_state = object.__new__(TrainState)
    for name, alias in _FIELDS:
        if alias not in fields:
            fields[alias] = getattr(state, name)
    _fill(new_state, **fields)
    return new_state


def apply_to_state(field: str, state: TrainState, update: Update) -> TrainState:
    """Apply a method of all transforms to a state and its slots, from left to right.

    After a skipped update, only transforms with the fact `sees_skips` are called.
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
                    f"{owner!r}.{field} returned a changed state after a skipped update, which"
                    " must not change the state. Return the argument `state` itself."
                )
                raise ArgumentError(msg)
            state = after
            slots = state._slots  # pyright: ignore[reportPrivateUsage] - the same as state.slots, but faster
            if new_slot is not slots.get(owner.name):
                state = evolve_state(state, slots=set_slot(slots, owner.name, new_slot))
    return state


def _count_skips(state: TrainState, flag: torch.Tensor | None) -> Skips:
    """Return the new count of skipped updates, after an update that the device may have skipped."""
    skips = state.skips
    before = state.num_skipped if skips is None else skips.count
    count = before if flag is None else before + flag.long()
    return Skips.start_copy(state.num_tried + 1, torch.as_tensor(count))
