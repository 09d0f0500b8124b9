# SPDX-License-Identifier: Apache-2.0
"""A mean over tokens is that of the whole batch, however ranks and micro-batches share it.

On a small transformer, texts of uneven length, and a loss of sums with its number of tokens.
"""

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import accelfn as af
from accelfn.testing import simulate

PAD, NUM_LETTERS, LONGEST, ROWS = 0, 11, 7, 6


class Writer(nn.Module):
    """Two layers of attention that look back, and at no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(NUM_LETTERS, 8, padding_idx=PAD)
        self.places = nn.Embedding(LONGEST, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, NUM_LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        found = self.letters(text) + self.places(torch.arange(length))
        return self.head(self.layers(found, mask=ahead))


def loss_fn(model: nn.Module, batch: Tensor) -> af.Loss:
    """Return the sum of the losses of letters, and how many letters are no padding."""
    wanted = batch[:, 1:]
    total = cross_entropy(
        model(batch[:, :-1]).mT, wanted, ignore_index=PAD, reduction="sum"
    )
    return af.Loss(total, (wanted != PAD).sum())


def padded(lengths: list[int]) -> Tensor:
    """Return texts of these lengths, filled up with padding."""
    draw = torch.Generator().manual_seed(sum(lengths))
    texts = torch.randint(1, NUM_LETTERS, (ROWS, LONGEST + 1), generator=draw)
    return texts * (torch.arange(LONGEST + 1) < torch.tensor(lengths)[:, None])


def by_hand(texts: Tensor, updates: int) -> list[Tensor]:
    """Return the parameters after updates on whole batches, in torch alone."""
    seed = af.TrainState.create(
        model=Writer, optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    with af.bind(seed.copy()) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(updates):
            logits = model(texts[:, :-1]).mT
            loss = cross_entropy(logits, texts[:, 1:], ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [param.detach().clone() for param in model.parameters()]


def shared(
    world: af.World, texts: Tensor, num_micro_batches: int, updates: int
) -> list[Tensor]:
    """Return the parameters after as many updates on shares of the batches."""
    state = af.TrainState.create(
        model=Writer,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=af.Data(texts, batch_size=ROWS),
        setup=af.chain(
            af.shard_data(),
            af.wrap_ddp(),
            af.accumulate(num_micro_batches=num_micro_batches),
        ),
        world=world,
    )
    step = af.make_step(loss_fn)
    for batch in af.batches(state, epochs=updates):
        state, _ = step(state, batch)
    return list(state.params.values())


@given(
    lengths=st.lists(st.integers(2, LONGEST + 1), min_size=ROWS, max_size=ROWS),
    size=st.integers(1, 4),
    num_micro_batches=st.integers(1, 3),
    updates=st.integers(1, 2),
)
def test_shares_of_padded_text_train_what_the_whole_batch_trains(
    lengths: list[int], size: int, num_micro_batches: int, updates: int
) -> None:
    """The parameters of every rank are those of one loop over whole batches, to 1e-6."""
    texts = padded(lengths)
    expected = by_hand(texts, updates)
    ranks = simulate(size, lambda w: shared(w, texts, num_micro_batches, updates))

    for found in ranks:
        for mine, want in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)
