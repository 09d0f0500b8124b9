# SPDX-License-Identifier: Apache-2.0
"""Scores of which each rank has those of some words are, whatever a loss does, those of all."""

from functools import partial
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import Scores, differentiable, gather_scores
from tests.strategies import differences

TEXTS, LENGTH, WORDS = 2, 3, 12


@attrs.frozen
class Way:
    """What a loss does to scores before their cross entropy.

    Attributes:
        name: a few words.
        scores: a function of them.
        due: the same of the words that are due, or None where that stays.
    """

    name: str
    scores: Any
    due: Any = None


ODD = torch.arange(TEXTS) % 2 == 1


def _flat(due: torch.Tensor) -> torch.Tensor:
    return due.flatten()


FLAT = [
    Way("view", lambda x: x.view(-1, x.size(-1)), _flat),
    Way("view by shape", lambda x: x.view(-1, x.shape[-1]), _flat),
    Way("view, words last", lambda x: x.view(TEXTS * LENGTH, -1), _flat),
    Way("reshape", lambda x: torch.reshape(x, (-1, WORDS)), _flat),
    Way("flatten", lambda x: x.flatten(0, 1), _flat),
    Way("reshape by keyword", lambda x: x.reshape(shape=(-1, WORDS)), _flat),
    Way("transpose", lambda x: x.transpose(dim0=1, dim1=2)),
    Way("permute", lambda x: x.permute(0, 2, 1)),
    Way("permute by keyword", lambda x: torch.permute(x, dims=(0, -1, 1))),
    Way("words moved", lambda x: x.movedim(-1, 1)),
    Way("mT", lambda x: x.mT),
    Way("one text", lambda x: x[0], lambda due: due[0]),
    Way("one word", lambda x: x[0, 1], lambda due: due[0, 1]),
    Way(
        "shifted",
        lambda x: x[:, :-1].contiguous().flatten(0, 1),
        lambda due: due[:, 1:].flatten(),
    ),
    Way(
        "shifted, of all words",
        lambda x: x[..., :-1, :].reshape(-1, WORDS),
        lambda due: due[..., 1:].flatten(),
    ),
    Way("by a mask", lambda x: x[ODD].flatten(0, 1), lambda due: due[ODD].flatten()),
    Way(
        "some words",
        lambda x: x[..., ::2].flatten(0, 1),
        lambda due: due.flatten().clamp(max=WORDS // 2 - 1),
    ),
    Way("words first", lambda x: x.permute(2, 0, 1).flatten(1).t(), _flat),
    Way("all flat", lambda x: x.flatten().view(-1, WORDS), _flat),
]
TRAINED = "by a number that is trained"
EACH = {
    "as they are": lambda x, _: x,
    TRAINED: lambda x, number: x * number,
    "the other way": lambda x, number: number * x,
    "softcapped": lambda x, _: 3 * torch.tanh(x / 3),
    "in place": lambda x, _: (x * 2).mul_(0.5).add_(1),
    "by a tensor": lambda x, _: x + torch.arange(float(WORDS)),
    "by a mask": lambda x, _: x.masked_fill(torch.arange(WORDS) == 11, -30.0),
    "in float": lambda x, _: x.float().double(),
    "of their own": lambda x, _: x - x.mean(-1, keepdim=True),
    "normed": lambda x, _: x.log_softmax(-1),
}
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "ignore_index": st.sampled_from([-100, -1, 2]),
        "label_smoothing": st.sampled_from([0.1, 1.0]),
        "weight": st.just(torch.linspace(0.5, 2.0, WORDS, dtype=torch.float64)),
    },
)


def entropy(
    scores: Any, number: Any, due: torch.Tensor, each: Any, way: Way, options: Any
) -> torch.Tensor:
    """Return one number of a cross entropy."""
    changed = way.scores(each(scores, number))
    if "weight" in options and changed.shape[-1 if changed.ndim == 1 else 1] != WORDS:
        options = {n: v for n, v in options.items() if n != "weight"}
    if way.due is not None:
        due = way.due(due)
    lost = F.cross_entropy(changed, due, **options)
    return (lost * torch.linspace(1, 2, lost.numel()).reshape(lost.shape)).sum()


