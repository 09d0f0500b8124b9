# SPDX-License-Identifier: Apache-2.0
"""Change nothing."""

from accelfn.definition.transform import transform


@transform
class identity:
    """Leave a step as it is: the transform that a law compares others with.

    Acts on: nothing.

    Law:
        `chain(identity(), t)` and `chain(t)` take the same steps, bitwise.

    Example:
        >>> identity()
        af.identity()
    """
