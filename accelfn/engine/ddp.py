# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: run the loss inside torch's DistributedDataParallel."""

import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.base import draws, tree
from accelfn.base.draws import NOTHING
from accelfn.base.system import ddp_options
from accelfn.collectives.failures import naming
from accelfn.collectives.packed import pack, sum_, unpack_
from accelfn.engine.doctor import reject_unused
from accelfn.engine.optimizer import LiveUpdate
from accelfn.engine.runner import (
    LossFunction,
    ReadLoss,
    RootModule,
    Samples,
    like,
    run_backward,
)
from accelfn.errors import ModelError, WorldError
from accelfn.state.results import Number
from accelfn.world import World

# pyright: reportPrivateUsage=false

# Compress the gradients in the buckets of DistributedDataParallel.
#
# Before compression, gradients are divided by the total weight of the losses, so that they have
# about the size of the mean gradient. Then 16 bits do not overflow for large batches, and the
# compression errors of one update have the right scale in the next update. A loss scale brings
# small gradients into the range of 16 bits. PowerSGD divides gradients by the loss scale.


Gradients: TypeAlias = Mapping[str, torch.Tensor]
Reduced: TypeAlias = torch.futures.Future[torch.Tensor]

_LABEL = "compressed gradients"


class Narrow:
    """Sums gradients over the ranks in 16 bits."""

    def __init__(self, name: str, dtype: torch.dtype, ranks: World) -> None:
        """Initialize with the slot's name, the 16-bit dtype and the ranks."""
        self.name = name
        self._dtype, self._ranks = dtype, ranks
        self._is_scaled = False
        self._unit = torch.ones(())

    def begin(self, slot: None, seed: int, loss_scale: torch.Tensor | None) -> None:
        """Begin a pass: record whether there is a loss scale. Slot and seed are not used."""
        del slot, seed
        self._is_scaled = loss_scale is not None

    def weigh(self, weight: torch.Tensor) -> None:
        """Choose the divisor of gradients: the smallest power of 2 that is at least the weight.

        Dividing by a power of 2 does not round.
        """
        mantissa, exponent = torch.frexp(weight)
        # if the mantissa is 0.5, the weight itself is a power of 2
        exponent = exponent - (mantissa == 0.5).to(exponent)
        unit = torch.ldexp(torch.ones_like(weight), exponent)
        divides = (weight > 0) & (not self._is_scaled)
        self._unit = torch.where(divides, unit, 1.0)

    def reduce(self, bucket: torch.Tensor, gradients: Gradients) -> Reduced:
        """Start to sum a bucket over the ranks in 16 bits, during the backward pass."""
        del gradients
        unit, size = self._unit.to(bucket), self._ranks.size
        narrow = (bucket / unit).to(self._dtype)
        work: Any = dist.all_reduce(narrow, group=self._ranks.group, async_op=True)

        def widen(future: Any) -> torch.Tensor:
            return bucket.copy_(future.value()[0]).mul_(unit / size)

        return work.get_future().then(widen)

    def end(self) -> dict[str, Any]:
        """Return no slots, because sums in 16 bits keep no errors for the next update."""
        return {}


@attrs.frozen
class _Matrix:
    """A gradient, its matrix at the scale of the mean gradient, and its last thin factor."""

    name: str
    gradient: torch.Tensor
    rows: torch.Tensor
    factor: torch.Tensor


