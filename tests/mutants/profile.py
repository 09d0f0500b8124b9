# SPDX-License-Identifier: Apache-2.0
"""The Hypothesis profile for mutation tests: as many examples as in CI, without shrinking."""

from hypothesis import HealthCheck, Phase, settings

from tests.internals import register_profiles


def load() -> None:
    """Load the profile; call this before property tests are imported."""
    register_profiles(replace=True)
    settings.register_profile(
        "mutants",
        parent=settings.get_profile("ci"),  # the same examples as in CI
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    settings.load_profile("mutants")
