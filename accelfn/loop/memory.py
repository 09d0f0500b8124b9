# SPDX-License-Identifier: Apache-2.0
"""`memory_estimate`: the bytes of a training state, before there is one.

The state is made of torch's fake tensors, which have a shape, a device and no values, and its
optimizer takes a step on them. So what is counted is what the optimizer and the transforms
really keep, and not a formula of theirs.
"""

import gc
import traceback
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar, cast

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

from accelfn.base import devices, tree
from accelfn.base.arguments import check_integer, explain_call_errors, format_bytes
from accelfn.base.tree import Pending, computes_on, is_shard, local
from accelfn.collectives import all_gather, barrier, naming
from accelfn.collectives.failures import check_world, wake
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

# A training state of tensors that have a shape, a device and no values: torch's fake
# tensors.


OptimizerFactory: TypeAlias = Callable[[NamedParameters], Optimizer]
_ATEN = torch.ops.aten
_READING = (
    _ATEN.item.default,
    _ATEN._local_scalar_dense.default,
    _ATEN.is_nonzero.default,
)


def stepped_on_fakes(
    bare: Skeleton, setup: chain, optimizer: OptimizerFactory, dtype: torch.dtype
) -> tuple[TrainState, Mapping[str, Any]]:
    """Return a state of fake tensors after an update, and the slots that a setup adds to it.

    Args:
        bare: the model's structure.
        setup: transforms.
        optimizer: a factory of named parameters.
        dtype: of the parameters, and of buffers of floating point.

    Raises:
        ModelError: a transform refuses the model in this dtype.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _Valueless(), _Copied():
        state = _state_after_step(_with_fake_tensors(bare, dtype), optimizer)
        return state, state.with_setup(setup).slots


def _with_fake_tensors(bare: Skeleton, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose tensors are fake, and those of floating point of a dtype."""

    def fake(meta: torch.Tensor) -> torch.Tensor:
        return _like(meta, dtype if meta.is_floating_point() else meta.dtype)

    return bare.build(
        {name: fake(param) for name, param in bare.module.named_parameters()},
        {name: fake(buffer) for name, buffer in bare.module.named_buffers()},
    )


def _state_after_step(module: nn.Module, optimizer: OptimizerFactory) -> TrainState:
    """Return the state of a model of fake tensors after a step of its optimizer."""
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
            world=World(),
            name="state",
        ),
    )


class _Valueless(TorchDispatchMode):
    """Reads 0.5 or 1 from tensors without values, for optimizers that look at norms.

    Those among an optimizer's options have values, which it checks.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation."""
        del types
        if func in _READING and getattr(args[0], "constant", None) is not None:
            args = (args[0].constant,)
        found = list(tree.tensor_leaves(args))
        if found and not any(isinstance(t, FakeTensor) for t in found):
            if func is not _ATEN.lift_fresh.default:  # which makes one fake
                with unset_fake_temporarily():
                    return func(*args, **(kwargs or {}))
        elif func in _READING:
            given = args[0].dtype
            return 0.5 if given.is_floating_point else given is torch.bool or 1
        return func(*args, **(kwargs or {}))


class _Copied(TorchFunctionMode):
    """Copies a tensor among an optimizer's options without its values, which torch cannot."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out a call."""
        del types
        if func is torch.Tensor.__deepcopy__:
            given, memo = args
            memo[id(given)] = _like(given, given.dtype)
            return memo[id(given)]
        return func(*args, **(kwargs or {}))


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a fake tensor of another's shape; that one may be of any kind."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)


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
                lines.append((name, *map(format_bytes, sizes)))
        totals = [each.total for each in self.by_dtype.values()]
        lines.append(("total", *map(format_bytes, totals)))
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


@explain_call_errors
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
    axes = {} if axes is None else fold_cp(extents("af.memory_estimate", axes))
    bare = _structure_of(model)
    by_dtype: dict[torch.dtype, StateBytes] = {}
    refused: dict[torch.dtype, str] = {}
    for dtype in _DTYPES:
        try:
            state, slots = stepped_on_fakes(bare, chain(setup), optimizer, dtype)
            by_dtype[dtype] = _count_bytes(state, slots, chain(setup), axes)
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


def _structure_of(source: ModelSource) -> Skeleton:
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


def _count_bytes(
    state: TrainState, slots: Mapping[str, Any], setup: chain, axes: Mapping[str, int]
) -> StateBytes:
    """Count the bytes of a state that is split along some axes."""
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
        for name, tensor in _named_tensors(value, self.shapes, None):
            whole = _num_bytes(tensor)
            if name is not None and tensor.shape == self.shapes[name]:
                whole = whole * self.parts[name].numel() // max(tensor.numel(), 1)
            sizes[id(tensor)] = whole
        return sum(sizes.values())


