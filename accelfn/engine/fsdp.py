# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: torch's `fully_shard`, with the loss inside."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
    foreach_reduce,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from accelfn.base import devices, tree
from accelfn.collectives import packed
from accelfn.collectives.failures import naming
from accelfn.collectives.packed import all_reduce_, gather_text
from accelfn.definition.definition import Definition
from accelfn.engine.doctor import reject_unused
from accelfn.engine.modules import Regions, has_forward, outermost, select_modules
from accelfn.engine.runner import (
    CallOrder,
    LossFunction,
    ReadLoss,
    RootModule,
    Samples,
    ShardedParams,
    build_module,
    full_results,
    like,
    run_backward,
)
from accelfn.errors import LossError, ModelError
from accelfn.state.results import Grads, Number
from accelfn.world import World

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

# Units are modules whose parameters are gathered together.
#
# A parameter belongs to the innermost unit that contains it. Parameters outside all units
# belong to the root.


ROOT = "the rest of the model"
_TABLES = nn.Embedding, nn.EmbeddingBag


def units_of(module: nn.Module, regions: Regions | None, owner: str) -> list[nn.Module]:
    """Return the modules that are units; by default the members of module lists.

    Raises:
        ModelError: `regions` selects no module; the error names the existing classes.
    """
    if regions is not None:
        return select_modules(module, regions, owner)
    members = [
        member
        for module_list in outermost(module, lambda _, m: isinstance(m, nn.ModuleList))
        for child in module_list.children()
        for member in outermost(child, lambda _, m: has_forward(m))
        if next(member.parameters(), None) is not None
    ]
    return list(dict.fromkeys(members))


def check_units(module: nn.Module, units: list[nn.Module], whose: str) -> None:
    """Raise if torch cannot gather a unit, or would gather a parameter twice.

    Args:
        module: the whole model.
        units: its units.
        whose: the call that needs units, for error messages.

    Raises:
        ModelError: a parameter is in two units, a unit has parameters of two dtypes or complex
        parameters, or a layer has sparse gradients.
    """
    for problem in _problems(module, units):
        msg = f"{whose}: {problem}"
        raise ModelError(msg)


def _problems(module: nn.Module, units: list[nn.Module]) -> Iterator[str]:
    for name, each in module.named_modules():
        if isinstance(each, _TABLES) and each.sparse and each.weight.requires_grad:
            yield (
                f"the gradient of {f'{name}.weight'.lstrip('.')!r} is sparse, but shards are"
                " dense. Create that layer with sparse=False, or train with af.wrap_ddp()."
            )
    names = {id(unit): name for name, unit in module.named_modules()}
    unit_ids = set(map(id, units))
    dtypes: dict[str, dict[torch.dtype, str]] = {}
    owner: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        unit = _unit_of(name, module, unit_ids, names)
        if owner.setdefault(id(param), unit) != unit:
            yield (
                f"{name!r} is shared by two places of the model, {owner[id(param)]} and {unit},"
                " and both would gather it. Pass units= so that both places are in one unit, or"
                " outside of all units."
            )
        if param.ndim:  # scalars are not sharded
            dtypes.setdefault(unit, {}).setdefault(param.dtype, name)
            if param.is_complex():
                yield (
                    f"{name!r} is complex, but torch can gather only real parameters. Make its"
                    " real view (torch.view_as_real) the parameter."
                )
            if "SCB" in vars(param):  # the scales of bitsandbytes
                yield (
                    f"{name!r} has 8 bits, and torch drops the scales when it gathers parameters."
                    " Use bitsandbytes.nn.Linear4bit, or train with af.wrap_ddp()."
                )
    for unit, first in dtypes.items():
        if len(first) > 1:
            listed = ", ".join(f"{name!r} is {dtype}" for dtype, name in first.items())
            yield (
                f"{unit} has parameters of several dtypes, but is gathered as one tensor:"
                f" {listed}. Give them one dtype, or pass units= that each have only one dtype."
            )


