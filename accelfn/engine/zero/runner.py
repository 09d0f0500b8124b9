# SPDX-License-Identifier: Apache-2.0
"""Runs the loss inside DeepSpeed's engine; the last micro-batch reduces, or each does."""

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from accelfn.collectives import gather_text, naming, start_sum_
from accelfn.engine.read_loss import ReadLoss, Samples
from accelfn.engine.root import RootModule
from accelfn.engine.runner import LossFunction, like
from accelfn.engine.zero.gathered import NOT_GATHERED, Gathered
from accelfn.engine.zero.home import ZeroHome
from accelfn.engine.zero.package import parted
from accelfn.errors import LossError, UnusedParametersError, WorldError
from accelfn.state.metrics import Number
from accelfn.world import World

_UNUSED = (
    "Some parameters took no part in the loss of some ranks: {told}. Ranks wait for the gradients"
    " of all. The state is as it was. Let all ranks use them, if only by 0, as in"
    " `+ 0 * net.head.weight.sum()`, freeze them with requires_grad_(False), or take"
    " af.wrap_fsdp(find_unused_parameters=True)."
)


class _Sums:
    """The weight of the loss, and how many parameters had no gradient, of all ranks.

    They cross beside DeepSpeed's last sum of gradients: ranks wait for both at once.
    """

    def __init__(self, home: ZeroHome, ranks: World, weight: Number) -> None:
        self._home, self._ranks, self._weight = home, ranks, weight

    def start(self) -> None:
        """Begin to sum, when all gradients have come."""
        counts, ranks = [0.0, len(self._home.unused())], self._ranks
        self._flat = torch.tensor(counts, dtype=torch.float64, device=ranks.device)
        self._flat[0] = self._weight
        self._wait = start_sum_(self._flat, ranks, label="weight of the loss")

    def wait(self) -> torch.Tensor:
        """Return both sums."""
        self._wait()
        return self._flat


class ZeroRunner:
    """Runs the loss inside DeepSpeed's engine."""

    reduces = True
    expects_unused = False
    lone_module = None

    def __init__(
        self, module: nn.Module, home: ZeroHome, ranks: World, *, in_parts: bool
    ) -> None:
        """Let DeepSpeed take over the module, which transforms may have changed."""
        self._ranks, self._home, self._in_parts = ranks, home, in_parts
        self._root = RootModule(module)
        with naming("build DeepSpeed's engine", ranks):
            self._zero = home.wrap(self._root)
        self._forward = naming("DeepSpeed forward", ranks)
        self._backward = naming("DeepSpeed backward", ranks)
        self._sync, self._is_over = True, False
        self._known = deque[LossFunction](maxlen=8)  # losses that had a first pass
        ranks.connection.hold(self.let_go)

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Return the loss.

        The first micro-batch of an update begins with rank 0's buffers, as DDP's does.
        """
        if self._is_over:
            msg = "The world is closed: a step needs its ranks. Step inside its `with` block."
            raise WorldError(msg)
        if samples.begins:
            self._home.bound.check_read()
            self._root.share_buffers(self._ranks)
            self._home.note_none()
        self._sync = sync
        reduces = sync or self._in_parts
        with self._forward, self._watched(loss_fn):
            self._scalar = self._zero.forward(
                loss_fn, samples, reduces=reduces, ends=sync
            )
        if not self._is_known(loss_fn):
            self._known.append(loss_fn)
        return self._root.take_read()

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`; with sync, average all and the weight."""
        scalar = self._scalar
        del self._scalar
        loss = scalar if scale is None else scalar * like(scalar, scale)
        sums = _Sums(self._home, self._ranks, weight)
        try:
            with self._backward:
                self._zero.backward(loss, ends=self._sync, when_all_came=sums.start)
        except RuntimeError as error:
            if any(sign in str(error) for sign in ("got [0]", "tensor b (0)")):
                msg = NOT_GATHERED.format(which="a parameter")
                raise LossError(msg) from error
            raise
        if not self._sync:
            return None
        total, num_unused = sums.wait()
        if num_unused:
            self._check_alike(self._home.unused())
        return total / self._ranks.size

    def _check_alike(self, unused: list[str]) -> None:
        """Raise unless what took no part in the loss is the same on all ranks.

        Raises:
            UnusedParametersError: it is not; they are named on all ranks.
        """
        text = "\n".join(unused)
        texts = gather_text(text, self._ranks, label="parameters without a gradient")
        if len({*texts}) > 1:
            rows = [", ".join(each.split("\n")[:5]) or "none" for each in texts]
            told = "; ".join(f"of rank {rank} {row}" for rank, row in enumerate(rows))
            raise UnusedParametersError(_UNUSED.format(told=told))

    def _watched(self, loss_fn: LossFunction) -> AbstractContextManager[object]:
        """Return what looks at a loss's first pass at stage 3."""
        if self._zero.stage < 3 or self._is_known(loss_fn):
            return nullcontext()
        return Gathered(self._home.names)

    def _is_known(self, loss_fn: LossFunction) -> bool:
        return any(known is loss_fn for known in self._known)

    def let_go(self) -> None:
        """Let DeepSpeed forget the process group."""
        self._is_over = True
        parted(self._ranks)
