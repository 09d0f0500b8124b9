# SPDX-License-Identifier: Apache-2.0
"""`ShardHome`: each rank has a part of every parameter, as torch's `fully_shard` keeps it.

torch keeps of a parameter its part as a flat view that is gathered, a DTensor that is in the
module when it is not gathered, and what was gathered. The first two share the memory of a
state's value, by pointers; the optimizer steps a plain parameter that shares it, too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from accelfn.base import accelerator, shards, tree
from accelfn.collectives import by_gloo
from accelfn.definition.definition import Definition
from accelfn.engine.home import built
from accelfn.engine.module.scores import whole
from accelfn.engine.module.units import ROOT
from accelfn.engine.parts import Parts, parameter
from accelfn.engine.unit_order import UnitOrder
from accelfn.errors import LossError
from accelfn.state.grads import Grads

# torch's FSDP has no public names for where it keeps a parameter
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false


# whether sums in another dtype than a parameter's have a place of their own; from torch 2.15 on
# the whole parameter's gradient has it, and the name only reads that
_ACCUMULATES_APART = not hasattr(FSDPParam, "unsharded_accumulated_grad")


class Unit(FSDPParamGroup):
    """A unit that is reduced if this rank has a gradient of it, then with all its parameters.

    Attributes:
        came: the parameters of which a backward pass had a gradient.
    """

    came: set[FSDPParam]

    def pre_backward(self, default_prefetch: Any, *unused: Any) -> None:
        """Gather it for a backward pass that nothing differentiates.

        Raises:
            LossError: something does; torch would reduce values that are not there any more.
        """
        if torch.is_grad_enabled():
            msg = (
                "The loss calls torch.autograd.grad(create_graph=True), as a gradient penalty"
                " does, and af.wrap_fsdp cannot run such a double backward. Train this model"
                " with af.wrap_ddp(), or leave the penalty out."
            )
            raise LossError(msg)
        super().pre_backward(default_prefetch, *unused)

    def post_backward(self, *unused: Any) -> None:
        """Reduce gradients; parameters that took no part have zeros."""
        came = [each for each in self.fsdp_params if _whole_gradient(each) is not None]
        self.came.update(came)
        self.reduce_scatter_unused_params = bool(came)
        super().post_backward(*unused)


class Valueless(Unit):
    """A unit in a world without values, which torch would have its user load first."""

    def _validate_no_meta_params(self) -> None:
        """Take them as they are."""


class Lent(nn.Module):
    """A module whose forward is a function of the model, with all that lies in no unit."""

    def __init__(self, module: nn.Module) -> None:
        """Take the model."""
        super().__init__()
        self.module = module

    def forward(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Return what a function of the model returns."""
        return whole(fn(self.module, *inputs))


@attrs.frozen(kw_only=True)
class Splitter:
    """How a model is split.

    Attributes:
        mesh: over which ranks.
        units: the modules of a model that are gathered together.
        reshard_after_forward: whether they are given up after the forward pass.
        gather_dtype: in which they are gathered and computed with; None is their own.
        reduce_dtype: in which gradients are reduced; None is the parameters' own.
        device: on which they are computed with.
        cpu_offload: whether parts lie on the CPU.
    """

    mesh: DeviceMesh
    units: Callable[[nn.Module], Sequence[nn.Module]]
    reshard_after_forward: bool
    gather_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    device: torch.device
    cpu_offload: bool

    @property
    def pins(self) -> bool:
        """Whether parts lie where the device copies from by itself."""
        return self.cpu_offload and accelerator.pins(self.device)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """In which there may be gradients beside the parameters' own."""
        return tuple(d for d in (self.gather_dtype, self.reduce_dtype) if d is not None)

    def split(
        self, module: nn.Module, root: nn.Module, whole: set[nn.Parameter]
    ) -> None:
        """Split a model's units, and what is in none of them with the module that runs it."""
        how: dict[str, Any] = {
            "mesh": self.mesh,
            # None: not what the backward pass begins with
            "reshard_after_forward": None if self.reshard_after_forward else False,
            "ignored_params": whole,
            "offload_policy": CPUOffloadPolicy(pin_memory=self.pins)
            if self.cpu_offload
            else OffloadPolicy(),
        }
        for unit in reversed(self.units(module)):  # what lies in another comes first
            fully_shard(unit, mp_policy=self._policy(unit), **how)
        if self.gather_dtype is not None:  # as torch casts what units are called with
            cast = partial(_cast, self.gather_dtype)
            module.register_forward_pre_hook(cast, with_kwargs=True)
        fully_shard(root, mp_policy=self._policy(root), **how)

    def _policy(self, unit: nn.Module) -> MixedPrecisionPolicy:
        # torch would reduce in the dtype in which it gathers
        own = next((param.dtype for param in unit.parameters() if param.ndim), None)
        dtype = self.reduce_dtype or (own if self.gather_dtype else None)
        return MixedPrecisionPolicy(param_dtype=self.gather_dtype, reduce_dtype=dtype)


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return a module's inputs with floating-point numbers in a dtype."""

    def cast(leaf: Any) -> Any:
        is_real = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_real else leaf

    return tree.tree_map(cast, args), tree.tree_map(cast, kwargs)


