# SPDX-License-Identifier: Apache-2.0
"""What `af.snapshot_model` lends stays as it was, and no write into it reaches a state."""

import tempfile
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.catalog import stacks
from tests.laws.histories import History, Kin, Training
from tests.laws.test_purity import RANKED
from tests.strategies import LOSSES, Run, differences, runs, tensors

KINDS = st.sampled_from(["norm", "plain", "tied", "frozen", "norm", "unused"])
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "parameters": lambda module: list(module.parameters()),
    "slice": lambda module: module.head.weight[:1],
    "array": lambda module: module.head.weight.numpy(),
}
"""What somebody keeps of a module, by which its values can be seen later."""
ACTS = [
    *("step", "step", "step", "keep", "copy", "load", "release", "evaluate", "look"),
    *(f"freeze {way}" for way in WAYS),
    *("freeze module", "freeze trained", "forget", "write", "write", "read"),
]
ENDS = [("freeze trained", 0), ("freeze module", 0), ("step", 0), ("write", -1)]
"""What is done in the end, whatever was done before."""
acts = st.lists(
    st.tuples(st.sampled_from(ACTS), st.integers(0, 3)), min_size=2, max_size=12
).map(lambda drawn: [*drawn, *ENDS])


def values(kept: Any) -> list[torch.Tensor]:
    """Return the tensors of what is kept."""
    match kept:
        case nn.Module():
            return [*kept.parameters(), *kept.buffers()]
        case dict():
            return list(kept.values())
        case np.ndarray():
            return [torch.from_numpy(kept)]
        case torch.Tensor():
            return [kept]
    return list(kept)


@attrs.define
class Kept:
    """What somebody keeps, and what it must look like."""

    what: Any
    expected: list[torch.Tensor]

    def check(self) -> None:
        """Compare it with what it must look like."""
        for value, expected in zip(values(self.what), self.expected, strict=True):
            assert torch.equal(value, expected)

    def write(self) -> None:
        """Change it, and what it must look like."""
        for value, expected in zip(values(self.what), self.expected, strict=True):
            value.fill_(7)  # not added to: what is tied is written twice
            expected.fill_(7)


def keep(module: nn.Module, way: str) -> Kept:
    """Keep something of a module."""
    what = WAYS[way](module)
    return Kept(what, [value.clone() for value in values(what)])


def do(act: str, i: int, history: History, kin: list[Kin], held: list[Kept]) -> None:
    """Do one thing to states, or to what is kept of them."""
    if act.startswith("freeze"):
        state, way = kin[i % len(kin)].state, act.removeprefix("freeze ")
        if way == "trained":
            module = af.snapshot_model(state, at="train")
            for name, param in module.named_parameters():
                assert torch.equal(param, state.params[name])
        else:
            module = af.snapshot_model(state, at="eval")
            for name, param in af.eval_params(state).items():
                assert torch.equal(dict(module.named_parameters())[name], param)
        held.append(keep(module, "module" if way == "trained" else way))
    elif act == "forget":
        del held[i % len(held)]
    elif act == "write":
        held[i % len(held)].write()
    elif act == "read":
        for each in held:
            each.check()
    else:
        history.do(act, kin, i % len(kin))


def check(run: Run, drawn: list[tuple[str, int]], world: af.World, folder: str) -> None:
    """Check it on one rank: of what is kept, and of states, against those nobody froze."""
    training = Training(
        fresh=run.state,
        data=lambda: af.Data(run.dataset(), global_batch_size=6),
        loss=LOSSES[run.loss],
        raising={},
    )
    state = run.state(world)
    batches = iter(af.batches(state))
    history = History(training, world, folder, [next(batches) for _ in drawn])
    kin, held = [Kin(state)], [keep(nn.Linear(1, 1).requires_grad_(False), "module")]  # noqa: FBT003 - torch's
    for act, i in drawn:
        if held or act not in {"forget", "write"}:
            do(act, i, history, kin, held)
    for each in held:
        each.check()
    for each in kin:
        assert differences(history.alone(each.updates), tensors(each.state)) == []


@given(run=runs(), kind=KINDS, setup=stacks(4), drawn=acts)
@example(run=Run(), kind="plain", setup=(af.ema(0.5),), drawn=[("step", 0), *ENDS])
def test_what_is_frozen_stays(run, kind, setup, drawn):
    """However states go on, and whatever is written: both have what they would have alone."""
    n = max(run.n, 12)
    run = attrs.evolve(
        run, kind=kind, setup=af.chain(*setup), n=n, batch_size=6, dyadic=False
    )
    with tempfile.TemporaryDirectory() as folder:
        check(run, drawn, af.World.single(device="cpu"), folder)


@given(run=runs(), setup=st.sampled_from(RANKED), size=st.integers(2, 3), drawn=acts)
def test_what_is_frozen_on_ranks_stays(run, setup, size, drawn):
    """On every rank too, the average of ranks that train apart among what is frozen."""
    run = attrs.evolve(run, setup=setup, n=24, batch_size=12, dyadic=False)
    with tempfile.TemporaryDirectory() as folder:
        simulate(size, lambda world: check(run, drawn, world, folder))
