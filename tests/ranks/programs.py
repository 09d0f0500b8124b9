# SPDX-License-Identifier: Apache-2.0
"""Programs that the rank processes of the tests run; each takes a world and plain data."""

import functools
from typing import Any

import attrs
import torch
import torch.distributed as dist

import accelfn as af
from tests.strategies import LOSSES, Run, tensors

Found = dict[str, torch.Tensor]


def place(world: af.World) -> tuple[int, int]:
    """Return where the rank is."""
    return world.rank, world.size


def train(world: af.World, run: Run) -> tuple[list[Found], list[dict[str, float]]]:
    """Train; return the states after every update, and the metrics' means over ranks."""
    state = run.state(world)
    states, means = [], []
    for _ in range(run.updates):
        state, metrics = run.train(state, 1)
        states.append(tensors(state))
        means.append(af.mean(metrics[0], world))
    return states, means


def train_and_finalize(world: af.World, run: Run) -> tuple[Found, Found]:
    """Train; return the state before and after finalize."""
    state, _ = run.train(run.state(world))
    before = tensors(state)
    return before, tensors(af.finalize(state))


def count_collectives(world: af.World, run: Run) -> list[list[int]]:
    """Train; return how many elements each all-reduce had, by update."""
    counted: list[list[int]] = []
    plain = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counted[-1].append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    state = run.state(world)
    dist.all_reduce = counting
    try:
        for _ in range(run.updates):
            counted.append([])
            state, _ = run.train(state, 1)
    finally:
        dist.all_reduce = plain
    return counted


def eval_params(world: af.World, run: Run) -> tuple[Found, Found, Found]:
    """Train; return the evaluation parameters, and the state before and after asking."""
    state, _ = run.train(run.state(world))
    before = tensors(state)
    asked = {f"params.{n}": p.clone() for n, p in af.eval_params(state).items()}
    return asked, before, tensors(state)


def custom_accumulation(world: af.World, run: Run) -> tuple[Found, Found]:
    """Accumulate by hand with into= and sync=, and by sync_grads at the end."""
    results = []
    for by_hand in (False, True):
        state = run.state(world)
        compute = af.value_and_grad(LOSSES[run.loss])
        (batch,) = [b for b, _ in zip(af.batches(state), range(1), strict=False)]
        parts = batch.parts()
        grads = None
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            _, grads = compute(state, part, into=grads, sync=last and not by_hand)
        if by_hand:
            grads = af.sync_grads(state, grads)
        results.append(tensors(af.apply_grads(state, grads)))
    return results[0], results[1]


def evaluate(world: af.World, run: Run, batch_size: int) -> tuple[Any, list[Any], bool]:
    """Evaluate and predict after training; say whether the state stayed as it was."""
    state, _ = run.train(run.state(world))
    data = af.Data(run.dataset(), batch_size=batch_size)
    before, generator = tensors(state), torch.get_rng_state()
    loss = LOSSES[run.loss]
    means = af.evaluate(state, data, loss)
    rows = list(af.predict(state, data, lambda net, batch: {"out": net(batch[0])}))
    after = tensors(state)
    same = (
        all(torch.equal(before[k], after[k]) for k in before)
        and before.keys() == after.keys()
    )
    return means, rows, same and torch.equal(generator, torch.get_rng_state())


def save(world: af.World, run: Run, directory: str, at: int) -> Found:
    """Train to an update, save, and train on; return the last state."""
    state, _ = run.train(run.state(world), at)
    af.save(state, directory)
    state, _ = run.train(state, run.updates - at)
    return tensors(state)


def resume(world: af.World, run: Run, directory: str, at: int) -> Found:
    """Load the state and train on; return the last state."""
    state = af.load(run.state(world), directory)
    state, _ = run.train(state, run.updates - at)
    return tensors(state)


