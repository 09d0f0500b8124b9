# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for property tests of training.

Draw all values in the test's thread, before a simulated world starts. A failing example is
printed as the code that creates it, and shrinks to the smallest value that still fails.

    @given(program=programs(), size=worlds(), schedule=schedules(), order=sums())
    def test_replicas_agree(program, size, schedule, order):
        run = simulate(size, program, schedule=schedule, sums=order)
        ...
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeAlias, get_args

import attrs
import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError
from accelfn.plug import arguments
from accelfn.plug import transform as contract
from accelfn.schedules import Schedule
from accelfn.testing.catalog import CATALOG, Row, row_of
from accelfn.testing.simulation.calls import Fault, Sums

# Strategies for valid chains of the catalog's transforms, in any order.


def chains(
    *,
    include: Iterable[Any] = (),
    exclude: Iterable[type] = (),
    field: str | None = None,
    reduced: bool = False,
    max_size: int = len(CATALOG),
) -> st.SearchStrategy[af.chain]:
    """Draw chains of public transforms with options. Examples shrink to shorter chains.

    Args:
        include: transforms that every chain has: your own transforms, or classes of public
            transforms (accelfn draws their options).
        exclude: classes of public transforms that no chain has.
        field: draw only transforms with this method, such as "grads". Transforms in `include`
            need not have it.
        reduced: whether every chain reduces gradients over ranks. Set it to train on several
            ranks.
        max_size: the largest number of drawn transforms, in addition to `include`.

    Raises:
        ArgumentError: an entry of `include` is not a transform, or the method is unknown.

    Example:
        >>> around_mine = chains(include=[af.ema(0.5)], exclude=[af.local_sgd])
    """
    if field is not None and field not in contract.FIELDS:
        msg = f"chains(field={field!r}): expected one of {', '.join(contract.FIELDS)}."
        raise ArgumentError(msg)
    musts = [_must(member) for member in include]
    without = {must.cls for must in musts} | {row_of(cls).cls for cls in exclude}
    free = [row for row in CATALOG if row.cls not in without]
    reducing = {"engine", "reduce"} if reduced else set[str]()
    # copies, because a row is drawn as a reducer or as another transform
    reducers = [attrs.evolve(row) for row in free if reducing & row.fields]
    fitting = [row for row in free if field is None or field in row.fields]
    return _chains(musts, reducers, fitting, max_size, field=field)


def _must(member: Any) -> Row:
    if isinstance(member, type):
        return row_of(member)
    if not contract.is_transform(member) or isinstance(member, af.chain):
        msg = f"chains(include=[{member!r}]): expected a transform, or a public transform's class."
        raise ArgumentError(msg)
    rows = [row for row in CATALOG if row.cls is type(member)]
    return attrs.evolve(
        rows[0] if rows else Row(type(member), st.just({})), value=member
    )


@st.composite
def _chains(
    draw: st.DrawFn,
    musts: Sequence[Row],
    reducers: Sequence[Row],
    rows: Sequence[Row],
    max_size: int,
    *,
    field: str | None,
) -> af.chain:
    chosen = list(musts)
    able = [row for row in reducers if row.composes(chosen)]
    if able:
        chosen.append(draw(st.sampled_from(able)))
    num_musts = len(chosen)
    order = draw(st.permutations([*chosen, *rows]))
    for row in order:
        take = row not in chosen and draw(st.booleans())
        if take and len(chosen) < num_musts + max_size and row.composes(chosen):
            chosen.append(row)

    def draw_transform(row: Row) -> af.Transform:
        strategy = row.transforms(other for other in chosen if other is not row)
        if field is not None and row in rows:  # options can disable a method
            strategy = strategy.filter(partial(contract.has_field, field=field))
        return draw(strategy)

    return af.chain(*[draw_transform(row) for row in order if row in chosen])


# Records that print as the call that creates them, so that you can copy a failing example.


def as_code(self: Any) -> str:
    """Return the call that creates a record, without arguments that equal their defaults."""
    codes: list[str] = []
    for field in attrs.fields(type(self)):
        value = getattr(self, field.name)
        if field.default is not attrs.NOTHING and value == field.default:
            continue
        name = arguments.qualname(value)
        codes.append(f"{field.name}={name}" if field.kw_only else name)
    return f"{type(self).__name__}({', '.join(codes)})"


