# SPDX-License-Identifier: Apache-2.0
"""The two parts of an engine: the binding of a state's tensors, and the runner of losses.

A `ParamBinding` points a module to a state's tensors, and collects gradients. Only the binding
knows whether a parameter is a whole tensor on each rank or a shard. A `Runner` runs a loss
function in that module, forward and backward, and checks what the function returns.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeAlias, cast

import attrs
import torch
from torch import nn
from torch.autograd import Variable

from accelfn.base import tree
from accelfn.base.arguments import qualname
from accelfn.base.devices import readable
from accelfn.base.tree import is_shard, local
from accelfn.collectives.packed import all_gather_list, broadcast_, gather_text, sum_
from accelfn.data import Batch
from accelfn.data.plan import Cursor
from accelfn.definition.definition import Definition
from accelfn.engine.optimizer import OptStateView
from accelfn.errors import (
    BatchError,
    CollectiveMismatchError,
    LossError,
    NonFiniteLossError,
)
from accelfn.state.results import Grads, Loss, Number, WeightedSum, check_whole
from accelfn.state.state import OptState, TrainState
from accelfn.world import World

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

# The binding of parameters that are replicated, or of layers that are split along "tp".


class ParamBinding(Protocol):
    """Points a module to a state's tensors, and collects the module's gradients.

    Attributes:
        module: the module that computes the loss; runners wrap it.
        params: the parameters that the optimizer steps, by name.
        trained: the trained parameters, by name.
    """

    module: nn.Module
    params: dict[str, nn.Parameter]
    trained: dict[str, nn.Parameter]

    @property
    def opt_state_view(self) -> OptStateView | None:
        """The converter of optimizer state between shards and a state's values.

        None means that no conversion is needed.
        """
        ...

    @property
    def holder(self) -> Any:
        """The object that hides gradients until the update (DeepSpeed), or None.

        The object has `hidden()`, a placeholder for the gradients; `reports()`, metrics of the
        last update; and `bound`, the parameters of the state after an update.
        """
        ...

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Point the module to a state's parameters, without a copy."""
        ...

    def has_gradients(self) -> bool:
        """Return whether some parameter has a gradient; the check is quick, not complete."""
        ...

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the last pass's gradients by parameter name; `.grad` is not cleared."""
        ...

    def put_gradients(self, grads: Grads) -> None:
        """Set gradients as `.grad`, for the next backward pass and the optimizer.

        Raises:
            GradsError: the gradients do not fit the parameters.
        """
        ...

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        ...

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return a callable that runs `fn(model, ...)` in evaluation mode on these tensors."""
        ...


class ReplicaBinding:
    """Binds parameters that are whole on this rank: in one process, or in a DDP replica."""

    opt_state_view: OptStateView | None = None
    holder = None

    def __init__(self, state: TrainState) -> None:
        """Build a module around the state's tensors."""
        self._definition = definition = state.definition
        self.module = build_module(definition, state.params, state.buffers)
        self.params = dict(self.module.named_parameters())
        self.trained = {n: self.params[n] for n in definition.skeleton.trainable}
        self._pairs = list(self.trained.items())

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Point the module's parameters to the state's memory."""
        for name, param in self.params.items():
            param.data = params[name]

    def has_gradients(self) -> bool:
        """Check the first and the last parameter only: every step calls this."""
        first, last = self._pairs[0][1], self._pairs[-1][1]
        return first.grad is not None or last.grad is not None

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that exist, by parameter name."""
        gradients: dict[str, torch.Tensor] = {}
        for name, param in self._pairs:
            if param.grad is not None:
                gradients[name] = param.grad
        return gradients

    def put_gradients(self, grads: Grads) -> None:
        """Set each parameter's gradient, or None."""
        grads.check_fit(self.trained)
        for name, param in self._pairs:
            param.grad = grads.as_taken.get(name)

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        for _, param in self._pairs:
            param.grad = None

    def lend(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[..., Any]:
        """Return a callable that runs `fn(model, ...)` in evaluation mode on these tensors."""
        return lend_module(self._definition, params, buffers)


class LayerBinding(ReplicaBinding):
    """Binds the parameters of a model with layers split along "tp": shards or whole tensors."""

    def __init__(self, state: TrainState) -> None:
        """Build a module around this rank's shards."""
        super().__init__(state)

        assert state.definition.layout is not None  # noqa: S101 - see `binding_of`
        self._layout = state.definition.layout
        self.opt_state_view = self._parts = ShardedParams(
            self._layout.cuts, self.params, state.params
        )

    def bind(self, params: Mapping[str, torch.Tensor]) -> None:
        """Point the module's parameters to the memory of the state's shards."""
        super().bind({name: local(param) for name, param in params.items()})
        self._parts.state = params

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients by parameter name, in the layout of the parameters."""
        gradients = super().take_gradients()
        return {n: self._layout.laid(n, grad) for n, grad in gradients.items()}

    def put_gradients(self, grads: Grads) -> None:
        """Set each parameter's `.grad` to this rank's shard of the gradient, or None."""
        grads.check_fit(self._parts.state)
        for name, param in self._pairs:
            grad = grads.as_taken.get(name)
            if grad is not None and not is_shard(grad):
                grad = self._layout.cut(name, grad)
            param.grad = None if grad is None else local(grad)


def binding_of(state: TrainState) -> ParamBinding:
    """Return the binding for an engine that does not gather parameters."""
    kind = ReplicaBinding if state.definition.layout is None else LayerBinding
    return kind(state)


def build_module(
    definition: Definition,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> nn.Module:
    """Build the model with this rank's tensors, and turn planned layers into split layers."""
    params = {name: local(param) for name, param in params.items()}
    module = definition.skeleton.build(params, buffers)
    for split in definition.setup.facts.get("splits_layers", ()):
        split(module, definition.world)
    return module


def lend_module(
    definition: Definition,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Callable[..., Any]:
    """Return a callable that runs `fn(model, ...)` in evaluation mode on these tensors."""
    model = build_module(definition, params, buffers).eval()

    def call(fn: Callable[..., Any], *inputs: Any) -> Any:
        return full_results(fn(model, *inputs))

    return call


def full_results(results: Any) -> Any:
    """Gather the scores in a tree that split layers returned; a collective if there are any."""
    return tree.tree_map(_full_scores, results)


def _full_scores(leaf: Any) -> Any:
    return leaf.full_scores() if hasattr(leaf, "full_scores") else leaf


# Convert the optimizer state of sharded parameters.


class ShardedParams:
    """Converts optimizer state between local shards and the DTensors of a state."""

    def __init__(
        self,
        split: Collection[str],
        params: Mapping[str, torch.nn.Parameter],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        """Initialize with names of split parameters, stepped parameters, state's parameters."""
        self._split, self._params, self.state = split, params, state

    def to_state(self, opt_state: OptState) -> OptState:
        """Return the optimizer's state with shards as DTensors."""
        return {n: self._entry(n, e) for n, e in opt_state.items()}

    def _entry(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        if name not in self._split:
            return entry
        value, shape = self.state[name], self._params[name].shape
        return {
            key: tree.with_local(value, part)
            if isinstance(part, torch.Tensor) and part.shape == shape
            else part
            for key, part in entry.items()
        }

    def from_state(self, opt_state: OptState) -> OptState:
        """Return the optimizer's state with local shards."""
        return {
            name: {key: local(value) for key, value in entry.items()}
            for name, entry in opt_state.items()
        }


# Read and check what a loss function returns.


@attrs.frozen
class ReadLoss:
    """A checked loss: the scalar to differentiate, its weight and the metrics.

    Attributes:
        scalar: the total, or the mean that a loss function returned.
        weight: the divisor of the total.
        is_mean: whether `scalar` is a mean; the total is then `scalar * weight`.
        sums: the step's metrics.
        is_finite: False if the loss is known to be infinite or NaN.
    """

    scalar: torch.Tensor
    weight: Number
    is_mean: bool
    sums: dict[str, WeightedSum]
    is_finite: bool = True


LossFunction: TypeAlias = Callable[..., Any]


@attrs.frozen
class Samples:
    """The arguments of a loss function except the model, and how their samples count.

    Attributes:
        value: the value of a batch.
        extras: the extra arguments.
        known: the number of samples, if the data define it; 0 for the filler of an empty share.
        lone: whether no other loss is combined with this loss; then `known` is not needed.
        judged: whether a transform checks the gradients, so the loss may be infinite or NaN.
        is_whole: whether these are all samples of the update on this rank.
        is_weighed: whether the loss function gets a weight per sample.
        into: the gradients of the update's earlier samples; None for its first samples.
        cursor: the data's cursor after these samples; None if they are plain values.
        loss_scale: the factor of the loss that avoids underflow; None means 1.
        batch: the batch of `af.batches` that has these samples, if any.
        origin: the loss function before transforms wrap it; the key for compiled functions.
    """

    value: Any
    extras: tuple[Any, ...]
    known: int | None
    lone: bool
    judged: bool = False
    is_whole: bool = True
    is_weighed: bool = False
    into: Grads | None = None
    cursor: Cursor | None = None
    loss_scale: torch.Tensor | None = None
    batch: Batch | None = None
    origin: LossFunction | None = None

    def counts(self) -> Sequence[int | None]:
        """Return each rank's number of samples (None: unknown); empty without an `af.Batch`."""
        batch = self.batch
        shares = () if batch is None or batch.shares is None else batch.shares()
        return [share[cast("Batch", batch).part] for share in shares]

    def with_weight(self, device: torch.device) -> "Samples":
        """Add an extra with a weight for each row: 1, or 0 for a filler.

        Raises:
            BatchError: the batch's tensors have different numbers of rows.
        """
        rows = tree.num_rows(self.value)
        weight = torch.full((rows,), float(self.known != 0), device=device)
        return attrs.evolve(self, extras=(*self.extras, weight))

    def count(self) -> int:
        """Return the number of samples from the tensors, if the data do not define it.

        Raises:
            BatchError: the number is needed, but tensors have different numbers of rows.
        """
        try:
            rows = tree.num_rows(self.value) or 1
        except BatchError:
            if self.lone:
                return 1
            raise
        return rows


def read_loss(result: Any, loss_fn: Callable[..., Any], samples: Samples) -> ReadLoss:
    """Check a loss function's result; the loss of a filler gets weight 0.

    Raises:
        LossError: the result is not a scalar tensor or an `af.Loss`, or has no gradient; or its
        weight is negative, infinite or NaN.
        NonFiniteLossError: the loss is infinite or NaN.

    On a GPU the values of loss and weight are not checked, because that would wait for the
    device.
    """
    if isinstance(result, torch.Tensor):
        value, finite = _check_scalar(result, loss_fn, samples)
        weight = samples.count() if samples.known is None else samples.known
        sums = {"loss": WeightedSum(value, weight, weight)}
        return ReadLoss(result, weight, is_mean=True, sums=sums, is_finite=finite)
    if isinstance(result, Loss):
        value, finite = _check_scalar(result.total, loss_fn, samples)
        totals = {"loss": (value, result.weight), **result.aux}
        if samples.known == 0:
            sums = dict.fromkeys(totals, WeightedSum(0.0, 0))
            return ReadLoss(result.total, 0, is_mean=True, sums=sums, is_finite=finite)
        weight = _detach(result.weight)
        _check_weight(weight, loss_fn)
        for entry in result.aux.values():
            check_whole(entry, qualname(loss_fn))
        sums = {
            name: WeightedSum(_detach(entry[0]), _detach(entry[1]))
            if isinstance(entry, tuple)
            else WeightedSum(_detach(entry), weight)
            for name, entry in totals.items()
        }
        return ReadLoss(
            result.total, weight, is_mean=False, sums=sums, is_finite=finite
        )
    msg = (
        f"{qualname(loss_fn)} returned a {type(result).__name__}. Return the loss alone, a scalar"
        " tensor without .item(), or with more numbers af.Loss(total, weight, name=total)."
    )
    raise LossError(msg)


def _check_weight(weight: Number, loss_fn: Callable[..., Any]) -> None:
    """Raise if a weight tensor cannot be a divisor; `af.Loss` itself checks plain numbers."""
    if not isinstance(weight, torch.Tensor) or not weight.is_cpu:
        return
    number: Any = weight.tolist()
    if not 0 <= number < math.inf:
        msg = (
            f"{qualname(loss_fn)} returned af.Loss(total, weight={number}): expected a finite"
            " weight of 0 or more."
        )
        raise LossError(msg)


def _check_scalar(
    scalar: torch.Tensor, loss_fn: Callable[..., Any], samples: Samples
) -> tuple[torch.Tensor, bool]:
    """Check a scalar loss; return its detached value, which no update changes.

    The second result is whether the value is finite, if this is known without waiting for a
    device.
    """
    if type(scalar) is not torch.Tensor:
        check_whole(scalar, qualname(loss_fn))
    if scalar.ndim != 0:
        msg = (
            f"{qualname(loss_fn)} returned a tensor of shape {tuple(scalar.shape)}; expected a"
            " scalar. Take its mean(), or return af.Loss(total.sum(), weight)."
        )
        raise LossError(msg)
    if scalar.is_complex():
        msg = f"{qualname(loss_fn)} returned a complex number; a loss is real. Return its abs()."
        raise LossError(msg)
    if not scalar.requires_grad:
        msg = (
            f"The loss that {qualname(loss_fn)} returned has no gradient: it does not depend on"
            " a trainable parameter. If af.all_reduce returned it, return this rank's loss instead:"
            " the step averages gradients over ranks. Otherwise it may be detached, computed under"
            " no_grad, or made from Python numbers. If a batch has no sample that counts, do not"
            " return a constant, but af.Loss(model(x[:0]).sum(), weight=0)."
        )
        raise LossError(msg)
    value = scalar.detach()
    # other computed scalars have their own memory
    if scalar.is_leaf or scalar._is_view():
        value = value.clone()
    # not `item`: a step must not use this operator, because it waits for devices
    if not value.is_cpu or math.isfinite(cast("Any", value.tolist())):
        return value, True
    if samples.judged:
        return value, False
    leaves = [leaf for leaf in tree.tensor_leaves(samples.value) if leaf.ndim]
    empty = leaves and not any(map(len, leaves))
    of = " for a batch without samples" if empty else ""
    msg = (
        f"{qualname(loss_fn)} returned {float(value)}{of}. The step did not change the state. Check"
        " the batch, the learning rate and the precision. af.skip_nonfinite() skips such updates."
    )
    raise NonFiniteLossError(msg)


def _detach(value: Number) -> Number:
    """Return a number's detached value, in its own memory if it is a tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).clone()
    return value


# Runners run a loss, and reduce its gradients.


class Runner(Protocol):
    """Runs a loss in a module forward and backward; gradients are added to `param.grad`.

    Attributes:
        reduces: whether a backward pass with `sync` averages gradients over ranks.
        expects_unused: whether parameters without a gradient are allowed.
    """

    reduces: bool
    expects_unused: bool

    @property
    def lone_module(self) -> nn.Module | None:
        """The module, if a pass runs only the loss, so that it can be one graph; else None."""
        ...

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Run the loss function, and return the checked loss."""
        ...

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale` to the parameters; None means a scale of 1.

        Returns the mean of `weight` over ranks if gradients were averaged, else None.
        """
        ...


class Delegating:
    """Runs another loss function in a runner: the function that `replace` returns."""

    lone_module = None

    def __init__(
        self, inner: Runner, replace: Callable[[LossFunction, Samples], LossFunction]
    ) -> None:
        """Initialize with the inner runner, and the function that returns the loss to run."""
        self.reduces, self.expects_unused = inner.reduces, inner.expects_unused
        self.backward, self._inner, self._replace = inner.backward, inner, replace

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Run the loss function that `replace` returns."""
        return self._inner.forward(self._replace(loss_fn, samples), samples, sync=sync)


class LocalRunner:
    """Calls the loss function with the module itself, without communication."""

    reduces = False
    expects_unused = True

    def __init__(self, module: nn.Module) -> None:
        """Initialize with the module."""
        self.lone_module = self._module = module

    def forward(
        self, loss_fn: LossFunction, samples: Samples, *, sync: bool
    ) -> ReadLoss:
        """Run the loss function, and return the checked loss."""
        del sync
        result = loss_fn(self._module, samples.value, *samples.extras)
        return read_loss(result, loss_fn, samples)

    def backward(
        self, scalar: torch.Tensor, scale: Number | None, weight: Number
    ) -> torch.Tensor | None:
        """Add the gradients of `scalar * scale`."""
        del weight
        run_backward((scalar,), (like(scalar, scale),))
        return None


_KEPT_GRAPH = (
    "The loss depends on a tensor that the loss function kept from an earlier call, with its"
    " graph. Keep a detached tensor, such as average = (0.9 * average + 0.1 * new).detach(), or a"
    " buffer of the model: accelfn saves buffers in checkpoints."
)


def run_backward(
    roots: tuple[torch.Tensor, ...], seeds: tuple[torch.Tensor, ...]
) -> None:
    """Run torch's backward pass from scalars with given initial gradients.

    On the CPU torch's engine is called directly. `torch.autograd.backward` adds checks that are
    not needed here, and a context for device threads, and costs 17 µs per call.
    """
    first, last = roots[0], roots[-1]
    try:
        if type(first) is type(last) is torch.Tensor and first.is_cpu and last.is_cpu:
            engine = cast("Any", Variable)._execution_engine
            keep_graph = create_graph = False
            engine.run_backward(
                *(roots, seeds, keep_graph, create_graph, ()),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        else:
            torch.autograd.backward(roots, seeds)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            error.add_note(_KEPT_GRAPH)
        raise


def like(scalar: torch.Tensor, value: Number | None) -> torch.Tensor:
    """Return `value` as a tensor like the scalar, without waiting; None means 1."""
    value = 1 if value is None else value
    if isinstance(value, torch.Tensor):
        # a copy, because autograd may store the tensor as a leaf's `.grad`
        return value.to(scalar, copy=True)
    return torch.full((), value, dtype=scalar.dtype, device=scalar.device)


# `RootModule`: a module whose forward is the loss, for DDP, FSDP and DeepSpeed.


class RootModule(nn.Module):
    """A module whose forward is the loss. The loss gets the plain model.

    DDP passes `weight`, a parameter that no optimizer steps. Its gradient is set to the weight
    of the loss. DDP reduces this gradient in its buckets, so the total weight of all ranks needs
    no extra collective. `weight` is a separate root of the backward pass, and adds no work.
    """

    def __init__(self, module: nn.Module, weight: nn.Parameter | None = None) -> None:
        """Initialize with the model, and a parameter that carries the weight of the loss."""
        super().__init__()
        self.module, self.weight = module, weight
        # a list, because it is slow to get parameters of a module
        self._roots = [] if weight is None else [weight]
        self._reads: list[ReadLoss] = []
        self._shared: list[torch.Tensor] | None = None

    def forward(self, loss_fn: LossFunction, samples: Samples) -> Any:
        """Return the loss; with a `weight`, also the root that reduces it."""
        result = loss_fn(self.module, samples.value, *samples.extras)
        read = read_loss(result, loss_fn, samples)
        self._reads.append(read)
        return (read.scalar, self._roots[0].view(())) if self._roots else read.scalar

    def take_read(self) -> ReadLoss:
        """Return the last pass's checked loss, and drop the losses of passes that raised."""
        read = self._reads.pop()
        self._reads.clear()
        return read

    def share_buffers(self, ranks: World) -> None:
        """Broadcast rank 0's buffers, as DDP does before an update; a collective."""
        if self._shared is None:  # the tensor objects stay the same: see `Buffers`
            self._shared = list(self.module.buffers())
        if self._shared:
            broadcast_(self._shared, ranks, label="buffers of rank 0")


# Keep the collectives of a pass in the same order on all ranks.
#
# A collective needs all ranks at once, so ranks follow one plan: the order of calls in the last
# pass. If a rank first needs another call, it still takes part in the planned call, and adds
# nothing. The turn of a call is its number in the order of all possible calls. At the end of the
# plan, the ranks ask each other which calls they still need, until no rank needs one.


_LABEL = "order of calls"
_END = -1
"""Marks the end of the pass. Lower numbers are calls that need all ranks."""


class CallOrder:
    """The order of the collectives of a pass on the ranks of a world.

    `needed` has the labels of the calls that this rank itself made in the pass, in order.

    Cost: one all-gather of 24 bytes per pass. If ranks differ, one more all-gather for each call
    that is not in the plan, and an all-reduce to drop calls that are not needed any more.
    """

    def __init__(self, ranks: World, calls: Mapping[str, Callable[[], object]]) -> None:
        """Initialize with the ranks and the calls.

        `calls` has, for each label, the function that takes part in the call.
        """
        self._ranks = attrs.evolve(ranks, group=ranks.connection, checked=False)
        self._labels, self._takes = list(calls), list(calls.values())
        self._turns = {label: turn for turn, label in enumerate(calls)}
        host = torch.device("cpu")  # to read a CPU tensor does not wait for a device
        joins_host = ranks.size > 1 and ranks.connection.joins(host)
        self._device = host if joins_host else readable(ranks.device)
        self._plans: dict[bool, list[int]] = {}
        self._plan, self._at = list[int](), 0
        self.needed: dict[int, str] = {}

    @contextmanager
    def begins(self, *, kind: bool = False) -> Generator[None]:
        """Begin a pass in a `with` block; each kind of pass has its own plan."""
        self._plan = self._plans.setdefault(kind, [])
        self._at, self.needed = 0, {}
        with self.goes_on():
            yield

    @contextmanager
    def goes_on(self) -> Generator[None]:
        """In a `with` block, make the collectives of the loss wait for their turn."""
        activity = self._ranks.connection.activity
        outer, activity.before_call = activity.before_call, self.reach
        try:
            yield
        finally:
            activity.before_call = outer

    def reach(self, label: str, world: World | None = None) -> None:
        """Take part in calls that come first; return when it is this call's turn.

        Raises:
            CollectiveMismatchError: the call needs all ranks, but ranks make different calls.
        """
        if world is not None and world.group is not self._ranks.group:
            return
        if label in self._turns:
            self._reach(self._turns[label])
        else:
            turn = -2 - zlib.crc32(label.encode())
            self._reach(turn, words=f"calls {label!r}")
            if self._plan[self._at : self._at + 1] != [turn]:
                self._plan.insert(self._at, turn)
            self._at += 1
        self.needed[self._at - 1] = label

    def end(self, note: int = 0) -> list[int]:
        """End the pass on all ranks; return the number `note` that each rank passed."""
        rows = self._reach(_END, note, "ends its pass")
        del self._plan[self._at :]
        if all(idle for _, idle, _ in rows):  # else a rank needed every call
            flags = [i in self.needed for i in range(self._at)]
            uses = torch.tensor(flags, dtype=torch.int64, device=self._device)
            sum_(uses, self._ranks, label=_LABEL)
            self._plan[:] = itertools.compress(self._plan, uses.tolist())
        return [note for *_, note in rows]

    def refuse(self, words: str) -> NoReturn:
        """Raise an error on all ranks; it shows the text `words` of each rank.

        Raises:
            CollectiveMismatchError: always.
        """
        texts = gather_text(words, self._ranks, label=_LABEL)
        rows = "; ".join(f"rank {rank} {words}" for rank, words in enumerate(texts))
        msg = (
            f"Rank {self._ranks.rank} of {self._ranks.size}: in a loss, all ranks must make the"
            f" same collectives in the same order, but {rows}. Make these calls on all ranks,"
            " not in a branch that depends on the samples."
        )
        raise CollectiveMismatchError(msg)

    def _reach(self, turn: int, note: int = 0, words: str = "") -> list[list[int]]:
        """Make the planned calls before the call number `turn`.

        If this call needs all ranks, return one row of numbers per rank: the rank's turn, the
        number of planned calls that it did not need, and its `note`. Otherwise return [].
        """
        while True:
            while self._at < len(self._plan) and self._plan[self._at] >= 0:
                call = self._plan[self._at]
                self._at += 1
                self._ranks.connection.activity.label = self._labels[call]
                if call == turn:
                    return []
                self._takes[call]()
            values = [turn, self._at - len(self.needed), note]
            row = torch.tensor(values, device=self._device)
            rows = torch.stack(all_gather_list(row, self._ranks, label=_LABEL)).tolist()
            turns = {turn for turn, *_ in rows}
            if any(turn >= 0 for turn in turns):
                calls = sorted(turn for turn in turns if turn >= 0)
                self._plan[self._at : self._at] = calls
            elif len(turns) == 1:
                return rows
            else:
                self.refuse(words)
