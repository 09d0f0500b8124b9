# SPDX-License-Identifier: Apache-2.0
"""`memory_estimate`: the bytes of a training state, before there is one.

The state is made of torch's fake tensors, which have a shape, a device and no values, and its
optimizer takes a step on them. So what is counted is what the optimizer and the transforms
really keep, and not a formula of theirs.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any, cast

import attrs
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.base import tree
from accelfn.base.calling import called
from accelfn.base.pending import Pending
from accelfn.base.sizes import shown
from accelfn.definition.cuts import cuts_of, largest_part
from accelfn.definition.transform import chain
from accelfn.errors import ArgumentError, ModelError
from accelfn.loop.fake_state import OptimizerFactory, stepped_on_fakes
from accelfn.state.state import TrainState
from accelfn.structure.skeleton import ModelSource, Skeleton, skeleton_of
from accelfn.world.axes import extents, folded

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@attrs.frozen(kw_only=True)
class StateBytes:
    """How many bytes a training state has on one rank, by what they are.

    Attributes:
        params: the parameters, trained or not.
        buffers: the model's other tensors.
        grads: one gradient a trained parameter.
        opt_state: what the optimizer keeps after a step.
        slots: what each transform keeps, by its name.
        buckets: DistributedDataParallel's buckets in a world of several ranks; 0 where
            gradients lie in them.
    """

    params: int
    buffers: int
    grads: int
    opt_state: int
    slots: Mapping[str, int]
    buckets: int

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(size for _, size in self.rows())

    def rows(self) -> Iterator[tuple[str, int]]:
        """Yield each part with its name."""
        yield "parameters", self.params
        yield "buffers", self.buffers
        yield "gradients", self.grads
        yield "optimizer", self.opt_state
        for name, size in self.slots.items():
            yield f"slot {name!r}", size
        yield "DDP's buckets", self.buckets


@attrs.frozen(kw_only=True)
class MemoryEstimate:
    """The bytes of a training state for each dtype of the parameters; `str` is a table.

    Attributes:
        num_parameters: how many numbers the model has.
        by_dtype: the bytes for each dtype that the setup takes.
        refused: why it does not take the others.
        on_host: the names of what lies in the host's memory, where the setup keeps it there.
    """

    num_parameters: int
    by_dtype: Mapping[torch.dtype, StateBytes]
    refused: Mapping[torch.dtype, str]
    on_host: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Show a table, a column a dtype."""
        columns = [dict(each.rows()) for each in self.by_dtype.values()]
        heads = map(_name, self.by_dtype)
        lines = [("", *heads)]
        for name in columns[0]:
            sizes = [column[name] for column in columns]
            if any(sizes):
                lines.append((name, *map(shown, sizes)))
        totals = [each.total for each in self.by_dtype.values()]
        lines.append(("total", *map(shown, totals)))
        width = max(len(line[0]) for line in lines)
        table = "\n".join(
            line[0].ljust(width) + "".join(f"{cell:>12}" for cell in line[1:])
            for line in lines
        )
        refused = "".join(
            f"Not {_name(dtype)}: {why}\n" for dtype, why in self.refused.items()
        )
        return (
            f"A training state of {self.num_parameters:,} parameters, on each rank:\n"
            f"{table}\n{refused}{self._placed()}Activations are not included, nor what a step"
            " makes and drops."
        )

    def _placed(self) -> str:
        names = ", ".join(self.on_host)
        return f"In the host's memory (cpu_offload): {names}.\n" if names else ""


@called
def memory_estimate(
    model: ModelSource,
    setup: Any = None,
    *,
    optimizer: OptimizerFactory,
    axes: Mapping[str, int] | None = None,
) -> MemoryEstimate:
    """Return the bytes of a training state in float32, bfloat16 and float16.

    Nothing is allocated: a factory of the model runs on torch's meta device; a step of the
    optimizer and the `init` of each transform run on fake tensors. Not included are
    activations, which depend on the batch (`af.find_batch_size` finds what fits), and what a
    step makes and drops again.

    Args:
        model: a factory, or an instance, on the meta device if it fits no other, which is left
            as it is.
        setup: transforms, whose slots are counted.
        optimizer: a factory of named parameters, as `TrainState.create` takes it.
        axes: how many ranks stand along each axis, where a setup splits the model over them
            (`{"dp_shard": 8}`); the bytes are those of the rank that has most.

    Law: the bytes are those of the tensors in a real state after an update, exactly. Left out
    is the memory of `compress("powersgd")`, which begins with the update from which it
    compresses: about that of the gradients of what it does; and what `diloco` keeps from its
    first average on: the outer optimizer's state, which is as large as the parameters, and with
    `delay` the fragment on its way.

    Cost: a few milliseconds a parameter tensor, and no memory.

    Raises:
        ArgumentError: `optimizer` is no factory, or `model` gives no module.
        ModelError: the setup refuses the model in float32.
        Exception: what torch says of an operation that needs values.

    Example:
        >>> from functools import partial
        >>> adamw = partial(torch.optim.AdamW, lr=0.1)
        >>> print(memory_estimate(lambda: nn.Linear(512, 512), optimizer=adamw))
        A training state of 262,656 parameters, on each rank:
                       float32    bfloat16     float16
        parameters    1.00 MiB  513.00 KiB  513.00 KiB
        gradients     1.00 MiB  513.00 KiB  513.00 KiB
        optimizer     2.00 MiB    1.00 MiB    1.00 MiB
        total         4.01 MiB    2.00 MiB    2.00 MiB
        Activations are not included, nor what a step makes and drops.
    """
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        msg = (
            f"af.memory_estimate(optimizer={type(optimizer).__name__}): expected a factory,"
            " such as functools.partial(torch.optim.AdamW, lr=3e-4)."
        )
        raise ArgumentError(msg)
    axes = {} if axes is None else folded(extents("af.memory_estimate", axes))
    bare = _bare(model)
    by_dtype: dict[torch.dtype, StateBytes] = {}
    refused: dict[torch.dtype, str] = {}
    for dtype in _DTYPES:
        try:
            state, slots = stepped_on_fakes(bare, chain(setup), optimizer, dtype)
            by_dtype[dtype] = _counted(state, slots, chain(setup), axes)
        except ModelError as error:
            if dtype is torch.float32:
                raise
            refused[dtype] = str(error)
    count = sum(param.numel() for param in bare.module.parameters())
    return MemoryEstimate(
        num_parameters=count,
        by_dtype=by_dtype,
        refused=refused,
        on_host=_on_host(chain(setup), axes),
    )


