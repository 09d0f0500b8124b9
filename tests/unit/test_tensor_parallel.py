# SPDX-License-Identifier: Apache-2.0
"""What tensor_parallel refuses, and what its words mean."""

import re
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)

import accelfn as af
from accelfn.errors import (
    ArgumentError,
    BatchError,
    CompositionError,
    LossError,
    ModelError,
    OptimizerError,
    WorldError,
)
from accelfn.testing import simulate
from tests.states import values
from tests.strategies import differences

WIDTH, HEADS = 8, 4
PAIR = {"up": "column", "down": "row"}


class Net(nn.Module):
    """Two layers, of which the first is wider, and others; what it computes can be said."""

    def __init__(self, computes: Any = None, **options: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.more = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH, elementwise_affine=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.words = nn.Embedding(4, WIDTH, **options)
        self.computes = computes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.computes is not None:
            return self.computes(self, x)
        return self.down(torch.tanh(self.up(x)))


class Tied(Net):
    """One parameter in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4, bias=False)
        self.head.weight = self.words.weight


class Tailed(Net):
    """Has a row layer in a module that stands behind a column layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(OrderedDict(norm=self.norm, down=self.down))
        del self.norm, self.down


class Own(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        return super().forward(input) * 2


def own() -> Net:
    net = Net()
    net.up = Own(WIDTH, 2 * WIDTH)
    return net


def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


adam = partial(torch.optim.Adam, lr=0.1)
sgd = partial(torch.optim.SGD, lr=0.1)
X = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def state_of(
    world: af.World,
    *behind: object,
    model: Any = Net,
    plan: Any = PAIR,
    optimizer: Any = adam,
) -> af.TrainState:
    setup = af.chain(af.tensor_parallel(plan), *behind)
    return af.TrainState.create(
        model=model, optimizer=optimizer, setup=setup, world=world
    )


def step_once(world: af.World, **options: Any) -> af.TrainState:
    return af.make_step(loss)(state_of(world, **options), X)[0]


def on_two(fn: Any, *args: Any, **options: Any) -> Any:
    return simulate(2, lambda world: fn(world, *args, **options), axes={"tp": 2})


def check_as_alone(fn: Any, *args: Any) -> None:
    """Check that two ranks train what one does."""
    alone = af.full_params(fn(af.World.single(), *args))
    for found in on_two(lambda world: af.full_params(fn(world, *args))):
        assert differences(alone, found, within=1e-5) == []


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (None, "expected a dict from module names to words"),
        (["up"], "expected a dict from module names to words"),
        ({"up": "columns"}, "Did you mean 'column'?"),
        ({"up": "split"}, "'split' for 'up'; expected one of column, gathered, row"),
        ({"up": "sequence"}, "needs sequences that are split between layers"),
        ({"up": SequenceParallel()}, "Pass sequence=True"),
        ({"up": 3}, "support this style"),
        ({"up": SequenceParallel(sequence_dim=0)}, "support this style"),
        ({"up": ColwiseParallel(input_layouts=Shard(0))}, "support this style"),
        ({"up": RowwiseParallel(use_local_output=False)}, "support this style"),
    ],
)
def test_what_is_no_plan_is_refused(plan, said):
    with pytest.raises(ArgumentError, match=re.escape(said)):
        af.tensor_parallel(plan)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        *(("colwise", "column"), ("rowwise", "row"), ("colwise_rep", "gathered")),
        *(("colwise_gather_output", "gathered"), ("embedding_rowwise", "vocabulary")),
        ("replicated_with_grad_allreduce", "replicated"),
        *((ColwiseParallel(), "column"), (RowwiseParallel(), "row")),
        (ColwiseParallel(output_layouts=Replicate()), "gathered"),
        (ColwiseParallel(use_local_output=False), "vocabulary"),
        (SequenceParallel(), "sequence"),
    ],
)
def test_words_of_others_are_taken(value, word):
    """A plan of Transformers or of torch is one of accelfn's."""
    options = {"sequence": True} if word == "sequence" else {}
    one, other = (af.tensor_parallel({"up": w}, **options) for w in (value, word))
    assert one == other
    shown = ", sequence=True" if options else ""
    assert repr(one) == f"af.tensor_parallel({{'up': '{word}'}}{shown})"


