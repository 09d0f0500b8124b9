# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: all that training is at one moment, as a value.

The record is frozen; its tensors are updated in place. A step is *given* its state, as
JAX's donated buffers are: after it, the old records raise, and the new one owns the tensors.
The lease belongs to the tensors, so all records that share them go together.
"""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self, TypeAlias

import attrs
import torch

from accelfn import tree
from accelfn.cursor import Cursor
from accelfn.data import Data
from accelfn.errors import ArgumentError, StateError
from accelfn.lease import Lease
from accelfn.model import ModelSource, Skeleton, materialize, skeleton_of
from accelfn.modes import own_modes
from accelfn.optimizer import OptimizerSource, prototype_of
from accelfn.schedules import Schedule
from accelfn.transform import chain, is_slot_name
from accelfn.world import World

OptState: TypeAlias = dict[str, dict[str, Any]]


@attrs.frozen(kw_only=True, eq=False)
class Definition:
    """What a state is a state of: everything that is not saved and does not change.

    `cache` holds what is derived from it and can be made again (the engine, composed
    functions); it lives as long as the states that share this definition.
    """

    skeleton: Skeleton
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    data: Data | None
    setup: chain
    world: World
    name: str
    cache: dict[Any, Any] = attrs.field(factory=dict, init=False, repr=False)


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
    """

    _params: dict[str, torch.Tensor] = attrs.field(alias="params")
    _buffers: dict[str, torch.Tensor] = attrs.field(alias="buffers")
    _opt_state: OptState = attrs.field(alias="opt_state")
    step: int
    cursor: Cursor
    seed: int
    _slots: dict[str, Any] = attrs.field(alias="slots")
    definition: Definition
    lease: Lease = attrs.field(factory=Lease)

    @classmethod
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
    ) -> Self:
        """Return the state before the first update.

        Args:
            model: a factory, drawn from the seed on every rank alike, or an instance,
                which is given away.
            optimizer: a factory that takes a list of `(name, parameter)`, such as
                `partial(torch.optim.AdamW, lr=3e-4)`, or a ready torch optimizer over the
                parameters of a model instance.
            schedule: update number -> factor of the learning rate; see `af.schedules`.
            data: `af.Data`, a torch DataLoader (see `Data.from_loader`), or None.
            setup: transforms; the same as `setup(TrainState.create(...))`.
            world: default `World.single()`.
            seed: of parameters, sample order and every draw in a step.
            name: tells the draws of several states apart, as a GAN's two.

        Raises:
            ModelError: no trainable parameter, or meta tensors.
            OptimizerError: it does not belong to the model, or needs a closure.
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            msg = f"TrainState.create(seed={seed!r}): expected an integer."
            raise ArgumentError(msg)
        if schedule is not None and not callable(schedule):
            msg = (
                f"TrainState.create(schedule={schedule!r}): expected a function of the"
                " update number; see af.schedules."
            )
            raise ArgumentError(msg)
        world = World.single() if world is None else world
        if not isinstance(world, World):
            msg = f"TrainState.create(world={world!r}): expected an af.World."
            raise ArgumentError(msg)
        with own_modes(world.device):
            module = materialize(model, seed=seed, name=name, device=world.device)
            skeleton = skeleton_of(module)
            prototype, opt_state = prototype_of(optimizer, module, skeleton)
            params = {n: p.detach() for n, p in module.named_parameters()}
            buffers = {n: b.detach() for n, b in module.named_buffers()}
        state = cls(
            params=params,
            buffers=buffers,
            opt_state=opt_state,
            step=0,
            cursor=Cursor(),
            seed=seed,
            slots={},
            definition=Definition(
                skeleton=skeleton,
                optimizer=prototype,
                schedule=schedule,
                data=_as_data(data),
                setup=chain(),
                world=world,
                name=name,
            ),
        )
        return state if setup is None else state.with_setup(chain(setup))

    @property
    def params(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name; a tied one under its first name."""
        self.lease.check()
        return MappingProxyType(self._params)

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers by name, persistent or not."""
        self.lease.check()
        return MappingProxyType(self._buffers)

    @property
    def opt_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Tensors and changing numbers of the optimizer, by parameter name.

        Numbers that belong to a whole parameter group stand under `<group 0>` and so on.
        """
        self.lease.check()
        return MappingProxyType(self._opt_state)

    @property
    def slots(self) -> Mapping[str, Any]:
        """The transforms' entries and the user's own, by name."""
        self.lease.check()
        return MappingProxyType(self._slots)

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
        """The learning rate's factor as a function of the update number."""
        return self.definition.schedule

    @property
    def name(self) -> str:
        """What tells its random draws from those of other states."""
        return self.definition.name

    @property
    def lrs(self) -> tuple[float, ...]:
        """The learning rates of the next update, one a parameter group."""
        factor = 1.0 if self.schedule is None else self.schedule(self.step)
        groups = self.definition.optimizer.param_groups
        return tuple(float(group["lr"]) * factor for group in groups)

    def copy(self) -> Self:
        """Return an equal state with tensors of its own; a step on one leaves the other.

        What is one tensor in this state is one tensor in the copy.

        Cost: a copy of every tensor.
        """
        self.lease.check()
        with own_modes(self.world.device):
            params, buffers, opt_state, slots = tree.clone(
                (self._params, self._buffers, self._opt_state, self._slots)
            )
            return attrs.evolve(
                self,
                params=params,
                buffers=buffers,
                opt_state=opt_state,
                slots={name: _own_objects(slot) for name, slot in slots.items()},
                lease=Lease(),
            )

    def with_params(self, params: Mapping[str, torch.Tensor]) -> Self:
        """Return the state with copies of other parameters in place of its own.

        Copies, because they may be another state's, which a step would then change.

        Raises:
            StateError: names, shapes, dtypes or devices are not the model's.
        """
        self.lease.check()
        _check_same(params, self._params)
        with own_modes(self.world.device):
            return self.viewing(
                {name: tree.clone(params[name]) for name in self._params}
            )

    def viewing(self, params: Mapping[str, torch.Tensor]) -> Self:
        """Return the state with these very parameters; to look at, not to step."""
        return attrs.evolve(self, params=dict(params))

    def with_slot(self, name: str, value: Any) -> Self:
        """Return the state with an entry of the user's own, saved like all others.

        Args:
            name: of the entry; not that of a transform in the setup.
            value: a tree of tensors and plain data.

        Raises:
            StateError: the name is a transform's.
        """
        self.lease.check()
        if not is_slot_name(name):
            msg = (
                f"with_slot({name!r}): expected a name of letters, digits, '.', '_' and"
                " '-'."
            )
            raise StateError(msg)
        if any(each.name == name for each in self.setup):
            msg = (
                f"with_slot({name!r}): the transform of that name in the setup owns"
                " this slot."
            )
            raise StateError(msg)
        return attrs.evolve(self, slots={**self._slots, name: value})

    def with_setup(self, setup: Any) -> Self:
        """Return the state with another setup; it shares this one's tensors.

        Slots of transforms with the same name are kept, new ones begin, those of
        transforms that are gone are dropped. The user's own entries stay.

        Raises:
            StateError: a new transform has the name of an entry of the user's own.
        """
        self.lease.check()
        composed = chain(setup)
        old, new = (
            {each.name for each in each_setup} for each_setup in (self.setup, composed)
        )
        taken = sorted((new - old) & self._slots.keys())
        if taken:
            msg = (
                f"The transforms {taken} would take over entries of the same name that"
                " with_slot made. Give the transforms another name=."
            )
            raise StateError(msg)
        gone = old - new
        slots = {name: slot for name, slot in self._slots.items() if name not in gone}
        state = attrs.evolve(
            self,
            slots=slots,
            definition=attrs.evolve(self.definition, setup=composed),
        )
        for each in composed.having("init"):
            if each.name not in slots:
                slots[each.name] = each.init(state)
        return state

    def __repr__(self) -> str:
        """Show what can be said in a line, donated or not."""
        count = sum(param.numel() for param in self._params.values())
        donated = " donated" if self.lease.is_over else ""
        return (
            f"<TrainState {self.name!r}{donated}: step {self.step}, epoch"
            f" {self.cursor.epoch} sample {self.cursor.samples}, {count:,} parameters,"
            f" rank {self.world.rank} of {self.world.size}>"
        )


def _as_data(data: Any) -> Data | None:
    if data is None or isinstance(data, Data):
        return data
    if isinstance(data, torch.utils.data.DataLoader):
        return Data.from_loader(data)
    msg = (
        f"TrainState.create(data={type(data).__name__}): expected af.Data(dataset,"
        " batch_size=...), a torch DataLoader or None."
    )
    raise ArgumentError(msg)


def _own_objects(slot: Any) -> Any:
    """Return a slot whose objects, which are no tensors, are copies."""
    return tree.tree_map(
        lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf),
        slot,
    )


def _check_same(
    given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    missing, extra = expected.keys() - given.keys(), given.keys() - expected.keys()
    if missing or extra:
        msg = f"with_params: missing {sorted(missing)}, unknown {sorted(extra)}."
        raise StateError(msg)
    for name, tensor in expected.items():
        new = given[name]
        if not isinstance(new, torch.Tensor):
            msg = f"with_params: {name!r} is {type(new).__name__}, not a tensor."
            raise StateError(msg)
        want = (tuple(tensor.shape), tensor.dtype, tensor.device)
        have = (tuple(new.shape), new.dtype, new.device)
        if want != have:
            msg = f"with_params: {name!r} is {have}, the model's is {want}."
            raise StateError(msg)
