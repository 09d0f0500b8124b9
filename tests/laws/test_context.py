# SPDX-License-Identifier: Apache-2.0
"""Ranks that have a part of each sequence train what one rank with all of it does."""

import tempfile
import warnings
from itertools import islice
from math import prod
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.long_texts import AXES, Text, engines, loss_of_tokens, texts
from tests.laws.worlds import close_means, single
from tests.strategies import differences, tensors

runs = st.sampled_from(AXES).flatmap(
    lambda axes: st.tuples(st.just(axes), texts(axes["cp"]))
)
Found = tuple[dict[str, torch.Tensor], list[dict[str, float]]]


def trained(world: af.World, text: Text, *engine: object) -> Found:
    """Return what a state has after three updates, and the metrics of each and at the end."""
    state, step = text.state(world, *engine), af.make_step(loss_of_tokens)
    means: list[dict[str, float]] = []
    for batch in islice(af.batches(state), 3):
        state, metrics = step(state, batch)
        means.append(metrics.all_reduce_mean(world))
    means.append(af.evaluate(state, text.data(), loss_of_tokens))
    return tensors(state), means


@given(
    run=runs,
    engine=engines,
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
)
@example(  # a rank whose sample of an update counts for nothing looks again
    run=(
        {"dp_shard": 2, "cp": 2},
        Text(
            n=4,
            batch_size=2,
            length=2,
            heads=2,
            shared_by=1,
            mask="none",
            scale=None,
            dropped=0.0,
            micro=1,
            behind=(),
            seed=0,
        ),
    ),
    engine=af.wrap_ddp(),
    dtype=torch.float64,
)
@example(  # what is learned of a mask has gradients from each part that goes round
    run=({"cp": 2}, Text(2, 2, 4, heads=2, mask="learned", ring=True)),
    engine=af.wrap_ddp(),
    dtype=torch.float64,
)
def test_parts_of_sequences_train_what_the_whole_does(run, engine, dtype):
    """Parameters, optimizer state, averages and metrics are those of one rank."""
    axes, text = run[0], attrs.evolve(run[1], dtype=dtype)
    alone, means = trained(single(), text)
    setup = (engine, text.sharing)
    ranks = simulate(prod(axes.values()), lambda w: trained(w, text, *setup), axes=axes)
    within = 1e-13 if dtype is torch.float64 else 1e-6
    for found, seen in ranks:
        whole = {name: value for name, value in alone.items() if name in found}
        assert differences(whole, found, within=within) == []
        if dtype is torch.float64:
            assert all(close_means(*pair) for pair in zip(means, seen, strict=True))


