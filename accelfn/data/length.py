# SPDX-License-Identifier: Apache-2.0
"""How long something says it is."""

from typing import Any

from accelfn.errors import DataError


def promised_length(value: Any) -> int | None:
    """Return the length that a dataset, stream or sampler says it has, if it says one.

    Raises:
        DataError: what it says is no length, such as one below 0.
    """
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None
    except (ValueError, OverflowError) as error:
        msg = (
            f"{type(value).__name__} has a __len__ that gives no length: {error}."
            " Expected a number of samples, 0 or more."
        )
        raise DataError(msg) from error