def _unit_of(
    name: str, module: nn.Module, units: set[int], names: Mapping[int, str]
) -> str:
    """Return the name of a parameter's unit."""
    path = name.split(".")[:-1]
    for length in range(len(path), 0, -1):
        each = module.get_submodule(".".join(path[:length]))
        if id(each) in units:
            return f"unit {names[id(each)]!r}"
    return ROOT


# All-gather and reduce-scatter units with the Gloo backend.
#
# The arguments are those of torch's functions. Asynchronous calls use torch's own collectives.


gather, reduce_scatter = DefaultAllGather(), DefaultReduceScatter()


def gather_by_gloo(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **how: Any
) -> Any:
    """All-gather the shards of a unit into `output_tensor`."""
    if how.get("async_op"):
        return gather(output_tensor, input_tensor, group, **how)
    return packed.gather_(output_tensor, input_tensor, group)


def reduce_scatter_by_gloo(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **how: Any
) -> Any:
    """Reduce-scatter a sum or a mean into `output_tensor`."""
    op = how["op"]
    if how.get("async_op") or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return reduce_scatter(output_tensor, input_tensor, group, **how)
    packed.reduce_scatter_(output_tensor, input_tensor, group)
    if op == dist.ReduceOp.AVG:
        output_tensor.div_(group.size())
    return None


# `UnitOrder`: all ranks gather and reduce the units of a model in the same order.
#
# Ranks may need units in different orders, or may not need all units (experts, heads, skipped
# layers). A rank that does not need a unit still contributes its shards to the gather, and
# zeros to the reduction, so that other ranks get correct results.


# torch's FSDP has no public names for the attributes of a unit


class OrderedCollective(DefaultAllocMixin):
    """A collective of a unit, which waits for its turn in the common order."""

    def __init__(self, reach: Callable[[], object], make: Callable[..., Any]) -> None:
        """Initialize with the function that waits for the turn, and the collective."""
        self._reach, self._make = reach, make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, then run the collective."""
        self._reach()
        return self._make(*args, **kwargs)


class UnitOrder(CallOrder):
    """A common order on all ranks for the gathers and reductions of a model's units."""

    def __init__(
        self, ranks: World, units: Mapping[str, FSDPParamGroup], *, by_gloo: bool
    ) -> None:
        """Initialize with the ranks and the units by name.

        All ranks must pass the units in the same order.
        """
        self._gather: Any = gather_by_gloo if by_gloo else gather
        self._reduce: Any = OrderedCollective(
            tuple, reduce_scatter_by_gloo if by_gloo else reduce_scatter
        )
        self._reduced_units: list[FSDPParamGroup] = []
        calls: dict[str, Callable[[], object]] = {}
        unit: Any
        for name, unit in units.items():
            first, then = f"FSDP gather {name}", f"FSDP reduce {name}"
            calls[first] = partial(self._gather_rows, unit)
            calls[then] = partial(self._reduce_zeros, unit)
            reach = partial(self.reach, first)
            unit._all_gather_comm = OrderedCollective(reach, self._gather)
            reach = partial(self.reach, then)
            unit._reduce_scatter_comm = OrderedCollective(reach, self._reduce)
        super().__init__(ranks, calls)

    def end(self, note: int = 0) -> list[int]:
        """End the pass on all ranks; return the number `note` that each rank passed."""
        notes = super().end(note)
        # this rank may not have run these units in this pass
        for unit in self._reduced_units:
            unit.finalize_backward()
        self._reduced_units.clear()
        return notes

    @torch.no_grad()
    def _gather_rows(self, unit: FSDPParamGroup) -> None:
        """Take part in the all-gather of a unit that this rank does not need."""
        params, group = unit.fsdp_params, unit._all_gather_process_group
        rows = [p._sharded_param_data.to(unit.device, p.param_dtype) for p in params]
        part = torch.cat(rows)
        self._gather(part.new_empty(len(part) * group.size()), part, group)

    @torch.no_grad()
    def _reduce_zeros(self, unit: FSDPParamGroup) -> None:
        """Add zeros to the sum of a unit's gradients, and keep this rank's shard of the sum."""
        params = [p for p in unit.fsdp_params if p.sharded_param.requires_grad]
        zeros = [
            torch.zeros(param._orig_size, dtype=param.orig_dtype, device=unit.device)
            for param in params
        ]
        replicas = unit._all_reduce_process_group if unit._is_hsdp else None
        context, device = unit.comm_ctx, cast("Any", unit.device_handle)
        _, _, stream, event, *_ = foreach_reduce(
            *(params, zeros, unit._reduce_scatter_process_group),
            *(context.reduce_scatter_stream, self._reduce, unit._orig_dtype),
            *(unit._reduce_dtype, unit.device, unit.gradient_divide_factor),
            *(replicas, context.all_reduce_stream, unit.all_reduce_grads),
            *(unit._partial_reduce_output, None, unit.force_sum_reduction_for_comms),
        )
        device.current_stream().wait_event(event)
        context._last_post_reduce_events[stream] = event
        self._reduced_units.append(unit)


