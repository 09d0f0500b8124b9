# SPDX-License-Identifier: Apache-2.0
"""One idea more: data that the model makes itself. PPO trains a player on its own games.

Each rank plays some of the games, and all ranks train on all of them (Schulman et al. 2017).
Games serve several epochs, until the player has moved far from the one that played them. The
KL divergence of both, over the moves of all ranks, tells all ranks to stop after that epoch.
"""

from functools import partial

import torch
from torch import Tensor, nn

import accelfn as af

CELLS, GAMES, MOVES, BATCH = 10, 21, 20, 64  # the last batch of 420 moves has 36
SLIP, DISCOUNT, TRACE = 0.1, 0.95, 0.9
RATE, CLIP, MAX_NORM, MAX_KL, MAX_EPOCHS = 0.01, 0.2, 0.5, 0.01, 8


def net() -> nn.Module:
    """Return a player: a table of cells, and two scores and a value for each."""
    return nn.Sequential(nn.Embedding(CELLS, 32), nn.Tanh(), nn.Linear(32, 3))


def judge(player: nn.Module, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return log probabilities of steps to the left and to the right, and values of cells."""
    outputs = player(cells)
    return outputs[:, :2].log_softmax(1), outputs[:, 2]


@torch.no_grad()
def play(state: af.TrainState) -> tuple[af.Data, Tensor]:
    """Return the moves of all games, and what each of them earned."""
    with af.fork_rng(state, "games", shared=True):
        luck = torch.rand(GAMES, MOVES, 2)  # the same on any number of ranks
    luck, player = af.split_over_ranks(luck, state.world), af.snapshot_model(state)
    cells, moves = torch.zeros(len(luck), dtype=torch.long), []
    for choice, slip in luck.permute(1, 2, 0):
        scores, values = judge(player, cells)
        right = (choice < scores[:, 1].exp()).long()
        score = scores.gather(1, right[:, None])[:, 0]
        reached = (
            cells + torch.where(slip < SLIP, 1 - 2 * right, 2 * right - 1)
        ).relu()
        won = reached == CELLS - 1  # it leads back to the first cell
        moves.append((cells, right, score, values, won.to(values)))
        cells = reached.where(~won, 0)
    gain, (_, following), rows = torch.zeros(len(luck)), judge(player, cells), []
    for cells, right, score, values, reward in reversed(moves):
        gain = reward + DISCOUNT * (following + TRACE * gain) - values
        following = values
        rows.append((cells, right, score, gain, gain + values, reward))
    mine = [
        torch.stack(column, 1).flatten() for column in zip(*rows[::-1], strict=True)
    ]
    *columns, reward = af.all_gather(mine, state.world, ragged=True)
    columns[3] = (columns[3] - columns[3].mean()) / columns[3].std()
    return af.Data(tuple(columns), global_batch_size=BATCH, shuffle=True), reward


def loss_fn(player: nn.Module, batch: tuple[Tensor, ...]) -> af.Loss:
    """Return the clipped loss of some moves; the divergence goes along."""
    cells, right, score, gain, value = batch
    scores, values = judge(player, cells)
    change = scores.gather(1, right[:, None])[:, 0] - score
    ratio = change.exp()
    surplus = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    total = ((values - value).square() / 2 - surplus).sum()
    return af.Loss(total, len(cells), kl=(ratio - 1 - change).sum())


def train(world: af.World, rollouts: int = 30) -> dict[str, Tensor]:
    """Return the parameters after some rollouts."""
    state = af.TrainState.create(
        model=net,
        optimizer=partial(torch.optim.Adam, lr=RATE),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), af.clip_grad_norm(MAX_NORM)),
        world=world,
    )
    step = af.make_step(loss_fn)
    for number in range(rollouts):
        data, reward = play(state)
        state, kl, epochs = state.with_data(data), 0.0, 0
        while kl < MAX_KL and epochs < MAX_EPOCHS:
            seen, epochs = af.Metrics(), epochs + 1
            for batch in af.batches(state, until_epoch=state.cursor.epoch + 1):
                state, metrics = step(state, batch)
                seen += metrics
            kl = seen.all_reduce_mean(world)["kl"]
        if number % 5 == 0:
            text = f"{reward.mean():.1%} of moves win, {epochs} epochs, KL {kl:.3f}"
            af.print_once(world, f"rollout {number}: {text}")
    return af.full_params(state)


if __name__ == "__main__":
    with af.World.from_env(device="cpu") as world:
        train(world)
