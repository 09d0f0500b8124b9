# SPDX-License-Identifier: Apache-2.0
"""What context_parallel(ring=True) refuses, sends and computes with."""

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
from accelfn.errors import BatchError, LossError
from accelfn.testing import simulate
from tests.internals import Block
from tests.unit.test_context_parallel import (
    LENGTH,
    SHARING,
    WIDTH,
    Attending,
    Batch,
    Flat,
    Masking,
    Within,
    loss_of_all,
    rows,
    state_of,
    stepped,
)

RING = af.chain(af.shard_data(), af.wrap_ddp(), af.context_parallel(ring=True))


class Dropping(Attending):
    """Drops what it attends to, in evaluation too."""

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        by_head = [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in three]
        attended = F.scaled_dot_product_attention(*by_head, dropout_p=0.5)
        return attended.transpose(1, 2).flatten(2)


class Spreading(Attending):
    """Has keys of one head for all heads of queries, which torch spreads."""

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        query, *rest = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in three)
        key, value = (each[:, :1] for each in rest)
        attended = F.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2).flatten(2)


class Doubling(Attending):
    """Has two keys for each query."""

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        query, *rest = (x[:, None] for x in three)
        both = [torch.cat([each, each], 2) for each in rest]
        return F.scaled_dot_product_attention(query, *both, is_causal=True)[:, 0]


class Halving(Attending):
    """Has a key for two queries."""

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        query, *rest = (x[:, None] for x in three)
        both, length = torch.cat([query, query], 2), query.shape[2]
        seen = F.scaled_dot_product_attention(both, *rest, is_causal=True)
        return seen[:, 0, :length]


class Answering(Attending):
    """Attends by a function of query, key, value and of which positions these are."""

    def __init__(self, attends: Any) -> None:
        super().__init__()
        self.attends = attends
        self.dropout = nn.Identity()

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        by_head = [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in three]
        return self.attends(*by_head).transpose(1, 2).flatten(2)


def with_both(*three: torch.Tensor) -> torch.Tensor:
    """Hide what is to come, and something else."""
    mask = torch.zeros(LENGTH, LENGTH)
    return F.scaled_dot_product_attention(*three, mask, is_causal=True)


def with_heads_of_values(*three: torch.Tensor) -> torch.Tensor:
    """Have one head of keys, and a value for each head of queries."""
    query, key, value = three
    return F.scaled_dot_product_attention(query, key[:, :1], value, enable_gqa=True)


def with_odd_keys(*three: torch.Tensor) -> torch.Tensor:
    """Attend to one key of each part under a mask."""
    query, key, value = three
    mask = torch.zeros(LENGTH, LENGTH // query.shape[2])
    return F.scaled_dot_product_attention(query, key[:, :, :1], value[:, :, :1], mask)


def checkpointed(*three: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    """Attend once more in the backward pass."""
    attends = partial(F.scaled_dot_product_attention, is_causal=True)
    return checkpoint(attends, *three, use_reentrant=use_reentrant)


by_function = partial(checkpointed, use_reentrant=True)
by_hooks = partial(checkpointed, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:.*draws random numbers")
@pytest.mark.filterwarnings("ignore:None of the inputs")  # in the first look
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Dropping, r"ring=True\): .* dropout_p=0\.5.* leave out ring"),
        (
            Spreading,
            r"query of shape \(1, 2, 2, 2\) does not fit the key of \(1, 1, 2, 2\)",
        ),
        (Doubling, r"called with 2 queries and 4 keys"),
        (Halving, r"called with 4 queries and 2 keys"),
        (partial(Answering, with_both), "with both attn_mask and is_causal=True"),
        (
            partial(Answering, with_heads_of_values),
            r"the key of \(1, 1, 2, 2\) and the value of \(1, 2, 2, 2\)",
        ),
        (partial(Answering, with_odd_keys), r"2 queries and 1 keys .* With a mask"),
        (partial(Answering, by_function), r"under torch\.utils\.checkpoint, which"),
        (partial(Answering, by_hooks), r"under torch\.utils\.checkpoint, which"),
        (Masking, r"attn_mask has the shape \(2, 2\), .* 4 x 4 positions"),
        (Flat, r"query of shape \(1, 2, 4\); expected \(samples, heads"),
    ],
)
def test_attention_that_no_ring_has_is_refused(model, words):
    """What is dropped, heads that torch would spread, and keys of no position."""
    with pytest.raises(LossError, match=words):
        simulate(2, lambda w: stepped(w, model, setup=RING), axes={"cp": 2})


