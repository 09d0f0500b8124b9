# SPDX-License-Identifier: Apache-2.0
"""Tests of a file, and those that start real ranks, stay together when others run beside them."""

import pytest


def test_tests_have_their_group(request):
    """pytest-xdist 3.8 groups by a name's end, which pytest 9.2 does not let it write."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("nothing runs beside it")
    assert request.node.nodeid.endswith("@tests/kit/test_side_by_side.py"), (
        "install what constraints.txt pins"
    )
