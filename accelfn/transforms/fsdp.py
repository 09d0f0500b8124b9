# SPDX-License-Identifier: Apache-2.0
"""Split the model over the ranks with torch's fully_shard."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import torch
import torch.distributed as dist
from torch import nn

from accelfn.base.arguments import option, truth
from accelfn.definition.layout import by_rows
from accelfn.definition.transform import facts_of, transform
from accelfn.engine.engine import Engine, build
from accelfn.engine.fsdp import check_units, units_of
from accelfn.engine.modules import Regions, are_regions
from accelfn.engine.optimizer import check_elements
from accelfn.errors import ArgumentError, CompositionError, WorldError
from accelfn.state.state import TrainState
from accelfn.world import World
from accelfn.world.axes import folded

if TYPE_CHECKING:
    from accelfn.engine.fsdp import FSDPRunner


def _are_units(_owner: object, _field: object, value: object) -> None:
    are_regions(f"af.wrap_fsdp(units={value!r})", value)


def _is_dtype(_owner: object, field: Any, value: object) -> None:
    if value is not None and not (
        isinstance(value, torch.dtype) and value.is_floating_point
    ):
        msg = (
            f"af.wrap_fsdp({field.name}={value!r}): expected a dtype of real numbers, such"
            " as torch.bfloat16, or None for the parameters' own."
        )
        raise ArgumentError(msg)


def _is_way(_owner: object, field: Any, value: object) -> None:
    if value not in ("whole", "sharded"):
        msg = f'af.wrap_fsdp({field.name}={value!r}): expected "whole" or "sharded".'
        raise ArgumentError(msg)


@transform
class wrap_fsdp:
    """Hold a part of the model on each rank, and gather a unit of it to compute with.

    Each rank has some rows of every parameter, and the same rows of its gradient, of the
    optimizer's state and of slots in its shape. torch's `fully_shard` runs a module whose
    forward is the loss: a unit is gathered before its forward pass, given up after it, and
    gathered again for its backward pass, after which its gradients are reduced, each rank
    keeping its rows. The root, which is what lies in no unit, is gathered once for the whole
    loss. The weights of the ranks' losses are summed beside the gradients, so the result is
    the mean over all samples (or tokens) of the update, however uneven the shares. In a world
    of 1 it changes nothing.

    Without axes, all ranks hold one copy of the model together. With {"dp_replicate": m,
    "dp_shard": n} there are m copies, each over n neighbouring ranks (HSDP); beside
    `local_sgd` these train apart, and gradients are summed within a copy alone.

    Acts on: layout, engine; init, which refuses.

    Args:
        units: the modules that are gathered together: a class, a tuple of classes, or a
            function (name, module) -> bool. Default: the members of each outermost
            nn.ModuleList, which is how transformers keep their blocks. A unit has a forward
            that the model calls, which containers such as nn.ModuleList lack.
        reshard_after_forward: whether units are given up between their forward and backward
            passes. Without, an update gathers each once, and all of the model is whole at the
            end of the forward pass.
        gather_dtype: in which parameters are gathered and computed with, and to which the
            model's inputs are cast, such as torch.bfloat16; None is the parameters' own. What
            ranks hold, and the optimizer steps, keeps its dtype.
        reduce_dtype: in which gradients are summed over the ranks; None is the parameters'
            own, whatever they are gathered in.
        accumulate: under several micro-batches, "whole" keeps whole gradients on each rank
            until the last one, which alone reduces; "sharded" reduces with each and keeps
            rows: 1/n of the memory, and a reduce-scatter a unit and micro-batch.
        find_unused_parameters: allow parameters that take no part in the loss.
        cpu_offload: whether a rank's rows of parameters, gradients and optimizer state, and
            slots of their shape, lie in the host's memory. They come to the device to be
            gathered, gradients go back once they are reduced, and the optimizer steps on the
            host. A lone number stays on the device.

    Law:
        Parameters and optimizer state are those of one process on the whole batch, up to
        rounding, for any units, axes and number of ranks; gather_dtype and reduce_dtype round
        to their own precision. What was saved in one layout is loaded into any other bitwise.

    Cost:
        Of n ranks of a copy each has 1/n of parameters, gradients, optimizer state and slots
        of their shape (rounded up to whole rows), and beside them the root, the unit at work
        and the next one. An update makes two all-gathers and one reduce-scatter a unit, one
        of each for the root, an all-reduce of 8 bytes, and a pass an all-gather of 24 bytes, in
        which ranks agree on the order of units (one more for each unit that ranks run in
        another order than in their last pass): at most 3 (n - 1) / n of the
        parameters' bytes a rank, where DistributedDataParallel sends 2 (n - 1) / n. Each
        further micro-batch gathers again. m copies add an all-reduce of a rank's rows.
        Buffers are broadcast from rank 0 before an update's first forward pass.
        With cpu_offload a device has of all this what is gathered and its gradients, and
        activations. Over its bus go a rank's rows for each all-gather, and back once for each
        reduce-scatter; the rows are in pinned memory. The update waits for the device, and
        takes as long as the host's processor needs for it.
        `TrainState.create(setup=...)` makes the whole model in the host's memory, on each
        rank, before it is cut; with init="shard", a module of it at a time.

    Raises:
        ArgumentError: an option is none.
        CompositionError: when composed, beside `wrap_ddp`, a transform that has a `reduce`,
            `optimizer_in_backward`, or `compile` as one graph; when the state is made, beside
            another transform than `local_sgd` that lets ranks differ.
        WorldError: when the state is made, the world has axes, and neither "dp_shard" nor "cp"
            among them; or has none, and copies are to train apart. With cpu_offload: the ranks
            compute on the CPU; one rank computes on a device; or they have no backend for what
            lies on the CPU.
        ModelError: when the state is made, `units` match nothing, or a container without a
            forward; a parameter is tied over two units, or a unit has parameters of two
            dtypes, or complex ones.
        OptimizerError: when the state is made, the optimizer does not go element by element;
            it is tried on small parameters, whole and in parts.
        ReplicaMismatchError: when the state is made, the ranks have drawn or read different
            models.
        LossError: at a step, the loss used a unit's parameters without calling the unit.
        CollectiveMismatchError: at a step, ranks make different collectives inside the loss.
        UnusedParametersError: at a step, as its name says.

    References:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models"; Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
        Parallel".

    Example:
        >>> wrap_fsdp(reshard_after_forward=False)
        af.wrap_fsdp(reshard_after_forward=False)
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "reduce": "reduces gradients to the parts that ranks hold, and {other!r} says how"
        " whole ones cross the ranks. Leave out one of the two.",
        "steps_in_backward": "reduces the gradients of a unit at once, when all are there,"
        " and {other!r} frees each as soon as it is complete. Leave out one of the two.",
        "one_graph": "gathers units between the parts of the model, and {other!r} makes one"
        " graph of it. Give regions=, the units.",
    }
    units: Regions | None = attrs.field(default=None, validator=_are_units)
    reshard_after_forward: bool = option(default=True, validator=truth())
    gather_dtype: torch.dtype | None = option(None, _is_dtype)
    reduce_dtype: torch.dtype | None = option(None, _is_dtype)
    accumulate: Literal["whole", "sharded"] = option("whole", _is_way)
    find_unused_parameters: bool = option(default=False, validator=truth())
    cpu_offload: bool = option(default=False, validator=truth())

    @property
    def tells(self) -> Mapping[str, Any]:
        """Whether it waits for all parameters, what gradients are, and where they lie."""
        unused = "find_unused_parameters=True" if self.find_unused_parameters else None
        return {
            "draws_nothing": True,
            "finds_unused": unused,
            "offloads": self.cpu_offload,
            "whole_gradients": self.accumulate == "whole",
        }

    def layout(
        self, name: str, meta: torch.Tensor, axes: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Cut rows along dp_shard; lone numbers, and what has no elements, stay whole."""
        del name, axes
        return by_rows(meta)

    def init(self, state: TrainState) -> None:
        """Refuse what cannot be split without changing the numbers."""
        module = state.definition.skeleton.module
        self._check_axes(state.world)
        if self.cpu_offload:
            self._check_offload(state.world)
        self._check_apart(state)
        check_units(module, self._units(module), f"{self!r}")
        check_elements(state, f"{self!r}", dims=(0,))

    def engine(self, state: TrainState) -> Engine:
        """Build torch's units around the state's parts."""
        from accelfn.engine.fsdp import FSDPRunner, ShardBinding, Splitter  # noqa: PLC0415

        splitter = Splitter(
            mesh=state.definition.splits.mesh,
            units=self._units,
            reshard_after_forward=self.reshard_after_forward,
            gather_dtype=self.gather_dtype,
            reduce_dtype=self.reduce_dtype,
            device=state.world.device,
            cpu_offload=self.cpu_offload,
        )
        home = ShardBinding(state.definition, splitter, state.params, state.buffers)
        make = partial(
            FSDPRunner,
            ranks=state.definition.copy,
            in_parts=self.accumulate == "sharded",
            finds_unused=self.find_unused_parameters,
        )

        def runner(module: nn.Module, live: object) -> "FSDPRunner":
            del live
            return make(module, home)

        return build(state, home, runner)

    def _units(self, module: nn.Module) -> list[nn.Module]:
        return units_of(module, self.units, f"{self!r}")

    def _check_apart(self, state: TrainState) -> None:
        """Refuse what would let ranks of one copy differ, and one copy that others train beside.

        Raises:
            CompositionError: a transform has ranks differ whose gradients are summed.
            WorldError: copies are to be trained apart, and no axis says how many there are.
        """
        for each in state.setup:
            told = facts_of(each)
            if "stays" in told and not state.world.axes and state.world.loss.size > 1:
                msg = (
                    f"{self!r}: without axes all ranks have one copy of the model together, and"
                    f" {each!r} trains copies apart. Say how many there are, as"
                    " World.from_env(axes={'dp_replicate': 2, 'dp_shard': -1})."
                )
                raise WorldError(msg)
            if "apart" in told and "stays" not in told:
                msg = (
                    f"{self!r}: has one model that is split over the ranks, and under {each!r}"
                    " each rank has a model of its own. Leave out one of the two."
                )
                raise CompositionError(msg)

    def _check_offload(self, world: World) -> None:
        """Refuse a world in which nothing would leave a device, or whose ranks could not sum it.

        One rank on the CPU is taken: there a script is tried that runs on devices.

        Raises:
            WorldError: there is no device, or no parts of anything, or no way to talk of them.
        """
        kind, several = world.device.type, world.loss.size > 1
        why = ""
        if several and kind == "cpu":
            why = "this world computes on the CPU, where all lies in the host's memory already"
        if kind != "cpu" and not several:
            why = (
                "this world has one rank, whose device has the model whole, and nothing is"
                " gathered"
            )
        if why:
            msg = (
                f"{self!r}: {why}. Leave cpu_offload out here; where a script runs on both:"
                ' cpu_offload=world.size > 1 and world.device.type != "cpu".'
            )
            raise WorldError(msg)
        if several and not world.connection.joins(torch.device("cpu")):
            known = dist.Backend.default_device_backend_map
            both = f"cpu:gloo,{kind}:{known.get(kind, '...')}"
            msg = (
                f"{self!r}: parts lie on the CPU, and this world's backend joins no ranks"
                f' there. Name one for both, as World.from_env(backend="{both}"),'
                " or none: that is what from_env takes by itself."
            )
            raise WorldError(msg)

    def _check_axes(self, world: World) -> None:
        """Refuse a world in which there is nothing to split over."""
        if not world.axes or world.loss.size == 1:
            return
        if folded(world.axes).get("dp_shard", 1) == 1:
            msg = (
                f"{self!r}: the world has no dp_shard of several ranks to split over:"
                f" {dict(world.axes)}. Name one, as axes={{'dp_shard': -1}}, or take"
                " af.wrap_ddp()."
            )
            raise WorldError(msg)
