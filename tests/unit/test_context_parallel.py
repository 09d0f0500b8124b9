# SPDX-License-Identifier: Apache-2.0
"""What context_parallel refuses, and what ranks that share their samples are given."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn

import accelfn as af
from accelfn.errors import BatchError, CompositionError, LossError, WorldError
from accelfn.testing import simulate

WIDTH, HEADS, LENGTH = 4, 2, 4
SHARING = af.chain(af.shard_data(), af.wrap_ddp(), af.context_parallel())
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attending(nn.Module):
    """Attention over vectors that know their places."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.both = heads, nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        three = self.both(self.dropout(x + places[..., None])).chunk(3, -1)
        return self.attend(*three)

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        by_head = [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in three]
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


class Counting(Attending):
    """Counts places for itself."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        del places
        return super().forward(x, torch.arange(x.shape[1]).expand(x.shape[:2]))


class Mixing(Attending):
    """Mixes neighbours."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return super().forward(x, places).cumsum(1)


class Partly(Attending):
    """Has a part that is not in training, as a norm that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.both.eval()


class Rounding(Attending):
    """Rounds a part of a sequence otherwise than the whole, as products in TF32 may."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return super().forward(x, places) * (1 + 1e-4 * (x.shape[1] < LENGTH))


class Masking(Attending):
    """Attends by a mask that it makes of what it sees."""

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        length = three[0].shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        by_head = [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in three]
        return F.scaled_dot_product_attention(*by_head, mask).transpose(1, 2).flatten(2)


class Sharing(Attending):
    """Has one head of keys for all of queries."""

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        query, *rest = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in three)
        key, value = (each[:, :1] for each in rest)
        attended = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)


class Flat(Attending):
    """Attends without a dim of heads."""

    def attend(self, *three: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*three)


class Torchs(nn.Module):
    """torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        del places
        return self.layer(x, x, x, need_weights=False)[0]


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
    loss = loss_of_all(net, batch)
    return af.Loss(loss.total, batch[1].shape[1] - 1)


def loss_of_noise(net: nn.Module, batch: Batch) -> af.Loss:
    """Return the loss of inputs with noise."""
    x, y, places = batch
    return loss_of_all(net, (x + torch.randn(x.shape), y, places))


def rows(length: int = LENGTH) -> Batch:
    """Return inputs, targets and places."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, length, WIDTH, generator=draw)
    return x, y, torch.arange(length).expand(2, -1).float()


def state_of(
    world: af.World, model: Any = Attending, setup: Any = SHARING, **options: Any
) -> af.TrainState:
    """Return a state over a dataset of two samples."""
    options = {"data": af.Data(rows(), global_batch_size=2), **options}
    return af.TrainState.create(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        setup=setup,
        world=world,
        **options,
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


@pytest.mark.parametrize("model", [Counting, Mixing])
def test_what_does_not_go_by_position_is_refused(model):
    """A model that counts its own positions, or mixes neighbours, trains nothing wrong."""
    with pytest.raises(
        LossError, match=r"loss_of_all gives another result if sequences.*shift"
    ):
        simulate(2, lambda w: stepped(w, model), axes={"cp": 2})


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_in_few_bits_round_as_they_like(precision):
    """What is no mistake in the precision that a program set for them is one in float32."""

    def run() -> None:
        simulate(2, lambda w: stepped(w, Rounding), axes={"cp": 2})

    with pytest.raises(LossError, match="another result if sequences are split"):
        run()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        run()
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("loss", [loss_of_next, loss_of_fewer])
def test_labels_that_are_shifted_in_parts_are_refused(loss):
    """A part's last position has no next one there, so its weight is not the whole's."""
    with pytest.raises(LossError, match=r"weight=3\), but the parts .*weight=2\)"):
        simulate(2, lambda w: stepped(w, loss=loss), axes={"cp": 2})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (partial(Attending, 1), r"the query .* 1 heads, .* among 2 ranks"),
        (Sharing, r"the key of shape .* 1 heads, .* among 2 ranks"),
        (Masking, r"attn_mask has the shape \(2, 2\), .* 4 x 4 positions"),
        (Flat, r"query of shape \(1, 2, 4\); expected \(samples, heads"),
        (Torchs, "MultiheadAttention would .* this rank's positions only"),
    ],
)
def test_attention_that_cannot_be_shared_is_refused(model, words):
    """Heads that do not divide, masks of a part, and what has no heads; torch would tell later."""
    with pytest.raises((LossError, RuntimeError), match=words):
        simulate(2, lambda w: stepped(w, model), axes={"cp": 2})


