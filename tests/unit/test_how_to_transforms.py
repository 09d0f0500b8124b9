# SPDX-License-Identifier: Apache-2.0
"""The methods that the how-to builds keep the laws of transforms."""

import re
from pathlib import Path

import pytest
import torch

import accelfn as af
from accelfn.testing import check_transform, simulate
from tests.budget import at_night
from tests.states import linear_state

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "methods-of-your-own.md"


@pytest.fixture(scope="module")
def methods():
    """Return what the page defines."""
    found = {}
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


@pytest.mark.parametrize("sizes", [(4, 1), (2, 4), (1, 3)])
@pytest.mark.parametrize("method", ["top_k", "demo"])
def test_owed_gradient_is_the_same_sum_on_any_number_of_ranks(
    tmp_path, methods, method, sizes
):
    """The sum over ranks of what was not sent is loaded, whatever their number."""
    way = methods[method](0.1 if method == "top_k" else 1)
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(24, 1)
    step = af.make_step(lambda model, x: (model(x) - x.sin()).square().mean())

    def begun(world):
        return linear_state(
            model=lambda: torch.nn.Linear(1, 20, dtype=torch.float64),
            data=af.Data(inputs, global_batch_size=12),
            setup=af.chain(af.shard_data(), way),
            world=world,
        )

    def owed(state):
        (entry,) = state.slots[method].values()
        return af.all_reduce(entry, state.world)

    def saved(world):
        state = begun(world)
        for batch in af.batches(state, until_epoch=1):
            state, _ = step(state, batch)
        af.save(state, tmp_path / "saved")
        return owed(state)

    def loaded(world):
        return owed(af.load(begun(world), tmp_path / "saved"))

    before, after = simulate(sizes[0], saved)[0], simulate(sizes[1], loaded)[0]
    assert all(float(each.norm()) > 0 for each in before.values())
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
