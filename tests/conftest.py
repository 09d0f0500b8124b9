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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip tests marked `gpu` where torch sees none; say which tests go one by one.

    Side by side, the tests of a file stay together, and so do all that start real ranks: some
    of these wait for a second only, and one such test at a time is enough for a machine.
    """
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
        if config.pluginmanager.hasplugin("xdist"):
            file = item.nodeid.partition("::")[0]
            group = "ranks" if file.startswith("tests/ranks/") else file
            item.add_marker(pytest.mark.xdist_group(group))
