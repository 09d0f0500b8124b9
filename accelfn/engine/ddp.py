# SPDX-License-Identifier: Apache-2.0
"""Data parallelism with torch's DistributedDataParallel, around the loss."""

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
from accelfn.collectives.failures import naming
from accelfn.collectives.packed import pack, sum_, unpack_
from accelfn.engine.doctor import reject_unused
from accelfn.engine.optimizer import LiveUpdate
from accelfn.engine.runner import (
    LossFunction,
    Ones,
    ReadLoss,
    Samples,
    like,
    read_loss,
    run_backward,
)
from accelfn.errors import ModelError, WorldError
from accelfn.state.results import Number
from accelfn.world import World

# Compressed gradients in buckets of DistributedDataParallel.
#
# # Gradients are divided by the total weight of the losses before compression, so they are near
# the mean gradient. Therefore 16 bits do not overflow for large batches, and errors of one
# update have the right scale in the next. A loss scale brings small gradients into the range of
# 16 bits; without 16 bits it is divided out.


Gradients: TypeAlias = Mapping[str, torch.Tensor]
Reduced: TypeAlias = torch.futures.Future[torch.Tensor]

_LABEL = "compressed gradients"


class Narrow:
    """Sums gradients in 16 bits."""

    def __init__(self, name: str, dtype: torch.dtype, ranks: World) -> None:
        """Take the slot's name, the 16-bit dtype and the ranks."""
        self.name = name
        self._dtype, self._ranks = dtype, ranks
        self._is_scaled = False
        self._unit = torch.ones(())

    def begin(self, slot: None, seed: int, loss_scale: torch.Tensor | None) -> None:
        """Note whether there is a loss scale; slot and seed are not used."""
        del slot, seed
        self._is_scaled = loss_scale is not None

    def weigh(self, weight: torch.Tensor) -> None:
        """Choose a unit, the next power of 2 of the weight; dividing by it changes no bit."""
        mantissa, exponent = torch.frexp(weight)
        exponent = exponent - (mantissa == 0.5).to(exponent)  # it is a power of 2
        unit = torch.ldexp(torch.ones_like(weight), exponent)
        divides = (weight > 0) & (not self._is_scaled)
        self._unit = torch.where(divides, unit, 1.0)

    def reduce(self, bucket: torch.Tensor, gradients: Gradients) -> Reduced:
        """Sum over the ranks in 16 bits, during the backward pass."""
        del gradients
        unit, size = self._unit.to(bucket), self._ranks.size
        narrow = (bucket / unit).to(self._dtype)
        work: Any = dist.all_reduce(narrow, group=self._ranks.group, async_op=True)

        def widen(future: Any) -> torch.Tensor:
            return bucket.copy_(future.value()[0]).mul_(unit / size)

        return work.get_future().then(widen)

    def end(self) -> dict[str, Any]:
        """Keep nothing."""
        return {}


@attrs.frozen
class _Matrix:
    """A gradient as a matrix in units of the mean gradient, and its last factor."""

    name: str
    gradient: torch.Tensor
    rows: torch.Tensor
    factor: torch.Tensor


class LowRank:
    """PowerSGD: reduces matrices as products of two thin ones, with error feedback.

    Each matrix is compressed independently, by its parameter's name, so a resumed run with
    other buckets gives the same result.
    """

    def __init__(
        self, name: str, state: str, ranks: World, *, rank: int, start: int, rate: float
    ) -> None:
        """Take the slot's name, the state's name, the ranks and the options."""
        self.name = name
        self._state, self._seed, self._ranks = state, 0, ranks
        self._rank, self._start, self._rate = rank, start, rate
        self._scale: torch.Tensor | None = None
        self._unit = torch.ones(())
        self._before: dict[str, Any] = {}
        self._errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}

    def begin(self, slot: Any, seed: int, loss_scale: torch.Tensor | None) -> None:
        """Load errors and factors from the slot."""
        self._before, self._seed, self._scale = slot, seed, loss_scale
        self._errors, self._factors = dict(slot["error"]), dict(slot["q"])

    def weigh(self, weight: torch.Tensor) -> None:
        """Choose the unit of the mean gradient."""
        scale = 1.0 if self._scale is None else self._scale.to(weight)
        # without any weight, errors are applied with the loss scale alone
        self._unit = torch.where(weight > 0, weight / self._ranks.size, 1.0) * scale

    def end(self) -> dict[str, Any]:
        """Return the slot with new errors and factors."""
        count = self._before["iter"] + 1
        slot = {"iter": count, "error": self._errors, "q": self._factors}
        self._before, self._errors, self._factors = {}, {}, {}
        return {self.name: slot}

    def reduce(self, bucket: torch.Tensor, gradients: Gradients) -> Reduced:
        """Reduce synchronously, so that all ranks run collectives in the same order."""
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
        """Whether the factors are smaller than the matrix by the minimum rate."""
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
        """Draw an initial factor, equal on all ranks."""
        key = draws.key(self._seed, self._state, self.name)
        seed = draws.key(key, name) % 2**63
        generator = torch.Generator().manual_seed(seed)
        shape = rows.shape[1], min(*rows.shape, self._rank)
        return torch.randn(shape, dtype=rows.dtype, generator=generator).to(rows.device)

    def _approximate_(self, matrices: list[_Matrix]) -> None:
        """Set gradients to their approximate mean, and keep the errors."""
        bases = [matrix.rows @ matrix.factor for matrix in matrices]
        self._mean_(bases)
        bases = [torch.linalg.qr(matrix).Q for matrix in bases]
        right = [
            matrix.rows.mH @ basis
            for matrix, basis in zip(matrices, bases, strict=True)
        ]
        self._mean_(right)
        for matrix, basis, factor in zip(matrices, bases, right, strict=True):
            product = basis @ factor.mH
            self._errors[matrix.name] = matrix.rows - product
            self._factors[matrix.name] = factor
            matrix.gradient.copy_(
                (product * self._unit.to(product)).view_as(matrix.gradient)
            )

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
"""A method to reduce gradients in fewer bytes."""
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_COPY = torch.ops.aten.copy_.default


