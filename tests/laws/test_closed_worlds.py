# SPDX-License-Identifier: Apache-2.0
"""A world that is closed while its ranks hold other parameters says so, and else nothing."""

import warnings
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate

SETUPS = st.one_of(
    st.builds(af.local_sgd, sync_every=st.integers(1, 3)),
    st.builds(
        af.diloco,
        sync_every=st.integers(2, 4),
        fragments=st.integers(1, 2),
        delay=st.integers(0, 1),
        mix=st.sampled_from([0.0, 0.5]),
    ),
    st.just(af.wrap_ddp()),
)


@given(
    size=st.integers(1, 3),
    setup=SETUPS,
    num_updates=st.integers(0, 6),
    end=st.sampled_from(["nothing", "nothing", "finalize", "save", "let go"]),
)
def test_ranks_that_end_with_other_models_are_told(size, setup, num_updates, end):
    """They are told to finalize where, and only where, that changes what they hold."""

    def rank(world: af.World) -> tuple[list[str], Any]:
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 1),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            setup=setup,
            world=world,
        )
        step = af.make_step(lambda model, batch: (model(batch) - batch).square().mean())
        for i in range(num_updates):
            state, _ = step(state, torch.tensor([[1.0 + world.rank + i]]))
        if end == "finalize":
            state = af.finalize(state)
        if end == "save":
            af.save(state, Path(folder) / "end")
        params = torch.cat([each.flatten() for each in state.params.values()])
        every = [af.all_gather(params[i : i + 1], world) for i in range(2)]
        if end == "let go":
            del state
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world.close()
            world.close()
        said = [str(each.message) for each in caught]
        return said, all(torch.equal(each, each[:1].expand(size)) for each in every)

    with TemporaryDirectory() as folder:
        (said, agree), *others = simulate(size, rank)
    assert not any(said for said, _ in others)
    if agree or end in ("save", "let go"):
        assert said == []
    else:
        (only,) = said
        assert repr(setup) in only
        assert "state = af.finalize(state)" in only