@pytest.mark.parametrize(
    ("plan", "model", "said"),
    [
        ({"blocks.*.up": "column"}, Net, "'blocks.*.up'. The closest names are 'up'"),
        ({"ups": "column"}, Net, "The closest names are 'up'"),
        ({"norm": "column"}, Net, "only an nn.Linear can be 'column'"),
        ({"norm": "vocabulary"}, Net, "only an nn.Embedding or nn.Linear can be"),
        ({"words": "row"}, Net, "only an nn.Linear can be 'row'"),
        ({"up": "column"}, own, "test_tensor_parallel.Own"),
        ({"words": "vocabulary"}, partial(Net, max_norm=1.0), "option max_norm"),
        ({"words": "vocabulary"}, partial(Net, sparse=True), "option sparse"),
        (
            *({"words": "vocabulary"}, partial(Net, scale_grad_by_freq=True)),
            "option scale_grad_by_freq",
        ),
        ({"words": "vocabulary"}, Tied, "'words.weight' and 'head.weight' are the"),
        ({"head": "gathered"}, Tied, "'words.weight' and 'head.weight' are the"),
        (
            *({"up": "column", "tail.down": "row", "tail": "replicated"}, Tailed),
            "includes all modules inside it, but 'tail.down' is 'row'. Instead, name each",
        ),
        (
            *({"tail": "replicated", "tail.norm": "replicated"}, Tailed),
            "but 'tail.norm' is 'replicated'",
        ),
    ],
)
def test_what_a_model_has_not_is_refused(plan, model, said):
    """On one process already, and in the names of what there is."""
    with pytest.raises(ModelError, match=re.escape(said)):
        state_of(af.World.single(), plan=plan, model=model)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"up": "column"}, "'up' has 16 output features, which cannot"),
        ({"up": "row"}, "'up' has 8 input features"),
        ({"words": "vocabulary"}, "'words' has 4 words"),
    ],
)
def test_features_that_do_not_divide_are_refused(plan, said):
    with pytest.raises(ModelError, match=said):
        simulate(3, lambda world: state_of(world, plan=plan), axes={"tp": 3})