def test_a_ring_has_two_pieces_a_rank():
    """Sequences of which there are no four pieces are refused; those of eight are cut so."""
    with pytest.raises(BatchError, match=r"need 4 pieces .* 2 positions"):
        simulate(2, lambda w: stepped(w, batch=rows(2), setup=RING), axes={"cp": 2})

    def fn(world: af.World) -> list[float]:
        seen: list[torch.Tensor] = []

        def noted(net: nn.Module, batch: Batch) -> af.Loss:
            seen.append(batch[2][0])
            return loss_of_all(net, batch)

        stepped(world, loss=noted, batch=rows(8), setup=RING)
        return seen[-1].tolist()

    expected = [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert list(simulate(2, fn, axes={"cp": 2})) == expected


@pytest.mark.parametrize("setup", [SHARING, RING])
def test_sequences_may_be_empty(setup):
    """Of which nothing counts: the update is that of no tokens, on one rank too."""

    def fn(world: af.World) -> dict[str, torch.Tensor]:
        return dict(stepped(world, Within, batch=rows(0), setup=setup).params)

    ((alone,), split) = simulate(1, fn), simulate(2, fn, axes={"cp": 2})
    for found in split:
        assert all(torch.equal(param, found[name]) for name, param in alone.items())


def test_an_empty_sequence_may_have_a_mask():
    """Of no positions, as a batch of paddings that were cut off may have."""

    def attends(*three: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*three, torch.zeros(0, 0))

    trains_as_alone(attends, 0)


@pytest.mark.parametrize("ring", [0, 1, None, "yes"])
def test_a_ring_is_there_or_not(ring):
    """True or False."""
    with pytest.raises(af.errors.ArgumentError, match=r"context_parallel\(ring="):
        af.context_parallel(ring=ring)


def test_a_ring_needs_no_heads():
    """One head, and more ranks than heads, in bfloat16 under autocast too."""
    heads = partial(Within, 1)
    for precision in ((), (af.autocast("bf16"),)):
        setup = af.chain(RING, *precision)

        def fn(world: af.World, setup: Any = setup) -> dict[str, torch.Tensor]:
            return dict(stepped(world, heads, batch=rows(8), setup=setup).params)

        (alone,), split = simulate(1, fn), simulate(4, fn, axes={"cp": 4})
        near = 3e-2 if precision else 1e-5
        for found in split:
            for name, param in alone.items():
                assert torch.allclose(param, found[name], atol=near), name


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", [(), (af.autocast("bf16"),)])
def test_a_ring_computes_in_the_dtype_of_autocast(given, precision):
    """What attention returns has the dtype of what torch's own does, of any inputs."""

    class Telling(Within):
        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            each = x[:, None].to(given)
            told.add(F.scaled_dot_product_attention(each, each, each).dtype)
            return super().forward(x, places)

    told: set[Any] = set()
    setup = af.chain(RING, *precision)
    simulate(2, lambda w: stepped(w, Telling, setup=setup), axes={"cp": 2})
    assert len(told) == 1  # the first look has torch's own, and the ring's
    found = told.pop()
    assert found is (torch.bfloat16 if precision and given is torch.float32 else given)


def test_keys_go_round_and_gradients_come_home():
    """Of n ranks n - 1 passes of keys and values each way, and n of their gradients."""

    def fn(world: af.World) -> None:
        state = state_of(world, setup=RING, data=None)
        step = af.make_step(loss_of_all)
        for _ in range(2):
            state, _ = step(state, rows(12))

    log = simulate(3, fn, axes={"cp": 3}).log
    sent = [each for each in log if each.kind.startswith("all_to_all")]
    second = [each for each in sent if each.step == 1]
    pair = 2 * 2 * (12 // 3) * WIDTH * 4  # keys and values of two samples, in float32
    assert [each.num_bytes for each in second] == [pair] * (2 + 2 + 3)
    assert {each.label for each in second} == {
        "context_parallel: keys and values round a ring"
    }


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


def trains_as_alone(
    attends: Any, length: int = 8, near: float = 1e-5, setup: Any = RING
) -> None:
    """Hold a ring of two ranks against one rank, of which both attend by a function."""

    def fn(world: af.World) -> dict[str, torch.Tensor]:
        batch = rows(length)
        model = partial(Answering, attends)
        return dict(stepped(world, model, batch=batch, setup=setup).params)

    ((alone,), split) = simulate(1, fn), simulate(2, fn, axes={"cp": 2})
    for found in split:
        for name, param in alone.items():
            assert torch.allclose(param, found[name], rtol=1e-3, atol=near), name


def hidden(value: float, length: int) -> torch.Tensor:
    """Return a mask of what is to come, which hides all from the first three, too."""
    mask = torch.full((length, length), value).triu(1)
    mask[:, :3] = value
    return mask


@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_who_is_hidden_from_all_by_a_number_sees_a_mean(value):
    """As padding is hidden: by a large number. Which mean is torch's rounding; of ones it is 1."""

    def attends(*three: torch.Tensor) -> torch.Tensor:
        query, key, values = three
        ones = torch.ones_like(values)
        return values + F.scaled_dot_product_attention(
            query, key, ones, hidden(value, 8)
        )

    trains_as_alone(attends)


def test_a_mask_keeps_its_precision():
    """Steps of 0.37 near -300 are none in 16 bits."""

    def attends(*three: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(8.0) * 0.37 - 300).expand(8, 8)
        narrow = (each.bfloat16() for each in three)
        return three[2] + F.scaled_dot_product_attention(*narrow, mask).float()

    trains_as_alone(attends, near=0.02)


@pytest.mark.parametrize("setup", [SHARING, RING])
def test_a_mask_of_all_positions_is_seen_whole(setup):
    """A look at 2,048 positions would have a mask of more."""
    length = 2056
    mask = torch.zeros(length, length)

    def attends(*three: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(each / length for each in three), mask)

    try:
        trains_as_alone(attends, length, setup=setup)
    except RuntimeError as error:
        pytest.fail(f"{error}")


@pytest.mark.parametrize("setup", [SHARING, RING])
@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1), (1, 1, 1, 8), (1, 2, 1, 8)])
def test_a_mask_may_be_one_for_all_queries_or_keys(shape, setup):
    """As torch spreads one: keys that are padding are hidden from all queries alike."""
    mask = torch.linspace(-2, 2, math.prod(shape)).reshape(shape)
    kinds = [mask] if shape[-1] == 1 else [mask, mask > -1]

    for each in kinds:
        attends = partial(F.scaled_dot_product_attention, attn_mask=each)
        trains_as_alone(attends, setup=setup)


@pytest.mark.parametrize("setup", [SHARING, RING])
def test_what_is_not_trained_may_attend_without_gradients(setup):
    """As a teacher does, which is run once."""

    def attends(*three: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = F.scaled_dot_product_attention(*three)
        return three[2] + taught

    trains_as_alone(attends, setup=setup)


def test_a_part_without_places_may_be_of_any_length():
    """One query a part, as of a pool that is learned: without a mask no place is asked."""

    def attends(*three: torch.Tensor) -> torch.Tensor:
        query, key, value = three
        seen = F.scaled_dot_product_attention(query[:, :, :3] * 0, key, value)
        return value + seen.mean(2, keepdim=True)

    trains_as_alone(attends)