def test_a_mean_is_refused():
    """Nobody knows of how many tokens of a part it is."""
    with pytest.raises(LossError, match=r"returned Tensor for a part.*Loss\(total"):
        simulate(2, lambda w: stepped(w, loss=loss_of_mean), axes={"cp": 2})


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (rows(3), r'2 ranks along "cp" need 2 pieces .* have 3 positions'),
        ((*rows()[:2], rows(6)[2]), r"equal length in dim 1, got \["),
        ((torch.ones(2),), r"equal length in dim 1, got no tensor with this dim"),
    ],
)
def test_sequences_that_cannot_be_split_are_refused(batch, words):
    """Of a length that does not divide, of several, or none."""
    with pytest.raises(BatchError, match=words):
        simulate(2, lambda w: stepped(w, batch=batch), axes={"cp": 2})


@pytest.mark.filterwarnings(
    "ignore::accelfn.errors.AccelfnWarning"
)  # of what is no batch
@pytest.mark.parametrize("odd", range(4))
def test_batches_that_differ_along_cp_are_refused(odd):
    """Ranks that share samples would otherwise add up parts of different ones."""

    def fn(world: af.World) -> None:
        x, y, places = rows()
        stepped(world, batch=(x + (world.rank == odd), y, places))

    with pytest.raises(BatchError, match=r'along "cp" must get the same batches'):
        simulate(4, fn, axes={"dp_shard": 2, "cp": 2})


def test_a_loss_that_draws_is_told_of():
    """It cannot be compared with itself in one piece, and trains on the same draws."""

    def fn(world: af.World) -> list[dict[str, torch.Tensor]]:
        state, step = state_of(world), af.make_step(loss_of_noise)
        return [dict(step(state, rows(), donate=False)[0].params) for _ in range(2)]

    with pytest.warns(
        af.errors.AccelfnWarning, match="loss_of_noise draws random numbers"
    ):
        found = simulate(2, fn, axes={"cp": 2})
    for first, again in found:
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_what_does_not_count_is_looked_at_later():
    """A first batch without weight tells nothing, so the next one is compared."""

    def weighed(net: nn.Module, batch: Any) -> af.Loss:
        x, y, places, weight = batch
        loss = loss_of_all(net, (x, y, places))
        return af.Loss(loss.total * weight, loss.weight * weight)

    def fn(world: af.World) -> None:
        state = state_of(world, Counting, data=None)
        step = af.make_step(weighed)
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

    def fn(world: af.World) -> float:
        state = state_of(world, Within)
        _, metrics = af.make_step(weighed)(state, (*rows(), weights))
        return metrics.all_reduce_mean(world)["loss"]

    ((alone,), found) = simulate(1, fn), simulate(2, fn, axes={"cp": 2})
    assert all(each == pytest.approx(alone, rel=1e-5) for each in found)


