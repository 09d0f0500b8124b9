# SPDX-License-Identifier: Apache-2.0
"""A model that is split over the ranks, by torch's own `fully_shard`, around the loss."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from accelfn.collectives import all_reduce_, gather_text, naming
from accelfn.engine.read_loss import ReadLoss, Samples
from accelfn.engine.root import RootModule
from accelfn.engine.runner import LossFunction, Ones, like, run_backward
from accelfn.engine.shard_home import ShardHome
from accelfn.engine.untaken import refuse_unused
from accelfn.errors import LossError
from accelfn.state.metrics import Number
from accelfn.world import World


class FSDPRunner:
    """Runs the loss inside a module that torch has split.

    The last micro-batch of an update reduces gradients; or each does, where parts of them
    are accumulated, and the last one the weight.
    """

    reduces = True
    lone_module = None

    def __init__(
        self,
        module: nn.Module,
        home: ShardHome,
        ranks: World,
        *,
        in_parts: bool,
        finds_unused: bool,
    ) -> None:
        """Split the module, which transforms may have changed."""
        self._ranks, self._home, self._in_parts = ranks, home, in_parts
        self.expects_unused = finds_unused
        self._root: Any = RootModule(module)
        with naming("split the model", ranks):
            home.split(self._root)
        self._forward = naming("FSDP forward", ranks)
        self._backward = naming("FSDP backward", ranks)
        self._ones, self._sync, self._ends = Ones(), True, True
        # on this rank: used in this update, and with gradients from micro-batches before
        self._used, self._parts = set[str](), set[str]()

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss; units are gathered as they are reached.

        The first micro-batch of an update begins with rank 0's buffers, as DDP's does.
        """
        self._parts = self._home.parts_there()
        if samples.begins:
            self._used = {*self._parts}
            self._root.share_buffers(self._ranks)
        reduces = sync or self._in_parts
        if reduces is not self._sync:
            self._root.set_requires_gradient_sync(reduces)
        self._sync, self._ends = reduces, sync
        self._home.note_none()
        try:
            with self._forward, self._home.order.begins(kind=reduces):
                self._scalar = self._root(loss_fn, samples)
        except RuntimeError as error:
            _explain(error)
            raise
        return self._root.take_read()

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`; with sync, average all and the weight."""
        scalar = self._scalar
        del self._scalar
        seed = self._ones.like(scalar) if scale is None else like(scalar, scale)
        home, order = self._home, self._home.order
        with self._backward:
            with order.goes_on():
                run_backward((scalar,), (seed,))
                used = home.used()
                self._used |= {name for name, is_used in used.items() if is_used}
                misses = self._ends and not self.expects_unused
                unused = [name for name in used if misses and name not in self._used]
                if any(order.end(len(unused))):
                    self._refuse_unused(unused)
            if not self._sync:
                return None
            total = self._reduced(weight, used)
        return total / self._ranks.size if self._ends else None

    def _reduced(self, weight: Number, used: Mapping[str, bool]) -> torch.Tensor:
        """Reduce what no unit has; return the weight of all ranks."""
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
            # what took part on no rank has no gradient
            some = zip(told, sums[1:].tolist(), strict=True)
            unused = (name for name, count in some if not count)
            home.drop_gradients(n for n in unused if n not in self._parts)
        return sums[0]

    def _refuse_unused(self, unused: list[str]) -> NoReturn:
        """Raise on all ranks what took no part in the loss of some."""
        texts = gather_text("\n".join(unused), self._ranks, label="unused parameters")
        refuse_unused(
            dict.fromkeys(filter(None, "\n".join(texts).split("\n"))), are_held=False
        )


def _explain(error: RuntimeError) -> None:
    """Raise what torch says of parts that meet whole tensors in words of a model.

    Raises:
        LossError: a module of a unit was called otherwise than the unit itself, or the loss
            asked for gradients of its parameters.
    """
    if "differentiated Tensor" in str(error):
        msg = (
            "The loss calls torch.autograd.grad with parameters that af.wrap_fsdp() has split:"
            " it has no gradients of them before the backward pass. Train this model with"
            " af.wrap_ddp(), or read the gradients in a transform's grads."
        )
        raise LossError(msg) from error
    if "mixed torch.Tensor and DTensor" in str(error):
        msg = (
            "The loss used parameters of a unit that was not gathered: a unit of"
            " af.wrap_fsdp is gathered when it is called itself. Call it as unit(...), not"
            " by another method of it nor by a module inside it; or give units= that leave"
            " that module out."
        )
        raise LossError(msg) from error