@pytest.mark.parametrize("way", FLAT, ids=lambda way: way.name)
@example(size=2, each=TRAINED, options={"ignore_index": 2}, seed=0, ignored=3)
@example(size=2, each=TRAINED, options={"ignore_index": 2}, seed=0, ignored=6)
@given(
    size=st.integers(2, 4),
    each=st.sampled_from(sorted(EACH)),
    options=OPTIONS,
    seed=st.integers(0, 99),
    ignored=st.integers(0, 6),
)
def test_the_entropy_of_parts_is_that_of_the_whole(
    way: Way, size: int, each: str, options: Any, seed: int, ignored: int
) -> None:
    """Its value, and the gradients of the scores and of a number that scales them."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    scores, number = 4 * draw(TEXTS, LENGTH, WORDS), 1 + draw(()).abs()
    due = torch.randint(WORDS, (TEXTS, LENGTH), generator=generator)
    if "ignore_index" in options:
        due.flatten()[:ignored] = options["ignore_index"]
    given = (due, EACH[each], way, options)

    def found(world: af.World) -> dict[str, torch.Tensor]:
        ranks = world.along("tp")
        mine = scores.clone().requires_grad_()
        scale = number.clone().requires_grad_()
        seen: Any = mine
        if ranks.size > 1:
            part = differentiable.scatter_to_ranks(mine, -1, ranks)
            seen = Scores.of(part, ranks)
        lost = gather_scores(entropy(seen, scale, *given))
        lost.backward()
        gradients = {"scores": mine.grad, "number": scale.grad}
        kept = {name: g for name, g in gradients.items() if g is not None}
        return {"entropy": lost.detach().reshape(1), **kept}

    alone = found(af.World.single())
    for each_found in simulate(size, found, axes={"tp": size}):
        assert type(each_found["entropy"]) is torch.Tensor
        close = {n: t.nan_to_num(123.0) for n, t in each_found.items()}
        wanted = {n: t.nan_to_num(123.0) for n, t in alone.items()}
        assert differences(wanted, close, within=1e-10) == []


GATHERING = {"some words", "words first", "all flat"}


@pytest.mark.parametrize("each", [*list(EACH)[:5], "in float"])
@pytest.mark.parametrize("way", [w for w in FLAT if w.name not in GATHERING])
def test_no_rank_has_all_scores(each, way):
    """Three numbers a token cross the ranks, or four where labels are smoothed."""
    scores = torch.randn(TEXTS, LENGTH, WORDS, dtype=torch.float64)
    due, number = torch.zeros(TEXTS, LENGTH, dtype=torch.int64), torch.tensor(2.0)

    def fn(world: af.World) -> None:
        ranks = world.along("tp")
        seen = Scores.of(differentiable.scatter_to_ranks(scores, -1, ranks), ranks)
        entropy(seen, number, due, EACH[each], way, {"label_smoothing": 0.1})

    run = simulate(2, fn, axes={"tp": 2})
    sent = [(e.kind, e.num_bytes) for e in run.log if e.label == "tensor_parallel"]
    assert {kind for kind, _ in sent} == {"all_reduce"}
    assert sum(count for _, count in sent) <= 4 * TEXTS * LENGTH * 8


OTHERS = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "topk": lambda x: x.topk(3).values,
    "max": lambda x: x.max(),
    "sum": lambda x: x.sum(),
    "a comparison": lambda x: x > 0,
    "a word": lambda x: x[..., 5],
    "some words": lambda x: x[0, 1, 5:],
    "another dtype": lambda x: x.view(torch.int64),
    "another shape": lambda x: x.reshape(-1, 4),
    "put together": lambda x: torch.cat([x, x], -1),
    "put beside": lambda x: torch.stack([x, x]),
    "as numbers": lambda x: torch.tensor(x.detach().tolist()),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "an einsum": lambda x: torch.einsum("btw,btw->bt", x, x),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "length": len,
    "shape": lambda x: (tuple(x.shape), x.size(1), x.numel(), x.ndim, x.dtype),
    "unbound": list,
    "a cast": lambda x: gather_scores(x.to(torch.float32)),
    "with probabilities": lambda x: F.cross_entropy(x[0], x[0].detach().softmax(-1)),
    "a divergence": lambda x: F.kl_div(
        x.log_softmax(-1), x.softmax(-1), reduction="sum"
    ),
    "a copy": lambda x: gather_scores(x.clone().transpose(0, 1)),
}


@pytest.mark.parametrize("name", list(OTHERS))
@given(size=st.integers(2, 4))
def test_every_other_function_sees_the_whole(name: str, size: int) -> None:
    """Bitwise, in whatever shape."""
    draw = torch.Generator().manual_seed(3)
    scores = torch.randn(TEXTS, LENGTH, WORDS, generator=draw, dtype=torch.float64)
    expected = OTHERS[name](scores)

    def fn(world: af.World) -> Any:
        ranks = world.along("tp")
        return OTHERS[name](
            Scores.of(differentiable.scatter_to_ranks(scores, -1, ranks), ranks)
        )

    for found in simulate(size, fn, axes={"tp": size}):
        same = zip(_leaves(expected), _leaves(found), strict=True)
        assert all(torch.equal(*pair) for pair in same)


def _leaves(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [
        each if isinstance(each, torch.Tensor) else torch.tensor(hash(each))
        for each in values
    ]