def _named_tensors(
    value: Any, names: Container[str], within: str | None
) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Yield the tensors of a tree with the names of their parameters."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        for key, inside in items.items():
            yield from _named_tensors(inside, names, key if key in names else within)
    elif isinstance(value, torch.Tensor):
        yield within, value
    elif isinstance(value, Pending):
        yield from _named_tensors(value.wait(), names, within)
    else:
        for leaf in tree.tree_leaves(value):
            if leaf is not value:
                yield from _named_tensors(leaf, names, within)


def _num_bytes(tensor: torch.Tensor) -> int:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_num_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# `memory`: the bytes of a training state that there is, on this rank and as a whole.


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
            cells = (format_bytes(column[i]) for column in columns.values())
            lines.append(f"{name:{width}}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join(lines)


@explain_call_errors
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
        here=sum(map(_local_bytes, tensors)),
        whole=sum(map(_size, tensors)),
        host=sum(_local_bytes(each) for each in tensors if _is_offloaded(each)),
    )


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return is_shard(tensor) and local(tensor).device.type != computes_on(tensor)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor on this rank, including the padding of a part."""
    if is_shard(tensor):
        return local(tensor).untyped_storage().nbytes()
    return _size(tensor)


# `find_batch_size`: the largest batch that fits into memory, on all ranks.
#
# A rank that runs out of memory leaves the others waiting in a collective that it will
# never join. So each try has a process group of its own. The rank gives it up, which ends
# the others' waiting, and all meet in the world's own group, which no try has used.


R = TypeVar("R")
_LABEL = "find_batch_size"
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""What torch's allocators, CUDA, cuBLAS and cuDNN say; the second and third are the CPU's."""