def print_code(self: Any, p: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's protocol
    """Print the repr. Hypothesis calls this as `_repr_pretty_` to show a failing example."""
    del cycle
    first, *rest = repr(self).splitlines()
    p.text(first)
    for line in rest:
        p.break_()
        p.text(line)


# Datasets that are easy to read: small integers with exact sums, or multiples of 1.1.


Table: TypeAlias = tuple[tuple[float, ...], ...]


def _as_table(rows: Iterable[Iterable[float]]) -> Table:
    return tuple(tuple(row) for row in rows)


@attrs.frozen(repr=False)
class Samples:
    """A map-style dataset of inputs and targets, as rows of numbers.

    Attributes:
        inputs: one row per sample.
        targets: one row per sample.

    Raises:
        ArgumentError: the numbers of rows differ.

    Example:
        >>> Samples([[1, 2, 0]], [[3, 4]])[0]
        (tensor([1., 2., 0.], dtype=torch.float64), tensor([3., 4.], dtype=torch.float64))
    """

    inputs: Table = attrs.field(converter=_as_table)
    targets: Table = attrs.field(converter=_as_table)

    _repr_pretty_ = print_code

    def __attrs_post_init__(self) -> None:
        """Raise an error if the numbers of rows differ."""
        if len(self.inputs) != len(self.targets):
            msg = (
                f"Samples: {len(self.inputs)} rows of inputs, but {len(self.targets)} rows of"
                " targets. Expected one row of each per sample."
            )
            raise ArgumentError(msg)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All inputs and all targets as two float64 tensors, which `af.Data` reads fastest."""
        return _tensor(self.inputs), _tensor(self.targets)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample."""
        return _tensor(self.inputs[index]), _tensor(self.targets[index])

    def __repr__(self) -> str:
        """Return the call that creates the samples, with rows as lists."""
        lists = [[list(row) for row in table] for table in (self.inputs, self.targets)]
        return f"Samples({lists[0]}, {lists[1]})"


def _tensor(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def datasets(
    *,
    dyadic: bool | None = None,
    inputs: int = 3,
    outputs: int = 2,
    min_size: int = 1,
    max_size: int = 12,
) -> st.SearchStrategy[Samples]:
    """Draw small datasets.

    Args:
        dyadic: True for integers from -3 to 3 (their sums and products are exact), False for
            1.1 times these integers (their sums are rounded), None for either kind.
        inputs: the number of features of a sample.
        outputs: the number of targets of a sample.
        min_size: the smallest number of samples.
        max_size: the largest number of samples.
    """

    def samples(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Samples]:
        row = st.lists(numbers, min_size=inputs + outputs, max_size=inputs + outputs)
        # draw the number of rows first: otherwise an example cannot shrink to only its last row
        sizes = st.integers(min_size, max_size)
        tables = sizes.flatmap(lambda n: st.lists(row, min_size=n, max_size=n))
        return tables.map(
            lambda rows: Samples([r[:inputs] for r in rows], [r[inputs:] for r in rows])
        )

    if dyadic is None:
        return samples(_INTEGERS) | samples(_TENTHS)
    return samples(_INTEGERS if dyadic else _TENTHS)


_INTEGERS = st.integers(-3, 3)
_TENTHS = _INTEGERS.map(lambda number: number + number / 10)


# Fields of a record that the caller sets, each to a value or to a strategy that draws values.


def field_strategies(
    fields: Mapping[str, Any], defaults: Mapping[str, st.SearchStrategy[Any]]
) -> dict[str, st.SearchStrategy[Any]]:
    """Return a strategy for every field. `fields` override `defaults`."""
    constant = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in fields.items()
    }
    return {**defaults, **constant}


# Loss functions that return a plain mean, or a total with a weight.


Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_REDUCTIONS = ("mean", "sum", "weighted", "masked")


@attrs.frozen(repr=False)
class Criterion:
    """A loss function of a batch `(inputs, targets)`.

    Attributes:
        reduction: "mean" returns a tensor. The others return an `af.Loss`: "sum" with the number
            of samples as weight, "weighted" with sample weights (some are 0) and a second
            metric, "masked" with only some samples, possibly none.
        squared: whether errors are squared distances. Otherwise they are products of outputs and
            targets, with exact sums on dyadic data.

    Example:
        >>> Criterion("masked", squared=True)
        Criterion('masked', squared=True)
    """

    reduction: str = attrs.field(
        default="mean", validator=arguments.one_of(*_REDUCTIONS, within="")
    )
    squared: bool = attrs.field(default=False, kw_only=True)

    __repr__ = as_code
    _repr_pretty_ = print_code

    def __call__(self, model: nn.Module, batch: Pair) -> torch.Tensor | af.Loss:
        """Return the loss of a batch."""
        inputs, targets = batch
        outputs = model(inputs)
        errors = (outputs - targets).square() if self.squared else outputs * targets
        sample_losses = errors.sum(1)
        if self.reduction == "mean":
            return sample_losses.mean()
        if self.reduction == "sum":
            return af.Loss(sample_losses.sum(), len(sample_losses))
        if self.reduction == "weighted":
            weights = targets[:, 0].abs()
            size = (inputs.sum(), float(len(inputs)))
            return af.Loss((sample_losses * weights).sum(), weights.sum(), size=size)
        counts = targets[:, 0] > 0
        return af.Loss(sample_losses[counts].sum(), counts.sum())


def losses(**fields: Any) -> st.SearchStrategy[Criterion]:
    """Draw losses.

    Args:
        fields: fields of `Criterion`, each a value or a strategy that draws values.
    """
    usual = {"reduction": st.sampled_from(_REDUCTIONS), "squared": st.booleans()}
    return st.builds(Criterion, **field_strategies(fields, usual))


# Small models with features that can break training: tied, frozen, unused parameters, buffers.


_FEATURES = arguments.integer(1, "a number of features", within="")
_LAYERS = arguments.integer(0, "a number of hidden layers", within="")


_DTYPE = arguments.satisfies(
    lambda name: (
        getattr(getattr(torch, str(name), None), "is_floating_point", False) is True
    ),
    'the name of a floating-point dtype as a string, such as "float32"',
    within="",
)


@attrs.frozen(kw_only=True, repr=False)
class Net:
    """A factory of a small model: `Net(depth=1)()` returns a module.

    Attributes:
        depth: the number of hidden layers.
        width: the number of features of each hidden layer.
        bias: whether layers add a bias.
        tied: whether to add two hidden layers that share one weight.
        frozen: whether to add a first layer that is not trained.
        unused: whether to add a parameter that the output does not depend on.
        norm: whether to add batch normalization, with buffers. All features form one channel,
            so a batch with a single sample also has statistics.
        dropout: whether to add dropout, which draws random numbers in training.
        dyadic: whether to set the weights to -1, 1 and 2. Sums of dyadic data are then exact.
        dtype: the dtype of parameters and buffers. Inputs are converted to it.
        inputs: the number of features of a sample.
        outputs: the number of outputs for a sample.

    Example:
        >>> Net(depth=1, width=2)().head
        Linear(in_features=2, out_features=2, bias=True)
    """

    depth: int = attrs.field(default=0, validator=_LAYERS)
    width: int = attrs.field(default=1, validator=_FEATURES)
    bias: bool = True
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    norm: bool = False
    dropout: bool = False
    dyadic: bool = False
    dtype: str = attrs.field(default="float64", validator=_DTYPE)
    inputs: int = attrs.field(default=3, validator=_FEATURES)
    outputs: int = attrs.field(default=2, validator=_FEATURES)

    __repr__ = as_code
    _repr_pretty_ = print_code

    def __attrs_post_init__(self) -> None:
        """Raise an error if batch normalization would have only one number per sample."""
        if self.norm and self.inputs < 2:
            msg = f"{self!r}: norm=True normalizes over a sample's inputs. Pass inputs=2 or more."
            raise ArgumentError(msg)

    @property
    def per_sample(self) -> bool:
        """Whether the output of a sample does not depend on the other samples of its batch."""
        return not (self.norm or self.dropout)

    def __call__(self) -> nn.Module:
        """Create the model. Its weights are drawn from torch's generator, unless `dyadic`."""
        return _Module(self)


class _Module(nn.Module):
    """The module that a `Net` creates."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        wide = net.inputs
        self.features = nn.ModuleList()
        if net.frozen:
            self.features.append(nn.Linear(wide, wide, bias=net.bias))
        self.norm = nn.BatchNorm1d(1) if net.norm else nn.Identity()
        self.hidden = nn.ModuleList()
        for _ in range(net.depth):
            self.hidden.append(nn.Linear(wide, net.width, bias=net.bias))
            wide = net.width
        if net.tied:
            first, again = (nn.Linear(wide, wide, bias=net.bias) for _ in range(2))
            again.weight = first.weight
            self.hidden.extend([first, again])
        if net.unused:
            self.unused = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(0.5) if net.dropout else nn.Identity()
        self.head = nn.Linear(wide, net.outputs, bias=net.bias)
        if net.dyadic:
            _set_dyadic(self)
        self.features.requires_grad_(requires_grad=False)
        self.to(getattr(torch, net.dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a batch."""
        features = inputs.to(self.head.weight.dtype)
        for layer in self.features:
            features = layer(features)
        features = self.norm(features.unsqueeze(1)).squeeze(1)
        for layer in self.hidden:
            # leaky, so that gradients are not all 0; the slope 0.5 keeps sums exact
            features = nn.functional.leaky_relu(layer(features), 0.5)
        return self.head(self.dropout(features))


def _set_dyadic(module: nn.Module) -> None:
    """Set the weights to -1, 1 and 2 in turn."""
    values = torch.tensor([-1.0, 1.0, 2.0])
    for shift, param in enumerate(module.parameters()):
        turn = (torch.arange(param.numel()) + shift) % len(values)
        param.data = values[turn].view_as(param)


def models(**fields: Any) -> st.SearchStrategy[Net]:
    """Draw factories of small models.

    Args:
        fields: fields of `Net`, each a value or a strategy that draws values.

    Example:
        >>> for_any_split = models(norm=False, dropout=False)
    """
    flags = "tied", "frozen", "unused", "norm", "dropout"
    usual: dict[str, st.SearchStrategy[Any]] = {
        "depth": st.integers(0, 2),
        "width": st.integers(1, 4),
        "bias": st.sampled_from([True, False]),
        **dict.fromkeys(flags, st.booleans()),
    }
    return st.builds(Net, **field_strategies(fields, usual))


# Factories of torch optimizers that can be compared and printed: a name and options.


@attrs.frozen(init=False, repr=False)
class TorchOptimizer:
    """A factory of a torch optimizer. Factories with equal names and options are equal.

    Attributes:
        name: the name of a class in `torch.optim`.
        options: the options by name, in order.

    Raises:
        ArgumentError: torch has no optimizer of that name.

    Example:
        >>> TorchOptimizer("SGD", lr=0.5)
        TorchOptimizer('SGD', lr=0.5)
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    _repr_pretty_ = print_code

    def __init__(self, name: str, **options: Any) -> None:
        """Initialize with the name of an optimizer class and its options."""
        cls = getattr(torch.optim, name, None)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            msg = (
                f"TorchOptimizer({name!r}): torch.optim has no optimizer of this name. Expected"
                ' a name such as "SGD".'
            )
            raise ArgumentError(msg)
        self.__attrs_init__(name=name, options=tuple(sorted(options.items())))  # type: ignore[attr-defined]

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """Create the optimizer for some parameters."""
        return getattr(torch.optim, self.name)(parameters, **dict(self.options))

    def __repr__(self) -> str:
        """Return the call that creates this factory."""
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"TorchOptimizer({self.name!r}{options})"


_DYADIC = (
    TorchOptimizer("SGD", lr=0.5),
    TorchOptimizer("SGD", lr=0.25, momentum=0.5),
    TorchOptimizer("SGD", lr=0.25, momentum=0.5, nesterov=True),
    TorchOptimizer("SGD", lr=0.5, weight_decay=0.5),
)
_OTHERS = (  # large eps: with a small eps, a rounding error of a zero gradient becomes a step
    TorchOptimizer("AdamW", lr=0.05, eps=1e-3),
    TorchOptimizer("Adam", lr=0.05, eps=1e-3, amsgrad=True),
    TorchOptimizer("RMSprop", lr=0.05, eps=1e-3),
    TorchOptimizer("Adagrad", lr=0.05, eps=1e-3),
)


def optimizers(*, dyadic: bool = False) -> st.SearchStrategy[TorchOptimizer]:
    """Draw optimizers: SGD (also with momentum or weight decay) and adaptive optimizers.

    Args:
        dyadic: whether to draw only optimizers with an exact first update for exact gradients.
    """
    return st.sampled_from(_DYADIC if dyadic else (*_DYADIC, *_OTHERS))


# Programs: small training runs that any world can run, as records that print as code.


@attrs.frozen(repr=False)
class Program:
    """A training run: the arguments of `TrainState.create`, a loss and a number of updates.

    A program is a function of a world: `simulate(2, program)` trains on two ranks.

    Attributes:
        dataset: `Samples`, or another dataset that `af.Data` accepts.
        model: a factory of the model.
        loss: the loss function of `af.make_step`.
        optimizer: a factory of the optimizer.
        setup: the transforms.
        schedule: the schedule of the learning rate.
        batch_size: the number of samples per update.
        shuffle: whether each epoch has a different order.
        remainder: how to handle a short last batch, as in `af.Data`.
        seed: the seed of the state.
        updates: the number of updates.

    Law: the same program in the same world gives the same state, bitwise.

    Example:
        >>> program = Program(Samples([[1, 2, 0]], [[3, 4]]), Net(dyadic=True), updates=1)
        >>> program(af.World.single(device="cpu")).step
        1
    """

    dataset: Any
    model: Callable[[], Any] = attrs.field(default=Net())
    loss: Callable[..., Any] = attrs.field(default=Criterion(), kw_only=True)
    optimizer: Callable[..., Any] = attrs.field(
        default=TorchOptimizer("SGD", lr=0.5), kw_only=True
    )
    setup: af.chain = attrs.field(factory=af.chain, converter=af.chain, kw_only=True)
    schedule: Schedule | None = attrs.field(default=None, kw_only=True)
    batch_size: int = attrs.field(default=8, kw_only=True)
    shuffle: bool = attrs.field(default=False, kw_only=True)
    remainder: Literal["short", "pad", "drop"] = attrs.field(
        default="short", kw_only=True
    )
    seed: int = attrs.field(default=0, kw_only=True)
    updates: int = attrs.field(default=2, kw_only=True)

    __repr__ = as_code
    _repr_pretty_ = print_code

    def __call__(self, world: af.World) -> af.TrainState:
        """Train for all updates, and return the last state."""
        state, _ = self.train(self.state(world))
        return state

    @property
    def data(self) -> af.Data:
        """The dataset as an `af.Data`, with the batch size and the order."""
        dataset = self.dataset
        return af.Data(
            dataset.tensors if isinstance(dataset, Samples) else dataset,
            global_batch_size=self.batch_size,
            shuffle=self.shuffle,
            remainder=self.remainder,
        )

    def state(self, world: af.World | None = None) -> af.TrainState:
        """Create the state before the first update, by default in a world of one rank."""
        return af.TrainState.create(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            data=self.data,
            setup=self.setup,
            world=af.World.single(device="cpu") if world is None else world,
            seed=self.seed,
        )

    def train(
        self, state: af.TrainState, updates: int | None = None
    ) -> tuple[af.TrainState, list[af.Metrics]]:
        """Train for some updates, by default all. Return the state and each update's metrics."""
        count = self.updates if updates is None else updates
        step, history = af.make_step(self.loss), list[af.Metrics]()
        for batch in islice(af.batches(state) if count else (), count):
            state, metrics = step(state, batch)
            history.append(metrics)
        return state, history


def programs(*, exact: bool = False, **fields: Any) -> st.SearchStrategy[Program]:
    """Draw programs that train in a world of any size.

    Dropout and batch statistics depend on how a batch is split. If your test compares splits,
    pass `model=models(norm=False, dropout=False)`.

    Args:
        exact: whether to draw only programs with exact sums in any order: dyadic data and
            weights, products as errors, one update, and a setup that only splits updates. Such a
            program gives equal results on any number of ranks; only the sign of a 0 may differ.
        fields: fields of `Program`, each a value or a strategy that draws values.

    Example:
        >>> for_mine = programs(setup=chains(include=[af.ema(0.5)], reduced=True))
    """
    values = {n for n, v in fields.items() if not isinstance(v, st.SearchStrategy)}
    return _programs(exact, field_strategies(fields, _EXACT if exact else _ANY), values)


_ANY: dict[str, st.SearchStrategy[Any]] = {
    "model": models(),
    "loss": losses(),
    "optimizer": optimizers(),
    "setup": chains(include=[af.shard_data], reduced=True),
    "schedule": st.sampled_from([None, af.schedules.linear(4)]),
    "shuffle": st.booleans(),
    "seed": st.integers(0, 3),
    "updates": st.integers(1, 3),
}
_EXACT: dict[str, st.SearchStrategy[Any]] = {
    **_ANY,
    "model": models(dyadic=True, norm=False, dropout=False),
    "loss": losses(squared=False),
    "optimizer": optimizers(dyadic=True),
    "setup": chains(field="data", include=[af.shard_data, af.wrap_ddp]),
    "schedule": st.none(),
    "updates": st.just(1),
}


@st.composite
def _programs(
    draw: st.DrawFn,
    exact: bool,  # noqa: FBT001 - hypothesis hands composites their arguments by position
    fields: Mapping[str, st.SearchStrategy[Any]],
    values: Collection[str],
) -> Program:
    args = {name: draw(field) for name, field in fields.items()}
    if "dataset" not in args:
        net = args["model"]
        is_net = isinstance(net, Net)
        sides = {"inputs": net.inputs, "outputs": net.outputs} if is_net else {}
        args["dataset"] = draw(datasets(dyadic=exact or None, **sides))
    n = len(af.Data(args["dataset"], global_batch_size=1))
    if "batch_size" not in args:
        powers = [size for size in (1, 2, 4, 8) if size <= n]
        args["batch_size"] = draw(st.sampled_from(powers) if exact else _BATCH_SIZES)
    if "remainder" not in args:
        fits = args["batch_size"] <= n
        kinds = ["drop"] if exact else ["short", "pad", *(["drop"] if fits else [])]
        args["remainder"] = draw(st.sampled_from(kinds))
    program = Program(**_with_unused_found(args, values))
    if any(isinstance(t, af.diloco) and t.fragments > 1 for t in program.setup):
        try:
            program.state()
        except ArgumentError:  # a small model cannot be divided into fragments
            reject()
    return program


_BATCH_SIZES = st.integers(1, 8)


def _with_unused_found(args: dict[str, Any], values: Collection[str]) -> dict[str, Any]:
    """Set `find_unused_parameters`, or remove the unused parameter from the model.

    Only fields that were drawn change. `values` names the fields that the caller set.
    """
    net, setup = args["model"], af.chain(args["setup"])
    ddp = next((t for t in setup if isinstance(t, af.wrap_ddp)), None)
    has_unused = isinstance(net, Net) and net.unused
    if not has_unused or ddp is None or ddp.find_unused_parameters:
        return args
    if "setup" not in values:
        finds = attrs.evolve(ddp, find_unused_parameters=True, static_graph=False)
        parts = [finds if transform is ddp else transform for transform in setup]
        return {**args, "setup": af.chain(*parts)}
    if "model" not in values:
        return {**args, "model": attrs.evolve(net, unused=False)}
    return args


# Strategies for `simulate`: the size of the world, the orders of turns and sums, and faults.


def worlds(sizes: Sequence[int] = (1, 2, 4)) -> st.SearchStrategy[int]:
    """Draw the size of a world. Examples shrink to the first of `sizes`.

    The default sizes are powers of two, because a division of dyadic sums by them is exact.
    """
    return st.sampled_from(tuple(sizes))


def schedules(size: int = 4, *, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Draw the order of ranks' turns, for `simulate(..., schedule=)`.

    Args:
        size: the number of ranks.
        max_size: the largest length of the schedule. After its end, ranks continue in turn.

    Law: examples shrink to the empty list. Ranks then continue in turn.
    """
    return st.lists(st.integers(0, max(size - 1, 0)), max_size=max_size)


def sums() -> st.SearchStrategy[Sums]:
    """Draw the order of additions over ranks, for `simulate(..., sums=)`.

    A test of bitwise equality must pass with all orders. Examples shrink to "ranks".
    """
    return st.sampled_from(get_args(Sums))


KINDS: tuple[type[Fault], ...] = get_args(Fault)


def faults(
    size: int,
    *,
    kinds: Sequence[type[Fault]] = KINDS,
    at: st.SearchStrategy[int | str] | None = None,
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Draw one fault or none, for `simulate(..., faults=)`.

    Args:
        size: the number of ranks.
        kinds: the classes of faults, the simplest first.
        at: a strategy for the place of the fault: the index of a rank's collective, or a label.
            By default one of the first 8 collectives.
    """
    where = st.integers(0, 7) if at is None else at
    some = [st.builds(kind, rank=st.integers(0, size - 1), at=where) for kind in kinds]
    return st.just(()) | st.one_of(some).map(lambda fault: (fault,))


__all__ = [
    "Criterion",
    "Net",
    "Program",
    "Samples",
    "TorchOptimizer",
    "chains",
    "datasets",
    "faults",
    "losses",
    "models",
    "optimizers",
    "programs",
    "schedules",
    "sums",
    "worlds",
]
