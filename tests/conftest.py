# SPDX-License-Identifier: Apache-2.0
"""pytest's configuration: Hypothesis profiles, one torch thread, groups, slow tests, skips."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings

from accelfn.errors import ArgumentError
from tests.internals import devices, register_profiles
from tests.turns import waiting

torch.set_num_threads(1)
# Transformers imports DeepSpeed, which would print a warning when it detects the accelerator.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# A shell starts background processes with Ctrl-C ignored, but tests send Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

WAIT = {
    *("test_faults", "test_launching", "test_locks"),
    *("test_other_launchers", "test_two_hosts"),
}

_WAITING = "ranks that wait"

# packages that `pip install accelfn[testing]` does not install
_OPTIONAL = {
    *("accelerate", "comet_ml", "datasets", "deepspeed", "lightning_fabric"),
    *("lomo_optim", "matplotlib", "megatron", "mlflow", "nbclient", "nbformat", "nox"),
    *("pandas", "peft", "PIL", "pyarrow", "schedulefree", "sklearn", "tensorboard"),
    *("timm", "torchao", "transformers", "wandb"),
}

register_profiles(replace=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--turn`: run only one part of the slow tests."""
    parser.addoption(
        "--turn", default="0/1", help="k/n: run every nth slow test, from the kth"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselect slow tests of other parts, skip accelerator tests, and group tests for xdist.

    With several workers, the tests of a file run on the same worker. Tests in tests/ranks/ form
    two groups: tests that wait for ranks to fail, and tests where ranks compute. The first group
    takes longest, and starts first.
    """
    from tests.budget import budgeted  # after the Hypothesis profile is loaded

    _take_turns(config, items)
    for item in items:
        if isinstance(item, pytest.Function):
            budgeted(item.function)
        if item.get_closest_marker("gpu") and not devices.count():
            item.add_marker(pytest.mark.skip(reason="torch sees no accelerator"))
        if item.get_closest_marker("cuda") and devices.kind() != "cuda":
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA"))
        if config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _group(item) != _WAITING)


def _take_turns(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests that `--turn` excludes."""
    late = waiting(
        {each.nodeid: _unit(each) for each in items}, config.getoption("turn")
    )
    config.hook.pytest_deselected(items=[each for each in items if each.nodeid in late])
    items[:] = [each for each in items if each.nodeid not in late]


def _unit(item: pytest.Item) -> str | None:
    """Return the unit that `--turn` selects: a slow test, or its file; None for a fast test."""
    mark = item.get_closest_marker("slow")
    if mark is not None and mark.kwargs.get("together"):
        return item.nodeid.partition("::")[0]
    is_slow = mark is not None or item.nodeid.startswith("tests/ranks/")
    return item.nodeid if is_slow else None


def _group(item: pytest.Item) -> str:
    file = item.nodeid.partition("::")[0]
    if not file.startswith("tests/ranks/"):
        return file
    return _WAITING if Path(file).stem in WAIT else "ranks"


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that garbage collections do not look at them.

    The search for a batch size, the end of a world, and Python run thousands of collections.
    """
    gc.collect()
    gc.freeze()


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module:
    """Skip a file whose imports need a package that is not installed."""
    return _Module.from_parent(parent, path=module_path)


class _Module(pytest.Module):
    def _getobj(self) -> ModuleType:
        try:
            return super()._getobj()
        except (ArgumentError, pytest.Collector.CollectError) as error:
            _skip_if_missing(error)
            raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    """Skip a test whose fixtures need a package that is not installed."""
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Skip a test that needs a package that is not installed."""
    return (yield from _skipping())


def _skipping() -> Generator[None]:
    try:
        return (yield)
    except Exception as error:
        _skip_if_missing(error)
        raise


def _skip_if_missing(error: BaseException | None) -> None:
    """Skip if Python or accelfn raised an error because an optional package is missing."""
    while error is not None:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in _OPTIONAL:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
        if isinstance(error, ArgumentError) and "Install it" in str(error):
            pytest.skip(str(error), allow_module_level=True)
        error = error.__cause__ or error.__context__
