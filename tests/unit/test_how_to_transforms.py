# SPDX-License-Identifier: Apache-2.0
"""The methods that the how-to builds keep the laws of transforms."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.testing import check_transform, simulate
from tests.budget import at_night

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "methods-of-your-own.md"


@pytest.fixture(scope="module")
def methods() -> dict[str, Any]:
    """Return what the page defines."""
    found: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    for block in blocks:
        if not block.startswith(">>>"):
            exec(block, found)  # noqa: S102 - the page's own
    return found


@pytest.mark.skipif(not at_night(), reason="half a minute: nox -s laws")
def test_they_keep_the_laws(methods):
    """Each of them, as the page says; the first one by day, on the page itself."""
    check_transform(methods["demo"](top=2))
    check_transform(methods["pairs"](sync_every=2))


@pytest.mark.parametrize("sizes", [(4, 2), (4, 1), (2, 4), (1, 3)])
@pytest.mark.parametrize("method", ["top_k", "demo"])
def test_owed_gradient_is_the_same_sum_on_any_number_of_ranks(
    tmp_path, methods, method, sizes
):
    """The sum over ranks of what was not sent is loaded, whatever their number."""
    way = {"top_k": partial(methods["top_k"], 0.1), "demo": partial(methods["demo"], 1)}
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(24, 1)

    def begun(world: af.World) -> af.TrainState:
        return af.TrainState.create(
            model=lambda: torch.nn.Linear(1, 20, dtype=torch.float64),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=af.Data(inputs, global_batch_size=12),
            setup=af.chain(af.shard_data(), way[method]()),
            world=world,
        )

    def owed(state: af.TrainState) -> dict[str, torch.Tensor]:
        (entry,) = state.slots[method].values()
        return af.all_reduce(entry, state.world)

    def saved(world: af.World) -> dict[str, torch.Tensor]:
        state = begun(world)
        step = af.make_step(lambda model, x: (model(x) - x.sin()).square().mean())
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)
        af.save(state, tmp_path / "saved")
        return owed(state)

    before = simulate(sizes[0], saved)[0]
    after = simulate(
        sizes[1], lambda world: owed(af.load(begun(world), tmp_path / "saved"))
    )
    assert all(float(each.norm()) > 0 for each in before.values())
    torch.testing.assert_close(after[0], before, rtol=1e-12, atol=1e-12)
