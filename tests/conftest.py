# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles, one torch thread, a warm import of what the tests use."""

import os

import pytest
import torch
from hypothesis import settings

from accelfn.testing.plugin import register_profiles

torch.set_num_threads(1)

register_profiles(replace=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