@explain_call_errors
def find_batch_size(fn: Callable[[int, World], R], start: int, world: World) -> R:
    """Return `fn(batch_size, world)` for the largest of start, start/2, ... that fits.

    `fn` is called anew for each batch size, so it creates its state and data inside, from
    the batch size and in the world that it is given: the same ranks, joined by a process
    group of this try's own. What it returns may go on to be used; its world is open as long as
    the outer one. Nothing of a try that failed is kept. Meanwhile torch's default group is the
    try's own, so packages that talk through it, as DeepSpeed does, take part.

    Out of memory is `torch.OutOfMemoryError`, `MemoryError`, and what the CPU's allocator,
    CUDA, cuBLAS and cuDNN raise for it. All other errors pass at once.

    Args:
        fn: takes a batch size and a `World`; what the batch size counts is its own affair.
        start: the first batch size, 1 or more, the same on all ranks.
        world: whose ranks agree.

    Law: the batch size is the largest `start // 2**k` for which no rank runs out of memory,
        the same on all ranks; a rank that does while others wait for it ends their waiting.

    Cost: a gather of two numbers a try, and in a world of several ranks a process group and a
        barrier a try.

    Raises:
        OutOfMemoryError: not even a batch size of 1 fits; the last error is its cause.
        PeerFailedError: another rank failed, and not for lack of memory.
        WorldError: several ranks are joined by NCCL, which cannot be left by one of them.
        ArgumentError: `start` is no positive integer, or differs between ranks.

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
    _check_world(world, start)
    batch_size = start
    while True:
        tried = _try_batch_size(fn, batch_size, world)
        if tried.all_fit(world, batch_size):
            return tried.result[0]
        if batch_size == 1:
            msg = (
                f"af.find_batch_size: {_who(tried)} ran out of memory with a batch size of"
                f" 1, the last after {start}. Make the model or its samples smaller."
            )
            raise OutOfMemoryError(msg) from tried.error
        del tried
        _free(world)
        batch_size //= 2


@attrs.define
class _Try(Generic[R]):
    """What came of one batch size on this rank: a result in a list, or an error."""

    result: list[R]
    error: Exception | None
    give_up: Callable[[], None]

    def all_fit(self, world: World, batch_size: int) -> bool:
        """Agree on whether the batch size fits on all ranks; if not, let go of the result.

        Raises:
            PeerFailedError: some rank lost its connection, and none ran out of memory.
        """
        lost = isinstance(self.error, PeerFailedError)
        mine = torch.tensor(
            [self.error is not None and not lost, lost], device=world.device
        )
        flags = torch.stack(all_gather(mine.int(), world, label=_LABEL)).any(0)
        none_left, some_lost = flags.tolist()
        if not none_left and not some_lost:
            return True
        if self.result:
            self.result.clear()
            self.give_up()
        if none_left:
            return False
        msg = (
            f"Rank {world.rank} of {world.size}: a rank lost its connection while"
            f" af.find_batch_size tried a batch size of {batch_size}, and no rank ran out of"
            " memory. Look at the other ranks' output for the cause."
        )
        raise PeerFailedError(msg) from self.error


def _try_batch_size(
    fn: Callable[[int, World], R], batch_size: int, world: World
) -> _Try[R]:
    """Call the function in a branch of the world; keep no frame of a call that failed."""
    branch, give_up = _branch(world)
    world.connection.is_lent = branch is not world
    try:
        if branch is world:
            result = fn(batch_size, world)
        else:
            with naming(_LABEL, branch), _standing_in(branch):
                result = fn(batch_size, branch)
    except Exception as error:
        if not isinstance(error, PeerFailedError) and not _is_out_of_memory(error):
            raise
        failure = error
    else:
        return _Try([result], None, give_up)
    finally:
        world.connection.is_lent = False
    _clear_frames(failure)
    give_up()
    return _Try([], failure, give_up)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, Error):
        return False
    return any(sign in str(error) for sign in _SIGNS)


def _clear_frames(error: BaseException) -> None:
    """Let go of what the functions that an error went through still refer to."""
    known: set[int] = set()
    behind: list[BaseException | None] = [error]
    while behind:
        each = behind.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            traceback.clear_frames(each.__traceback__)
            behind += [each.__cause__, each.__context__]


def _free(world: World) -> None:
    """Give memory back, of objects too that refer to themselves."""
    gc.collect()
    devices.give_back_memory(world.device)


def _who(tried: _Try[R]) -> str:
    ours = tried.error is not None and not isinstance(tried.error, PeerFailedError)
    return "this rank" if ours else "another rank"


def _check_world(world: World, start: int) -> None:
    if world.size == 1:
        return
    _check_group(world)
    mine = torch.tensor([start], device=world.device)
    starts = [int(each) for each in all_gather(mine, world, label=_LABEL)]
    if len(set(starts)) > 1:
        msg = f"af.find_batch_size: start differs between ranks: {starts}."
        raise ArgumentError(msg)


def _check_group(world: World) -> None:
    """Refuse a world beside which torch cannot join the same ranks once more."""
    if world.axes:
        msg = (
            f"af.find_batch_size in a world of axes, {dict(world.axes)}: it tries sizes in a"
            " second group of all ranks, which has none. Find the batch size without axes."
        )
        raise WorldError(msg)
    simulated = world.connection.simulated
    is_whole = (
        world.group is dist.group.WORLD if simulated is None else simulated.is_whole
    )
    if not is_whole or world.connection.is_branch:
        msg = (
            f"af.find_batch_size in a world of {world.size} ranks that is a part of the job,"
            " or the world of another search: it needs the job's whole world, as"
            " World.from_env() gives it."
        )
        raise WorldError(msg)
    backend = world.connection.backend(world.device)
    if backend not in (None, "gloo"):
        msg = (
            f"af.find_batch_size in a world of {world.size} ranks joined by {backend}: a"
            " rank that runs out of memory cannot end the others' waiting there. Open the"
            " world with World.from_env(backend='gloo'), or find the batch size of one rank in"
            " a run of one process, without a launcher."
        )
        raise WorldError(msg)


def _backend(world: World) -> Any:
    group = world.group
    assert group is not None  # noqa: S101 - a world of several has one
    return group._get_backend(world.device)


def _branch(world: World) -> tuple[World, Callable[[], None]]:
    """Return the same ranks with a process group of their own, and what gives it up."""
    if world.size == 1:
        return world, _nothing
    simulated = world.connection.simulated
    make = _torch_branch if simulated is None else simulated.branch
    branch, give_up = make(world)
    world.connection.hold(branch.connection.close)
    return branch, give_up


def _torch_branch(world: World) -> tuple[World, Callable[[], None]]:
    timeout = _backend(world).options._timeout
    group = dist.new_group(timeout=timeout, backend="gloo")
    # a rank that gave it up while others join it still would break their joining
    barrier(world, label=_LABEL)
    branch = attrs.evolve(world, group=group)
    branch.connection.is_branch = True
    del group
    return branch, lambda: _leave(branch)


@contextmanager
def _standing_in(branch: World) -> Generator[None, None, None]:
    """Let a branch's group be torch's default one, through which packages talk, as DeepSpeed."""
    if branch.connection.simulated is not None:
        yield
        return
    before, dist.group.WORLD = dist.group.WORLD, branch.group
    try:
        yield
    finally:
        dist.group.WORLD = before


def _leave(branch: World) -> None:
    """Close a group's connections, which is what the other ranks notice.

    Gloo closes them, too, when nothing refers to the group any more; but DeepSpeed's engine
    does for ever, and DistributedDataParallel until it is collected.
    """
    group = branch.group
    wake(branch)
    branch.connection.close()
    gc.collect()
    dist.destroy_process_group(group)


def _nothing() -> None: ...
