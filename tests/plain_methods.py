# SPDX-License-Identifier: Apache-2.0
"""The methods of `examples/` as plain PyTorch functions: one process, without accelfn's setups.

A function receives an example as a module, with its model, data and settings, and a number of
epochs. It returns the value that the example's `train` must return. `METHODS` has a row for each
example.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import accelfn as af
from tests.states import linear_state

Params = dict[str, Tensor]


@attrs.frozen
class Method:
    """A plain program, its number of epochs, and further options of the example's `train`.

    The example must train the same with each of these options.
    """

    program: Callable[[ModuleType, int], Any]
    epochs: int = 2
    options: tuple[dict[str, Any], ...] = ({},)
    rtol: float = 0.0
    atol: float = 1e-12


def initial_model(factory: Callable[[], nn.Module], name: str = "state") -> nn.Module:
    """Return a model with the values that a run with the seed 0 begins with."""
    values, model = af.full_params(linear_state(model=factory, name=name)), factory()
    model.load_state_dict(values, strict=False)
    return model


def epoch_order(count: int, epoch: int, seed: int = 0) -> Tensor:
    """Return the order of an epoch of a run with a seed."""
    data = af.Data(torch.arange(count), global_batch_size=1, shuffle=True)
    order = data.epoch(seed=seed, number=epoch).order(torch.arange(count).numpy())
    return torch.from_numpy(order)


def shared_draws(purpose: str, step: int, name: str = "state", seed: int = 0) -> Any:
    """Return a context that draws what `af.fork_rng` lets all ranks draw."""
    state = linear_state(name=name, seed=seed)
    return af.fork_rng(attrs.evolve(state, step=step), purpose, shared=True)


def plain_batches(
    tensors: tuple[Tensor, ...], size: int, epochs: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the shuffled batches of a run with the seed 0; the last of an epoch is short."""
    for epoch in range(epochs):
        for rows in epoch_order(len(tensors[0]), epoch).split(size):
            yield tuple(tensor[rows] for tensor in tensors)


def drawn_batches(data: af.Data, epochs: int) -> Iterator[Any]:
    """Yield the batches of a dataset that draws random numbers, as one rank reads them."""
    for batch in af.batches(linear_state(data=data), until_epoch=epochs):
        yield batch.value


def states() -> Iterator[af.TrainState]:
    """Yield states of one update after another, whose random numbers are those of a run."""
    state = linear_state()
    step = af.make_step(lambda model, batch: model(batch).mean())
    while True:
        yield state
        state, _ = step(state, torch.ones(1, 1))


def params_of(model: nn.Module) -> Params:
    """Return a model's parameters by name."""
    return {name: param.detach() for name, param in model.named_parameters()}


def contrastive(example: ModuleType, epochs: int) -> Params:
    """Train two towers on whole batches."""
    model = initial_model(example.towers)
    optimizer = torch.optim.Adam(model.parameters(), lr=example.RATE)
    data = example.pairs(example.NUM_PAIRS)
    for batch in plain_batches(data, example.BATCH, epochs):
        optimizer.zero_grad()
        example.clip_loss(example.embed(model, batch)).backward()
        optimizer.step()
    return params_of(model)


def dino(example: ModuleType, epochs: int) -> dict[str, Any]:
    """Train a student, its average and a center, of all samples of a batch."""
    student, teacher = initial_model(example.net), initial_model(example.net)
    optimizer = torch.optim.Adam(student.parameters(), lr=example.RATE)
    center = torch.zeros(example.OUTPUTS)
    data = af.Data(
        example.Views(example.NUM_SAMPLES, 0),
        global_batch_size=example.BATCH,
        shuffle=True,
    )
    for views in drawn_batches(data, epochs):
        with torch.no_grad():
            outputs = teacher(views)
        targets = ((outputs - center) / example.COLD).softmax(2)
        center = example.KEEP_CENTER * center
        center += (1 - example.KEEP_CENTER) * outputs.mean((0, 1))
        scores = (student(views) / example.WARM).log_softmax(2)
        optimizer.zero_grad()
        first = (targets[:, 0] * scores[:, 1]).sum(1)
        second = (targets[:, 1] * scores[:, 0]).sum(1)
        (-(first + second).mean() / 2).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(
                teacher.parameters(), student.parameters(), strict=True
            ):
                old.lerp_(new, 1 - example.KEEP_TEACHER)
    return {
        "student": params_of(student),
        "teacher": params_of(teacher),
        "center": center,
    }


def mixture_of_experts(example: ModuleType, epochs: int) -> Params:
    """Keep experts in balance over all samples of a batch."""
    model = initial_model(example.Mixture)
    optimizer = torch.optim.Adam(model.parameters(), lr=example.RATE)
    data = example.samples(example.NUM_SAMPLES)
    for inputs, targets in plain_batches(data, example.BATCH, epochs):
        probs = model.router(inputs).softmax(1)
        choices = probs.argmax(1).tolist()
        rows = [
            probs[i, k] * model.experts[k](inputs[i]) for i, k in enumerate(choices)
        ]
        loss = (torch.stack(rows) - targets).square().mean()
        for k in range(example.EXPERTS):
            share = choices.count(k) / len(choices)
            loss = loss + example.EXPERTS * share * probs[:, k].mean()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)  # of an expert without samples, too
        loss.backward()
        optimizer.step()
    return params_of(model)