class LowRank:
    """PowerSGD: reduces each matrix as a product of two thin matrices (factors).

    Each rank adds the error of this approximation to its next gradient. Each matrix is
    compressed independently, under its parameter's name. So a resumed run with other buckets
    gives the same result.
    """

    def __init__(
        self, name: str, state: str, ranks: World, *, rank: int, start: int, rate: float
    ) -> None:
        """Initialize with the names of slot and state, the ranks and the options."""
        self.name = name
        self._state, self._seed, self._ranks = state, 0, ranks
        self._rank, self._start, self._rate = rank, start, rate
        self._scale: torch.Tensor | None = None
        self._unit = torch.ones(())
        self._before: dict[str, Any] = {}
        self._errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}

    def begin(self, slot: Any, seed: int, loss_scale: torch.Tensor | None) -> None:
        """Begin a pass: load errors and factors from the slot."""
        self._before, self._seed, self._scale = slot, seed, loss_scale
        self._errors, self._factors = dict(slot["error"]), dict(slot["q"])

    def weigh(self, weight: torch.Tensor) -> None:
        """Choose the divisor that turns summed gradients into the mean gradient."""
        scale = 1.0 if self._scale is None else self._scale.to(weight)
        # if the weight is 0, only the loss scale applies to the errors
        self._unit = torch.where(weight > 0, weight / self._ranks.size, 1.0) * scale

    def end(self) -> dict[str, Any]:
        """Return the slot with the new errors and factors, by its name."""
        count = self._before["iter"] + 1
        slot = {"iter": count, "error": self._errors, "q": self._factors}
        self._before, self._errors, self._factors = {}, {}, {}
        return {self.name: slot}

    def reduce(self, bucket: torch.Tensor, gradients: Gradients) -> Reduced:
        """Reduce a bucket at once, so that all ranks run collectives in the same order."""
        plain: list[torch.Tensor] = []
        matrices: list[_Matrix] = []
        for name, gradient in gradients.items():
            if self._before["iter"] >= self._start and self._pays(gradient):
                matrices.append(self._matrix(name, gradient))
            else:
                plain.append(gradient)
        if plain:
            self._mean_(plain)
        if matrices:
            self._approximate_(matrices)
        future: Reduced = torch.futures.Future()
        future.set_result(bucket)
        return future

    def _pays(self, gradient: torch.Tensor) -> bool:
        """Return whether the two factors are smaller than the matrix by the minimum rate."""
        if gradient.ndim < 2 or not gradient.numel():
            return False
        rows, columns = _shape(gradient)
        rank = min(rows, columns, self._rank)
        return (rows + columns) * rank * self._rate < rows * columns

    def _matrix(self, name: str, gradient: torch.Tensor) -> _Matrix:
        wide = tree.wide(gradient).reshape(_shape(gradient)).contiguous()
        rows = wide / self._unit.to(wide)
        if name in self._errors:
            rows = rows + self._errors[name]
        factor = self._factors.get(name)
        if factor is None:
            factor = self._draw_factor(name, rows)
        return _Matrix(name, gradient, rows, torch.linalg.qr(factor).Q)

    def _draw_factor(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Draw the initial thin factor of a parameter, equal on all ranks."""
        key = draws.key(self._seed, self._state, self.name)
        generator = torch.Generator().manual_seed(draws.key(key, name) % 2**63)
        shape = rows.shape[1], min(*rows.shape, self._rank)
        return torch.randn(shape, dtype=rows.dtype, generator=generator).to(rows.device)

    def _approximate_(self, matrices: list[_Matrix]) -> None:
        """Replace gradients by their approximate mean over the ranks, and keep the errors."""
        bases = [matrix.rows @ matrix.factor for matrix in matrices]
        self._mean_(bases)
        bases = [torch.linalg.qr(matrix).Q for matrix in bases]
        pairs = zip(matrices, bases, strict=True)
        right = [matrix.rows.mH @ basis for matrix, basis in pairs]
        self._mean_(right)
        for matrix, basis, factor in zip(matrices, bases, right, strict=True):
            product = basis @ factor.mH
            self._errors[matrix.name] = matrix.rows - product
            self._factors[matrix.name] = factor
            product = product * self._unit.to(product)
            matrix.gradient.copy_(product.view_as(matrix.gradient))

    def _mean_(self, tensors: list[torch.Tensor]) -> None:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = pack(same)
            sum_(flat, self._ranks, label=_LABEL)
            unpack_(flat.div_(self._ranks.size), same)


def _shape(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the shape of a gradient as a matrix: the first dimension by all others."""
    return gradient.shape[0], gradient.numel() // gradient.shape[0]


Compression: TypeAlias = Narrow | LowRank
"""A method that reduces gradients with fewer bytes."""
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_COPY = torch.ops.aten.copy_.default


class LeanDDP(DistributedDataParallel):
    """DistributedDataParallel with its final buckets from the start, and a faster forward.

    The order in which a backend sums values depends on their place in a bucket. torch rebuilds
    the buckets after the first step of a process. So a resumed run would have other buckets
    than an uninterrupted run, and its results would differ in the last bits.

    torch's forward spends some 60 µs on a disabled profiler and a context manager, which this
    class leaves out. It also leaves out DDP's steps in a pass that does not communicate. Under a
    profiler, torch's own forward runs.
    """

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters in the order of their gradients, as far as it is known."""
        params, are_sparse = super()._build_params_for_reducer()
        if not self.find_unused_parameters:
            params, are_sparse = params[::-1], are_sparse[::-1]
        # with find_unused_parameters, torch itself reverses the order, and builds the buckets
        # once
        self._in_reducer = params
        return params, are_sparse

    def params_missing(self) -> list[nn.Parameter]:
        """Return the parameters that got no gradient in the last pass.

        Parameters that the loss itself froze in that pass are left out.
        """
        try:
            self._check_reducer_finalized()
        except RuntimeError as error:
            match = _INDICES.search(str(error))
            params = self._in_reducer
            missing = [params[int(i)] for i in match[1].split()] if match else params
            return [param for param in missing if param.requires_grad]
        return []

    def lay_out(self) -> None:
        """Build the final buckets now; torch would build them after the first step."""
        self.reducer._push_all_rebuilt_params()
        with _KeepsOrder() if self.device.type == "meta" else NOTHING:
            self.reducer._rebuild_buckets()

    def forward(self, *inputs: Any) -> Any:
        """Run the module between DDP's own steps before and after a forward pass."""
        if profiler._is_profiler_enabled:
            return super().forward(*inputs)
        broadcasts = self.require_forward_param_sync  # of buffers
        communicates = broadcasts or self.require_backward_grad_sync
        if communicates:
            inputs, _ = self._pre_forward(*inputs)
        # torch.compile reads this attribute
        DistributedDataParallel._active_ddp_module = self
        try:
            output = self.module(*inputs)
        finally:
            # simulated ranks take turns, so another rank's module may be active now
            if DistributedDataParallel._active_ddp_module is self:
                DistributedDataParallel._active_ddp_module = None
        return self._post_forward(output) if communicates else output


class _KeepsOrder(TorchDispatchMode):
    """Lets DDP keep its own order of buckets, instead of using rank 0's order.

    On the meta device tensors have no values, so rank 0's order cannot be read. All ranks have
    the same order there.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, except for copies from meta tensors to the CPU."""
        del types
        if func is _COPY and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _gradients(bucket: dist.GradBucket) -> list[torch.Tensor]:
    """Return the gradients in a bucket, as views.

    The bucket's own `gradients()` supports only contiguous, real parameters.
    """
    params = bucket.parameters()
    lengths = [param.numel() * (1 + param.is_complex()) for param in params]
    parts = bucket.buffer().split(lengths)
    return [_laid_out(*pair) for pair in zip(parts, params, strict=True)]


def _laid_out(part: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a gradient from its flat piece of a bucket, with the parameter's strides."""
    if param.is_complex():
        part = torch.view_as_complex(part.view(param.numel(), 2))
    dense = torch.ops.aten.is_non_overlapping_and_dense.default
    if param.is_contiguous() or not dense(param):
        return part.view(param.shape)
    return part.as_strided(param.size(), param.stride())


def _hook(
    reduce: "weakref.WeakMethod[Callable[[dist.GradBucket], Reduced]]",
    bucket: dist.GradBucket,
) -> Reduced:
    """Reduce a bucket. torch checks the annotations of this function."""
    reduce_bucket = reduce()
    assert reduce_bucket is not None  # noqa: S101 - the runner is alive during its backward pass
    return reduce_bucket(bucket)


class DDPRunner:
    """Runs the loss in DistributedDataParallel. Only the last micro-batch communicates."""

    reduces = True
    lone_module = None

    def __init__(
        self,
        module: nn.Module,
        ranks: World,
        options: Mapping[str, Any],
        compression: Compression | None = None,
        live: LiveUpdate | None = None,
    ) -> None:
        """Wrap the module in DDP, over the world's process group.

        DDP's first broadcast of rank 0's values is turned off, because the ranks were already
        compared. For compression, and for an update during the backward pass, the weight is
        all-reduced before the gradients.
        """
        self._ranks, self._compression, self._live = ranks, compression, live
        self._is_early = compression is not None or live is not None
        if live is not None:
            live.by_buckets = True
        self._reduced: deque[tuple[Reduced, list[torch.Tensor]]] = deque()
        self._names = {id(param): name for name, param in module.named_parameters()}
        self._forward = naming("DistributedDataParallel forward", ranks)
        self._backward = naming("DistributedDataParallel backward", ranks)
        self.expects_unused = any(
            options.get(name) for name in ("find_unused_parameters", "static_graph")
        )
        dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
        # the weight is as precise as the most precise gradient, so that no gradient is divided
        # by a rounded weight; and at least float32, to count exactly
        is_double = bool(dtypes & {torch.float64, torch.complex128})
        dtype = torch.float64 if is_double else torch.float32
        carrier = torch.zeros((), dtype=dtype, device=ranks.device)
        self._carrier = nn.Parameter(carrier)
        self._inner = RootModule(module, self._carrier)
        self._roots: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sync = True
        self._weight = torch.zeros(1)
        self._learns = bool(options.get("static_graph"))
        built = ddp_options({**options, "static_graph": False})
        with naming("build DistributedDataParallel", ranks):
            ddp = LeanDDP(
                self._inner, process_group=ranks.group, init_sync=False, **built
            )
            ddp.lay_out()
        self._wrapped: LeanDDP | None = ddp
        if self._is_early:
            self._refuse_sparse(ddp)
            # a weak reference: Python does not collect references that the reducer holds in C++
            ddp.register_comm_hook(weakref.WeakMethod(self._reduce), _hook)
        ranks.connection.hold(self.let_go)

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss. Without `sync`, DDP does not prepare to reduce gradients."""
        self._sync = sync
        ddp = self._ddp
        flags = vars(ddp)  # assigning attributes of a module takes longer
        flags["require_backward_grad_sync"] = sync  # as `no_sync` does
        # otherwise torch treats a pass after `no_sync` as part of the earlier update
        flags["require_forward_param_sync"] = samples.into is None
        with self._forward:
            # Use the next pass, which reduces gradients, as the static graph. If it is set
            # earlier, torch also adds passes without a reduction to the graph. torch then waits
            # for gradients that never come, and reduces nothing any more (torch 2.13).
            if sync and self._learns:
                ddp._set_static_graph()
                self._learns = False
            self._roots = ddp(loss_fn, samples)
        return self._inner.take_read()

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`; with sync, average gradients and weight."""
        del scalar  # DDP may have wrapped this scalar
        assert self._roots is not None  # noqa: S101 - forward set it
        (scalar, root), self._roots = self._roots, None
        carrier, early = self._carrier, self._sync and self._is_early
        if early:
            self._sum(weight)
        # with compression the weight was already summed, because 16 bits cannot hold a count
        seeds = (like(scalar, scale), like(root, 0 if early else weight))
        with self._backward:
            run_backward((scalar, root), seeds)
            self._step_reduced(wait=True)
        # all parameters must be used in the last micro-batch, even if earlier micro-batches used
        # all of them
        missing = self._ddp.params_missing() if self._sync else []
        if missing:
            reject_unused((self._names[id(p)] for p in missing), are_held=False)
        mean_weight, carrier.grad = carrier.grad, None
        if not self._sync or mean_weight is None:
            return None
        if early:
            return self._weight.to(mean_weight)[0]
        # with gradient_as_bucket_view this is a view into a bucket, which the next pass
        # overwrites
        return mean_weight if mean_weight._base is None else mean_weight.clone()

    def _sum(self, weight: Number) -> None:
        """All-reduce the weight before the gradients are reduced."""
        ranks = self._ranks
        total = torch.zeros(1, dtype=torch.float64, device=ranks.device) + weight
        sum_(total, ranks, label="weight of the loss")
        self._weight = total / ranks.size
        self._reduced.clear()  # drops buckets of a pass that raised an error
        if self._compression is not None:
            self._compression.weigh(total[0])
        if self._live is not None:
            self._live.divide_by(self._weight[0])

    def _reduce(self, bucket: dist.GradBucket) -> Reduced:
        """Reduce a bucket whose gradients are complete."""
        params, gradients = bucket.parameters(), _gradients(bucket)
        if self._compression is None:
            future = self._average(bucket.buffer())
        else:
            named = {
                self._names[id(param)]: gradient
                for param, gradient in zip(params, gradients, strict=True)
                if id(param) in self._names
            }
            future = self._compression.reduce(bucket.buffer(), named)
        if self._live is not None:
            model_params = [param for param in params if param is not self._carrier]
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            self._reduced.append((future, model_params))
            self._step_reduced(wait=False)
        return future

    def _refuse_sparse(self, ddp: LeanDDP) -> None:
        """Raise if a gradient is sparse, because then it is in no bucket."""
        pairs = zip(*ddp._build_params_for_reducer(), strict=True)
        sparse = [self._names[id(param)] for param, is_sparse in pairs if is_sparse]
        if sparse:
            msg = (
                f"af.wrap_ddp: the gradients of {', '.join(sparse[:5])} are sparse, but"
                " af.compress_grads and af.optimizer_in_backward need dense gradients. Create"
                " those layers with sparse=False, or leave these transforms out."
            )
            raise ModelError(msg)

    def _average(self, bucket: torch.Tensor) -> Reduced:
        """Average a bucket over the ranks, as DDP does without a hook."""
        bucket.mul_(1.0 / self._ranks.size)
        work: Any = dist.all_reduce(bucket, group=self._ranks.group, async_op=True)

        def first(future: Any) -> torch.Tensor:
            return future.value()[0]

        return work.get_future().then(first)

    def _step_reduced(self, *, wait: bool) -> None:
        """Step the parameters of buckets that are reduced, in order."""
        while self._live is not None and self._reduced:
            future, params = self._reduced[0]
            if not (wait or future.done()):
                return
            future.wait()
            self._reduced.popleft()
            for param in params:
                self._live.take(param)

    def let_go(self) -> None:
        """Release DistributedDataParallel and with it the process group."""
        self._wrapped = None

    @property
    def _ddp(self) -> LeanDDP:
        if self._wrapped is None:
            msg = "The world is closed. Call the step inside the `with` block of the world."
            raise WorldError(msg)
        return self._wrapped
