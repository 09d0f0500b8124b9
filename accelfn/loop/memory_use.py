# SPDX-License-Identifier: Apache-2.0
"""`memory`: the bytes of a training state that there is, on this rank and as a whole."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from accelfn.base import tree
from accelfn.base.calling import called
from accelfn.base.shards import computes_on, is_shard, local
from accelfn.base.sizes import shown
from accelfn.state.argument import check_state
from accelfn.state.state import TrainState


@attrs.frozen(kw_only=True)
class Bytes:
    """How much memory tensors take.

    Attributes:
        here: on this rank, with what rounds parts up to one size.
        whole: as much as one process would need for all of them.
        host: of `here`, what parts of tensors take in the host's memory where the ranks
            compute on another device (`wrap_fsdp(cpu_offload=True)`).
    """

    here: int
    whole: int
    host: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        """Return both together."""
        return Bytes(
            here=self.here + other.here,
            whole=self.whole + other.whole,
            host=self.host + other.host,
        )


@attrs.frozen(kw_only=True)
class Memory:
    """What a training state takes, by what it is; `str` is a table.

    Attributes:
        params: the parameters, trained or not.
        buffers: the model's other tensors.
        opt_state: what the optimizer keeps; nothing before the first update.
        slots: what each transform keeps, by its name.
    """

    params: Bytes
    buffers: Bytes
    opt_state: Bytes
    slots: Mapping[str, Bytes]

    @property
    def total(self) -> Bytes:
        """All of them together."""
        return sum((each for _, each in self.rows()), Bytes(here=0, whole=0))

    def rows(self) -> Iterator[tuple[str, Bytes]]:
        """Yield each part with its name."""
        yield "parameters", self.params
        yield "buffers", self.buffers
        yield "optimizer", self.opt_state
        for name, size in self.slots.items():
            yield f"slot {name!r}", size

    def __str__(self) -> str:
        """Show a table: a line for what there is, a column for this rank and for the whole.

        Between them stands what of this rank's lies on the host, if there is any.
        """
        rows = [(name, each) for name, each in self.rows() if each.whole]
        rows.append(("total", self.total))
        columns = {
            "here": [each.here for _, each in rows],
            "on host": [each.host for _, each in rows],
            "whole": [each.whole for _, each in rows],
        }
        if not self.total.host:
            del columns["on host"]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':{width}}" + "".join(f"{head:>12}" for head in columns)]
        for i, (name, _) in enumerate(rows):
            cells = (shown(column[i]) for column in columns.values())
            lines.append(f"{name:{width}}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join(lines)


@called
def memory(state: TrainState) -> Memory:
    """Return the bytes of a state's tensors: of those on this rank, and of the whole.

    They differ where a model is split over the ranks (see `wrap_fsdp`). Gradients and
    activations are not of the state.

    Args:
        state: not donated.

    Law: the `here` of all ranks add up to `whole` and what rounds parts up, for what is split.

    Cost: no tensor is looked into, and nothing crosses the ranks.

    Example:
        >>> from functools import partial
        >>> from torch import nn
        >>> adamw = partial(torch.optim.AdamW, lr=0.1)
        >>> state = TrainState.create(model=lambda: nn.Linear(512, 512), optimizer=adamw)
        >>> print(memory(state))
                          here       whole
        parameters    1.00 MiB    1.00 MiB
        total         1.00 MiB    1.00 MiB
    """
    check_state("af.memory(state)", state)
    return Memory(
        params=_bytes_of(state.params),
        buffers=_bytes_of(state.buffers),
        opt_state=_bytes_of(state.opt_state),
        slots={name: _bytes_of(slot) for name, slot in state.slots.items()},
    )


def _bytes_of(value: Any) -> Bytes:
    """Return the bytes of all tensors in a tree, each counted once."""
    tensors = {id(each): each for each in tree.tensor_leaves(value)}.values()
    return Bytes(
        here=sum(map(_held, tensors)),
        whole=sum(map(_size, tensors)),
        host=sum(_held(each) for each in tensors if _is_offloaded(each)),
    )


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return is_shard(tensor) and local(tensor).device.type != computes_on(tensor)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _held(tensor: torch.Tensor) -> int:
    """Return the bytes on this rank: of a part, with the room that it has."""
    if is_shard(tensor):
        return local(tensor).untyped_storage().nbytes()
    return _size(tensor)