def dp_sgd(example: ModuleType, epochs: int) -> Params:
    """Clip the gradient of one sample after another, and add noise once."""
    model = initial_model(example.net)
    params = list(model.parameters())
    rates = {"lr": example.RATE, "momentum": example.MOMENTUM}
    optimizer = torch.optim.SGD(params, **rates)
    data = example.samples(example.NUM_SAMPLES)
    batches = plain_batches(data, example.BATCH, epochs)
    for (inputs, labels), state in zip(batches, states(), strict=False):
        sums = [torch.zeros_like(param) for param in params]
        for x, label in zip(inputs, labels, strict=True):
            loss = nn.functional.cross_entropy(model(x), label)
            grads = torch.autograd.grad(loss, params)
            norm = torch.cat([grad.flatten() for grad in grads]).norm().item()
            for total, grad in zip(sums, grads, strict=True):
                total.add_(grad, alpha=min(1.0, example.CLIP / norm))
        with af.fork_rng(state, "noise", shared=True):
            for total, param in zip(sums, params, strict=True):
                noise = example.NOISE * example.CLIP * torch.randn_like(total)
                param.grad = (total + noise) / len(inputs)
        optimizer.step()
    return params_of(model)


def kfac(example: ModuleType, epochs: int) -> Params:
    """Divide gradients by Kronecker factors of whole batches."""
    model = initial_model(example.net)
    optimizer = torch.optim.SGD(model.parameters(), lr=example.RATE)
    averages: dict[int, list[Tensor]] = {}
    data = example.samples(example.NUM_SAMPLES)
    for inputs, targets in plain_batches(data, example.BATCH, epochs):
        values = [inputs]
        for layer in model:
            values.append(layer(values[-1]))
        optimizer.zero_grad()
        loss = (values[-1] - targets).square().mean() / 2
        loss.backward(retain_graph=True)
        slopes = torch.autograd.grad(values[-1].sum(), [values[1], values[3]])
        for place, slope in zip((0, 2), slopes, strict=True):
            layer = model[place]
            rows = torch.cat([values[place].detach(), torch.ones(len(inputs), 1)], 1)
            new = [each.T @ each / len(inputs) for each in (rows, slope)]
            old = averages.get(place, new)
            averages[place] = [
                example.DECAY * before + (1 - example.DECAY) * now
                for before, now in zip(old, new, strict=True)
            ]
            a, g = averages[place]
            ratio = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
            a = a + ratio * example.DAMPING**0.5 * torch.eye(len(a))
            g = g + example.DAMPING**0.5 / ratio * torch.eye(len(g))
            grad = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            grad = torch.linalg.solve(a, torch.linalg.solve(g, grad), left=False)
            layer.weight.grad, layer.bias.grad = grad[:, :-1], grad[:, -1]
        optimizer.step()
    return params_of(model)


def play_games(example: ModuleType, player: nn.Module, luck: Tensor) -> list[Tensor]:
    """Return cells, steps, their log probabilities, gains and values; a row a game."""
    size = (example.GAMES, example.MOVES)
    cells, rights = (torch.zeros(size, dtype=torch.long) for _ in range(2))
    scores, values, rewards, gains = (torch.zeros(size) for _ in range(4))
    for game in range(example.GAMES):
        cell = 0
        for move in range(example.MOVES):
            (left_and_right,), (value,) = example.judge(player, torch.tensor([cell]))
            right = int(luck[game, move, 0] < left_and_right[1].exp())
            goes_right = right != int(luck[game, move, 1] < example.SLIP)
            cells[game, move], rights[game, move] = cell, right
            scores[game, move], values[game, move] = left_and_right[right], value
            cell = max(cell + (1 if goes_right else -1), 0)
            if cell == example.CELLS - 1:
                cell, rewards[game, move] = 0, 1.0
        gain, following = 0.0, example.judge(player, torch.tensor([cell]))[1][0]
        for move in reversed(range(example.MOVES)):
            surprise = rewards[game, move] + example.DISCOUNT * following
            surprise = surprise - values[game, move]
            gain = surprise + example.DISCOUNT * example.TRACE * gain
            gains[game, move], following = gain, values[game, move]
    surplus = (gains - gains.mean()) / gains.std()
    return [each.flatten() for each in (cells, rights, scores, surplus, gains + values)]