class LossModule(nn.Module):
    """A module whose forward is the loss, so that the loss gets the plain model.

    `weight` is a parameter that no optimizer steps. Its gradient is the weight of the loss,
    which DDP reduces in its buckets, so the total weight of all ranks costs no collective. It
    is a separate root of the backward pass, and adds no work to the loss.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the model, and the weight's dtype and device."""
        super().__init__()
        self.module = module
        self.weight = nn.Parameter(torch.zeros((), dtype=dtype, device=device))
        # lists, because getting and setting attributes of a module is slow
        self.roots = [self.weight]
        self.reads: list[ReadLoss] = []

    def forward(
        self, loss_fn: LossFunction, samples: Samples
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and the root of its weight."""
        result = loss_fn(self.module, samples.value, *samples.extras)
        read = read_loss(result, loss_fn, samples)
        self.reads.append(read)
        return read.scalar, self.roots[0].view(())


class LeanDDP(DistributedDataParallel):
    """DistributedDataParallel with final buckets from the start, and a faster forward.

    A backend's order of summation depends on a value's place in a bucket. torch rebuilds
    buckets after the first step of a process, so a resumed run would have other buckets, and
    other last bits, than an uninterrupted run.

    torch's forward spends some 60 µs on a disabled profiler and a context manager; this one
    does not. Under a profiler torch's own forward runs.
    """

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return parameters in the most likely order of their gradients."""
        params, are_sparse = super()._build_params_for_reducer()
        if not self.find_unused_parameters:
            params, are_sparse = params[::-1], are_sparse[::-1]
        # otherwise torch builds buckets once, in reverse order
        self._in_reducer = params
        return params, are_sparse

    def sparse_params(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are sparse."""
        pairs = zip(*self._build_params_for_reducer(), strict=True)
        return [param for param, is_sparse in pairs if is_sparse]

    def params_missing(self) -> list[nn.Parameter]:
        """Return the parameters without a gradient in the last pass.

        Parameters that the loss froze in that pass are left out.
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
        """Build the final buckets now; torch would after a step."""
        self.reducer._push_all_rebuilt_params()
        with _KeepsOrder() if self.device.type == "meta" else NOTHING:
            self.reducer._rebuild_buckets()

    def learn(self) -> None:
        """Take the next pass, which reduces, as the static graph.

        If torch is told before, it adds the passes before that one to the graph, waits for
        gradients that never come, and reduces nothing any more (torch 2.13).
        """
        self._set_static_graph()

    def forward(self, *inputs: Any) -> Any:
        """Run the module between DDP's own pre- and post-forward steps."""
        if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
            return super().forward(*inputs)
        inputs, _ = self._pre_forward(*inputs)
        DistributedDataParallel._active_ddp_module = (
            self  # torch.compile reads this attribute
        )
        try:
            output = self.module(*inputs)
        finally:
            # simulated ranks take turns: it may be another rank's module now
            if DistributedDataParallel._active_ddp_module is self:
                DistributedDataParallel._active_ddp_module = None
        return self._post_forward(output)


class _KeepsOrder(TorchDispatchMode):
    """Lets DDP keep its own order of buckets, instead of rank 0's.

    Meta tensors cannot be read, and the order is the same on all ranks.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, except for a copy from meta to the CPU."""
        del types
        if func is _COPY and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _gradients(bucket: dist.GradBucket) -> list[torch.Tensor]:
    """Return the gradients in a bucket, as views.

    The bucket's own `gradients()` assumes contiguous, real parameters.
    """
    params = bucket.parameters()
    lengths = [param.numel() * (1 + param.is_complex()) for param in params]
    parts = bucket.buffer().split(lengths)
    return [_laid_out(*pair) for pair in zip(parts, params, strict=True)]


def _laid_out(part: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return flat values as a gradient with the strides of its parameter."""
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
    """Call the reduction of a bucket; torch checks these annotations."""
    reduce_bucket = reduce()
    assert reduce_bucket is not None  # noqa: S101 - the runner is alive during its backward pass
    return reduce_bucket(bucket)


class DDPRunner:
    """Runs the loss in DistributedDataParallel; only the last micro-batch communicates."""

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
        """Wrap the module for the world's process group, given explicitly.

        DDP's initial broadcast of rank 0's values is disabled: ranks were already compared. For
        compression, and for an update in the backward pass, the weight is all-reduced before
        the gradients.
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
        # as precise as the most precise gradient, so that no gradient is divided by a rounded
        # weight; and at least float32, to count exactly
        is_double = bool(dtypes & {torch.float64, torch.complex128})
        dtype = torch.float64 if is_double else torch.float32
        inner = LossModule(module, dtype, ranks.device)
        self._carrier, self._reads = inner.weight, inner.reads
        self._roots: tuple[torch.Tensor, torch.Tensor] | None = None
        self._ones = Ones()
        self._sync = True
        self._weight = torch.zeros(1)
        self._learns = bool(options.get("static_graph"))
        built: dict[str, Any] = {**options, "static_graph": False}
        with naming("build DistributedDataParallel", ranks):
            ddp = LeanDDP(inner, process_group=ranks.group, init_sync=False, **built)
            ddp.lay_out()
        self._wrapped: LeanDDP | None = ddp
        if self._is_early:
            self._refuse_sparse(ddp)
            # weakly: Python does not collect references that the reducer holds in C++
            ddp.register_comm_hook(weakref.WeakMethod(self._reduce), _hook)
        ranks.connection.hold(self.let_go)

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss; without `sync`, DDP does not prepare to reduce."""
        self._sync = sync
        ddp = self._ddp
        # torch treats a pass after `no_sync` as a continuation of that one
        ddp.require_forward_param_sync = samples.begins
        with self._forward:
            if sync and self._learns:
                ddp.learn()
                self._learns = False
            with NOTHING if sync else ddp.no_sync():
                self._roots = ddp(loss_fn, samples)
        read = self._reads.pop()
        self._reads.clear()  # results of a forward that raised
        return read

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`; with sync, average all and the weight."""
        del scalar  # DDP may have wrapped it
        assert self._roots is not None  # noqa: S101 - forward set it
        (scalar, root), self._roots = self._roots, None
        seed = self._ones.like(scalar) if scale is None else like(scalar, scale)
        carrier, early = self._carrier, self._sync and self._is_early
        if early:
            self._sum(weight)
        # 16 bits cannot hold a count; it was summed before
        seeds = (seed, like(root, 0 if early else weight))
        with self._backward:
            with NOTHING if self._sync else self._ddp.no_sync():
                run_backward((scalar, root), seeds)
            self._step_reduced(wait=True)
        # an earlier micro-batch's gradient is only reduced if the last one uses the parameter
        missing = self._ddp.params_missing() if self._sync else []
        if missing:
            reject_unused((self._names[id(p)] for p in missing), are_held=False)
        mean_weight, carrier.grad = carrier.grad, None
        if not self._sync or mean_weight is None:
            return None
        if early:
            return self._weight.to(mean_weight)[0]
        # with gradient_as_bucket_view the next pass overwrites it in its bucket
        return mean_weight if mean_weight._base is None else mean_weight.clone()

    def _sum(self, weight: Number) -> None:
        """All-reduce the weight before the gradients, for compression and early updates."""
        ranks = self._ranks
        total = torch.zeros(1, dtype=torch.float64, device=ranks.device) + weight
        sum_(total, ranks, label="weight of the loss")
        self._weight = total / ranks.size
        self._reduced.clear()  # buckets of a pass that raised
        if self._compression is not None:
            self._compression.weigh(total[0])
        if self._live is not None:
            self._live.divide_by(self._weight[0])

    def _reduce(self, bucket: dist.GradBucket) -> Reduced:
        """Reduce a bucket that the backward pass has filled."""
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
        """Reject sparse gradients, which are in no bucket."""
        sparse = [self._names[id(param)] for param in ddp.sparse_params()]
        if sparse:
            msg = (
                f"af.wrap_ddp: the gradients of {', '.join(sparse[:5])} are sparse, which"
                " af.compress_grads and af.optimizer_in_backward cannot take from its buckets."
                " Make those layers with sparse=False, or leave these transforms out."
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
        """Step the parameters of reduced buckets, in order."""
        while self._live is not None and self._reduced:
            future, params = self._reduced[0]
            if not (wait or future.done()):
                return
            future.wait()
            self._reduced.popleft()
            for param in params:
                self._live.take(param)

    def let_go(self) -> None:
        """Release DistributedDataParallel and its process group."""
        self._wrapped = None

    @property
    def _ddp(self) -> LeanDDP:
        if self._wrapped is None:
            msg = "The world is closed: a step needs its ranks. Step inside its `with` block."
            raise WorldError(msg)
        return self._wrapped
