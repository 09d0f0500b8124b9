# SPDX-License-Identifier: Apache-2.0
"""What is split is split: in the memory of each rank, and in what crosses the ranks."""

import tempfile
from math import prod
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.internals import local, tensor_leaves
from tests.laws.split_models import AXES, LOSSES, Block, Net, runs

BYTES = 8  # of a float64


def parts(state: af.TrainState) -> list[tuple[str, int, int]]:
    """Return what each tensor that has a dim is called, how many rows it has, and how many here."""
    fields = {
        "params": state.params,
        "opt_state": state.opt_state,
        "slots": state.slots,
    }
    return [
        (name, len(leaf), len(local(leaf)))
        for name, value in fields.items()
        for leaf in tensor_leaves(value)
        if leaf.ndim
    ]


@given(run=runs(micro=1), axes=st.sampled_from(AXES), reshard=st.booleans())
def test_each_rank_has_its_share_and_no_more(run, axes, reshard):
    """Of every tensor as many rows as divide among the ranks: at the start, after updates,
    with averages, and after a load; and no more memory behind them than the largest share.
    """
    shares = axes["dp_shard"]

    def look(state):
        for what, rows, here in parts(state):
            assert here <= -(-rows // shares), what
        memory = af.memory(state)
        params = list(state.params.values())
        most = sum(
            -(-len(p) // shares) * p[0].numel() * BYTES if p.ndim else BYTES
            for p in params
        )
        assert memory.params.here <= most
        assert memory.params.whole == sum(p.numel() for p in params) * BYTES
        for slot in memory.slots.values():
            assert slot.here <= most
        # two moments, and a count of steps for each
        assert memory.opt_state.here <= 2 * most + 8 * len(params)
        return parts(state)

    with tempfile.TemporaryDirectory() as folder:

        def fn(world):
            wrap = af.wrap_fsdp(reshard_after_forward=reshard)
            state, step = run.state(world, wrap), af.make_step(LOSSES[run.loss])
            seen = [look(state)]
            for batch in run.batches(state, 2):
                state, _ = step(state, batch)
                seen.append(look(state))
            af.save(state, f"{folder}/saved")
            return [*seen, look(af.load(run.state(world, wrap), f"{folder}/saved"))]

        ranks = list(simulate(prod(axes.values()), fn, axes=axes))
    for at_once in zip(*ranks, strict=True):
        for there in zip(*at_once, strict=True):
            rows = {rows for _, rows, _ in there}
            assert rows == {sum(here for _, _, here in there[:shares])}


@given(
    run=runs(loss="mean", dtype=torch.float64),
    axes=st.sampled_from(AXES),
    units=st.sampled_from([None, Block, torch.nn.Linear]),
    reshard=st.booleans(),
    keep_grads=st.sampled_from(["whole", "sharded"]),
    dtypes=st.tuples(*[st.sampled_from([None, torch.float32])] * 2),
)
def test_what_crosses_the_ranks_is_units(
    run, axes, units, keep_grads, dtypes, *, reshard
):
    """A micro-batch gathers each unit once, and once more where it was given up; gradients are
    reduced a unit at a time, with the last micro-batch or with each; in the dtypes asked for.
    """
    wrap = af.wrap_fsdp(
        units,
        reshard_after_forward=reshard,
        keep_grads=keep_grads,
        gather_dtype=dtypes[0],
        reduce_dtype=dtypes[1],
    )

    def fn(world):
        state, step = run.state(world, wrap), af.make_step(LOSSES[run.loss])
        for batch in run.batches(state, 2):
            state, _ = step(state, batch)

    log = list(simulate(prod(axes.values()), fn, axes=axes).log)
    net = Net(torch.float64, in_list=run.in_list)
    inside = _units(net, units)
    rest = _size(net, axes["dp_shard"]) - sum(
        _size(u, axes["dp_shard"]) for u in inside
    )
    recomputed = af.checkpoint_activations(Block) in run.behind
    gathers, scatters = (
        [e.num_bytes for e in log if e.kind == kind and e.step == 1]
        for kind in ("all_gather_single", "reduce_scatter_single")
    )
    width = {None: 8, torch.float32: 4}
    times = 2 if reshard else 1
    if not recomputed:
        each = [_size(unit, axes["dp_shard"]) for unit in inside] * times + [rest]
        copies = axes.get("dp_replicate", 1)
        assert sorted(gathers) == sorted(
            size * width[dtypes[0]] for size in each * run.micro * copies
        )
    shares = axes["dp_shard"]
    rounds = run.micro if keep_grads == "sharded" else 1
    trained = [_size(unit, shares, trained=True) for unit in inside]
    trained.append(_size(net, shares, trained=True) - sum(trained))
    assert sorted(scatters) == sorted(
        size * shares * width[dtypes[1]]
        for size in trained * rounds * axes.get("dp_replicate", 1)
    )


def _units(net: Net, units: Any) -> list[torch.nn.Module]:
    if units is None:
        return list(net.blocks) if net.in_list else []
    return [module for module in net.modules() if isinstance(module, units)]


def _size(module: torch.nn.Module, shares: int, *, trained: bool = False) -> int:
    """Return how many numbers the largest share of a module has."""
    return sum(
        -(-len(p) // shares) * p[0].numel()
        for p in module.parameters()
        if p.ndim and (p.requires_grad or not trained)
    )
