# SPDX-License-Identifier: Apache-2.0
"""Collected where an accelerator is: the fake one, by `python -m tests.accelerator`, or another."""

import pytest

from tests.accelerator.tested_device import IS_FAKE, NAME

OF_THE_FAKE_ONE = ["test_streams.py"]
"""What looks into it, and hardware cannot be asked."""
if NAME == "cpu":
    collect_ignore_glob = ["test_*.py"]
elif not IS_FAKE:
    collect_ignore = OF_THE_FAKE_ONE


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take one part of several: CI allows each test ten minutes, and a run is one."""
    parser.addoption("--part", default="0/1", help="k/n: each nth test, from the kth")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave the other parts to other processes."""
    k, n = map(int, config.getoption("--part").split("/"))
    items[:] = items[k::n]
