# SPDX-License-Identifier: Apache-2.0
"""What context_parallel refuses, sends and computes, by exchanged heads and by a ring."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import accelfn as af
from accelfn.errors import (
    AccelfnWarning,
    ArgumentError,
    BatchError,
    CompositionError,
    LossError,
    WorldError,
)
from accelfn.testing import simulate
from tests.internals import Block

WIDTH, HEADS, LENGTH = 4, 2, 4
SHARING = af.chain(af.shard_data(), af.wrap_ddp(), af.context_parallel())
RING = af.chain(af.shard_data(), af.wrap_ddp(), af.context_parallel(ring=True))
BOTH = pytest.mark.parametrize("setup", [SHARING, RING])
ALIKE = {"dp_shard": 2, "cp": 2}
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
attention = F.scaled_dot_product_attention
causal = partial(attention, is_causal=True)


class Attending(nn.Module):
    """Attention over vectors that know their places, by a function of query, key and value."""

    def __init__(
        self, attends: Any = causal, heads: int = HEADS, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.attends, self.heads = attends, heads
        self.both, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        three = self.both(self.dropout(x + places[..., None])).chunk(3, -1)
        by_head = [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in three]
        return self.attends(*by_head).transpose(1, 2).flatten(2)


exact = partial(Attending, dropout=0.0)


class Counting(Attending):
    """Counts places for itself."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return super().forward(x, torch.arange(x.shape[1]).expand(places.shape))


class Mixing(Attending):
    """Mixes neighbours."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return super().forward(x, places).cumsum(1)


class Rounding(Attending):
    """Rounds a part of a sequence otherwise than the whole, as products in TF32 may."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return super().forward(x, places) * (1 + 1e-4 * (x.shape[1] < LENGTH))


class Flat(Attending):
    """Attends without a dim of heads."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return attention(*self.both(x + places[..., None]).chunk(3, -1))


class Torchs(nn.MultiheadAttention):
    """torch's own layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> Any:
        return super().forward(x, x, x, need_weights=False)[0]


def loss_of_all(net: nn.Module, batch: Batch) -> af.Loss:
    """Return the sum of squares, by their number."""
    x, y, places = batch
    return af.Loss((net(x, places) - y).square().sum(), y[..., 0].numel())