def global_orders(world: af.World, run: Run) -> list[tuple[list[int], list[bool]]]:
    """Return this rank's indices and filler, batch by batch, of one epoch."""
    state = run.state(world)
    return [
        (batch.indices.tolist(), batch.filler.tolist())
        for batch in af.batches(state, epochs=1)
    ]


def instance_by_rank(world: af.World) -> None:
    """Build a model that differs by rank, as an unseeded instance does."""
    torch.manual_seed(world.rank)
    net = torch.nn.Linear(2, 2)
    state = af.TrainState.create(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        setup=af.wrap_ddp(),
        world=world,
    )
    af.build(state)


def shape_by_rank(world: af.World) -> None:
    """Build a model whose shape differs by rank."""
    state = af.TrainState.create(
        model=lambda: torch.nn.Linear(2, 2 + world.rank),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        setup=af.wrap_ddp(),
        world=world,
    )
    af.build(state)


def unreduced(world: af.World, run: Run) -> None:
    """Take a step in a setup that reduces nothing."""
    run.train(attrs.evolve(run, setup=af.chain(af.shard_data())).state(world), 1)


def add_to_reduced(world: af.World, run: Run) -> None:
    """Add to gradients that are reduced already."""
    state = run.state(world)
    compute = af.value_and_grad(LOSSES[run.loss])
    (batch,) = [b for b, _ in zip(af.batches(state), range(1), strict=False)]
    _, grads = compute(state, batch)
    compute(state, batch, into=grads)


def fail_in_forward(world: af.World, run: Run) -> tuple[str, Found, Found]:
    """Raise in the loss on all ranks; return the state before, and after a good step."""
    state = run.state(world)
    before = tensors(state)
    armed = [True]

    def loss(net: torch.nn.Module, batch: Any) -> Any:
        value = LOSSES[run.loss](net, batch)
        if armed[0]:
            raise KeyError("boom")
        return value

    step = af.make_step(loss)
    (batch,) = [b for b, _ in zip(af.batches(state), range(1), strict=False)]
    try:
        step(state, batch)
    except KeyError as error:
        said = str(error)
    same = tensors(state)
    assert before.keys() == same.keys()
    assert all(torch.equal(before[k], same[k]) for k in before)
    armed[0] = False
    state, _ = step(state, batch)
    return said, before, tensors(state)


def ddp_options(world: af.World, setup: Any) -> dict[str, Any]:
    """Return what DistributedDataParallel was given."""
    import accelfn.engine.ddp as module  # the one place that builds it

    seen: dict[str, Any] = {}
    real = module.LeanDDP

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs)
        return real(*args, **kwargs)

    module.LeanDDP = spy
    try:
        af.build(Run(setup=setup).state(world))
    finally:
        module.LeanDDP = real
    seen.pop("process_group")
    return seen


def under_a_profiler(world: af.World, run: Run) -> tuple[list[str], Any, Any]:
    """Return what a profiler sees of a run, and the run's tensors without one and with it."""
    plain, _ = run.train(run.state(world))
    with torch.profiler.profile() as profile:
        watched, _ = run.train(run.state(world))
    seen = [event.name for event in profile.events()]
    return seen, tensors(plain), tensors(watched)


def fused_division(world: af.World, name: str) -> tuple[bool, float]:
    """Train with and without torch's fused kernel; say if both agree, and how far."""
    optimizer = getattr(torch.optim, name)
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    results = []
    for fused in (True, False):
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(3, 2),
            optimizer=functools.partial(optimizer, lr=0.1, fused=fused),
            data=af.Data(data, batch_size=5),
            setup=af.chain(af.shard_data(), af.wrap_ddp()),
            world=world,
        )
        step = af.make_step(lambda model, x: model(x).square().mean())
        for batch in af.batches(state, epochs=2):
            state, _ = step(state, batch)
        results.append(torch.cat([p.flatten() for p in state.params.values()]))
    apart = float((results[0] - results[1]).abs().max())
    return bool(torch.allclose(*results, rtol=1e-5, atol=1e-6)), apart
