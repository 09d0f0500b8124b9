# SPDX-License-Identifier: Apache-2.0
"""Named spans in a profiler's trace, which cost nothing while no profiler runs."""

from contextlib import AbstractContextManager

from torch.autograd import profiler


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *error: object) -> None:
        return None


_NOTHING = _Nothing()


def is_profiled() -> bool:
    """Whether torch's profiler records now."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def span(name: str) -> AbstractContextManager[object]:
    """Return a context whose time stands in the trace under this name."""
    return profiler.record_function(name) if is_profiled() else _NOTHING