def counted(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Count what tokens weigh, and those of one letter."""
    return {"weight": batch["weights"].sum(), "zeros": (batch["due"] == 0).sum()}


def loss_of_counts(
    net: nn.Module, batch: dict[str, torch.Tensor], counts: dict[str, float]
) -> af.Loss:
    """Return a loss of two means over different tokens, and how many there are of each."""
    logits, due = net(batch), batch["due"]
    each = F.cross_entropy(logits.transpose(1, 2), due, reduction="none")
    weighed, zeros = (each * batch["weights"]).sum(), (each * (due == 0)).sum()
    share = weighed / counts["weight"] + zeros / counts["zeros"]
    told = {f"told_{name}": (number, 1) for name, number in counts.items()}
    return af.Loss(share, 1, **told)


@given(run=runs, engine=engines)
def test_counts_are_of_whole_texts(
    run: tuple[dict[str, int], Text], engine: object
) -> None:
    """What ranks of the same texts count is told once, and divides as it does on one rank."""
    axes, text = run

    def trained(
        world: af.World, *setup: object
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        state, means = text.state(world, *setup), []
        step = af.make_step(loss_of_counts, count=counted)
        for batch in islice(af.batches(state), 2):
            state, metrics = step(state, batch)
            means.append(metrics.all_reduce_mean(world))
        return tensors(state), means

    alone, expected = trained(single())
    setup = (engine, text.sharing)
    size = prod(axes.values())
    for found, means in simulate(size, lambda w: trained(w, *setup), axes=axes):
        whole = {name: value for name, value in alone.items() if name in found}
        assert differences(whole, found, within=1e-13) == []
        assert all(close_means(*pair) for pair in zip(expected, means, strict=True))


@given(axes=st.sampled_from(AXES), engine=engines, seed=st.integers(0, 9))
def test_each_part_has_draws_of_its_own(
    axes: dict[str, int], engine: object, seed: int
) -> None:
    """Noise of one rank's positions is not that of another's, nor of other samples."""
    size = prod(axes.values())
    ranks = size // axes["cp"]
    text = Text(ranks, ranks, 4 * axes["cp"], heads=axes["cp"], seed=seed)

    def drawn(world: af.World) -> torch.Tensor:
        noise: list[torch.Tensor] = []

        def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> af.Loss:
            noise.append(torch.rand(4))
            return loss_of_tokens(net, batch)

        state = text.state(world, engine, text.sharing)
        af.value_and_grad(loss)(state, next(iter(af.batches(state))))
        return noise[-1]

    with warnings.catch_warnings(category=af.errors.AccelfnWarning, action="ignore"):
        found = simulate(size, drawn, axes=axes)
    assert len({tuple(each.tolist()) for each in found}) == size


@given(run=runs, engine=engines, other=st.sampled_from([None, {"dp_shard": 2}]))
def test_what_trained_on_parts_goes_on_anywhere(
    run: tuple[dict[str, int], Text], engine: object, other: dict[str, int] | None
) -> None:
    """A checkpoint of ranks along "cp" is loaded bitwise by one process, and by others."""
    axes, text = run
    setup = (engine, text.sharing)

    def saved(world: af.World, folder: str) -> dict[str, torch.Tensor]:
        state, step = text.state(world, *setup), af.make_step(loss_of_tokens)
        state, _ = step(state, next(iter(af.batches(state))))
        af.save(state, folder)
        return tensors(state)

    def loaded(world: af.World, folder: str) -> dict[str, torch.Tensor]:
        begun = text.state(world, *((af.wrap_fsdp(),) if other else ()))
        return tensors(af.load(begun, folder))

    with tempfile.TemporaryDirectory() as parent:
        folder = f"{parent}/saved"
        ranks = simulate(prod(axes.values()), lambda w: saved(w, folder), axes=axes)
        found: Any = (
            simulate(2, lambda w: loaded(w, folder), axes=other).results
            if other
            else [loaded(single(), folder)]
        )
        for each in found:
            assert differences(ranks[0], each, within=0) == []


@given(
    axes=st.dictionaries(
        st.sampled_from(["dp_replicate", "dp_shard", "cp", "tp"]),
        st.integers(1, 3),
        min_size=1,
    ),
    n=st.integers(1, 11),
    batch_size=st.integers(1, 5),
    kind=st.sampled_from(["items", "stream", "dispatch"]),
    cut=st.integers(0, 3),
)
def test_ranks_of_one_batch_read_alike(axes, n, batch_size, kind, cut):
    """Ranks along "cp" and "tp" have the same samples; the others have each once."""
    if prod(axes.values()) > 8:
        return
    options = {
        "items": {},
        "stream": {"replay": True},
        "dispatch": {"replay": True, "dispatch": True},
    }[kind]
    source: Any = list(range(n)) if kind == "items" else Counting(n)

    def read(world: af.World) -> tuple[tuple[int, ...], list[list[float]]]:
        data = af.Data(source, global_batch_size=batch_size, **options)
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 1),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=data,
            setup=af.chain(af.shard_data(), Sharing()),
            world=world,
        )
        batches = iter(af.batches(state, until_epoch=1))
        first = [*islice(batches, cut)]
        if first:
            rest = af.batches(
                attrs.evolve(state, cursor=first[-1].cursor), until_epoch=1
            )
            batches = iter(() if first[-1].cursor.epoch else rest)
        own = [
            [] if batch.weights[0] == 0 else torch.as_tensor(batch.value).tolist()
            for batch in [*first, *batches]
        ]
        return (world.batch.rank,), own

    by_place: dict[tuple[int, ...], list[list[float]]] = {}
    for place, own in simulate(prod(axes.values()), read, axes=axes):
        assert by_place.setdefault(place, own) == own
    seen = sorted(each for own in by_place.values() for part in own for each in part)
    assert seen == list(range(n))


class Counting(torch.utils.data.IterableDataset[int]):
    """Numbers from 0 on."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(range(self.n))


@af.transform
class Sharing:
    """Says that ranks share samples."""

    tells = {"splits_sequences": True, "splits_layers": True}  # noqa: RUF012
    refuses = {"apart": "{other!r}"}  # noqa: RUF012