def loss_of_mean(net: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean, of nobody knows how many."""
    return loss_of_all(net, batch).total


def loss_of_next(net: nn.Module, batch: Batch) -> af.Loss:
    """Return the loss of each position's next, which the last of a part has not."""
    x, _, places = batch
    errors = (net(x, places)[:, :-1] - x[:, 1:]).square()
    return af.Loss(errors.sum(), errors[..., 0].numel())


def loss_of_fewer(net: nn.Module, batch: Batch) -> af.Loss:
    """Return the sum of squares, by one less than their number."""
    return af.Loss(loss_of_all(net, batch).total, batch[1].shape[1] - 1)


def loss_of_noise(net: nn.Module, batch: Batch) -> af.Loss:
    """Return the loss of inputs with noise."""
    x, *others = batch
    return loss_of_all(net, (x + torch.randn(x.shape), *others))


def rows(length: int = LENGTH) -> Batch:
    """Return inputs, targets and places."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, length, WIDTH, generator=draw)
    return x, y, torch.arange(length).expand(2, -1).float()


def state_of(
    world: af.World, model: Any = Attending, setup: Any = SHARING, data: Any = None
) -> af.TrainState:
    return af.TrainState.create(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        setup=setup,
        world=world,
        data=data,
    )


def stepped(
    world: af.World,
    model: Any = Attending,
    loss: Any = loss_of_all,
    batch: Any = None,
    setup: Any = SHARING,
) -> af.TrainState:
    """Return the state after an update."""
    given = rows() if batch is None else batch
    return af.make_step(loss)(state_of(world, model, setup), given)[0]


def on_two(*given: Any, **options: Any) -> Any:
    """Take a step on two ranks."""
    return simulate(2, lambda w: stepped(w, *given, **options), axes={"cp": 2})


def check_as_alone(
    *given: Any, size: int = 2, near: float = 1e-5, **options: Any
) -> None:
    """Check that ranks that share sequences step as one rank does."""

    def fn(world: af.World) -> dict[str, torch.Tensor]:
        return dict(stepped(world, *given, **options).params)

    ((alone,), split) = simulate(1, fn), simulate(size, fn, axes={"cp": size})
    for found in split:
        torch.testing.assert_close(found, alone, rtol=1e-3, atol=near)


# what is refused

WHOLE = r"loss_of_all gives another result if sequences.*shift"
WEIGHTS = r"weight=3\), but the parts .*weight=2\)"


def with_one_key(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
    return attention(query, key[:, :1], value[:, :1], **options)


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (Counting, loss_of_all, WHOLE),
        (Mixing, loss_of_all, WHOLE),
        (Attending, loss_of_next, WEIGHTS),
        (Attending, loss_of_fewer, WEIGHTS),
        (Attending, loss_of_mean, r"returned Tensor for a part.*Loss\(total"),
        (partial(Attending, heads=1), loss_of_all, r"the query .* 1 heads, .* 2 ranks"),
        (
            partial(Attending, partial(with_one_key, enable_gqa=True)),
            *(loss_of_all, r"the key of shape .* 1 heads, .* among 2 ranks"),
        ),
        (Torchs, loss_of_all, "MultiheadAttention would .* this rank's positions only"),
    ],
)
def test_what_does_not_go_by_position_is_refused(model, loss, words):
    """Models that count or mix positions, labels that are shifted in parts, means of nobody knows
    how many, and heads that do not divide.
    """
    with pytest.raises((LossError, RuntimeError), match=words):
        on_two(model, loss)


def again(*three: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    """Attend once more in the backward pass."""
    return checkpoint(causal, *three, use_reentrant=use_reentrant)


def by_one_key(query: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """Attend to one key of each part under a mask."""
    mask = torch.zeros(LENGTH, LENGTH // query.shape[2])
    return attention(query, key[:, :, :1], value[:, :, :1], mask)


def halved(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, : x.shape[2] // 2]


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], 2)


BY_RING = {
    r"ring=True\): .* dropout_p=0\.5.* leave out ring": partial(
        attention, dropout_p=0.5
    ),
    # which torch spreads
    r"query of shape \(1, 2, 2, 2\) does not fit the key of \(1, 1, 2": with_one_key,
    "called with 2 queries and 4 keys": lambda q, k, v: causal(q, twice(k), twice(v)),
    "called with 4 queries and 2 keys": lambda q, k, v: halved(causal(twice(q), k, v)),
    "with both attn_mask and is_causal=True": partial(
        causal, attn_mask=torch.zeros(LENGTH, LENGTH)
    ),
    r"the key of \(1, 1, 2, 2\) and the value of \(1, 2, 2, 2\)": lambda q, k, v: (
        attention(q, k[:, :1], v, enable_gqa=True)
    ),
    "2 queries and 1 keys .* With a mask": by_one_key,
    r"under torch\.utils\.checkpoint, which": partial(again, use_reentrant=True),
    r"under torch\.utils\.checkpoint, .*": partial(again, use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore:.*draws random numbers")
@pytest.mark.filterwarnings("ignore:None of the inputs")  # in the first look
@pytest.mark.parametrize("words", BY_RING)
def test_attention_that_no_ring_has_is_refused(words):
    """What is dropped, heads that torch would spread, keys of no position, and passes that are
    run again.
    """
    with pytest.raises(LossError, match=words):
        on_two(partial(exact, BY_RING[words]), setup=RING)


def with_mask_of_part(*three: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(three[0].shape[2], three[0].shape[2], dtype=torch.bool)
    return attention(*three, mask.tril())


@BOTH
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            partial(Attending, with_mask_of_part),
            r"attn_mask has the shape \(2, 2\), .* 4 x 4 positions",
        ),
        (Flat, r"query of shape \(1, 2, 4\); expected \(samples, heads"),
    ],
)
def test_attention_that_cannot_be_shared_is_refused(model, words, setup):
    """Masks of a part, and what has no heads."""
    with pytest.raises(LossError, match=words):
        on_two(model, setup=setup)


@pytest.mark.parametrize(
    ("batch", "setup", "words"),
    [
        (rows(3), SHARING, r'2 ranks along "cp" need 2 pieces .* have 3 positions'),
        (rows(2), RING, r"need 4 pieces .* 2 positions"),
        ((*rows()[:2], rows(6)[2]), SHARING, r"equal length in dim 1, got \["),
        ((torch.ones(2),), SHARING, r"equal length in dim 1, got no tensor with this"),
    ],
)
def test_sequences_that_cannot_be_split_are_refused(batch, setup, words):
    """Of a length that does not divide, of several, or none."""
    with pytest.raises(BatchError, match=words):
        on_two(batch=batch, setup=setup)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_in_few_bits_round_as_they_like(precision):
    """What is no mistake in the precision that a program set for them is one in float32."""
    with pytest.raises(LossError, match="another result if sequences are split"):
        on_two(Rounding)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        on_two(Rounding)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.filterwarnings("ignore::accelfn.errors.AccelfnWarning")  # of no batch
@pytest.mark.parametrize("odd", range(4))
def test_batches_that_differ_along_cp_are_refused(odd):
    """Ranks that share samples would otherwise add up parts of different ones."""

    def fn(world: af.World) -> None:
        x, *others = rows()
        stepped(world, batch=(x + (world.rank == odd), *others))

    with pytest.raises(BatchError, match=r'along "cp" must get the same batches'):
        simulate(4, fn, axes=ALIKE)


@pytest.mark.parametrize("axis", ["cp", "tp"])
@pytest.mark.parametrize("setup", [None, af.wrap_ddp(), af.wrap_fsdp()])
def test_an_axis_without_work_is_refused(axis, setup):
    """Its ranks would all do the same."""
    said = f"along '{axis}': its 2 ranks would all do the same"
    with pytest.raises(WorldError, match=said):
        simulate(2, lambda w: state_of(w, setup=setup), axes={axis: 2})


def test_options_that_cannot_be_are_refused():
    """Ranks that train apart add nothing up; a compiler cannot see an exchange."""
    for other in (af.local_sgd(sync_every=2), af.compile()):
        with pytest.raises(CompositionError, match="context_parallel"):
            af.chain(af.context_parallel(), other)
    for ring in (0, 1, None, "yes"):
        with pytest.raises(ArgumentError, match=r"context_parallel\(ring="):
            af.context_parallel(ring=ring)


# how a loss is looked at


def test_a_loss_that_draws_is_told_of():
    """It cannot be compared with itself in one piece, and trains on the same draws."""

    def fn(world: af.World) -> list[dict[str, torch.Tensor]]:
        state, step = state_of(world), af.make_step(loss_of_noise)
        return [dict(step(state, rows(), donate=False)[0].params) for _ in range(2)]

    with pytest.warns(AccelfnWarning, match="loss_of_noise draws random numbers"):
        found = simulate(2, fn, axes={"cp": 2})
    for first, again in found:
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_what_does_not_count_is_looked_at_later():
    """A first batch without weight tells nothing, so the next one is compared."""

    def weighed(net: nn.Module, batch: Any) -> af.Loss:
        *others, weight = batch
        loss = loss_of_all(net, others)
        return af.Loss(loss.total * weight, loss.weight * weight)

    def fn(world: af.World) -> None:
        state, step = state_of(world, Counting), af.make_step(weighed)
        state, _ = step(state, (*rows(), torch.zeros(())))
        with pytest.raises(LossError, match="another result if sequences are split"):
            step(state, (*rows(), torch.ones(())))

    simulate(2, fn, axes={"cp": 2})


@pytest.mark.parametrize("kind", [int, torch.Tensor])
def test_weights_are_compared_as_whole_numbers(kind):
    """Above 2 ** 24, too, where float32 has not every one of them."""

    def weighed(net: nn.Module, batch: Any) -> af.Loss:
        x, y, places, weights = batch
        errors = (net(x, places) - y).square().sum(-1)
        weight = weights.sum()
        return af.Loss((errors * weights).sum(), int(weight) if kind is int else weight)

    weights = torch.tensor([[2**24 + 1, 0, 1, 0]] * 2)
    check_as_alone(exact, weighed, (*rows(), weights))


@pytest.mark.parametrize("ring", [False, True])
def test_a_look_at_long_sequences_is_at_their_beginning(ring):
    """Of at most 2,048 positions, which three ranks share in whole pieces."""
    lengths = set[int]()

    def noted(net: nn.Module, batch: Batch) -> af.Loss:
        x, *_, places = batch
        lengths.add(places.shape[1])
        return af.Loss(net.get_submodule("both")(x).sum(), x[..., 0].numel())

    setup = af.chain(af.wrap_ddp(), af.context_parallel(ring=ring))
    long = rows(2052)
    simulate(3, lambda w: stepped(w, exact, noted, long, setup), axes={"cp": 3})
    whole = 2046  # the largest multiple of 3 pieces, and of 6
    assert lengths == {whole // 3, 2052 // 3, whole}


def test_looking_leaves_no_trace():
    """Buffers, modes of each part and draws of the first update are as if nobody had looked."""

    class Partly(Attending):
        def __init__(self) -> None:
            super().__init__()
            self.both.eval()  # as a norm that is frozen

    def fn(world: af.World) -> None:
        state, modes = state_of(world, Partly), []

        def seen(net: nn.Module, batch: Batch) -> af.Loss:
            modes.append((net.training, net.both.training))
            return loss_of_all(net, batch)

        step = af.make_step(seen)
        (first, _), (again, _) = (step(state, rows(), donate=False) for _ in range(2))
        assert modes == [(False, False)] * 2 + [(True, False)] * 2
        assert first.buffers["calls"] == again.buffers["calls"] == 1
        assert all(torch.equal(p, again.params[n]) for n, p in first.params.items())

    simulate(2, fn, axes={"cp": 2})


# which samples ranks have


def test_ranks_of_one_sample_are_not_split_between():
    """A sample's ranks would get parts of one another's; the axis itself can be meant."""

    def fn(world: af.World) -> tuple[list[int], list[int]]:
        with pytest.raises(ArgumentError, match=r"Pass world\.batch"):
            af.split_over_ranks([0, 1, 2, 3], world)
        parts = af.split_over_ranks([0, 1, 2, 3], world.batch)
        return parts, af.split_over_ranks([0, 1], world.along("cp"))

    expected = [([0, 1], [0]), ([0, 1], [1]), ([2, 3], [0]), ([2, 3], [1])]
    assert list(simulate(4, fn, axes=ALIKE)) == expected


def test_a_ring_has_two_pieces_a_rank():
    """One from each end, so that all have as much to do."""

    def fn(world: af.World) -> list[float]:
        seen: list[torch.Tensor] = []

        def noted(net: nn.Module, batch: Batch) -> af.Loss:
            seen.append(batch[2][0])
            return loss_of_all(net, batch)

        stepped(world, loss=noted, batch=rows(8), setup=RING)
        return seen[-1].tolist()

    expected = [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert list(simulate(2, fn, axes={"cp": 2})) == expected


# what is trained as by one rank


def test_any_dim_can_be_the_sequence():
    """Features may come before positions."""

    def turned(net: nn.Module, batch: Batch) -> af.Loss:
        x, y, places = (each.mT for each in batch)
        return loss_of_all(net, (x, y, places[..., 0]))

    x, y, places = rows()
    batch = (x.mT.contiguous(), y.mT.contiguous(), places[:, None])
    setup = af.chain(af.wrap_ddp(), af.context_parallel(seq_dim=2))
    check_as_alone(exact, turned, batch, setup)


@pytest.mark.parametrize("beside", [(), ("a name", 3, None)])
@pytest.mark.parametrize("weights", [torch.arange(1.0, WIDTH + 1), 2.0])
def test_a_batch_may_have_what_is_of_no_sample(weights, beside):
    """Weights of features, say: the loss is looked at on all samples then; and no tensors."""

    def weighed(net: nn.Module, batch: Any) -> af.Loss:
        x, y, places, weights, *_ = batch
        errors = (net(x, places) - y).square() * weights
        return af.Loss(errors.sum(), y[..., 0].numel())

    check_as_alone(exact, weighed, (*rows(), weights, *beside))


@BOTH
def test_sequences_may_be_empty(setup):
    """Of which nothing counts: the update is that of no tokens, on one rank too."""
    check_as_alone(exact, batch=rows(0), setup=setup, near=0.0)


def test_a_ring_needs_no_heads():
    """More ranks than heads, in bfloat16 under autocast."""
    setup = af.chain(RING, af.autocast("bf16"))
    heads = partial(exact, heads=1)
    check_as_alone(heads, batch=rows(8), setup=setup, size=4, near=3e-2)


def taught(query: Any, key: Any, value: Any) -> torch.Tensor:
    """Attend without gradients, as a teacher does that is run once."""
    with torch.no_grad():
        seen = attention(query, key, value)
    return value + seen


@BOTH
@pytest.mark.parametrize(
    "mask",
    [
        *(
            torch.linspace(-2, 2, math.prod(shape)).reshape(shape)
            for shape in [(1, 8), (8, 1), (1, 1), (1, 1, 1, 8), (1, 2, 1, 8)]
        ),
        *(
            torch.linspace(-2, 2, 8).view(shape) > -1
            for shape in [(1, 8), (1, 1, 1, 8)]
        ),
        None,
    ],
)
def test_a_mask_may_be_one_for_all_queries_or_keys(mask, setup):
    """As torch spreads one: keys that are padding are hidden from all queries alike."""
    attends = taught if mask is None else partial(attention, attn_mask=mask)
    check_as_alone(partial(exact, attends), batch=rows(8), setup=setup)


def hidden(value: float) -> Any:
    """Hide what is to come, and all from the first three. Which mean these see is torch's
    rounding; of ones it is 1.
    """
    mask = torch.full((8, 8), value).triu(1)
    mask[:, :3] = value
    return lambda q, k, v: v + attention(q, k, torch.ones_like(v), mask)


def precise(*three: torch.Tensor) -> torch.Tensor:
    """Add a mask whose steps of 0.37 near -300 are none in 16 bits."""
    mask = (torch.arange(8.0) * 0.37 - 300).expand(8, 8)
    narrow = (each.bfloat16() for each in three)
    return three[2] + attention(*narrow, mask).float()


def pooled(query: Any, key: Any, value: Any) -> torch.Tensor:
    """Attend by queries of no place, as a pool that is learned."""
    return value + attention(query[:, :, :3] * 0, key, value).mean(2, keepdim=True)


@pytest.mark.parametrize(
    ("attends", "length", "near"),
    [
        *(
            (hidden(number), 8, 1e-5)
            for number in (-1e4, -1e9, torch.finfo(torch.float32).min)
        ),
        (precise, 8, 0.02),
        (pooled, 8, 1e-5),
        (partial(attention, attn_mask=torch.zeros(0, 0)), 0, 1e-5),
    ],
)
def test_a_ring_attends_as_one_rank(attends, length, near):
    """Where numbers hide all, in the precision of a mask, by any number of queries, by none."""
    check_as_alone(partial(exact, attends), batch=rows(length), setup=RING, near=near)


@BOTH
def test_a_mask_of_all_positions_is_seen_whole(setup):
    """A look at 2,048 positions would have a mask of more."""
    length = 2056
    mask = torch.zeros(length, length)

    def attends(*three: torch.Tensor) -> torch.Tensor:
        return attention(*(each / length for each in three), mask)

    check_as_alone(partial(exact, attends), batch=rows(length), setup=setup)


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", [(), (af.autocast("bf16"),)])
def test_a_ring_computes_in_the_dtype_of_autocast(given, precision):
    """What attention returns has the dtype of what torch's own does, of any inputs."""
    told: set[Any] = set()

    def telling(*three: torch.Tensor) -> torch.Tensor:
        told.add(attention(*(each.to(given) for each in three)).dtype)
        return causal(*three)

    on_two(partial(Attending, telling), setup=af.chain(RING, *precision))
    assert len(told) == 1  # the first look has torch's own, and the ring's
    found = told.pop()
    assert found is (torch.bfloat16 if precision and given is torch.float32 else given)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_of_gpus_is_called_as_torch_declares_it(is_causal):
    """In 16 bits and without a mask; on tensors that have a place and no values."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode():
        query = torch.empty(2, 4, 6, 16, **options)
        key, value = (torch.empty(2, 2, 6, 16, **options) for _ in range(2))
        block = Block(query, key, value, None, is_causal=is_causal, scale=0.5)
        seen, lse = block.attend()
        assert (seen.shape, lse.shape) == (query.shape, query.shape[:3])
        assert (seen.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        gradients = block.gradients(torch.empty_like(seen), seen, lse)
    shapes = [each.shape for each in gradients]
    assert shapes == [query.shape, key.shape, value.shape]


# what is sent


@pytest.mark.parametrize(
    ("setup", "size", "counts"),
    [
        # query, key and value, and the result; both again in the backward pass
        (SHARING, 2, [1, 1, 3, 3]),
        # n - 1 passes of keys and values each way, and n of their gradients
        (RING, 3, [2] * (2 + 2 + 3)),
    ],
)
def test_attention_sends_what_it_must(setup, size, counts):
    """Each of the numbers in a part of two samples, in float32."""

    def fn(world: af.World) -> None:
        state, step = state_of(world, setup=setup), af.make_step(loss_of_all)
        for _ in range(2):
            state, _ = step(state, rows(4 * size))

    log = simulate(size, fn, axes={"cp": size}).log
    sent = [e for e in log if e.kind.startswith("all_to_all") and e.step == 1]
    part = 2 * 4 * WIDTH * 4
    assert sorted(each.num_bytes for each in sent) == [n * part for n in counts]
    if setup is RING:
        label = "context_parallel: keys and values round a ring"
        assert {each.label for each in sent} == {label}
