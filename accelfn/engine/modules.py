# SPDX-License-Identifier: Apache-2.0
"""Change modules of a model: select modules, float8 layers, synchronized BatchNorm."""

import importlib.util
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from accelfn.base import tree
from accelfn.collectives.failures import await_turn
from accelfn.collectives.packed import all_gather_list, sum_
from accelfn.definition.transform import check_returned
from accelfn.engine.runner import CallOrder
from accelfn.errors import ArgumentError, ModelError
from accelfn.state.state import TrainState
from accelfn.world import World

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Regions: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...] | Predicate


def are_regions(owner: object, field: Any, value: object) -> None:
    """Check an option that selects modules: a module class, a tuple, a function or None.

    Raises:
        ArgumentError: `value` is something else.
    """
    several = cast("tuple[Any, ...]", value if isinstance(value, tuple) else (value,))
    fit = all(
        isinstance(kind, type) and issubclass(kind, nn.Module) for kind in several
    )
    predicate = callable(value) and not isinstance(value, (nn.Module, type))
    if value is not None and not (several and fit) and not predicate:
        msg = (
            f"af.{type(owner).__name__}({field.name}={value!r}): expected a module class, a"
            " tuple of module classes, or a function (name, module) -> bool."
        )
        raise ArgumentError(msg)


def select_modules(
    module: nn.Module, regions: Regions | None, owner: str
) -> list[nn.Module]:
    """Return the selected modules, without modules that are inside another selected module.

    None selects the model's direct children, and the members of containers that have no
    forward.

    Raises:
        ModelError: no module is selected (the error names the existing classes), or a selected
        module has no forward, so it is never called.
    """

    def is_meant(name: str, module: nn.Module) -> bool:
        if isinstance(regions, (type, tuple)):
            return isinstance(module, regions)
        if regions is None:
            return bool(name) and has_forward(module)
        return regions(name, module)

    chosen = outermost(module, is_meant)
    if not chosen:
        names = sorted({type(submodule).__qualname__ for submodule in module.modules()})
        msg = (
            f"{owner}: this selects no module of {type(module).__qualname__}. Its modules have"
            f" the classes {', '.join(names)}."
        )
        raise ModelError(msg)
    unique = list(dict.fromkeys(chosen))
    for region in unique:
        _check_forward(region, module, owner)
    return unique


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; `nn.ModuleList`, for example, cannot."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _check_forward(region: nn.Module, module: nn.Module, owner: str) -> None:
    if has_forward(region):
        return
    name = next(name for name, inner in module.named_modules() if inner is region)
    kinds = sorted({type(child).__qualname__ for child in region.children()})
    members = f"its members instead, by their class: {', '.join(kinds)}"
    msg = (
        f"{owner}: this selects {name!r}, a {type(region).__qualname__}, but such a container"
        " has no forward and is never called. Choose"
        f" {members if kinds else 'the module that uses it'}."
    )
    raise ModelError(msg)


def outermost(
    module: nn.Module, is_meant: Predicate, name: str = ""
) -> list[nn.Module]:
    """Return the modules for which a predicate is true, without those inside another one."""
    if is_meant(name, module):
        return [module]
    return [
        region
        for key, child in module.named_children()
        for region in outermost(child, is_meant, f"{name}.{key}" if name else key)
    ]


# Apply the transforms that change the engine's module.


def apply_module_transforms(module: nn.Module, state: TrainState) -> nn.Module:
    """Apply the `module` methods of the setup's transforms to the engine's module.

    The methods change the module in place, because its parameters are bound to the state.

    Raises:
        ModelError: a transform returned a module with other parameters or buffers.
    """
    for owner in state.definition.setup.owners["module"]:
        before = _held_by(module)
        new_module = owner.module(module, state)
        check_returned(owner, "module", new_module, nn.Module)
        after = _held_by(new_module)
        names = before.keys() | after.keys()
        differing = {n for n in names if before.get(n) is not after.get(n)}
        if differing:
            msg = (
                f"{owner!r}.module returned a module with other parameters or buffers than it"
                f" got, and a state does not have these: {', '.join(sorted(differing)[:5])}."
                " Change the module in place, and return it."
            )
            raise ModelError(msg)
        module = new_module
    return module


