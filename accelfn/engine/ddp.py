# SPDX-License-Identifier: Apache-2.0
"""Data parallel over torch's own DistributedDataParallel, around the loss."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel

from accelfn.collectives import naming
from accelfn.engine.read_loss import ReadLoss, Samples, read_loss
from accelfn.engine.runner import LossFunction, Ones, like, run_backward
from accelfn.errors import WorldError
from accelfn.loss import Number
from accelfn.world import World


class LossModule(nn.Module):
    """A module whose forward is the loss, so that the loss sees the plain model.

    `weight` is a parameter that no optimizer knows. Its gradient is the weight of the loss:
    it travels in DDP's own buckets, so dividing by the weight seen on all ranks costs no
    collective. It is a root of the backward pass of its own, and adds no work to the loss.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the model, and dtype and device of the weight."""
        super().__init__()
        self.module = module
        self.weight = nn.Parameter(torch.zeros((), dtype=dtype, device=device))
        # lists, because a module looks its attributes up, and sets them, slowly
        self.roots = [self.weight]
        self.reads: list[ReadLoss] = []

    def forward(
        self, loss_fn: LossFunction, extras: tuple[Any, ...], samples: Samples
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and the root through which its weight travels."""
        returned = loss_fn(self.module, samples.value, *extras)
        read = read_loss(returned, loss_fn, samples)
        self.reads.append(read)
        return read.scalar, self.roots[0].view(())


class LeanDDP(DistributedDataParallel):
    """DistributedDataParallel whose forward leaves no record for a profiler that is off.

    The record, and a context manager that is a generator, cost some 60 µs a step. Under a
    profiler the forward is torch's own.
    """

    def forward(self, *inputs: Any) -> Any:
        """Return what the module returns, between what DDP does before and after."""
        if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
            return super().forward(*inputs)
        inputs, _ = self._pre_forward(*inputs)
        outer = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = self  # torch.compile looks there
        try:
            returned = self.module(*inputs)
        finally:
            DistributedDataParallel._active_ddp_module = outer
        return self._post_forward(returned)


class DDPRunner:
    """Runs the loss inside DistributedDataParallel; the last micro-batch communicates."""

    reduces = True

    def __init__(
        self, module: nn.Module, world: World, options: Mapping[str, Any]
    ) -> None:
        """Wrap the module for the world's process group, given explicitly.

        DDP's own broadcast of rank 0's values is left out: ranks were checked to agree.
        """
        self._forward = naming("DistributedDataParallel forward", world)
        self._backward = naming("DistributedDataParallel backward", world)
        self.expects_unused = any(
            options.get(name) for name in ("find_unused_parameters", "static_graph")
        )
        dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
        # the parameters' own dtype shares their bucket; below float32 it could not count
        dtype = torch.float64 if dtypes == {torch.float64} else torch.float32
        inner = LossModule(module, dtype, world.device)
        self._carrier, self._reads = inner.weight, inner.reads
        self._roots: tuple[torch.Tensor, torch.Tensor] | None = None
        self._ones = Ones()
        self._sync = True
        with naming("build DistributedDataParallel", world):
            self._wrapped: DistributedDataParallel | None = LeanDDP(
                inner, process_group=world.group, init_sync=False, **options
            )
        world.connection.hold(self.let_go)

    def forward(
        self,
        loss_fn: LossFunction,
        extras: tuple[Any, ...],
        samples: Samples,
        *,
        sync: bool,
    ) -> ReadLoss:
        """Return the loss; without `sync`, DDP does not prepare to reduce."""
        self._sync = sync
        ddp = self._ddp
        with self._forward:
            if sync:
                self._roots = ddp(loss_fn, extras, samples)
            else:
                with ddp.no_sync():
                    self._roots = ddp(loss_fn, extras, samples)
        read = self._reads.pop()
        self._reads.clear()  # what a forward that raised had left
        return read

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`; with sync, average all and the weight."""
        del scalar  # DDP may have put a node of its own behind it
        assert self._roots is not None  # noqa: S101 - forward set it
        (scalar, root), self._roots = self._roots, None
        seed = self._ones.like(scalar) if scale is None else like(scalar, scale)
        seeds = (seed, like(root, weight))
        carrier = self._carrier
        with self._backward:
            if self._sync:
                run_backward((scalar, root), seeds)
            else:
                with self._ddp.no_sync():
                    run_backward((scalar, root), seeds)
        averaged, carrier.grad = carrier.grad, None
        if not self._sync or averaged is None:
            return None
        # with gradient_as_bucket_view it lies in a bucket that the next pass writes
        return averaged if averaged._base is None else averaged.clone()

    def let_go(self) -> None:
        """Drop DistributedDataParallel, and with it the process group."""
        self._wrapped = None

    @property
    def _ddp(self) -> DistributedDataParallel:
        if self._wrapped is None:
            msg = "The world is closed: a step needs its ranks. Step inside its `with` block."
            raise WorldError(msg)
        return self._wrapped
