# SPDX-License-Identifier: Apache-2.0
"""`Zero`: DeepSpeed's engine at a ZeRO stage, with the flat tensors that its optimizer updates.

At stages 1 and 2, each rank has the whole model in one flat tensor per parameter group, and a
float32 shard of that tensor, which the optimizer updates. At stage 3, each rank has only its
shards of all parameters, concatenated in the flat tensor that the optimizer updates. DeepSpeed
gathers the parameters of a module when the module runs.

At all stages, a state has the tensors that the optimizer updates. To use another state, accelfn
makes DeepSpeed's tensors point to the state's memory, and DeepSpeed computes the model's weights
from them.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accelfn import World
from accelfn.deepspeed.flats import Flats, Place, cut_of, evenly
from accelfn.deepspeed.settings import (
    note_signatures,
    patch_attributes,
    running_patches,
    use_deepspeed,
)
from accelfn.errors import LossError
from accelfn.plug import Layout, collectives

# pyright: reportPrivateUsage=false

# `ModuleOrder`: at stage 3, check that all ranks run the same modules before they communicate.


Ways: TypeAlias = dict[str, "Ways"]
"""A tree of known orders: the next places that ranks reached after the places before."""
_LARGEST = 2**16
"""The maximum number of remembered places; a model may use a new order in each update."""
_LOOKS_EVERY = 0.01
_LABEL = "compare where DeepSpeed is"
_ADVICE = (
    "At stage 3 DeepSpeed gathers parameters and reduces gradients as modules run, so ranks would"
    " wait for each other, or mix up parameters. The state is unchanged. On all ranks, run the"
    " same modules in the same order, and use all parameters, at least times 0, as in"
    " `+ 0 * net.head.weight.sum()`. Or use stage 2, which allows any order, or"
    " af.wrap_fsdp(find_unused_parameters=True)."
)


class ModuleOrder:
    """Checks that all ranks reach the same places of a model in the same order.

    A place is, for example, the forward pass of a module. While ranks follow the only order that
    they have used before, they do not communicate. At a new place, or if several places can be
    next, the ranks compare their places. A rank that leaves the only known order cannot use a
    collective, because other ranks may be in one of DeepSpeed's collectives. So it asks the other
    ranks through the rendezvous store, and gives up after half of the collective timeout.
    """

    def __init__(self, ranks: World) -> None:
        """Start without a known order; call this on all ranks."""
        self._ranks = ranks
        self._number = self._store.add(f"courses of {ranks.rank}", 1)
        self._root: Ways = {}
        self._size = self._num_asked = 0
        self.begin()

    def begin(self) -> None:
        """Start an update at the beginning of the known orders."""
        if self._size > _LARGEST:
            self._root, self._size = {}, 0
        self._at, self._depth = self._root, 0

    def come(self, place: str) -> None:
        """Record that this rank reached a place, and compare the ranks' places if needed.

        Raises:
            LossError: other ranks reached another place. They also raise this error, or
                `PeerFailedError` if they are in one of DeepSpeed's collectives.
        """
        branches = self._at
        if len(branches) != 1 or place not in branches:
            self.compare(place)
            self._size += place not in branches
        self._at = branches.setdefault(place, {})
        self._depth += 1

    def compare(self, place: str) -> None:
        """Compare a place with the other ranks' places.

        Raises:
            LossError: other ranks reached another place.
        """
        if len(self._at) == 1:
            self._ask(place)
        else:
            places = collectives.gather_text(place, self._ranks, label=_LABEL)
            if len({*places}) > 1:
                _raise_mismatch(dict(enumerate(places)))

    def _ask(self, place: str) -> None:
        """Ask the other ranks through the store which place they reached."""
        store, ranks = self._store, self._ranks
        self._num_asked += 1
        keys = [f"{self._number}.{self._num_asked}.{r}" for r in range(ranks.size)]
        store.set(keys[ranks.rank], json.dumps([self._depth, place]))
        until = time.monotonic() + (ranks.connection.timeout(ranks.device) or 0) / 2
        while not (are_there := store.check(keys)) and time.monotonic() < until:
            time.sleep(_LOOKS_EVERY)
        if are_there:
            answers = [tuple(json.loads(store.get(key))) for key in keys]
            if len({*answers}) > 1:
                _raise_mismatch({rank: at for rank, (_, at) in enumerate(answers)})
            return
        (usual,) = self._at
        silent = {r: usual for r in range(ranks.size) if not store.check([keys[r]])}
        try:
            _raise_mismatch({ranks.rank: place, **silent})
        except LossError as error:
            collectives.break_off(ranks, error)
            raise

    @property
    def _store(self) -> Any:
        # not cached: a store keeps a port, and DeepSpeed's engine is never garbage collected
        group: Any = self._ranks.connection.group
        store = dist.PrefixStore("accelfn DeepSpeed", group.get_group_store())
        store.set_timeout(timedelta(seconds=30))
        return store


def _raise_mismatch(places: dict[int, str]) -> NoReturn:
    listing = ", ".join(f"rank {rank} {places[rank]}" for rank in sorted(places))
    msg = f"Ranks used the model in different ways: {listing}. {_ADVICE}"
    raise LossError(msg)


def _wrap_gather(gather: Any, course: ModuleOrder, name: str) -> Any:
    """Wrap a parameter's `all_gather`: compare the ranks if a loss uses the parameter directly.

    From then on DeepSpeed gathers the parameter with the module that runs, so this place is not
    part of later orders.
    """

    def call(params: Any = None, **options: Any) -> Any:
        if params is None:
            course.compare(f"used the parameter {name!r} by name")
        return gather(params, **options)

    return call


# `reduce_by_gloo`: with Gloo, reduce gradients only to the ranks that own their shards.
#
# Without this, DeepSpeed's stages 1 and 2 all-reduce each bucket, although each rank keeps only
# its own shards.


def reduce_by_gloo(zero: Any, ranks: World) -> None:
    """Make DeepSpeed's optimizer of stage 1 or 2 reduce gradients only to their owners.

    Args:
        zero: DeepSpeed's optimizer.
        ranks: the ranks that share the optimizer's state.
    """
    everywhere = zero.allreduce_and_copy_with_multiple_ranks

    def reduce(bucket: list[Any], dtype: torch.dtype, **options: Any) -> None:
        owners: Sequence[frozenset[int]] = options["bucket_ranks"]
        several = any(len(rank) > 1 for rank in owners)
        summed_apart = any(t is not None for t in options["output_bucket"])
        converts = any(t.dtype != dtype for t in bucket)
        if several or summed_apart or converts or options["divide"]:
            everywhere(bucket, dtype, **options)
            return
        holders = [min(rank) for rank in owners]
        collectives.reduce_to_holders_(bucket, holders, ranks.group)

    zero.allreduce_and_copy_with_multiple_ranks = reduce


# `ReduceOrder`: at stages 1 and 2, reduce gradients in the same order on all ranks.


class ReduceOrder:
    """The order of gradient reductions on all ranks: an order that you pass, or rank 0's order.

    DeepSpeed reduces each gradient when it is computed, and does not compare names over ranks. So
    a gradient that is computed early waits until the gradients before it in the order are
    reduced. Gradients that are missing are reduced at the end of the pass. If you pass no order,
    rank 0 broadcasts its order in the first pass.
    """

    def __init__(
        self, count: int, ranks: World, order: Sequence[int] | None = None
    ) -> None:
        """Start with a number of parameters, and with an order if it is known."""
        self._count, self._ranks = count, ranks
        self._order = [] if order is None else [*order]
        self._had, self._waiting = set[int](), set[int]()

    def come(self, number: int) -> Iterable[int]:
        """Return the parameters to reduce now, after the gradient of `number` is computed."""
        turn = len(self._had)
        in_turn = turn < len(self._order) and self._order[turn] == number
        if in_turn and not self._waiting:  # the usual case
            self._had.add(number)
            return (number,)
        return self._out_of_turn(number)

    def _out_of_turn(self, number: int) -> Iterator[int]:
        if number in self._had:  # a second gradient: DeepSpeed raises an error
            yield number
        self._waiting.add(number)
        while self._waiting and (turn := self._turn(number)) in self._waiting:
            yield self._take(turn)

    def rest(self) -> Iterator[int]:
        """Yield the parameters that are not reduced yet at the end of a pass; then reset."""
        while len(self._had) < self._count:
            untold = {*range(self._count)} - {*self._order}
            yield self._take(self._turn(min(untold, default=0)))
        self.begin()

    def begin(self) -> None:
        """Start a backward pass."""
        self._had.clear()
        self._waiting.clear()

    def _take(self, turn: int) -> int:
        self._had.add(turn)
        self._waiting.discard(turn)
        return turn

    def _turn(self, turn: int) -> int:
        """Return the next parameter of the order; rank 0's `turn` if unknown; -1 at the end."""
        if len(self._had) == len(self._order):
            if len(self._order) == self._count:
                return -1
            number = torch.tensor(turn, device=self._ranks.device)
            collectives.broadcast_([number], self._ranks, label="order of gradients")
            self._order.append(int(number))
        return self._order[len(self._had)]