def _held_by(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# Linear layers with float8 matrix products, computed by torchao.


_MULTIPLE = 16
_CAPABILITY = (8, 9)
_CONVERTED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def check_installed(call: str) -> None:
    """Raise if torchao is not installed, because float8 needs it.

    Raises:
        ArgumentError: torchao is not installed.
    """
    if importlib.util.find_spec("torchao") is None:
        msg = f"{call}: float8 needs torchao. Install it: pip install 'accelfn[fp8]'."
        raise ArgumentError(msg)


def to_float8(model: nn.Module, layers: Predicate | None, call: str) -> None:
    """Let the linear layers of a module multiply in float8, without changing its structure.

    A module is converted only once. Both sizes of a layer must be multiples of 16 on every
    device, because GPUs require it.

    Raises:
        ModelError: a layer's size is not a multiple of 16, or no layer is selected.
        ArgumentError: the device cannot multiply in float8.
    """
    if model in _CONVERTED:
        return
    named = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (layers is None or layers(name, module))
    ]
    _check_layers(named, call)
    _check_device(named[0][1].weight.device, call)
    float8 = cast("Any", importlib.import_module("torchao.float8.float8_linear"))
    for _, module in named:
        # a second layer with the same parameters; only its forward is used
        twin = float8.Float8Linear.from_float(module)
        vars(module)["forward"] = partial(_forward, twin)
    _CONVERTED.add(model)


def _forward(twin: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        inputs = inputs.to(torch.get_autocast_dtype(kind))
    # the inputs are cast above, because torchao casts only on CUDA, and by a deprecated call
    with torch.autocast("cuda", enabled=False):
        return twin.forward(inputs)


def _check_layers(named: list[tuple[str, nn.Linear]], call: str) -> None:
    if not named:
        msg = f"{call}: this selects no torch.nn.Linear, and only these can run in float8."
        raise ModelError(msg)
    odd = [
        f"{name} ({module.in_features} to {module.out_features})"
        for name, module in named
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    ]
    if odd:
        msg = (
            f"{call}: float8 needs layer sizes that are multiples of {_MULTIPLE}, but"
            f" linear layers have other sizes: {', '.join(odd[:5])}. Keep these"
            " layers in bfloat16: layers=lambda name, layer: layer.out_features % 16 == 0."
        )
        raise ModelError(msg)


def _check_device(device: torch.device, call: str) -> None:
    if device.type == "cpu":
        return
    if device.type == "cuda":
        have = torch.cuda.get_device_capability(device)
        if have >= _CAPABILITY:
            return
        problem = f"this GPU has {have[0]}.{have[1]}"
    else:
        problem = f"the device is of type {device.type!r}"
    msg = (
        f"{call}: float8 matrix products need a GPU of compute capability 8.9 or more, but"
        f" {problem}. Use af.autocast('bf16')."
    )
    raise ArgumentError(msg)


# Batch normalization with the statistics of all ranks' samples.
#
# Each rank's count, means and centered sums of squares are all-gathered once, in float64, and
# combined in rank order (Chan, Golub, LeVeque 1979). So all ranks have the same statistics. The
# backward pass sums two numbers per channel. torch's SyncBatchNorm does the same, but only on
# CUDA.


BatchNorm: TypeAlias = _BatchNorm
"""The base class of torch's batch normalization, also of lazy and synchronized layers."""

_LABEL = "sync_batchnorm"
_OWN_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)


_SYNCED = "_accelfn_synced"
"""The attribute of a synchronized layer that holds its `SyncedNorm`."""


