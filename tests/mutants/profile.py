# SPDX-License-Identifier: Apache-2.0
"""What hypothesis draws in a hunt: as much as in CI, and nothing to shrink what it found."""

from hypothesis import HealthCheck, Phase, settings

from tests.internals import register_profiles


def load() -> None:
    """Load the profile; before laws are imported, which take it over."""
    register_profiles(replace=True)
    settings.register_profile(
        "mutants",
        parent=settings.get_profile("ci"),  # what CI draws, and as many
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    settings.load_profile("mutants")