# `Zero`: DeepSpeed's engine. DeepSpeed has no type hints, and its state has only private names.


class Zero:
    """DeepSpeed's engine for a module; the module's forward pass returns the loss."""

    def __init__(
        self,
        root: nn.Module,
        optimizer: Optimizer,
        config: Mapping[str, Any],
        ranks: World,
    ) -> None:
        """Create DeepSpeed's engine, which then owns the module's parameters.

        Args:
            root: the module; its parameters have memory, but no values yet.
            optimizer: the optimizer of the module's parameters.
            config: DeepSpeed's complete config.
            ranks: the ranks that share the model.
        """
        self.stage: int = config["zero_optimization"]["stage"]
        with use_deepspeed(ranks) as package:
            self._engine, *_ = package.initialize(
                model=root, optimizer=optimizer, config=dict(config)
            )
            self._others = running_patches() if self.stage == 3 else []
        note_signatures(root)
        self._optimizer: Any = self._engine.optimizer
        self._params: list[Any] = list(root.parameters())
        self._ranks = ranks
        self._coalesces = self._flushes = False
        self._when_all_came: Callable[[], None] | None = None
        # drop DeepSpeed's views into flat tensors, which would keep replaced tensors alive
        if self.stage == 3:
            self._optimizer.lp_param_buffer = None
        else:
            for param in self._params:
                param._hp_mapping = None

    @property
    def base(self) -> Optimizer:
        """The torch optimizer that updates the flat tensors."""
        return self._optimizer.optimizer

    @property
    def flats(self) -> Sequence[torch.Tensor]:
        """The flat tensors that this rank's optimizer updates."""
        zero = self._optimizer
        if self.stage == 3:
            return zero.fp32_partitioned_groups_flat
        return zero.single_partition_of_fp32_groups

    @property
    def norm(self) -> Any:
        """The gradient norm of the last update."""
        return self._optimizer._global_grad_norm

    def where(self, names: Mapping[int, str], layout: Layout) -> Flats:
        """Return where parameters are in the flat tensors; `names` has names by `id`."""
        find = self._places_of_parts if self.stage == 3 else self._places_of_groups
        sizes, device = [flat.numel() for flat in self.flats], self.flats[0].device
        return Flats(find(names), sizes, device, layout, self._ranks)

    def _places_of_groups(self, names: Mapping[int, str]) -> dict[str, Place]:
        """Return the places at stages 1 and 2, where a group is sharded as one tensor."""
        zero, rank, ranks = self._optimizer, self._ranks.rank, self._ranks.size
        places: dict[str, Place] = {}
        for i, params in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[i])
            starts = zero.round_robin_bit16_offsets[i]
            for param, start in zip(params, starts, strict=True):
                interval = start, start + param.numel()
                runs = [
                    cut_of((r * size, (r + 1) * size), interval) for r in range(ranks)
                ]
                offset = runs[rank][0] - rank * size
                spans = [(begin - start, end - start) for begin, end in runs]
                places[names[id(param)]] = Place(i, min(offset, size), spans)
        return places

    def _places_of_parts(self, names: Mapping[int, str]) -> dict[str, Place]:
        """Return the places at stage 3, where each parameter is sharded."""
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
        """Use these flat tensors, and compute the model's weights from them; a collective."""
        zero = self._optimizer
        with torch.no_grad():
            if self.stage == 3:
                zero._partition_all_parameters()
            for i, flat in enumerate(self.flats):
                flat.data = flats[i]
                if self.stage == 3:
                    zero._reassign_or_swap_out_partitioned_parameters(i)
            if self.stage != 3:
                zero.update_lp_params()
            elif zero.persistent_parameters:
                first, *_ = zero.persistent_parameters
                first.all_gather(zero.persistent_parameters)

    def keep(self, param: nn.Parameter, part: torch.Tensor) -> None:
        """Copy this rank's shard into a frozen parameter."""
        if self.stage == 3:
            tensor: Any = param
            tensor.ds_tensor.data[: part.numel()].copy_(part)
        else:
            param.data.copy_(part.view(param.shape))

    def runs_of(self, param: nn.Parameter) -> list[tuple[int, int]]:
        """Return the range of elements of a frozen parameter that each rank has."""
        tensor: Any = param
        if self.stage == 3:
            return evenly(tensor.ds_numel, tensor.partition_numel(), self._ranks.size)
        return [(0, param.numel())] * self._ranks.size

    def forward(self, *inputs: Any, reduces: bool, ends: bool) -> torch.Tensor:
        """Run the forward pass and return the loss.

        Args:
            inputs: the module's inputs.
            reduces: whether the backward pass reduces gradients.
            ends: whether this is the last pass of an update.
        """
        if not reduces:
            self._coalesce(on=True)
        if not self._coalesces:
            self._engine.set_gradient_accumulation_boundary(ends)
        with patch_attributes(self._others):
            return self._engine(*inputs)

    def backward(
        self, loss: torch.Tensor, *, ends: bool, when_all_came: Callable[[], None]
    ) -> None:
        """Run the backward pass; the last pass of an update reduces the gradients.

        Args:
            loss: the loss that `forward` returned.
            ends: whether this is the last pass of an update.
            when_all_came: called in the last pass when all gradients are computed, before
                DeepSpeed waits for the last reduction. All ranks call the function between the
                same two collectives.
        """
        self._when_all_came = when_all_came if ends else None
        with patch_attributes(self._others):
            self._engine.backward(loss, scale_wrt_gas=False)
            if ends and self._coalesces:
                self._flush()
        self._tell_all_came()

    def _flush(self) -> None:
        """Reduce the gradients that earlier passes kept on their ranks."""
        self._coalesce(on=False)
        self._engine.set_gradient_accumulation_boundary(True)
        self._flushes = True
        stages = "zero3" if self.stage == 3 else "zero12"
        getattr(self._engine, f"_flush_coalesced_reduction_{stages}")(self._optimizer)
        self._flushes = False

    def _tell_all_came(self) -> None:
        """Call `when_all_came` if this update has not called it yet."""
        tell, self._when_all_came = self._when_all_came, None
        if tell is not None:
            tell()

    def _coalesce(self, *, on: bool) -> None:
        """Switch DeepSpeed to keep gradients on their rank instead of reducing them.

        DeepSpeed's own context manager `coalesce_grad_reduction` would also reduce, at its exit,
        gradients that accelfn has dropped.
        """
        self._coalesces = on
        self._engine.inside_no_sync_ctxt = on
        self._optimizer._coalesce_grad_reduction = on

    def step(self, divisor: float) -> bool:
        """Update with gradients divided by `divisor`; return whether gradients were finite.

        The divisor is passed as DeepSpeed's loss scale, so DeepSpeed divides gradients before it
        computes their norm and clips.
        """
        scaler, zero = self._optimizer.loss_scaler, self._optimizer
        before, scaler.cur_scale = scaler.cur_scale, divisor
        try:
            self._engine.step()
        finally:
            scaler.cur_scale = before
        return not zero.overflow

    def begin(self) -> None:
        """Start an update."""
        for order in self._orders:
            order.begin()

    def align(self, names: Mapping[int, str]) -> None:
        """Install hooks that keep collectives in the same order on all ranks.

        Args:
            names: the names of parameters, by `id`.
        """
        self._orders: Sequence[ModuleOrder | ReduceOrder]
        if self.stage == 3:
            self._orders = [self._check_module_order(names)]
        else:
            self._orders = self._order_reductions()
            if collectives.carries(self._ranks.group, self.flats[0].device):
                reduce_by_gloo(self._optimizer, self._ranks)

    def _check_module_order(self, names: Mapping[int, str]) -> ModuleOrder:
        """Make DeepSpeed's optimizer of stage 3 call a `ModuleOrder` at each place."""
        zero, course = self._optimizer, ModuleOrder(self._ranks)
        named = {"": "the loss", "module": "the model"}
        modules = {
            module: named.get(name, repr(name.removeprefix("module.")))
            for name, module in self._engine.module.named_modules()
        }
        send = zero.reduce_ready_partitions_and_remove_grads
        end = zero.independent_gradient_partition_epilogue
        coordinator = zero.parameter_offload.get_param_coordinator()
        fetch = coordinator.fetch_sub_module

        def come(param: nn.Parameter) -> None:
            if not self._coalesces:
                course.come(f"computed the gradient of {names[id(param)]!r}")
            send(param)

        def end_on_course() -> None:
            course.come("finished its backward pass")
            self._tell_all_came()
            end()

        def fetch_on_course(module: nn.Module, *, forward: bool) -> None:
            verb = "ran" if forward else "ran the backward pass of"
            course.come(f"{verb} {modules[module]}")
            fetch(module, forward=forward)

        zero.reduce_ready_partitions_and_remove_grads = come
        zero.independent_gradient_partition_epilogue = end_on_course
        coordinator.fetch_sub_module = fetch_on_course
        for params in zero.fp16_groups:
            for p in params:
                p.all_gather = _wrap_gather(p.all_gather, course, names[id(p)])
        return course

    def _order_reductions(self) -> tuple[ReduceOrder, ReduceOrder]:
        """Make DeepSpeed's optimizer of stage 1 or 2 reduce all gradients in a common order.

        A missing gradient is reduced as 0.

        Returns:
            Two orders: the order of the parameters, for passes where `_come_listed()` is true,
            and rank 0's order, for other passes.
        """
        zero = self._optimizer
        listed_in: list[tuple[nn.Parameter, int]] = [
            (param, group)
            for group, params in enumerate(zero.bit16_groups)
            for param in params
            if param.requires_grad
        ]
        # by id, because hashing a tensor is a slow Python call
        number_of = {id(param): i for i, (param, _) in enumerate(listed_in)}
        static = ReduceOrder(len(listed_in), self._ranks, range(len(listed_in)))
        learnt = ReduceOrder(len(listed_in), self._ranks)
        send = zero.reduce_ready_partitions_and_remove_grads
        end = zero.independent_gradient_partition_epilogue

        def come(param: nn.Parameter, _group: int) -> None:
            turns = static if self._come_listed() else learnt
            for turn in turns.come(number_of[id(param)]):
                send(*listed_in[turn])

        def end_in_turn() -> None:
            for turn in (static if self._come_listed() else learnt).rest():
                param, group = listed_in[turn]
                if zero.get_gradient_for_reduction(param) is None:
                    param.grad = torch.zeros_like(param)
                    if zero.use_grad_accum_attribute:
                        zero._fill_param_grad_accum_attribute(param)
                send(param, group)
            self._tell_all_came()
            end()

        zero.reduce_ready_partitions_and_remove_grads = come
        zero.independent_gradient_partition_epilogue = end_in_turn
        return static, learnt

    def _come_listed(self) -> bool:
        """Return whether this pass reduces gradients in the order of the parameters."""
        return self._flushes or (self.stage == 1 and not self._optimizer.overlap_comm)

    def free(self) -> None:
        """Free all of the engine's memory, except flat tensors that belong to states.

        torch's hooks refer to DeepSpeed's engine, so the engine is never garbage collected.
        """
        zero: Any = self._optimizer
        zero.optimizer.state.clear()
        tensors: list[Any] = [*self._params, *self.flats]
        tensors += [p.ds_tensor for p in tensors if hasattr(p, "ds_tensor")]
        for tensor in tensors:
            tensor.grad, tensor.data = None, tensor.data.new_empty(0)
        names = ("bit16_groups_flat", "parallel_partitioned_bit16_groups")
        names += ("averaged_gradients", "all_grad_tensors", "ipg_buckets")
        # gradient shards, which are views into `grad_partitions_flat_buffer`
        names += ("_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",)
        for name in names:
            if hasattr(zero, name):
                getattr(zero, name).clear()
        if self.stage == 3:
            zero.grad_partitions_flat_buffer = None

    def drop_gradients(self) -> None:
        """Drop the gradients of backward passes that no update will apply."""
        zero, self._when_all_came = self._optimizer, None
        self._coalesce(on=False)
        for param in self._params:
            param.grad = None
            if self.stage != 3:
                param.grad_accum = None
        for table in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            for key in list(table):
                table[key] = None
        zero._epilogue_ran_this_backward = False
        zero.micro_step_id = 0 if self.stage == 3 else -1