class SyncedNorm:
    """The forward of a batch normalization layer, with statistics of all ranks."""

    def __init__(self, layer: BatchNorm, ranks: World, label: str) -> None:
        """Initialize with the layer, which keeps its parameters, buffers and options."""
        self._layer, self.ranks, self.label = layer, ranks, label

    def take_part(self) -> None:
        """Take part in the layer's collective without samples."""
        nothing = torch.zeros(2 * self._layer.num_features + 1, dtype=torch.float64)
        _combine_statistics(nothing.to(self.ranks.device), self.ranks, self.label)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize inputs; with batch statistics, this call is a collective."""
        layer = self._layer
        if not layer.training and layer.running_mean is not None:
            return type(layer).forward(layer, inputs)
        layer._check_input_dim(inputs)  # pyright: ignore[reportPrivateUsage]
        samples = self.ranks.connection.activity.samples
        counts = samples is None or samples.known != 0  # a filler does not count
        outputs, count, mean, var = _Normed.apply(  # pyright: ignore[reportGeneralTypeIssues]
            *(inputs, layer.weight, layer.bias, layer.eps),
            *(self.ranks, counts, self.label),
        )
        if inputs.is_cpu and count == 1:
            size = inputs.size()
            msg = (  # the same message as in torch
                "Expected more than 1 value per channel when training, got input size"
                f" {size}, and no value from other ranks in {self.label!r}"
            )
            raise ValueError(msg)
        if layer.training and layer.track_running_stats:
            self._track(count, mean, var)
        return cast("torch.Tensor", outputs)

    def _track(
        self, count: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> None:
        """Update the running statistics as torch does; without samples they do not change."""
        layer, has_samples = self._layer, count > 0
        factor: Any = 0.0 if layer.momentum is None else layer.momentum
        unbiased_var = var * (count / (count - 1).clamp(min=1))
        moving = (layer.running_mean, mean), (layer.running_var, unbiased_var)
        with torch.no_grad():
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(has_samples)
                if layer.momentum is None:
                    factor = 1 / layer.num_batches_tracked.clamp(min=1).double()
            share = has_samples.double() * factor
            for running, batch in moving:
                if running is not None:
                    running.lerp_(batch.to(running), share.to(running))


class _Normed(torch.autograd.Function):
    """Normalizes inputs with the statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: Any, bias: Any, *how: Any
    ) -> tuple[torch.Tensor, ...]:
        eps, ranks, counts, label = ctx.how = how
        wide = tree.wide(inputs)
        await_turn(label, ranks)
        statistics = _local(wide, counts=counts)
        count, mean, var = _combine_statistics(statistics, ranks, label)
        own_mean, own_var = mean.to(wide), var.to(wide)
        affine = (None if p is None else p.to(wide) for p in (weight, bias))
        outputs = nn.functional.batch_norm(wide, own_mean, own_var, *affine, eps=eps)  # pyright: ignore[reportArgumentType]
        ctx.save_for_backward(inputs, weight, own_mean, own_var, count)
        ctx.mark_non_differentiable(count, mean, var)
        return outputs.to(inputs.dtype), count, mean, var

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> Any:
        inputs, weight, mean, var, count = ctx.saved_tensors
        eps, ranks, counts, label = ctx.how
        wide = tree.wide(inputs)
        scale = torch.ones_like(mean) if weight is None else weight.to(wide)
        masks = [ctx.needs_input_grad[0], True, True]
        nothing = mean.new_empty(0)  # CUDA needs an empty tensor instead of None
        plain, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            *(grads[0].to(wide), wide, scale, mean, var, nothing, nothing),
            *(False, eps, masks),  # use the given statistics
        )
        # an input may need a gradient on some ranks only, so all ranks take part in the sum
        sums, label = torch.cat([by_weight, by_bias]), f"{label} backward"
        await_turn(label, ranks)
        sum_(sums, ranks, label=label)
        input_grad = None
        if ctx.needs_input_grad[0]:
            weight_total, bias_total = (sums / count.to(sums)).split(len(mean))
            inverse = torch.rsqrt(var + eps)
            slope = scale * inverse * inverse * weight_total
            offset = scale * inverse * bias_total - slope * mean
            through = wide * _channels(slope, wide) + _channels(offset, wide)
            # filler samples have no effect on the statistics
            input_grad = (plain - through if counts else plain).to(inputs.dtype)
        needs = ctx.needs_input_grad[1:3]
        parameters = [
            grad.to(weight.dtype) if need and weight is not None else None
            for grad, need in zip((by_weight, by_bias), needs, strict=True)
        ]
        return input_grad, *parameters, None, None, None, None


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.ndim - 2))