class ByColumns(torch.optim.SGD):
    """Divides by the length of rows."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.ndim == 2:
                    param.grad /= param.grad.norm(dim=1, keepdim=True)
        super().step(closure)


def test_an_optimizer_of_rows_is_refused():
    """Of a row layer a rank has columns."""
    with pytest.raises(OptimizerError, match="by its own gradient only"):
        on_two(state_of, optimizer=partial(ByColumns, lr=0.1))


NOT_ITS_SLICE = "the input of 'down' is not this rank's slice"


@pytest.mark.parametrize(
    ("computes", "said"),
    [
        (  # counts heads for itself
            lambda net, x: net.down(
                net.up(x).view(len(x), 4, -1).cumsum(-1).flatten(1)
            ),
            NOT_ITS_SLICE,
        ),
        (
            lambda net, x: net.down(nn.functional.normalize(net.up(x), dim=-1)),
            NOT_ITS_SLICE,
        ),
        (  # knows how many features there are
            lambda net, x: net.down(net.up(x).view(len(x), 2 * WIDTH)),
            "fails with split layers: shape",
        ),
        (
            lambda net, x: net.up(x),
            'no "row" layer follows the "column" layer \'up\'',
        ),
        (
            lambda net, x: net.down(y := net.up(x)) + y.square().sum(),
            "with whole layers, but",
        ),
        (
            lambda net, x: net.down(net.up(x) * net.scale),
            "all ranks have the parameter 'scale', but compute different gradients",
        ),
    ],
)
def test_a_model_that_is_another_in_parts_is_refused(computes, said):
    """At the first step, on all ranks, and when it is taken once more."""

    def fn(world: af.World) -> None:
        state = state_of(world, model=partial(Net, computes))
        for _ in range(2):
            with pytest.raises(LossError, match=re.escape(said)):
                af.make_step(loss)(state, X)

    on_two(fn)


@pytest.mark.parametrize(
    "beside",
    [
        af.local_sgd(sync_every=2),
        af.compile(),
        af.chain(af.wrap_ddp(), af.compress_grads("powersgd")),
        af.optimizer_in_backward(),
        "fp8",  # which needs a package
        af.tensor_parallel(PAIR, name="other"),
    ],
    ids=lambda each: repr(each)[3:20],
)
def test_what_cannot_stand_beside_is_refused(beside):
    beside = af.autocast("fp8") if beside == "fp8" else beside
    with pytest.raises(CompositionError, match="Leave out one"):
        af.chain(af.tensor_parallel(PAIR), beside)


def test_batches_that_differ_along_tp_are_refused():
    with pytest.raises(BatchError, match='along "tp" must get the same batches'):
        on_two(lambda w: af.make_step(loss)(state_of(w), X + w.rank))


def test_a_batch_may_have_what_is_no_tensor():
    """Names of samples, say, which the first look at a loss passes on."""

    def named(net: nn.Module, batch: Any) -> torch.Tensor:
        assert batch[1:] == (["one", "two"], None)
        return loss(net, batch[0])

    def fn(world: af.World) -> None:
        after, _ = af.make_step(named)(state_of(world), (X, ["one", "two"], None))
        assert values(after) == values(step_once(world))

    on_two(fn)


def test_an_axis_that_no_plan_uses_is_refused():
    def fn(world: af.World) -> object:
        return af.TrainState.create(model=Net, optimizer=adam, world=world)

    with pytest.raises(WorldError, match=r"or add af.tensor_parallel\(plan\)"):
        on_two(fn)


def one_input(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.first(x)
    return net.down(torch.tanh(net.up(x)) * net.more(x))


def two_inputs(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.first(x)
    return net.down(net.up(x) * net.more(x.sin()))


def test_layers_of_one_input_add_up_its_gradient_once():
    """As those of query, key and value; layers of others have their own gradients."""
    plan = {**PAIR, "more": "column"}

    def fn(world: af.World) -> None:
        state = step_once(world, model=partial(Net, one_input), plan=plan)
        af.make_step(loss)(state, X)

    sums = [
        e
        for e in on_two(fn).log
        if (e.kind, e.label) == ("all_reduce", "tensor_parallel")
    ]
    assert len(sums) == 1 + 2 * 2  # in the first look, and there and back in each step
    model = partial(Net, two_inputs)
    check_as_alone(partial(step_once, model=model, plan=plan, optimizer=sgd))


class Reads(nn.Module):
    """Reads letters, and says for each which one comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8, WIDTH), nn.Embedding(8, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.seen: list[Any] = []

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.words(letters) + self.places(torch.arange(letters.shape[1]))
        self.seen.append(tuple(x.shape))
        return self.head(x + self.down(self.up(self.norm(x))))


READ = {
    **PAIR,
    "words": "vocabulary",
    "places": "scattered",
    "norm": "sequence",
    "head": "vocabulary",
}
LETTERS = torch.arange(12).reshape(2, 6) % 8


def read(net: nn.Module, letters: torch.Tensor) -> torch.Tensor:
    scores = net(letters)
    return nn.functional.cross_entropy(scores.view(-1, 8), letters.flatten())


def reading(
    world: af.World, plan: Any = READ, loss: Any = read, letters: Any = LETTERS
) -> af.TrainState:
    state = af.TrainState.create(
        model=Reads,
        optimizer=sgd,
        setup=af.tensor_parallel(plan, sequence=True),
        world=world,
    )
    return af.make_step(loss)(state, letters)[0]


def lacking(name: str) -> dict[str, str]:
    return {other: word for other, word in READ.items() if other != name}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{**READ, "head": "row"}], 'Mark the output head as "vocabulary" or'),
        ([{**READ, "head": "replicated"}], "'head', but this module is not between a"),
        (
            [{**READ, "up": "replicated", "down": "replicated"}],
            "is not between a column",
        ),
        ([{**READ, "norm": "replicated"}], "'norm', but this module is not between"),
        ([{**READ, "words": "sequence"}], "'words', but this module is not in a part"),
        ([{**READ, "places": "sequence"}], 'such as position embeddings, as "scattere'),
        (
            [lacking("head")],
            "After 'places' each rank has only its part of each sequence",
        ),
        ([lacking("norm")], "all ranks have the parameter 'norm."),
        ([lacking("down")], "fails with split layers"),
        (
            [lacking("head"), lambda net, x: net(x).square().mean()],
            "is computed from this rank's part",
        ),
        ([READ, read, LETTERS[:, :5]], "5, 8) at 'words' cannot be split"),
    ],
)
def test_a_plan_of_sequences_that_cannot_be_is_refused(given, said):
    """A word in the wrong place, a layer without one, a loss of some positions alone, and
    sequences that do not divide.
    """

    def fn(world: af.World) -> None:
        with pytest.raises(LossError, match=re.escape(said)):
            reading(world, *given)

    on_two(fn)