class ShardHome:
    """Each rank has a part of every parameter, and gathers a unit of them to compute with."""

    holder = None

    def __init__(
        self,
        definition: Definition,
        splitter: Splitter,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Build the module without values, and what the optimizer steps."""
        assert definition.layout is not None  # noqa: S101 - asked by who splits
        self._definition, self._splitter = definition, splitter
        self._layout, skeleton = definition.layout, definition.skeleton
        metas = {
            name: meta.new_empty(self._layout.computed(name))
            for name, meta in skeleton.module.named_parameters()
        }
        whole = {n: p for n, p in params.items() if not shards.is_shard(p)}
        self.module = built(definition, {**metas, **whole}, buffers)
        inside = dict(self.module.named_parameters())
        self.params: dict[str, nn.Parameter] = {
            name: inside[name] if name in whole else parameter(value, inside[name])
            for name, value in params.items()
        }
        self.trained = {name: self.params[name] for name in skeleton.trainable}
        self._places = {
            (id(module), key): name
            for name, param in inside.items()
            for module in self.module.modules()
            for key, each in module._parameters.items()
            if each is param
        }
        self._is_inner = splitter.mesh != self._layout.mesh
        self.whole = {name: inside[name] for name in whole}
        self._split: dict[str, FSDPParam] = {}
        self._came = set[FSDPParam]()
        self.order: UnitOrder
        self.shows = Parts(self._split, self.params, params)

    def split(self, root: nn.Module) -> None:
        """Split a module that runs this home's, and take what torch made of its parameters."""
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
            cast("Unit", unit).came = self._came
            for param in unit.fsdp_params:
                info = param._module_info
                name = self._places[id(info.module), info.param_name]
                self._split[name] = param
        for name, param in self._split.items():
            held = _held(param, shards.local(self.shows.state[name]))
            trained = self.params[name].requires_grad
            param.sharded_param = nn.Parameter(held, requires_grad=trained)
            param._setattr_on_modules(param.sharded_param)
        self.bind(self.shows.state)
        mesh = self._splitter.mesh
        carries = by_gloo.carries(mesh.get_group(mesh.ndim - 1), self._splitter.device)
        self.order = UnitOrder(self._definition.copy, units, by_gloo=carries)
        state: Any = cast("Any", root)._get_fsdp_state()
        state._lazy_init()
        # what autograd has not reduced comes last, and the root last of all: whether inputs of
        # a unit need a gradient may differ between ranks
        state._state_ctx.all_states.reverse()

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return what calls functions of a module of other values, split alike."""
        return lent_in_parts(self._definition, self._splitter, params, buffers)

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Point torch's parts, and the optimizer's, at the state's memory."""
        for name, param in self.params.items():
            value: Any = params[name]
            if name not in self._split:
                param.data = value
                continue
            split = self._split[name]
            count = split.padded_sharded_param_size.numel()
            part = value._local_tensor
            has_room = shards.room(part) >= count  # not if made by somebody's operators
            if not has_room or (self._splitter.pins and not part.is_pinned()):
                part = value._local_tensor = self._rehomed(part, count)
            split._sharded_param_data = part.as_strided(
                (count,), (1,), part.storage_offset()
            )
            held: Any = split.sharded_param
            held._local_tensor = param.data = part
        self.shows.state = params

    def _rehomed(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Return a copy of a part in memory from which torch can gather it."""
        if not self._splitter.pins:
            return shards.padded(part, count)
        shape = (max(count, part.numel()),)
        memory = accelerator.host_memory(shape, part.dtype, self._splitter.device)
        return memory.zero_()[: part.numel()].view(part.shape).copy_(part)

    def has_gradients(self) -> bool:
        """Whether some are there."""
        return any(param.grad is not None for param in self.trained.values())

    def note_none(self) -> None:
        """Begin a backward pass, which has come by no parameter yet."""
        self._came.clear()

    def used(self) -> dict[str, bool]:
        """Return of each trained parameter whether this rank's pass came by it."""
        return {
            name: param.grad is not None
            if name in self.whole
            else self._split[name] in self._came
            for name, param in self.trained.items()
        }

    def whole_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of what is not split, zeros where there was none."""
        gradients: list[torch.Tensor] = []
        for param in self.whole.values():
            if param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                gradients.append(param.grad)
        return gradients

    def parts_there(self) -> set[str]:
        """Return the names of parameters of which a part of a gradient is there already."""
        return {
            name
            for name, split in self._split.items()
            if split.sharded_param.grad is not None
        }

    def drop_gradients(self, names: Iterable[str]) -> None:
        """Leave these parameters without a gradient."""
        for name in names:
            self.trained[name].grad = None
            if name in self._split:
                self._split[name].sharded_param.grad = None

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return parts of reduced gradients, or whole ones that were not reduced."""
        gradients: dict[str, torch.Tensor] = {}
        for name, param in self.trained.items():
            split = self._split.get(name)
            if split is None:
                grad = param.grad
            else:
                grad = split.sharded_param.grad
                if grad is None:
                    grad = _whole_gradient(split)
                    grad = None if grad is None else self._layout.laid(name, grad)
                else:
                    param.grad = part = shards.local(grad)
                    split.sharded_param.grad = None
                    if self._is_inner:  # torch's FSDP knows of its own ranks alone
                        grad = shards.with_local(self.shows.state[name], part)
            if grad is not None:
                gradients[name] = grad
        return gradients

    def put_gradients(self, grads: Grads) -> None:
        """Let the optimizer have parts, and the next pass what it adds to."""
        # until they are reduced they are as they were computed
        dtypes = () if grads.reduced else self._splitter.dtypes
        grads.check_fit(self.shows.state, dtypes, self._splitter.device)
        self.clear_gradients()
        for name, param in self.trained.items():
            grad, split = grads.as_taken.get(name), self._split.get(name)
            if grad is None or split is None:
                param.grad = grad
            elif grads.reduced:
                is_part = "dp_shard" in shards.cut_axes(grad)
                part = grad if is_part else self._layout.cut(name, grad)
                param.grad = shards.local(part)
            elif "dp_shard" in shards.cut_axes(grad):
                split.sharded_param.grad = _held(split, shards.local(grad))
            else:
                _put_whole(split, shards.local(grad))

    def clear_gradients(self) -> None:
        """Leave none."""
        for param in self.trained.values():
            param.grad = None
        for split in self._split.values():
            split.sharded_param.grad = None
            if hasattr(split, "_unsharded_param"):
                split._unsharded_param.grad = None
            if _ACCUMULATES_APART:
                split.unsharded_accumulated_grad = None


def lent_in_parts(
    definition: Definition,
    splitter: Splitter,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Callable[..., Any]:
    """Return what calls functions of a model in evaluation mode, of which ranks have parts."""
    home = ShardHome(definition, splitter, params, buffers)
    lent = Lent(home.module.eval())
    home.split(lent)

    def call(fn: Callable[..., Any], *inputs: Any) -> Any:
        with home.order.begins():
            found = lent(fn, *inputs)
            home.order.end()
        return found

    return call


def _held(split: FSDPParam, part: torch.Tensor) -> torch.Tensor:
    """Return a part as torch's FSDP keeps it: over its own ranks alone."""
    return DTensor(part, split._sharding_spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def _put_whole(split: FSDPParam, grad: torch.Tensor) -> None:
    """Put a gradient to where torch adds those of further passes."""
    whole = getattr(split, "_unsharded_param", None)
    if not _ACCUMULATES_APART:
        split.unsharded_param.grad = grad
    elif whole is not None and whole.dtype == grad.dtype:
        whole.grad = grad
    else:  # it is computed in another dtype than it is reduced in
        split.unsharded_accumulated_grad = grad


def _whole_gradient(split: FSDPParam) -> torch.Tensor | None:
    if split.unsharded_accumulated_grad is not None:
        return split.unsharded_accumulated_grad
    whole = getattr(split, "_unsharded_param", None)
    return None if whole is None else whole.grad