def clip_grads(model: nn.Module, max_norm: float) -> None:
    """Scale gradients down to a norm, without the 1e-6 that torch adds to what it divides by."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    for grad in grads if norm > max_norm else ():
        grad.mul_(max_norm / norm)


def ppo(example: ModuleType, rollouts: int) -> Params:
    """Train a player on all games, until it has moved away from the one that played them."""
    player = initial_model(example.net)
    optimizer = torch.optim.Adam(player.parameters(), lr=example.RATE)
    step = epoch = 0
    for _ in range(rollouts):
        with torch.no_grad(), shared_draws("games", step):
            luck = torch.rand(example.GAMES, example.MOVES, 2)
            moves = play_games(example, player, luck)
        for _ in range(example.MAX_EPOCHS):
            total = 0.0
            for rows in epoch_order(len(moves[0]), epoch).split(example.BATCH):
                cells, rights, before, gains, returns = (each[rows] for each in moves)
                scores, values = example.judge(player, cells)
                chosen = scores[torch.arange(len(rows)), rights]
                ratio = chosen.exp() / before.exp()
                clipped = ratio.clamp(1 - example.CLIP, 1 + example.CLIP)
                policy = torch.minimum(ratio * gains, clipped * gains).mean()
                optimizer.zero_grad()
                ((values - returns).square().mean() / 2 - policy).backward()
                clip_grads(player, example.MAX_NORM)
                optimizer.step()
                step += 1
                total += (ratio - 1 - (chosen - before)).detach().sum()
            epoch += 1
            if total / len(moves[0]) >= example.MAX_KL:
                break
    return params_of(player)


@attrs.define
class Run:
    """A member of a population: a model, its optimizer, its rate and how far it has come."""

    seed: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int = 0

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.optimizer.param_groups[0]["lr"]

    def train(self, example: ModuleType, epoch: int) -> None:
        """Train for an epoch, in the order of this member."""
        inputs, targets = example.samples(example.NUM_SAMPLES)
        for rows in epoch_order(len(inputs), epoch, self.seed).split(example.BATCH):
            self.optimizer.zero_grad()
            (self.model(inputs[rows]) - targets[rows]).square().mean().backward()
            self.optimizer.step()
            self.steps += 1


def population(example: ModuleType, rounds: int) -> dict[str, Params]:
    """Train four models, and copy the best over the worst after each round."""
    runs = []
    for seed, rate in enumerate(example.RATES):
        model = initial_model(example.net)
        sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=example.MOMENTUM)
        runs.append(Run(seed, model, sgd))
    inputs, targets = example.samples(203, seed=1)
    for number in range(rounds):
        losses = []
        for run in runs:
            for epoch in range(example.EPOCHS * number, example.EPOCHS * (number + 1)):
                run.train(example, epoch)
            with torch.no_grad():
                losses.append((run.model(inputs) - targets).square().mean())
        best, worst = (runs[losses.index(pick(losses))] for pick in (min, max))
        with shared_draws("explore", worst.steps, f"member {worst.seed}", worst.seed):
            rate = best.rate * (2.0 if torch.rand(()) < 0.5 else 0.5)
        worst.model.load_state_dict(best.model.state_dict())
        worst.optimizer.load_state_dict(deepcopy(best.optimizer.state_dict()))
        worst.optimizer.param_groups[0]["lr"] = rate
        worst.steps = best.steps
    return {f"member {run.seed}": params_of(run.model) for run in runs}


def gan(example: ModuleType, epochs: int) -> Tensor:
    """Train a generator and a critic in turns; return points of the generator's average."""
    generator = initial_model(partial(example.net, 2, 2), "generator")
    critic = initial_model(partial(example.net, 2, 1), "critic")
    average = deepcopy(generator)
    adam = partial(torch.optim.Adam, lr=example.RATE, betas=example.BETAS)
    makes, judges = adam(generator.parameters()), adam(critic.parameters())
    points, step = example.ring(example.NUM_POINTS), 0
    for epoch in range(epochs):
        for rows in epoch_order(len(points), epoch).split(example.BATCH):
            with shared_draws("noise", step, "critic"):
                noise = torch.randn(2, len(points), 2)[:, rows]
            true = points[rows].requires_grad_()
            made, score = critic(generator(noise[0]).detach()), critic(true)
            (slope,) = torch.autograd.grad(score.sum(), true, create_graph=True)
            penalty = example.PENALTY * slope.square().sum() / len(rows)
            judges.zero_grad()
            (penalty - (logsigmoid(-made) + logsigmoid(score)).mean()).backward()
            judges.step()
            makes.zero_grad()
            (-logsigmoid(critic(generator(noise[1])))).mean().backward()
            makes.step()
            for mean, param in zip(
                average.parameters(), generator.parameters(), strict=True
            ):
                mean.data.lerp_(param.data, 1 - example.MEMORY)
            step += 1
    with shared_draws("look", step, "generator"), torch.no_grad():
        return average(torch.randn(4096, 2))


METHODS = {
    "09_gan": Method(gan, epochs=1),
    "23_contrastive": Method(contrastive, options=({}, {"parts": 2})),
    "24_dino": Method(dino, options=({}, {"parts": 2})),
    "25_mixture_of_experts": Method(mixture_of_experts, options=({}, {"parts": 2})),
    "26_dp_sgd": Method(dp_sgd, epochs=1, options=({}, {"parts": 2})),
    "27_kfac": Method(kfac),
    "28_ppo": Method(ppo, epochs=4),
    "29_population": Method(population, epochs=5),
}