# `ShardBinding` connects a state's sharded parameters with torch's `fully_shard`.
#
# For each parameter, torch keeps three tensors: the gathered parameter; a DTensor, which is in
# the module between gathers; and a flat view of the shard, which torch gathers. The DTensor and
# the flat view share the memory of the state's value. The plain parameter that the optimizer
# steps also shares this memory.


# torch's FSDP has no public names for the attributes of a parameter


# whether FSDPParam has its own attribute for gradient sums in another dtype; from torch 2.15 on
# they are in the unsharded parameter's `grad`, and the name is read-only
_ACCUMULATES_APART = not hasattr(FSDPParam, "unsharded_accumulated_grad")


class Unit(FSDPParamGroup):
    """A unit whose gradients are reduced together, if this rank has at least one of them.

    Attributes:
        came: the parameters that got a gradient in the backward pass.
    """

    came: set[FSDPParam]

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the unit for a forward pass; raise if the loss uses other values for it.

        Raises:
            LossError: the loss calls the unit with other parameters.
        """
        for param in self.fsdp_params:
            place = param._module_info
            value = place.module._parameters.get(place.param_name)
            full = getattr(param, "_unsharded_param", None)
            if value is not param.sharded_param and value is not full:
                msg = (
                    "The loss calls the model with other parameters, as torch.func.functional_call"
                    f" does, but af.wrap_fsdp would replace {place.param_name!r} of a"
                    f" {type(place.module).__name__} by the state's own. Train this model with"
                    " af.wrap_ddp(), or with af.wrap_fsdp(units=...) that leaves out this module."
                )
                raise LossError(msg)
        return super().pre_forward(module, args, kwargs)

    def pre_backward(self, default_prefetch: Any, *unused: Any) -> None:
        """Gather the unit for a backward pass; raise in a double backward.

        Raises:
            LossError: the loss differentiates the backward pass; torch would reduce values that
            are already freed.
        """
        if torch.is_grad_enabled():
            msg = (
                "The loss calls torch.autograd.grad(create_graph=True), as a gradient penalty does,"
                " but af.wrap_fsdp allows no double backward. Use af.wrap_ddp(), or no penalty."
            )
            raise LossError(msg)
        super().pre_backward(default_prefetch, *unused)

    def post_backward(self, *unused: Any) -> None:
        """Reduce gradients; parameters that were not used contribute zeros."""
        came = [p for p in self.fsdp_params if _whole_gradient(p) is not None]
        self.came.update(came)
        self.reduce_scatter_unused_params = bool(came)
        super().post_backward(*unused)


class Valueless(Unit):
    """A unit of meta tensors, for which torch's check of their values is turned off."""

    def _validate_no_meta_params(self) -> None:
        """Allow meta parameters."""