def _local(wide: torch.Tensor, *, counts: bool) -> torch.Tensor:
    """Return this rank's means, centered sums of squares and count, in float64."""
    num_channels = wide.shape[1]
    num_values = wide.numel() // num_channels
    statistics = wide.new_zeros(2 * num_channels + 1, dtype=torch.float64)
    if counts and num_values:
        axes = [0, *range(2, wide.ndim)]
        var, mean = torch.var_mean(wide, axes, correction=0)
        statistics[:num_channels] = mean
        statistics[num_channels:-1] = var.double() * num_values
        statistics[-1] = num_values
    return statistics


def _combine_statistics(
    statistics: torch.Tensor, ranks: World, label: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return count, means and variances over all ranks; mean 0, variance 1 without samples."""
    num_channels = (len(statistics) - 1) // 2
    rows = torch.stack(all_gather_list(statistics, ranks, label=label))
    means, squares, counts = rows.split([num_channels, num_channels, 1], dim=1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count.clamp(min=1)
    squares_of_all = squares + counts * (means - mean).square()
    var = torch.where(count > 0, squares_of_all.sum(0) / count.clamp(min=1), 1.0)
    return count, mean, var


class _AnyDims(BatchNorm):
    """Batch normalization that accepts inputs with any number of dims, like SyncBatchNorm."""

    _check_input_dim = nn.SyncBatchNorm._check_input_dim  # pyright: ignore[reportPrivateUsage]


def sync_norms(module: nn.Module, ranks: World, owner: str, *, compiles: bool) -> None:
    """Synchronize a module's batch normalization layers over the ranks.

    Raises:
        ModelError: a layer has a custom forward or its own process group.
    """
    for path, layer in module.named_modules():
        if not isinstance(layer, BatchNorm):
            continue
        if type(layer).forward not in _OWN_FORWARDS or "forward" in vars(layer):
            msg = (
                f"{owner}: {path!r} is a {type(layer).__name__} with a custom forward, which"
                f" {owner} would replace. If another transform set this forward, put {owner}"
                " before it in the chain. Otherwise use a layer of torch.nn."
            )
            raise ModelError(msg)
        chosen = getattr(layer, "process_group", None)
        if chosen is not None and chosen is not ranks.group:
            msg = (
                f"{owner}: {path!r} is a SyncBatchNorm with its own process group. Create it"
                f" without process_group=, or leave out {owner}."
            )
            raise ModelError(msg)
        if isinstance(layer, nn.SyncBatchNorm):
            # DistributedDataParallel rejects this class on the CPU
            cast("Any", layer).__class__ = _AnyDims
        norm: Any = SyncedNorm(layer, ranks, f"{_LABEL} {path}".rstrip())
        vars(layer)[_SYNCED] = norm
        if compiles:  # collectives run between the compiled graphs
            norm = torch.compiler.disable(norm.__call__)
        vars(layer)["forward"] = norm


def order_norms(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that checks whether all ranks run the same synchronized layers.

    Each rank must run a layer, because the layer normalizes the samples of all ranks together.

    Raises:
        CollectiveMismatchError: the returned function raises it on all ranks, if they ran
        different layers.
    """
    norms: list[SyncedNorm] = [
        vars(layer)[_SYNCED] for layer in module.modules() if _SYNCED in vars(layer)
    ]
    if not norms:
        return forward
    order = CallOrder(norms[0].ranks, {norm.label: norm.take_part for norm in norms})

    def checked_forward(*args: Any, **kwargs: Any) -> Any:
        with order.begins():
            output = forward(*args, **kwargs)
            calls = ", ".join(map(repr, order.needed.values())) or "none"
            if len({*order.end(zlib.crc32(calls.encode()))}) > 1:
                order.refuse(f"calls {calls}")
        return output

    return checked_forward


def norm_buffers(module: nn.Module, *, is_synced: bool) -> frozenset[str]:
    """Return the names of running statistics of the synchronized layers, or of all others."""
    return frozenset(
        f"{path}.{key}" if path else key
        for path, owner in module.named_modules()
        if isinstance(owner, BatchNorm) and (_SYNCED in vars(owner)) == is_synced
        for key in owner._buffers  # pyright: ignore[reportPrivateUsage]
    )
