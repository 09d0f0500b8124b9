# SPDX-License-Identifier: Apache-2.0
"""Memory of a training state: estimate, measurement, and the largest batch size that fits.

`memory_estimate` creates a state of torch's fake tensors, which have a shape and a device but no
values, and runs an optimizer step on it. So it counts the tensors that the optimizer and the
transforms really create, without a formula for each of them.
"""

import gc
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)

from accelfn.base import arguments, devices, tree
from accelfn.base.arguments import check_integer, format_bytes, text_as_html
from accelfn.base.tree import Pending, computes_on, is_shard, local
from accelfn.collectives.failures import check_world, naming, wake
from accelfn.collectives.packed import all_gather_list, barrier
from accelfn.data.plan import Cursor
from accelfn.definition.definition import Definition
from accelfn.definition.layout import cuts_of, largest_part
from accelfn.definition.transform import chain
from accelfn.engine.optimizer import LiveOptimizer
from accelfn.errors import (
    ArgumentError,
    Error,
    ModelError,
    OutOfMemoryError,
    PeerFailedError,
    WorldError,
)
from accelfn.model.model import ModelSource, Skeleton, skeleton_of
from accelfn.model.optimizer import NamedParameters, prototype_of, rebuilt
from accelfn.state.state import TrainState, check_state
from accelfn.world import World
from accelfn.world.axes import extents, fold_cp
from accelfn.world.connection import Connection, clear_frames