def _on_host(setup: chain, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of what a setup keeps in the host's memory, where a model is cut."""
    if "offloads" not in setup.facts or axes.get("dp_shard", 1) == 1:
        return ()
    names = ("parameters", "gradients", "optimizer", "slots")
    are_whole = _are_whole(setup)  # on the device, until they are reduced
    return tuple(each for each in names if each != "gradients" or not are_whole)


def _are_whole(setup: chain) -> bool:
    """Whether gradients of micro-batches wait whole for the last one."""
    return "whole_gradients" in setup.facts and "micro_batches" in setup.facts


def _bare(source: ModelSource) -> Skeleton:
    """Return the model's structure."""
    if isinstance(source, nn.Module):
        return skeleton_of(source)
    with torch.device("meta"):
        made = source()
    if not isinstance(made, nn.Module):
        msg = (
            f"af.memory_estimate(model={source!r}) gave {type(made).__name__}; expected a"
            " torch.nn.Module, or a factory that takes no argument and returns one."
        )
        raise ArgumentError(msg)
    return skeleton_of(made)


def _counted(
    state: TrainState, slots: Mapping[str, Any], setup: chain, axes: Mapping[str, int]
) -> StateBytes:
    """Return the bytes of a state that is cut along some axes."""
    params = dict(state.params)
    cuts = cuts_of(setup.owners["layout"], params, axes)
    parts = {n: largest_part(params[n].shape, cuts[n], axes) for n in cuts}
    size = _Size({n: params[n].shape for n in parts}, parts)
    trainable = state.definition.skeleton.trainable
    gradients = {name: params[name] for name in trainable}
    whole = _Size({}, {}).of(gradients)
    grads = whole if _are_whole(setup) else size.of(gradients)
    copied = [
        each
        for each in setup.owners["engine"]
        if not getattr(each, "gradient_as_bucket_view", True)
    ]
    return StateBytes(
        params=size.of(params),
        buffers=size.of(dict(state.buffers)),
        grads=grads,
        opt_state=size.of(dict(state.opt_state)),
        slots={name: size.of(slot) for name, slot in slots.items()},
        buckets=grads if copied else 0,
    )


@attrs.frozen
class _Size:
    """The bytes of trees, of which what has a cut parameter's name and shape is cut, too.

    Attributes:
        shapes: of the parameters that are cut.
        parts: the shapes of what one rank has of them.
    """

    shapes: Mapping[str, torch.Size]
    parts: Mapping[str, torch.Size]

    def of(self, value: Any) -> int:
        """Return the bytes of all tensors in a tree, each counted once."""
        sizes: dict[int, int] = {}
        for name, tensor in _named(value, self.shapes, None):
            whole = _num_bytes(tensor)
            if name is not None and tensor.shape == self.shapes[name]:
                whole = whole * self.parts[name].numel() // max(tensor.numel(), 1)
            sizes[id(tensor)] = whole
        return sum(sizes.values())


def _named(
    value: Any, names: Container[str], within: str | None
) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Yield the tensors of a tree, each with the parameter's name under which it stands."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        for key, inside in items.items():
            yield from _named(inside, names, key if key in names else within)
    elif isinstance(value, torch.Tensor):
        yield within, value
    elif isinstance(value, Pending):
        yield from _named(value.wait(), names, within)
    else:
        for leaf in tree.tree_leaves(value):
            if leaf is not value:
                yield from _named(leaf, names, within)


def _num_bytes(tensor: torch.Tensor) -> int:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_num_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
