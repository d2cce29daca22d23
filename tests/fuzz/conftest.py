"""How long to look: `scripts/test tests/fuzz` as CI does, with `--hypothesis-profile=long --timeout=0` for hours."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A failing example is printed with the line that repeats it; what was found is kept in .hypothesis for the next run.
settings.register_profile(
    "long",
    max_examples=50_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
