# SPDX-License-Identifier: Apache-2.0
"""Split the model over the ranks with torch's fully_shard."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import torch
import torch.distributed as dist
from torch import nn

from accelfn.base.arguments import one_of, option, satisfies, truth
from accelfn.definition.layout import by_rows
from accelfn.definition.transform import facts_of, transform
from accelfn.engine.engine import Engine, build_engine
from accelfn.engine.fsdp import check_units, units_of
from accelfn.engine.modules import Regions, are_regions
from accelfn.engine.optimizer import check_elements
from accelfn.errors import CompositionError, WorldError
from accelfn.state.state import TrainState
from accelfn.world import World
from accelfn.world.axes import fold_cp

if TYPE_CHECKING:
    from accelfn.engine.fsdp import FSDPRunner


def _are_units(_owner: object, _field: object, value: object) -> None:
    are_regions(f"af.wrap_fsdp(units={value!r})", value)


_is_dtype = satisfies(
    lambda value: (
        value is None or (isinstance(value, torch.dtype) and value.is_floating_point)
    ),
    "a dtype of real numbers, such as torch.bfloat16, or None for the parameters' own",
)


@transform
class wrap_fsdp:
    """Shard the model over the ranks with torch's `fully_shard` (FSDP2).

    Each rank holds some rows of every parameter, and the same rows of its gradient, its
    optimizer state and slots in its shape. torch's `fully_shard` runs a module that computes
    the loss: a unit is gathered before its forward pass, resharded after it, and gathered again
    for its backward pass; then its gradients are reduce-scattered. The root (all parameters
    outside units) is gathered once for the whole loss. The weights of the ranks' losses are
    summed with the gradients, so the result is the mean over all samples (or tokens) of the
    update, even if the ranks' shares differ in size. In a world of 1 nothing changes.

    Without axes, all ranks together hold one copy of the model. With {"dp_replicate": m,
    "dp_shard": n} there are m copies, each over n neighboring ranks (HSDP). With `local_sgd`
    the copies train independently, and gradients are summed only within a copy.

    Acts on: layout, engine; init (checks the model).

    Args:
        units: the modules that are gathered as one: a class, a tuple of classes, or a function
        (name, module) -> bool. Default: the members of each outermost nn.ModuleList, such as
        the blocks of a transformer. The model must call a unit's forward; containers such as
        nn.ModuleList have none.
        reshard_after_forward: whether units are resharded between their forward and backward
        passes. If False, an update gathers each unit once, and the whole model is gathered at
        the end of the forward pass.
        gather_dtype: the dtype in which parameters are gathered and used, and to which the
        model's inputs are cast, such as torch.bfloat16; None means the parameters' own. The
        shards that the optimizer steps keep their dtype.
        reduce_dtype: the dtype in which gradients are summed over ranks; None means the
        parameters' own, independent of gather_dtype.
        accumulate: with several micro-batches, "whole" keeps full gradients on each rank and
        reduces only with the last one; "sharded" reduces with each and keeps shards: 1/n of the
        memory, and one reduce-scatter per unit and micro-batch.
        find_unused_parameters: allow parameters that take no part in the loss.
        cpu_offload: whether a rank's shards of parameters, gradients, optimizer state and slots
        are in host memory. They are copied to the device to be gathered, gradients are copied
        back after reduction, and the optimizer steps on the host. Scalars stay on the device.

    Law:
        Parameters and optimizer state are those of one process on the whole batch, up to
        rounding, for any units, axes and number of ranks; gather_dtype and reduce_dtype round
        to their own precision. A checkpoint of one layout loads into any other bitwise.

    Cost:
        With n ranks per copy, each rank holds 1/n of parameters, gradients, optimizer state and
        slots (rounded up to whole rows), plus the gathered root, the current unit and the next
        one. An update makes two all-gathers and one reduce-scatter per unit, one of each for
        the root, and an all-reduce of 8 bytes. Each pass adds an all-gather of 24 bytes, in
        which ranks agree on the order of units (one more for each unit that ranks run in
        another order than in their last pass). In total a rank sends at most 3 (n - 1) / n of
        the parameters' bytes; DistributedDataParallel sends 2 (n - 1) / n. Each further
        micro-batch gathers again. m copies add an all-reduce of a rank's shards. Buffers are
        broadcast from rank 0 before an update's first forward pass.

        With cpu_offload the device only holds gathered units, their gradients and activations.
        Each all-gather copies a rank's shards to the device, and each reduce-scatter copies
        them back, from and to pinned memory. The update waits for the device and runs on the
        CPU.

        `TrainState.create(setup=...)` creates the whole model in each rank's host memory before
        sharding; with init="shard", one module at a time.

    Raises:
        ArgumentError: an invalid option.
        CompositionError: when composed with `wrap_ddp`, a transform that defines `reduce`,
        `optimizer_in_backward`, or `compile` as one graph; when the state is created with a
        transform other than `local_sgd` that lets ranks differ.
        WorldError: when the state is created in a world with axes but without "dp_shard" or
        "cp", or in a world without axes under `local_sgd`. With cpu_offload: the ranks compute
        on the CPU; the world has one rank; or no backend joins the ranks' CPUs.
        ModelError: when the state is created, `units` match no module or a container without a
        forward; a parameter is tied over two units; or a unit has parameters of two dtypes or
        complex parameters.
        OptimizerError: when the state is created, the optimizer is not elementwise; accelfn
        tries it on small parameters, whole and sharded.
        ReplicaMismatchError: when the state is created, the ranks have different models.
        LossError: at a step, the loss used a unit's parameters without calling the unit.
        CollectiveMismatchError: at a step, ranks run different collectives inside the loss.
        UnusedParametersError: at a step, a parameter took no part in the loss.

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
    accumulate: Literal["whole", "sharded"] = option(
        "whole", one_of("whole", "sharded")
    )
    find_unused_parameters: bool = option(default=False, validator=truth())
    cpu_offload: bool = option(default=False, validator=truth())

    @property
    def tells(self) -> Mapping[str, Any]:
        """Facts about unused parameters, offloading and partial gradients."""
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
        """Shard rows along dp_shard; scalars and empty parameters stay whole."""
        del name, axes
        return by_rows(meta)

    def init(self, state: TrainState) -> None:
        """Reject models and optimizers that sharding would change."""
        module = state.definition.skeleton.module
        self._check_axes(state.world)
        if self.cpu_offload:
            self._check_offload(state.world)
        self._check_apart(state)
        check_units(module, self._units(module), f"{self!r}")
        check_elements(state, f"{self!r}", dims=(0,))

    def engine(self, state: TrainState) -> Engine:
        """Build torch's units around the state's shards."""
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

        return build_engine(state, home, runner)

    def _units(self, module: nn.Module) -> list[nn.Module]:
        return units_of(module, self.units, f"{self!r}")

    def _check_apart(self, state: TrainState) -> None:
        """Reject transforms that let ranks of one copy differ, and a missing copy axis.

        Raises:
            CompositionError: a transform lets ranks differ although their gradients are summed.
            WorldError: copies train independently, and no axis gives their number.
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
        """Reject worlds in which cpu_offload cannot work or has no effect.

        One rank on the CPU is allowed, to try out a script for devices.

        Raises:
            WorldError: there is no device, only one rank, or no CPU backend.
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
        """Reject a world with axes but no dp_shard axis of several ranks."""
        if not world.axes or world.loss.size == 1:
            return
        if fold_cp(world.axes).get("dp_shard", 1) == 1:
            msg = (
                f"{self!r}: the world has no dp_shard of several ranks to split over:"
                f" {dict(world.axes)}. Name one, as axes={{'dp_shard': -1}}, or take"
                " af.wrap_ddp()."
            )
            raise WorldError(msg)