OptimizerFactory: TypeAlias = Callable[[NamedParameters], Optimizer]
_ATEN = torch.ops.aten
_READS = (
    _ATEN.item.default,
    _ATEN._local_scalar_dense.default,
    _ATEN.is_nonzero.default,
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = {
    "params": "parameters",
    "grads": "gradients",
    "opt_state": "optimizer",
    "buckets": "DDP's buckets",
}
"""Names of a table's rows, by attribute, if they differ from the attribute's name."""


def _rows(self: "StateBytes | Memory") -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table: a name, such as "gradients", and its bytes."""
    for name, size in attrs.asdict(self, recurse=False).items():
        if name == "slots":
            yield from ((f"slot {slot!r}", number) for slot, number in size.items())
        else:
            yield _ROWS.get(name, name), size


@attrs.frozen(kw_only=True)
class StateBytes:
    """Bytes of a training state on one rank.

    Attributes:
        params: bytes of all parameters, trained and frozen.
        buffers: bytes of the model's buffers.
        grads: bytes of one gradient for each trained parameter.
        opt_state: bytes of the optimizer's state after a step.
        slots: bytes of each transform's slot, by the name of the transform.
        buckets: bytes of DistributedDataParallel's buckets in a world of several ranks; 0 if
            gradients are views into the buckets.
    """

    params: int
    buffers: int
    grads: int
    opt_state: int
    slots: Mapping[str, int]
    buckets: int

    rows = _rows

    @property
    def total(self) -> int:
        """The sum of all rows, in bytes."""
        return sum(size for _, size in self.rows())


@attrs.frozen(kw_only=True)
class MemoryEstimate:
    """Bytes of a training state for each dtype of the parameters; `str` returns a table.

    Attributes:
        num_parameters: the number of elements of all parameters.
        by_dtype: the bytes for each dtype that the setup accepts.
        refused: the reason for each dtype that the setup rejects.
        on_host: the names of the table's rows that are in the host's memory.
    """

    num_parameters: int
    by_dtype: Mapping[torch.dtype, StateBytes]
    refused: Mapping[torch.dtype, str]
    on_host: tuple[str, ...] = ()

    _repr_html_ = text_as_html

    def __str__(self) -> str:
        """Return a table with a column for each dtype."""
        columns = [dict(size.rows()) for size in self.by_dtype.values()]
        rows = [(name, [column[name] for column in columns]) for name in columns[0]]
        rows = [(name, sizes) for name, sizes in rows if any(sizes)]
        rows.append(("total", [size.total for size in self.by_dtype.values()]))
        notes = [f"Not {_name(dtype)}: {why}" for dtype, why in self.refused.items()]
        if self.on_host:
            notes.append(
                f"In the host's memory (cpu_offload): {', '.join(self.on_host)}."
            )
        return "\n".join(
            [
                f"A training state of {self.num_parameters:,} parameters, on each rank:",
                _format_table(map(_name, self.by_dtype), rows),
                *notes,
                "Activations and temporary tensors of a step are not included.",
            ]
        )


def memory_estimate(
    model: ModelSource,
    setup: Any = None,
    *,
    optimizer: OptimizerFactory,
    axes: Mapping[str, int] | None = None,
) -> MemoryEstimate:
    """Estimate the bytes of a training state in float32, bfloat16 and float16.

    No tensor memory is allocated: the model's factory runs on torch's meta device, and the
    optimizer's step and the `init` of each transform run on fake tensors. The estimate does not
    include activations, which depend on the batch (see `af.find_batch_size`), or temporary
    tensors of a step.

    Args:
        model: a module, which is not changed, or a function that returns a module. If the model
            is too large for your machine, create the module on the meta device.
        setup: the transforms to include.
        optimizer: a function that creates the optimizer, as for `TrainState.create`.
        axes: the number of ranks along each axis, such as `{"dp_shard": 8}`, if the setup shards
            the model over ranks. The result is for the rank with the most bytes.

    Law: the estimate equals the bytes of the tensors in a real state after an update, with two
    exceptions. `compress_grads("powersgd")` allocates about as much memory as its compressed
    gradients, at its first compressed update. `diloco` allocates the outer optimizer's state, as
    large as the parameters, at its first average; with `delay`, also a copy of one fragment.

    Cost: a few milliseconds for each parameter tensor.

    Raises:
        ArgumentError: `optimizer` is not a function, or `model` does not return a module.
        ModelError: the setup rejects the model in float32.
        Exception: torch's error, if the optimizer or a transform reads values of a tensor.

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
        Activations and temporary tensors of a step are not included.
    """
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        msg = (
            f"af.memory_estimate(optimizer={type(optimizer).__name__}): expected a function that"
            " creates the optimizer, such as functools.partial(torch.optim.AdamW, lr=3e-4)."
        )
        raise ArgumentError(msg)
    axes = {} if axes is None else fold_cp(extents("af.memory_estimate", axes))
    setup, skeleton = chain(setup), _skeleton_from(model)
    by_dtype: dict[torch.dtype, StateBytes] = {}
    reasons: dict[torch.dtype, str] = {}
    for dtype in _DTYPES:
        try:
            state, slots = _fake_state(skeleton, setup, optimizer, dtype)
            by_dtype[dtype] = _count_bytes(state, slots, setup, axes)
        except ModelError as error:
            if dtype is torch.float32:
                raise
            reasons[dtype] = str(error)
    return MemoryEstimate(
        num_parameters=sum(param.numel() for param in skeleton.module.parameters()),
        by_dtype=by_dtype,
        refused=reasons,
        on_host=_on_host(setup, axes),
    )


def _skeleton_from(model: Any) -> Skeleton:
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        msg = (
            f"af.memory_estimate: model() returned {kind}; expected a torch.nn.Module."
        )
        raise ArgumentError(msg)
    return skeleton_of(model)


def _on_host(setup: chain, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of the table's rows that a setup keeps in the host's memory."""
    if "offloads" not in setup.facts or axes.get("dp_shard", 1) == 1:
        return ()
    if _has_full_gradients(setup):  # gradients stay on the device until reduced
        return "parameters", "optimizer", "slots"
    return "parameters", "gradients", "optimizer", "slots"


def _has_full_gradients(setup: chain) -> bool:
    """Return whether ranks keep full gradients until the last micro-batch of an update."""
    return "whole_gradients" in setup.facts and "micro_batches" in setup.facts


def _fake_state(
    skeleton: Skeleton, setup: chain, optimizer: OptimizerFactory, dtype: torch.dtype
) -> tuple[TrainState, Mapping[str, Any]]:
    """Return a state of fake tensors after an update, and the setup's slots for it."""

    def fake(meta: torch.Tensor) -> torch.Tensor:
        return _empty_like(meta, dtype if meta.is_floating_point() else meta.dtype)

    with FakeTensorMode(allow_non_fake_inputs=True), _FakeReads(), _FakeDeepCopies():
        module = skeleton.build(
            {name: fake(param) for name, param in skeleton.module.named_parameters()},
            {name: fake(buffer) for name, buffer in skeleton.module.named_buffers()},
        )
        state = _state_after_step(module, optimizer)
        return state, state.with_setup(setup).slots


def _state_after_step(module: nn.Module, optimizer: OptimizerFactory) -> TrainState:
    """Return the state after one optimizer step on a module of fake tensors."""
    skeleton = skeleton_of(module)
    prototype, _ = prototype_of(optimizer, module, skeleton)
    params = dict(module.named_parameters())
    metas = dict(skeleton.module.named_parameters())
    memo: dict[int, Any] = {id(metas[name]): param for name, param in params.items()}
    names = {param: name for name, param in params.items()}
    live = LiveOptimizer(rebuilt(prototype, memo), names)
    live.load({})
    for name in skeleton.trainable:
        params[name].grad = torch.empty_like(params[name])
    return TrainState(
        params={name: param.detach() for name, param in params.items()},
        buffers={name: buffer.detach() for name, buffer in module.named_buffers()},
        opt_state=live.update({}),
        step=1,
        cursor=Cursor(),
        seed=0,
        slots={},
        definition=Definition(
            skeleton=skeleton,
            optimizer=prototype,
            schedule=None,
            rates=None,
            data=None,
            setup=chain(),
            world=World(group=Connection(None)),  # without a warning in a job of ranks
            name="state",
        ),
    )


class _FakeReads(TorchDispatchMode):
    """Let optimizers read a number from a fake tensor: 0.5, or 1 for integers.

    Some optimizers read norms. A tensor among the optimizer's options, such as a learning rate,
    keeps its real value, because the optimizer checks the value.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; replace reads of a fake tensor by a constant."""
        del types
        if func in _READS and getattr(args[0], "constant", None) is not None:
            args = (args[0].constant,)
        tensors = tree.tensor_leaves(args)
        if tensors and not any(isinstance(t, FakeTensor) for t in tensors):
            if func is not _ATEN.lift_fresh.default:  # lift_fresh creates a fake tensor
                with unset_fake_temporarily():
                    return func(*args, **(kwargs or {}))
        elif func in _READS:
            dtype = args[0].dtype
            return 0.5 if dtype.is_floating_point else dtype is torch.bool or 1
        return func(*args, **(kwargs or {}))


class _FakeDeepCopies(TorchFunctionMode):
    """Support `deepcopy` of fake tensors among an optimizer's options; torch does not."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function; replace `Tensor.__deepcopy__` by an empty tensor."""
        del types
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = _empty_like(tensor, tensor.dtype)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor with a tensor's shape and strides, under the active modes."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)


def _count_bytes(
    state: TrainState, slots: Mapping[str, Any], setup: chain, axes: Mapping[str, int]
) -> StateBytes:
    """Count the bytes of a state on one rank, if the setup shards it along some axes."""
    params = dict(state.params)
    cuts = cuts_of(setup.owners["layout"], params, axes)
    shards = {
        name: (params[name].shape, largest_part(params[name].shape, cut, axes))
        for name, cut in cuts.items()
    }
    trained_params = {
        name: params[name] for name in state.definition.skeleton.trainable
    }
    grads = _tree_bytes(trained_params, {} if _has_full_gradients(setup) else shards)
    has_buckets = any(
        not getattr(owner, "gradient_as_bucket_view", True)
        for owner in setup.owners["engine"]
    )
    return StateBytes(
        params=_tree_bytes(params, shards),
        buffers=_tree_bytes(dict(state.buffers), shards),
        grads=grads,
        opt_state=_tree_bytes(dict(state.opt_state), shards),
        slots={name: _tree_bytes(slot, shards) for name, slot in slots.items()},
        buckets=grads if has_buckets else 0,
    )


def _tree_bytes(value: Any, shards: Mapping[str, tuple[torch.Size, torch.Size]]) -> int:
    """Return the bytes of all tensors in a tree on one rank; count each tensor once.

    Args:
        value: a tree. A tensor with the name and shape of a sharded parameter is also sharded.
        shards: for each sharded parameter, its full shape and the shape of its largest shard.
    """
    sizes: dict[int, int] = {}
    for name, tensor in _named_tensors(value, shards, None):
        size = _num_bytes(tensor)
        if name is not None and tensor.shape == shards[name][0]:
            size = size * shards[name][1].numel() // max(tensor.numel(), 1)
        sizes[id(tensor)] = size
    return sum(sizes.values())


def _named_tensors(
    value: Any, names: Container[str], within: str | None
) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Yield each tensor of a tree with the name of its parameter, or None."""
    value = value.wait() if isinstance(value, Pending) else value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        for key, inside in items.items():
            yield from _named_tensors(inside, names, key if key in names else within)
    else:
        for tensor in tree.tensor_leaves(value):
            yield within, tensor


def _num_bytes(tensor: torch.Tensor) -> int:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_num_bytes(getattr(tensor, name)) for name in names)
    return _full_bytes(tensor)


def _full_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format_table(heads: Iterable[str], rows: list[tuple[str, list[int]]]) -> str:
    """Format a table of sizes in bytes, with a name before each row."""
    lines = [("", *heads), *((name, *map(format_bytes, row)) for name, row in rows)]
    width = max(len(line[0]) for line in lines)
    return "\n".join(
        line[0].ljust(width) + "".join(f"{cell:>12}" for cell in line[1:])
        for line in lines
    )


# `memory`: the bytes of an existing training state, on this rank and unsharded.


@attrs.frozen(kw_only=True)
class Bytes:
    """Bytes of some tensors, on this rank and unsharded.

    Attributes:
        here: bytes on this rank, including the padding of shards.
        whole: bytes of the full (unsharded) tensors.
        host: the bytes of `here` that are in the host's memory because the setup offloads them
            from the device, as `wrap_fsdp(cpu_offload=True)` does.
    """

    here: int
    whole: int
    host: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        """Add the bytes of two groups of tensors."""
        return Bytes(
            here=self.here + other.here,
            whole=self.whole + other.whole,
            host=self.host + other.host,
        )


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes of a training state, by kind of tensor; `str` returns a table.

    Attributes:
        params: bytes of all parameters, trained and frozen.
        buffers: bytes of the model's buffers.
        opt_state: bytes of the optimizer's state; usually 0 before the first update.
        slots: bytes of each transform's slot, by the name of the transform.
    """

    params: Bytes
    buffers: Bytes
    opt_state: Bytes
    slots: Mapping[str, Bytes]

    rows = _rows

    @property
    def total(self) -> Bytes:
        """The sum of all rows."""
        return sum((size for _, size in self.rows()), Bytes(here=0, whole=0))

    _repr_html_ = text_as_html

    def __str__(self) -> str:
        """Return a table with a column for this rank and a column for the full state.

        If this rank has offloaded tensors, a third column shows the bytes in the host's memory.
        """
        columns = {"here": "here", "on host": "host", "whole": "whole"}
        if not self.total.host:
            del columns["on host"]
        sizes = [(name, size) for name, size in self.rows() if size.whole]
        rows = [
            (name, [getattr(size, column) for column in columns.values()])
            for name, size in (*sizes, ("total", self.total))
        ]
        return _format_table(columns, rows)


def memory(state: TrainState) -> Memory:
    """Return the bytes of a state's tensors, on this rank and unsharded.

    The two numbers differ if the model is sharded over ranks (see `wrap_fsdp`). Gradients and
    activations do not belong to the state, and are not included.

    Args:
        state: a state that is not donated.

    Law: for sharded tensors, the sum of `here` over all ranks is `whole` plus the padding.

    Cost: none; no tensor is read, and ranks do not communicate.

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
    """Return the bytes of all tensors in a tree; count each tensor once."""
    tensors = {id(t): t for t in tree.tensor_leaves(value)}.values()
    return Bytes(
        here=sum(map(_local_bytes, tensors)),
        whole=sum(map(_full_bytes, tensors)),
        host=sum(_local_bytes(t) for t in tensors if _is_offloaded(t)),
    )


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return is_shard(tensor) and local(tensor).device.type != computes_on(tensor)


def _local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor on this rank, including the padding of a shard."""
    if is_shard(tensor):
        return local(tensor).untyped_storage().nbytes()
    return _full_bytes(tensor)


# `find_batch_size`: find the largest batch size that fits into memory on all ranks.
#
# If a rank runs out of memory, the other ranks wait for it in a collective. So each try has its
# own process group. The rank that ran out of memory closes the group, and the collective then
# fails on the other ranks. After the try, all ranks communicate over the world's own group,
# which no try has used.


R = TypeVar("R")
_LABEL = "find_batch_size"
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Words in out-of-memory errors of the CPU's allocators (2 and 3), CUDA, cuBLAS and cuDNN."""


@arguments.explain_call_errors
def find_batch_size(fn: Callable[[int, World], R], start: int, world: World) -> R:
    """Call `fn(batch_size, world)` with start, start/2, ... until the batch size fits in memory.

    `fn` runs once for each batch size that is tried. So it must create its state and data
    itself, with the batch size and the world that it receives. This world has the same ranks,
    with a process group only for this try. You can use the result of `fn` as long as the outer
    world is open. Objects of a failed try are freed. During a try, torch's default process group
    is the group of the try, because packages such as DeepSpeed use the default group.

    The next batch size is tried after `torch.OutOfMemoryError`, `MemoryError`, and out-of-memory
    errors of the CPU's allocator, CUDA, cuBLAS and cuDNN. All other errors are raised at once.

    Args:
        fn: a function `(batch_size, world)`. It decides what the batch size counts.
        start: the first batch size, 1 or more; equal on all ranks.
        world: the ranks that search together.

    Returns: the result of `fn` for the largest batch size that fits.

    Law: the batch size is the largest `start // 2**k` that fits on every rank. All ranks use the
        same batch size. Ranks never wait for a rank that ran out of memory.

    Cost: for each try, a gather of two numbers; with several ranks also a new process group and
        a barrier.

    Raises:
        OutOfMemoryError: not even a batch size of 1 fits; `__cause__` is the last error.
        PeerFailedError: another rank failed for another reason.
        WorldError: several ranks use NCCL, where a rank cannot leave a collective.
        ArgumentError: `start` is not a positive integer, or differs between ranks.

    Example:
        >>> def train(batch_size, world):
        ...     if batch_size > 24:
        ...         raise MemoryError
        ...     return f"trained on {batch_size}"
        >>> find_batch_size(train, 64, World.single())
        'trained on 16'
    """
    if not callable(fn):
        msg = f"af.find_batch_size({fn!r}): expected a function fn(batch_size, world)."
        raise ArgumentError(msg)
    check_integer("af.find_batch_size", "start", start, 1)
    check_world("af.find_batch_size(fn, start, world)", world)
    if world.size > 1:
        _check_group(world)
        limit = torch.tensor([start], device=world.device)
        starts = [int(other) for other in all_gather_list(limit, world, label=_LABEL)]
        if len(set(starts)) > 1:
            msg = f"af.find_batch_size: start must be equal on all ranks, got {starts}."
            raise ArgumentError(msg)
    batch_size = start
    while not (result := _try_batch_size(fn, batch_size, start, world)):
        gc.collect()  # free reference cycles of the failed try
        devices.give_back_memory(world.device)
        batch_size //= 2
    return result[0]


def _try_batch_size(
    fn: Callable[[int, World], R], batch_size: int, start: int, world: World
) -> list[R]:
    """Return `[result of fn]`, or an empty list if a rank ran out of memory.

    Raises:
        OutOfMemoryError: a rank ran out of memory with a batch size of 1.
        PeerFailedError: a rank lost its connection, although no rank ran out of memory.
    """
    branch, leave = _branch(world)
    result, error = _call_in_branch(fn, batch_size, world, branch)
    if error is not None:
        leave()  # collectives of the other ranks fail, so that they do not wait
    is_lost = isinstance(error, PeerFailedError)
    has_no_memory = error is not None and not is_lost
    own_flags = torch.tensor([has_no_memory, is_lost], device=world.device).int()
    flags = torch.stack(all_gather_list(own_flags, world, label=_LABEL)).any(0).tolist()
    if not any(flags):
        return result
    if error is None:
        result.clear()
        leave()
    if not flags[0]:
        msg = (
            f"Rank {world.rank} of {world.size}: a rank lost its connection while"
            f" af.find_batch_size tried a batch size of {batch_size}, and no rank ran out of"
            " memory. Look at the other ranks' output."
        )
        raise PeerFailedError(msg) from error
    if batch_size == 1:
        rank = "this rank" if has_no_memory else "another rank"
        msg = (
            f"af.find_batch_size: {rank} ran out of memory even with a batch size of 1 (the"
            f" search started at {start}). Make the model or its samples smaller."
        )
        raise OutOfMemoryError(msg) from error
    return []


def _call_in_branch(
    fn: Callable[[int, World], R], batch_size: int, world: World, branch: World
) -> tuple[list[R], Exception | None]:
    """Return `([result], None)`, or `([], error)` with the error's local variables cleared."""
    world.connection.is_lent = branch is not world
    try:
        if branch is world:
            return [fn(batch_size, world)], None
        with naming(_LABEL, branch), _as_default_group(branch):
            return [fn(batch_size, branch)], None
    except Exception as error:
        if not isinstance(error, PeerFailedError) and not _is_out_of_memory(error):
            raise
        failure = error
    finally:
        world.connection.is_lent = False
    clear_frames(failure)
    return [], failure


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    is_foreign = isinstance(error, RuntimeError) and not isinstance(error, Error)
    return is_foreign and any(sign in str(error) for sign in _SIGNS)


def _check_group(world: World) -> None:
    """Raise for a world that cannot have a second process group of the same ranks."""
    ranks = world.connection.simulated
    is_whole = world.group is dist.group.WORLD
    if ranks is not None:
        is_whole = not ranks.group.members.name
    backend = world.connection.backend(world.device)
    why = ""
    if world.axes:
        why = f"the world has axes, {dict(world.axes)}. Search in a world without axes."
    elif not is_whole or world.connection.is_branch:
        why = (
            f"these {world.size} ranks are only some ranks of the job, or the world of another"
            " search. Pass the world of all ranks, as World.from_env() returns it."
        )
    elif backend not in (None, "gloo"):
        why = (
            f"the {world.size} ranks are connected by {backend}, and there the other ranks would"
            " wait forever for a rank that runs out of memory. Open the world with"
            " World.from_env(backend='gloo'), or search in one process, without a launcher."
        )
    if why:
        msg = f"af.find_batch_size: {why}"
        raise WorldError(msg)


def _branch(world: World) -> tuple[World, Callable[[], None]]:
    """Return a world of the same ranks with a new group, and a function that closes it."""
    if world.size == 1:
        return world, lambda: None
    ranks = world.connection.simulated
    make = _torch_branch if ranks is None else ranks.branch
    branch, leave = make(world)
    world.connection.hold(branch.connection.close)
    return branch, leave


def _torch_branch(world: World) -> tuple[World, Callable[[], None]]:
    group = world.group
    assert group is not None  # noqa: S101 - a world of several ranks has a group
    timeout = group._get_backend(world.device).options._timeout
    group = dist.new_group(timeout=timeout, backend="gloo")
    # wait for all ranks: if one closed the group early, the others could not connect
    barrier(world, label=_LABEL)
    branch = attrs.evolve(world, group=group)
    branch.connection.is_branch = True
    del group
    return branch, lambda: _leave(branch)


@contextmanager
def _as_default_group(branch: World) -> Generator[None]:
    """In a `with` block, make a try's group torch's default group, which DeepSpeed uses."""
    if branch.connection.simulated is not None:
        yield
        return
    before, dist.group.WORLD = dist.group.WORLD, branch.group
    try:
        yield
    finally:
        dist.group.WORLD = before


def _leave(branch: World) -> None:
    """Close a group's connections, so that collectives of the other ranks fail.

    Gloo closes connections when no object refers to the group. But DeepSpeed's engine refers to
    the group forever, and DistributedDataParallel until it is garbage collected.
    """
    group = branch.group
    wake(branch)
    branch.connection.close()
    gc.collect()
    dist.destroy_process_group(group)
