# SPDX-License-Identifier: Apache-2.0
"""Test that examples of published methods have the same result as a plain PyTorch program.

Each dataset has a short last batch: on four ranks, a rank has no sample, or fewer than others.
"""

from collections.abc import Generator
from functools import cache, partial
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.testing import simulate
from tests.plain_methods import METHODS
from tests.processes import run_ranks
from tests.test_examples import example


@pytest.fixture(autouse=True)
def _in_float64(tmp_path, monkeypatch) -> Generator[None, None, None]:
    """Build all tensors in float64, in a folder of its own; real ranks take over both."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@cache
def plain(name: str) -> Any:
    return METHODS[name].program(example(f"{name}.py"), METHODS[name].epochs)


def run_example(world: af.World, name: str, options: dict[str, Any]) -> Any:
    return example(f"{name}.py").train(world, METHODS[name].epochs, **options)


CASES = [
    pytest.param(name, options, id="-".join((name, *options)))
    for name, method in METHODS.items()
    for options in method.options
]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_method_trains_what_a_plain_program_trains(name, options, size):
    """Simulated ranks have the parameters of one plain process, up to rounding."""
    close = {"rtol": METHODS[name].rtol, "atol": METHODS[name].atol}
    for values in simulate(size, partial(run_example, name=name, options=options)):
        torch.testing.assert_close(values, plain(name), **close)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", METHODS)
def test_real_ranks_train_what_a_plain_program_trains(name):
    """Two processes that Gloo joins also have these parameters."""
    close = {"rtol": METHODS[name].rtol, "atol": METHODS[name].atol}
    for values in run_ranks(2, run_example, name, {}):
        torch.testing.assert_close(values, plain(name), **close)