def test_ranks_have_their_positions_between_layers_and_words_behind_the_head():
    """Activations are halves, the loss is no bigger than that, and the sums are sent in halves."""

    def fn(world: af.World) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def looking(net: Any, letters: torch.Tensor) -> torch.Tensor:
            found = read(net, letters)
            shapes.append(net.seen[-1])
            return found

        reading(world, loss=looking)
        return shapes

    run = on_two(fn)
    for shapes in run:
        assert shapes == [(1, 6, WIDTH), (1, 3, WIDTH), (2, 3, WIDTH)]
    kinds = [e.kind for e in run.log if e.label == "tensor_parallel"]
    assert "reduce_scatter_single" in kinds
    largest = max(
        e.num_bytes
        for e in run.log
        if (e.kind, e.label) == ("all_gather", "tensor_parallel")
    )
    assert largest <= 2 * 6 * WIDTH * 4  # never the scores of all letters: 2 x 6 x 8


def test_a_letter_that_is_none_is_refused_as_by_torch():
    """And not taken for one that no rank has."""

    def wrong(net: nn.Module, letters: torch.Tensor) -> torch.Tensor:
        due = letters.flatten().clone()
        due[-1] = 8 if net.training else 0
        return nn.functional.cross_entropy(net(letters).view(-1, 8), due)

    def fn(world: af.World) -> None:
        with pytest.raises(
            (RuntimeError, IndexError), match="out of bounds|out of range"
        ):
            reading(world, loss=wrong)

    on_two(fn)


def test_changing_scores_in_place_is_refused_where_words_are_chosen():
    """A number multiplies them in place."""

    def halved(net: nn.Module, letters: torch.Tensor) -> torch.Tensor:
        scores = net(letters)
        scores *= 0.5
        return nn.functional.cross_entropy(scores.view(-1, 8), letters.flatten())

    def masked(net: nn.Module, letters: torch.Tensor) -> torch.Tensor:
        scores = net(letters)
        scores.masked_fill_(torch.arange(8) > 6, -1e9)
        return nn.functional.cross_entropy(scores.view(-1, 8), letters.flatten())

    def fn(world: af.World) -> af.TrainState:
        if world.size > 1:
            with pytest.raises(LossError, match="masked_fill_ cannot change scores"):
                reading(world, loss=masked)
        return reading(world, loss=halved)

    check_as_alone(fn)


def test_scores_are_shown_without_asking_another_rank():
    """One rank alone may print them; what leaves a loss or prediction is whole."""

    def fn(world: af.World) -> Any:
        def printing(net: nn.Module, letters: torch.Tensor) -> torch.Tensor:
            scores = net(letters)
            if world.rank == 0 and net.training and world.size > 1:
                assert "this rank's words" in f"{scores} {scores!r}"
                assert scores.shape == (2, 6, 8)
            return read(lambda _: scores, letters)

        state = reading(world, loss=printing)
        data = af.Data(LETTERS, global_batch_size=2)
        made = next(iter(af.predict(state, data, lambda net, batch: net(batch))))
        assert type(made) is torch.Tensor
        return made

    alone = fn(af.World.single())
    for found in on_two(fn):
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)
