# SPDX-License-Identifier: Apache-2.0
"""`Zero`: DeepSpeed's engine of a stage, as flat tensors that are stepped.

Stages 1 and 2 have a whole model on each rank, in one flat tensor a parameter group, and of
that a float32 part that the optimizer steps. Stage 3 has parts of each parameter alone, one
after the other in the flat tensor that is stepped, and gathers a module's when it runs. In all
of them what a state has is the part that is stepped: it is exchanged by pointers, and what the
model computes with is made of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.collectives import by_gloo
from accelfn.definition.layout import Layout
from accelfn.engine.zero.course import Course, keep_course
from accelfn.engine.zero.flats import Flats, Place
from accelfn.engine.zero.package import (
    exchanged,
    joined,
    note_signatures,
    of_running,
)
from accelfn.engine.zero.places import cut_of, evenly
from accelfn.engine.zero.reducing import reduce_by_gloo
from accelfn.engine.zero.turns import take_turns
from accelfn.world import World

# DeepSpeed has no types, and no public names for what it keeps
# pyright: reportPrivateUsage=false


class Zero:
    """DeepSpeed's engine around a module whose forward is the loss."""

    def __init__(
        self,
        root: nn.Module,
        optimizer: Optimizer,
        config: Mapping[str, Any],
        ranks: World,
    ) -> None:
        """Let DeepSpeed take over the module's parameters; their values are none yet."""
        self.stage: int = config["zero_optimization"]["stage"]
        with joined(ranks) as deepspeed:
            self._engine, *_ = deepspeed.initialize(
                model=root, optimizer=optimizer, config=dict(config)
            )
            self._others = of_running() if self.stage == 3 else []
        note_signatures(root)
        self._optimizer: Any = self._engine.optimizer
        self._params: list[Any] = list(root.parameters())
        self._ranks = ranks
        self._coalesces = self._flushes = False
        self._when_all_came: Callable[[], None] | None = None
        self._drop_views()

    def _drop_views(self) -> None:
        """Let go of what would keep the memory of flat tensors that others take the place of."""
        if self.stage == 3:
            self._optimizer.lp_param_buffer = None
        else:
            for param in self._params:
                param._hp_mapping = None

    @property
    def base(self) -> Optimizer:
        """The optimizer that steps the flat tensors."""
        return self._optimizer.optimizer

    @property
    def flats(self) -> Sequence[torch.Tensor]:
        """The tensors that are stepped, on this rank."""
        zero = self._optimizer
        if self.stage == 3:
            return zero.fp32_partitioned_groups_flat
        return zero.single_partition_of_fp32_groups

    @property
    def norm(self) -> Any:
        """The norm of the gradients of the last update."""
        return self._optimizer._global_grad_norm

    def where(self, names: Mapping[int, str], layout: Layout) -> Flats:
        """Return where the parameters lie, whose names are given by their ids."""
        find = self._places_of_parts if self.stage == 3 else self._places_of_groups
        sizes, device = [flat.numel() for flat in self.flats], self.flats[0].device
        return Flats(find(names), sizes, device, layout, self._ranks)

    def _places_of_groups(self, names: Mapping[int, str]) -> dict[str, Place]:
        """Return the cuts of whole groups, each of which goes on over all ranks."""
        zero, rank, ranks = self._optimizer, self._ranks.rank, self._ranks.size
        places: dict[str, Place] = {}
        for i, params in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[i])
            for param, start in zip(
                params, zero.round_robin_bit16_offsets[i], strict=True
            ):
                within = start, start + param.numel()
                runs = [
                    cut_of((r * size, (r + 1) * size), within) for r in range(ranks)
                ]
                offset = runs[rank][0] - rank * size
                own = [(begin - start, end - start) for begin, end in runs]
                places[names[id(param)]] = Place(i, min(offset, size), own)
        return places

    def _places_of_parts(self, names: Mapping[int, str]) -> dict[str, Place]:
        """Return the cuts of parameters, each in as many equal parts as there are ranks."""
        places: dict[str, Place] = {}
        for i, params in enumerate(self._optimizer.fp16_groups):
            offset = 0
            for param in params:
                part = param.partition_numel()
                runs = evenly(param.ds_numel, part, self._ranks.size)
                places[names[id(param)]] = Place(i, offset, runs)
                offset += part
        return places

    def point_at(self, flats: Mapping[int, torch.Tensor]) -> None:
        """Step these tensors from now on, and compute with what they hold; a collective."""
        zero = self._optimizer
        with torch.no_grad():
            if self.stage != 3:
                for i, flat in enumerate(self.flats):
                    flat.data = flats[i]
                zero.update_lp_params()
                return
            zero._partition_all_parameters()
            for i, flat in enumerate(self.flats):
                flat.data = flats[i]
                zero._reassign_or_swap_out_partitioned_parameters(i)
            if zero.persistent_parameters:
                first, *_ = zero.persistent_parameters
                first.all_gather(zero.persistent_parameters)

    def keep(self, param: nn.Parameter, part: torch.Tensor) -> None:
        """Give a parameter that is not trained what this rank holds of it."""
        if self.stage == 3:
            held: Any = param
            held.ds_tensor.data[: part.numel()].copy_(part)
        else:
            param.data.copy_(part.view(param.shape))

    def runs_of(self, param: nn.Parameter) -> list[tuple[int, int]]:
        """Return which elements each rank holds of a parameter that is not trained."""
        held: Any = param
        if self.stage == 3:
            return evenly(held.ds_numel, held.partition_numel(), self._ranks.size)
        return [(0, param.numel())] * self._ranks.size

    def forward(self, *inputs: Any, reduces: bool, ends: bool) -> torch.Tensor:
        """Return the loss.

        Args:
            inputs: of the module.
            reduces: whether the gradients cross the ranks in this pass.
            ends: whether it is the last one of an update.
        """
        if not reduces:
            self._coalesce(on=True)
        if not self._coalesces:
            self._engine.set_gradient_accumulation_boundary(ends)
        with exchanged(self._others):
            return self._engine(*inputs)

    def backward(
        self, loss: torch.Tensor, *, ends: bool, when_all_came: Callable[[], None]
    ) -> None:
        """Add the gradients of a loss; in the last pass they are those of all ranks.

        Args:
            loss: that `forward` returned.
            ends: whether the pass is the last one of an update.
            when_all_came: is called in that, once all gradients have come, and before
                DeepSpeed waits for the last sum of them: at the same place among its sums on
                all ranks.
        """
        self._when_all_came = when_all_came if ends else None
        with exchanged(self._others):
            self._engine.backward(loss, scale_wrt_gas=False)
            if ends and self._coalesces:
                self._flush()
        self._tell_all_came()

    def _flush(self) -> None:
        """Let gradients cross that stayed on their ranks."""
        self._coalesce(on=False)
        self._engine.set_gradient_accumulation_boundary(True)
        self._flushes = True
        if self.stage == 3:
            self._engine._flush_coalesced_reduction_zero3(self._optimizer)
        else:
            self._engine._flush_coalesced_reduction_zero12(self._optimizer)
        self._flushes = False

    def _tell_all_came(self) -> None:
        """Let it be known that all gradients have come, once in an update."""
        tell, self._when_all_came = self._when_all_came, None
        if tell is not None:
            tell()

    def _coalesce(self, *, on: bool) -> None:
        """Leave gradients on their rank, or no more.

        As DeepSpeed's context `coalesce_grad_reduction` does, which would reduce them, too,
        when it is dropped with them.
        """
        self._coalesces = on
        self._engine.inside_no_sync_ctxt = on
        self._optimizer._coalesce_grad_reduction = on

    def step(self, divisor: float) -> bool:
        """Step, with gradients divided by a number; return whether they were finite.

        DeepSpeed takes the number for a scale of the loss, by which it divides before it looks
        at the norm and clips.
        """
        scaler, zero = self._optimizer.loss_scaler, self._optimizer
        before, scaler.cur_scale = scaler.cur_scale, divisor
        try:
            self._engine.step()
        finally:
            scaler.cur_scale = before
        return not zero.overflow

    def begin(self) -> None:
        """Begin an update."""
        if self.stage == 3:
            self._course.begin()
        else:
            for turns in self._turns:
                turns.begin()

    def align(self, names: Mapping[int, str]) -> None:
        """Have gradients of all ranks meet those of the same parameters, named by their ids."""
        if self.stage == 3:
            named = {"": "the loss", "module": "the model"}
            modules = {
                module: named.get(name, repr(name.removeprefix("module.")))
                for name, module in self._engine.module.named_modules()
            }
            self._course = Course(self._ranks)
            keep_course(
                self._optimizer,
                self._course,
                names,
                modules,
                stay=lambda: self._coalesces,
                when_all_came=self._tell_all_came,
            )
        else:
            self._turns = take_turns(
                self._optimizer, self._ranks, self._come_listed, self._tell_all_came
            )
            if by_gloo.carries(self._ranks.group, self.flats[0].device):
                reduce_by_gloo(self._optimizer, self._ranks)

    def _come_listed(self) -> bool:
        """Whether gradients of this pass are sent in the order of the list of parameters."""
        return self._flushes or (self.stage == 1 and not self._optimizer.overlap_comm)

    def free(self) -> None:
        """Let go of all memory but that of states, whose flat tensors stay as they are.

        DeepSpeed's engine is referred to by hooks that torch keeps, and not collected.
        """
        zero: Any = self._optimizer
        zero.optimizer.state.clear()
        held: list[Any] = [*self._params, *self.flats]
        held += [p.ds_tensor for p in held if hasattr(p, "ds_tensor")]
        for tensor in held:
            tensor.grad, tensor.data = None, tensor.data.new_empty(0)
        names = ("bit16_groups_flat", "parallel_partitioned_bit16_groups")
        names += ("averaged_gradients", "all_grad_tensors", "ipg_buckets")
        # parts of gradients, which are views of the buffer that goes below
        names += ("_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",)
        for name in names:
            if hasattr(zero, name):
                getattr(zero, name).clear()
        if self.stage == 3:
            zero.grad_partitions_flat_buffer = None

    def drop_gradients(self) -> None:
        """Leave nothing of backward passes that no update will take."""
        zero, self._when_all_came = self._optimizer, None
        self._coalesce(on=False)
        for param in self._params:
            param.grad = None
            if self.stage != 3:
                param.grad_accum = None
        for found in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            for key in list(found):
                found[key] = None
        zero._epilogue_ran_this_backward = False
        zero.micro_step_id = 0 if self.stage == 3 else -1
