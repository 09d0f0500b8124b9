# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: all that training is at one moment, as a value.

The record is frozen; its tensors are updated in place. A step is *given* its state, as
JAX's donated buffers are: after it, the old records raise, and the new one owns the tensors.
The lease belongs to the tensors, so all records that share them go together.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, Self

import attrs
import torch

from accelfn.base import tree, words
from accelfn.base.calling import called
from accelfn.base.contexts import own_modes
from accelfn.base.read_only import ReadOnly
from accelfn.base.words import foreign
from accelfn.data import Data
from accelfn.data.cursor import Cursor
from accelfn.definition import slots as entries
from accelfn.definition.checks import check_setup, say_batch_size
from accelfn.definition.definition import Definition
from accelfn.definition.transform import chain
from accelfn.errors import CallError
from accelfn.schedules.schedule import Schedule
from accelfn.state.anew import slots_of
from accelfn.state.beginning import begin, begin_slots
from accelfn.state.hyper import rates_of_next_update
from accelfn.state.lease import Lease
from accelfn.state.skips import Skips
from accelfn.state.values import OptState, Values, carried, cut
from accelfn.structure.given import seal_optimizer
from accelfn.structure.prototype import OptimizerSource, trained_names
from accelfn.structure.skeleton import ModelSource, check_params, give_away
from accelfn.world import World


@called
@foreign(
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
    @called
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
        say_batch_size(data, state.definition)
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
        return rates_of_next_update(self, self._slots)

    @called
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

    @called
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
            copies = cut(copies, self.definition.layout)
        made = attrs.evolve(self, params=copies)
        return attrs.evolve(made, slots=slots_of(self, made))

    @called
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

    @called
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
        values = carried(values, self.definition, definition)
        state = attrs.evolve(self, **values.by_field, definition=definition)
        begin_slots(state, values.slots)
        return state

    @called
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