@pytest.mark.parametrize("ring", [False, True])
def test_a_look_at_long_sequences_is_at_their_beginning(ring):
    """Of at most 2,048 positions, which three ranks share in whole pieces."""
    lengths: list[int] = []

    def noted(net: nn.Module, batch: Batch) -> af.Loss:
        x, *_, places = batch
        lengths.append(places.shape[1])
        return af.Loss(net.get_submodule("layer.both")(x).sum(), x[..., 0].numel())

    setup = af.chain(af.wrap_ddp(), af.context_parallel(ring=ring))
    long = rows(2052)

    def fn(world: af.World) -> None:
        stepped(world, Within, noted, long, setup)

    simulate(3, fn, axes={"cp": 3})
    whole = 2046  # the largest multiple of 3 pieces, and of 6
    assert sorted(set(lengths)) == [whole // 3, 2052 // 3, whole]


def test_looking_leaves_no_trace():
    """Buffers, modes of each part and draws of the first update are as if nobody had looked."""

    def fn(world: af.World) -> tuple[dict[str, torch.Tensor], bool]:
        state, modes = state_of(world, Partly), []

        def seen(net: nn.Module, batch: Batch) -> af.Loss:
            modes.append((net.training, net.both.training))
            return loss_of_all(net, batch)

        first, _ = af.make_step(seen)(state, rows(), donate=False)
        again, _ = af.make_step(seen)(state, rows(), donate=False)
        assert modes == [(False, False)] * 2 + [(True, False)] * 2
        assert first.buffers["calls"] == again.buffers["calls"] == 1
        same = (torch.equal(p, again.params[n]) for n, p in first.params.items())
        return dict(first.params), all(same)

    assert all(same for _, same in simulate(2, fn, axes={"cp": 2}))


@pytest.mark.parametrize("axis", ["cp", "tp"])
@pytest.mark.parametrize("setup", [None, af.wrap_ddp(), af.wrap_fsdp()])
def test_an_axis_without_work_is_refused(axis, setup):
    """Its ranks would all do the same."""
    with pytest.raises(
        WorldError, match=f"along '{axis}': its 2 ranks would all do the same"
    ):
        simulate(2, lambda w: state_of(w, setup=setup), axes={axis: 2})


@pytest.mark.parametrize("other", [af.local_sgd(sync_every=2), af.compile()])
def test_it_stands_beside_neither(other):
    """Ranks that train apart add nothing up; a compiler cannot see an exchange."""
    with pytest.raises(CompositionError, match="context_parallel"):
        af.chain(af.context_parallel(), other)


def test_ranks_of_one_sample_are_not_split_between():
    """A sample's ranks would get parts of one another's; the axis itself can be meant."""

    def fn(world: af.World) -> tuple[list[int], list[int]]:
        with pytest.raises(af.errors.ArgumentError, match=r"Pass world\.batch"):
            af.split_over_ranks([0, 1, 2, 3], world)
        parts = af.split_over_ranks([0, 1, 2, 3], world.batch)
        return parts, af.split_over_ranks([0, 1], world.along("cp"))

    expected = [([0, 1], [0]), ([0, 1], [1]), ([2, 3], [0]), ([2, 3], [1])]
    assert list(simulate(4, fn, axes={"dp_shard": 2, "cp": 2})) == expected


def test_what_is_predicted_and_gathered_comes_once():
    """Predictions are of whole sequences; samples, draws and lockstep go by batch ranks."""

    def fn(world: af.World) -> Any:
        state = state_of(world, partial(Attending))
        outputs = af.predict(state, state.data, lambda net, b: net(b[0], b[2]))
        predicted = torch.stack([*outputs])
        batch = next(iter(af.batches(state)))
        valid = af.all_gather_valid(batch.value[0], batch, world)
        steps = [*af.join_uneven([1] * (world.batch.rank + 1), world)]
        with af.fork_rng(state, "noise"):
            drawn = float(torch.rand(()))
        return predicted, valid, len(steps), (world.batch.rank, drawn)

    ((whole, _, _, _),) = simulate(1, fn, axes={"cp": 1})
    found = list(simulate(4, fn, axes={"dp_shard": 2, "cp": 2}))
    for predicted, valid, steps, _ in found:
        assert torch.allclose(predicted, whole)
        assert valid.shape == (2, LENGTH, WIDTH)
        assert steps == 2
    assert len({draw for *_, draw in found}) == 2


class Within(nn.Module):
    """Attention in a module of its own."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.layer = Attending(heads)
        self.layer.dropout = nn.Identity()

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.layer(x, places)


def test_what_is_computed_again_sees_all_positions():
    """A block that is run again in the backward pass attends to what it first did."""
    again = af.checkpoint_activations(Attending)

    def fn(world: af.World) -> dict[str, torch.Tensor]:
        state = state_of(world, Within, af.chain(SHARING, again))
        state, _ = af.make_step(loss_of_all)(state, next(iter(af.batches(state))))
        return dict(state.params)

    ((alone,), split) = simulate(1, fn), simulate(2, fn, axes={"cp": 2})
    for found in split:
        for name, param in alone.items():
            assert torch.allclose(param, found[name], atol=1e-5), name


def test_any_dim_can_be_the_sequence():
    """Features may come before positions."""

    def turned(net: nn.Module, batch: Batch) -> af.Loss:
        x, y, places = (each.mT for each in batch)
        return loss_of_all(net, (x, y, places[..., 0]))

    def fn(world: af.World) -> float:
        x, y, places = rows()
        batch = (x.mT.contiguous(), y.mT.contiguous(), places[:, None])
        setup = af.chain(af.wrap_ddp(), af.context_parallel(seq_dim=2))
        _, metrics = af.make_step(turned)(state_of(world, Within, setup), batch)
        return metrics.all_reduce_mean(world)["loss"]

    ((alone,), found) = simulate(1, fn), simulate(2, fn, axes={"cp": 2})
    assert all(each == pytest.approx(alone, rel=1e-5) for each in found)


@pytest.mark.parametrize("beside", [(), ("a name", 3, None)])
@pytest.mark.parametrize("weights", [torch.arange(1.0, WIDTH + 1), 2.0])
def test_a_batch_may_have_what_is_of_no_sample(weights, beside):
    """Weights of features, say: the loss is looked at on all samples then; and no tensors."""

    def weighed(net: nn.Module, batch: Any) -> af.Loss:
        x, y, places, weights, *_ = batch
        errors = (net(x, places) - y).square()
        if isinstance(weights, torch.Tensor):
            return af.Loss((errors @ weights).sum(), y[..., 0].numel())
        return af.Loss(errors.sum() * weights, y[..., 0].numel())

    def fn(world: af.World) -> float:
        batch = (*rows(), weights, *beside)
        _, metrics = af.make_step(weighed)(state_of(world, Within), batch)
        return metrics.all_reduce_mean(world)["loss"]

    ((alone,), found) = simulate(1, fn), simulate(2, fn, axes={"cp": 2})
    assert all(each == pytest.approx(alone, rel=1e-5) for each in found)


def test_one_rank_reads_a_stream_for_all():
    """Along "cp" too: a queue has each sample once."""
    readers = []

    class Queue(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            readers.append(1)
            return iter(zip(*rows(), strict=True))

    def fn(world: af.World) -> int:
        state = af.TrainState.create(
            model=Attending,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=af.Data(Queue(), global_batch_size=2, dispatch=True),
            setup=SHARING,
            world=world,
        )
        return sum(len(batch.value[0]) for batch in af.batches(state, until_epoch=1))

    assert list(simulate(4, fn, axes={"dp_shard": 2, "cp": 2})) == [1, 1, 1, 1]
    assert len(readers) == 1


def test_every_attention_is_between_two_exchanges():
    """One of query, key and value, and one of the result; both again in the backward pass."""

    def fn(world: af.World) -> None:
        state, step = state_of(world, data=None), af.make_step(loss_of_all)
        for _ in range(2):
            state, _ = step(state, rows())

    log = simulate(2, fn, axes={"cp": 2}).log
    sent = [each for each in log if each.kind.startswith("all_to_all")]
    second = [each.num_bytes for each in sent if each.step == 1]
    part = 2 * (LENGTH // 2) * WIDTH * 4
    assert sorted(second) == [part, part, 3 * part, 3 * part]
