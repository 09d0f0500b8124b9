# SPDX-License-Identifier: Apache-2.0
"""Two hosts for tests, which are skipped, with the reason, where the system makes none."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import pytest

from tests import hosts
from tests.hosts import Host


@contextmanager
def two_hosts(megabits: float | None = None) -> Generator[tuple[Host, Host]]:
    """Make two hosts that are joined by a cable; skip where the system makes none."""
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(hosts.two_hosts(megabits))
        except hosts.NoHostsError as error:
            pytest.skip(str(error))
        yield pair
