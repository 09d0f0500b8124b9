# SPDX-License-Identifier: Apache-2.0
"""accelfn's pytest plugin: a marker that runs a test on ranks, and Hypothesis profiles.

Every pytest run imports this file. So it is installed next to the package, and it imports
torch and Hypothesis only when a test needs them. The rest of the plugin is in
`accelfn.testing.plugin`. If you change this file, install the package again.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import pytest

_MARKER = (
    "simulated(*sizes, seed=0, schedule=None, faults=(), sums='ranks'): run the test on every"
    " rank of a simulated world of each size (default 1, 2 and 4). The test takes `world`."
)
_SIZES = (1, 2, 4)
_OPTIONS = ("faults", "schedule", "seed", "sums")

_PROFILES: dict[str, dict[str, Any]] = {
    "dev": {"max_examples": 25},
    "ci": {
        "max_examples": 60,
        "derandomize": True,
        "database": None,
        "print_blob": True,
    },
    "deep": {"max_examples": 2000},
}


def register_profiles(*, replace: bool = False) -> None:
    """Register the Hypothesis profiles dev, ci and deep: 25, 60 and 2,000 examples.

    The profiles have no deadline, because the first step of a process takes longer than later
    steps. `ci` draws the same examples in every run, and prints how to repeat a failing example.

    Args:
        replace: whether to replace existing profiles of these names, such as Hypothesis's `ci`.
    """
    from hypothesis import HealthCheck, settings  # noqa: PLC0415 - only if needed
    from hypothesis.errors import InvalidArgument  # noqa: PLC0415

    # not the loaded profile: if CI is set, that profile draws no new examples
    parent = settings.get_profile("default")
    ignored_checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    common = {
        "parent": parent,
        "deadline": None,
        "suppress_health_check": ignored_checks,
    }
    for name, options in _PROFILES.items():
        with suppress(InvalidArgument):  # the profile does not exist
            if settings.get_profile(name) and not replace:
                continue
        settings.register_profile(name, **common, **options)


@pytest.hookimpl(tryfirst=True)  # before Hypothesis loads the selected profile
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the profiles if Hypothesis is in use."""
    config.addinivalue_line("markers", _MARKER)
    profile = config.getoption("--hypothesis-profile", None)
    if profile in _PROFILES or sys.modules.get("hypothesis"):
        register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--update-collectives`."""
    parser.getgroup("accelfn").addoption(
        "--update-collectives",
        action="store_true",
        help="write the files of `collectives_snapshot` instead of comparing with them",
    )


@pytest.fixture
def collectives_snapshot(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """Compare a run's collectives with a text file: `collectives_snapshot(run, "ddp.txt")`.

    The file is in the directory of the test. `pytest --update-collectives` writes the file.
    """
    from accelfn.testing.comparing import (  # noqa: PLC0415 - it imports torch
        assert_collectives,
    )

    update = bool(request.config.getoption("--update-collectives"))

    def check(run: Any, name: str) -> None:
        __tracebackhide__ = True
        assert_collectives(run, request.path.parent / name, update=update)

    return check


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Turn each marked test into one test per size of its world."""
    marker = metafunc.definition.get_closest_marker("simulated")
    if marker is None:
        return
    sizes = marker.args or _SIZES
    wrong = [size for size in sizes if type(size) is not int or size < 1]
    wrong += sorted(marker.kwargs.keys() - set(_OPTIONS))
    if wrong:
        msg = (
            f"{metafunc.definition.nodeid}: @pytest.mark.simulated accepts numbers of ranks, and"
            f" the options {', '.join(_OPTIONS)}, not {', '.join(map(repr, wrong))}."
        )
        raise pytest.Collector.CollectError(msg)
    if "world" not in metafunc.fixturenames:
        msg = (
            f"{metafunc.definition.nodeid}: a test with @pytest.mark.simulated takes the argument"
            " `world`, the World of its rank. Add this argument."
        )
        raise pytest.Collector.CollectError(msg)
    metafunc.parametrize("world", sizes, ids=[f"{size}ranks" for size in sizes])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the test as parametrized, so that Hypothesis knows there is one test per size."""
    marker = item.get_closest_marker("simulated")
    if marker is not None:
        item.add_marker(pytest.mark.parametrize("world", marker.args or _SIZES))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(
    pyfuncitem: pytest.Function,
) -> Generator[None, object, object]:
    """Run a test with the marker `simulated` on every rank of a simulated world."""
    marker = pyfuncitem.get_closest_marker("simulated")
    if marker is None:
        return (yield)
    from accelfn.testing.plugin import on_ranks  # noqa: PLC0415 - it imports torch

    with on_ranks(pyfuncitem, marker.kwargs):
        return (yield)