class FunctionModule(nn.Module):
    """A root module whose forward calls a given function with the model."""

    def __init__(self, module: nn.Module) -> None:
        """Initialize with the model."""
        super().__init__()
        self.module = module

    def forward(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function with the model, and return its result."""
        return full_results(fn(self.module, *inputs))


@attrs.frozen(kw_only=True)
class Splitter:
    """Shards models with torch's `fully_shard`, with these options.

    Attributes:
        mesh: the device mesh of the ranks.
        units: a function that returns a model's units.
        reshard_after_forward: whether units are resharded after the forward pass.
        gather_dtype: the dtype of gathered parameters; None means their own.
        reduce_dtype: the dtype of reduced gradients; None means the parameters' own.
        device: the device that computes.
        cpu_offload: whether shards are on the CPU.
    """

    mesh: DeviceMesh
    units: Callable[[nn.Module], Sequence[nn.Module]]
    device: torch.device
    reshard_after_forward: bool = True
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cpu_offload: bool = False

    @property
    def pins(self) -> bool:
        """Whether shards are in pinned memory."""
        return self.cpu_offload and devices.can_pin(self.device)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The possible dtypes of gradients, besides the parameters' own."""
        return tuple(d for d in (self.gather_dtype, self.reduce_dtype) if d is not None)

    def split(
        self, module: nn.Module, root: nn.Module, whole: set[nn.Parameter]
    ) -> None:
        """Shard a model's units, and all other parameters with the root module."""
        how: dict[str, Any] = {
            "mesh": self.mesh,
            # None means that all units except the root are resharded
            "reshard_after_forward": None if self.reshard_after_forward else False,
            "ignored_params": whole,
            "offload_policy": CPUOffloadPolicy(pin_memory=self.pins)
            if self.cpu_offload
            else OffloadPolicy(),
        }
        for unit in reversed(self.units(module)):  # inner units first
            fully_shard(unit, mp_policy=self._policy(unit), **how)
        if self.gather_dtype is not None:  # torch casts only the inputs of units
            cast = partial(_cast, self.gather_dtype)
            module.register_forward_pre_hook(cast, with_kwargs=True)
        fully_shard(root, mp_policy=self._policy(root), **how)

    def _policy(self, unit: nn.Module) -> MixedPrecisionPolicy:
        # without a reduce dtype, torch would reduce gradients in the gather dtype
        own = next((param.dtype for param in unit.parameters() if param.ndim), None)
        dtype = self.reduce_dtype or (own if self.gather_dtype else None)
        return MixedPrecisionPolicy(param_dtype=self.gather_dtype, reduce_dtype=dtype)


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point inputs of a module to a dtype."""

    def cast(leaf: Any) -> Any:
        is_real = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_real else leaf

    return tree.tree_map(cast, args), tree.tree_map(cast, kwargs)


class ShardBinding:
    """Connects a state's sharded parameters with torch's FSDP units.

    Attributes:
        whole: the unsharded parameters, by name.
        came: the parameters that got a gradient in the backward pass.
        order: the order of the units' collectives on all ranks.
    """

    holder = None

    def __init__(
        self,
        definition: Definition,
        splitter: Splitter,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Build the module without values, and the parameters that the optimizer steps."""
        assert definition.layout is not None  # noqa: S101 - callers shard
        self._definition, self._splitter = definition, splitter
        self.lend = partial(lend_sharded, definition, splitter)
        self._layout, skeleton = definition.layout, definition.skeleton
        named = skeleton.module.named_parameters()
        metas = {n: meta.new_empty(self._layout.computed(n)) for n, meta in named}
        whole = {n: p for n, p in params.items() if not tree.is_shard(p)}
        self.module = build_module(definition, {**metas, **whole}, buffers)
        inside = dict(self.module.named_parameters())
        self.params: dict[str, nn.Parameter] = {
            name: inside[name]
            if name in whole
            else nn.Parameter(tree.local(value), inside[name].requires_grad)
            for name, value in params.items()
        }
        self.trained = {name: self.params[name] for name in skeleton.trainable}
        self._places = {
            (id(module), key): name
            for name, param in inside.items()
            for module in self.module.modules()
            for key, parameter in module._parameters.items()
            if parameter is param
        }
        self._is_inner = splitter.mesh != self._layout.mesh
        self.whole = {name: inside[name] for name in whole}
        self._split: dict[str, FSDPParam] = {}
        self.came = set[FSDPParam]()
        self.order: UnitOrder
        self.opt_state_view = ShardedParams(self._split, self.params, params)

    def split(self, root: nn.Module) -> None:
        """Shard a root that contains this binding's module; find torch's FSDP parameters."""
        self._splitter.split(self.module, root, set(self.whole.values()))
        units = {
            path.removeprefix("module.") or ROOT: unit
            for path, module in root.named_modules()
            if isinstance(module, FSDPModule)
            for unit in module._get_fsdp_state()._fsdp_param_groups
        }
        is_meta = self._splitter.device.type == "meta"
        for unit in units.values():
            unit.__class__ = Valueless if is_meta else Unit
            cast("Unit", unit).came = self.came
            for param in unit.fsdp_params:
                info = param._module_info
                name = self._places[id(info.module), info.param_name]
                self._split[name] = param
        for name, param in self._split.items():
            held = _fsdp_part(param, tree.local(self.opt_state_view.state[name]))
            trained = self.params[name].requires_grad
            param.sharded_param = nn.Parameter(held, requires_grad=trained)
            param._setattr_on_modules(param.sharded_param)
        self.bind(self.opt_state_view.state)
        mesh = self._splitter.mesh
        carries = packed.carries(mesh.get_group(mesh.ndim - 1), self._splitter.device)
        self.order = UnitOrder(self._definition.copy, units, by_gloo=carries)
        state = cast("Any", root)._get_fsdp_state()
        state._lazy_init()
        # autograd may not reduce all units, because an input may need no gradient on some ranks.
        # torch reduces the remaining units in this order, so that the root is last
        state._state_ctx.all_states.reverse()

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Point the shards of torch and of the optimizer to the state's memory."""
        for name, param in self.params.items():
            value: Any = params[name]
            if name not in self._split:
                param.data = value
                continue
            split = self._split[name]
            count = split.padded_sharded_param_size.numel()
            part = value._local_tensor
            # a tensor made by user code may lack the padding
            has_room = tree.room(part) >= count
            if not has_room or (self._splitter.pins and not part.is_pinned()):
                part = value._local_tensor = self._reallocate(part, count)
            flat = part.as_strided((count,), (1,), part.storage_offset())
            split._sharded_param_data, held = flat, cast("Any", split.sharded_param)
            held._local_tensor = param.data = part
        self.opt_state_view.state = params

    def _reallocate(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Copy a shard to padded memory, as torch needs it to gather."""
        if not self._splitter.pins:
            return tree.pad_part(part, count)
        shape = (max(count, part.numel()),)
        memory = devices.host_memory(shape, part.dtype, self._splitter.device)
        return memory.zero_()[: part.numel()].view(part.shape).copy_(part)

    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient."""
        return any(param.grad is not None for param in self.trained.values())

    def used_params(self) -> dict[str, bool]:
        """Return for each trained parameter whether this rank's pass has used it."""
        return {
            name: param.grad is not None
            if name in self.whole
            else self._split[name] in self.came
            for name, param in self.trained.items()
        }

    def whole_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of unsharded parameters; set missing ones to zeros."""
        gradients: list[torch.Tensor] = []
        for param in self.whole.values():
            if param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                gradients.append(param.grad)
        return gradients

    def parts_there(self) -> set[str]:
        """Return the names of parameters that already have a shard of a reduced gradient."""
        splits = self._split.items()
        return {name for name, s in splits if s.sharded_param.grad is not None}

    def drop_gradients(self, names: Iterable[str]) -> None:
        """Clear the gradients of these parameters."""
        for name in names:
            self.trained[name].grad = None
            if name in self._split:
                self._split[name].sharded_param.grad = None

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the reduced gradient shards, or whole gradients that are not reduced yet."""
        gradients = {
            name: self._take(name, param) for name, param in self.trained.items()
        }
        return {name: grad for name, grad in gradients.items() if grad is not None}

    def _take(self, name: str, param: nn.Parameter) -> torch.Tensor | None:
        split = self._split.get(name)
        if split is None:
            return param.grad
        grad = split.sharded_param.grad
        if grad is None:
            grad = _whole_gradient(split)
            return None if grad is None else self._layout.laid(name, grad)
        param.grad = part = tree.local(grad)
        split.sharded_param.grad = None
        # torch's FSDP knows only the ranks of its own mesh
        state = self.opt_state_view.state
        return tree.with_local(state[name], part) if self._is_inner else grad

    def put_gradients(self, grads: Grads) -> None:
        """Set shards for the optimizer, or earlier gradients for the next pass to add to."""
        # unreduced gradients have the compute dtype
        dtypes = () if grads.reduced else self._splitter.dtypes
        grads.check_fit(self.opt_state_view.state, dtypes, self._splitter.device)
        self.clear_gradients()
        for name, param in self.trained.items():
            grad, split = grads.as_taken.get(name), self._split.get(name)
            if grad is None or split is None:
                param.grad = grad
            elif grads.reduced:
                is_part = "dp_shard" in tree.cut_axes(grad)
                part = grad if is_part else self._layout.cut(name, grad)
                param.grad = tree.local(part)
            elif "dp_shard" in tree.cut_axes(grad):
                split.sharded_param.grad = _fsdp_part(split, tree.local(grad))
            else:
                _put_whole(split, tree.local(grad))

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        for param in self.trained.values():
            param.grad = None
        for split in self._split.values():
            split.sharded_param.grad = None
            if hasattr(split, "_unsharded_param"):
                split._unsharded_param.grad = None
            if _ACCUMULATES_APART:
                split.unsharded_accumulated_grad = None


def sharded_lender(
    definition: Definition, caller: str
) -> Callable[..., Callable[..., Any]]:
    """Return a function like `ParamBinding.lend` that shards the model with torch's FSDP.

    Args:
        definition: the definition of a state; its layout splits parameters by rows.
        caller: the transform that needs it, for error messages.
    """
    units = partial(units_of, regions=None, owner=caller)
    mesh, device = definition.splits.mesh, definition.world.device
    splitter = Splitter(mesh=mesh, units=units, device=device)
    return partial(lend_sharded, definition, splitter)


def lend_sharded(
    definition: Definition,
    splitter: Splitter,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Callable[..., Any]:
    """Return a callable that runs `fn(model, ...)` on a sharded model, in evaluation mode."""
    home = ShardBinding(definition, splitter, dict(params), buffers)
    lent = FunctionModule(home.module.eval())
    home.split(lent)

    def call(fn: Callable[..., Any], *inputs: Any) -> Any:
        with home.order.begins():
            found = lent(fn, *inputs)
            home.order.end()
        return found

    return call


def _fsdp_part(split: FSDPParam, part: torch.Tensor) -> torch.Tensor:
    """Return a shard in the form that torch's FSDP keeps: a DTensor over FSDP's own ranks."""
    return DTensor(part, split._sharding_spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def _put_whole(split: FSDPParam, grad: torch.Tensor) -> None:
    """Set an unsharded gradient. torch adds the gradients of further passes to it."""
    whole = getattr(split, "_unsharded_param", None)
    if not _ACCUMULATES_APART:
        split.unsharded_param.grad = grad
    elif whole is not None and whole.dtype == grad.dtype:
        whole.grad = grad
    else:  # the compute dtype is not the reduce dtype
        split.unsharded_accumulated_grad = grad


def _whole_gradient(split: FSDPParam) -> torch.Tensor | None:
    if split.unsharded_accumulated_grad is not None:
        return split.unsharded_accumulated_grad
    whole = getattr(split, "_unsharded_param", None)
    return None if whole is None else whole.grad


class FSDPRunner:
    """Runs the loss inside a module that torch has sharded.

    The last micro-batch of an update reduces gradients. With `in_parts`, each micro-batch
    reduces gradients, and the last one also reduces the weight.
    """

    reduces = True
    lone_module = None

    def __init__(
        self,
        module: nn.Module,
        home: ShardBinding,
        ranks: World,
        *,
        in_parts: bool,
        finds_unused: bool,
    ) -> None:
        """Shard the module, which transforms may have changed before."""
        self._ranks, self._home, self._in_parts = ranks, home, in_parts
        self.expects_unused = finds_unused
        self._root: Any = RootModule(module)
        with naming("split the model", ranks):
            home.split(self._root)
        self._forward = naming("FSDP forward", ranks)
        self._backward = naming("FSDP backward", ranks)
        self._sync = self._ends = True
        # on this rank: the parameters used in this update, and the parameters with a gradient
        # of an earlier micro-batch
        self._used, self._parts = set[str](), set[str]()

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss; each unit is gathered when the model calls it.

        Before the first micro-batch of an update, rank 0's buffers are broadcast, as in DDP.
        """
        self._parts = self._home.parts_there()
        if samples.into is None:
            self._used = {*self._parts}
            self._root.share_buffers(self._ranks)
        reduces = sync or self._in_parts
        if reduces is not self._sync:
            self._root.set_requires_gradient_sync(reduces)
        self._sync, self._ends = reduces, sync
        self._home.came.clear()
        try:
            with self._forward, self._home.order.begins(kind=reduces):
                self._scalar = self._root(loss_fn, samples)
        except RuntimeError as error:
            for sign, msg in _EXPLAINED.items():
                if sign in str(error):
                    raise LossError(msg) from error
            raise
        return self._root.take_read()

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`; with sync, average gradients and weight."""
        scalar = self._scalar
        del self._scalar
        home, order = self._home, self._home.order
        with self._backward:
            with order.goes_on():
                run_backward((scalar,), (like(scalar, scale),))
                used = home.used_params()
                self._used |= {name for name, is_used in used.items() if is_used}
                misses = self._ends and not self.expects_unused
                unused = [name for name in used if misses and name not in self._used]
                if any(order.end(len(unused))):  # unused on any rank: all raise
                    told = "\n".join(unused)
                    texts = gather_text(told, self._ranks, label="unused parameters")
                    names = filter(None, "\n".join(texts).split("\n"))
                    reject_unused(dict.fromkeys(names), are_held=False)
            if not self._sync:
                return None
            total = self._reduce_rest(weight, used)
        return total / self._ranks.size if self._ends else None

    def _reduce_rest(self, weight: Number, used: Mapping[str, bool]) -> torch.Tensor:
        """Reduce unsharded gradients, the weight and usage counts; return the total weight."""
        home, ranks = self._home, self._ranks
        whole = home.whole_gradients()
        may_miss = self.expects_unused or self._in_parts
        told = used if may_miss else ()
        counts = [0.0, *(float(used[name]) for name in told)]
        sums = torch.tensor(counts, dtype=torch.float64, device=ranks.device)
        sums[0] = weight
        all_reduce_([sums, *whole], ranks, label="weight of the loss")
        for gradient in whole:
            gradient.div_(ranks.size)
        if may_miss and not sums.is_meta:
            # parameters unused on all ranks get no gradient
            some = zip(told, sums[1:].tolist(), strict=True)
            unused = (name for name, count in some if not count)
            home.drop_gradients(n for n in unused if n not in self._parts)
        return sums[0]


_EXPLAINED = {
    "differentiated Tensor": (
        "The loss calls torch.autograd.grad for parameters that af.wrap_fsdp() has sharded,"
        " but their gradients exist only after the backward pass. Train this model with"
        " af.wrap_ddp(), or read the gradients in the `grads` method of a transform."
    ),
    "mixed torch.Tensor and DTensor": (
        "The loss used parameters of a unit that was not gathered. af.wrap_fsdp gathers a unit"
        " when the unit itself is called. Call it as unit(...), not by another method or by a"
        " module inside it, or pass units= without that module."
    ),
}
"""Error messages, by a part of torch's own message that has the same cause."""
