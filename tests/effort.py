"""How many examples hypothesis tries: a fifth of what a test names, all of them when thorough.

The profile is that of the environment's HYPOTHESIS_PROFILE, "quick" or "thorough", which processes
that a test starts have too.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["examples", "is_thorough"]

_SHARES = {"quick": 0.2, "thorough": 1.0}

for name, share in _SHARES.items():
    # a busy machine is no failure
    settings.register_profile(
        name,
        max_examples=round(100 * share),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
_CHOSEN = os.environ.get("HYPOTHESIS_PROFILE", "quick")
settings.load_profile(_CHOSEN)


def examples(count: int) -> settings:
    """For a property: that many examples when thorough."""
    return settings(max_examples=max(5, round(count * _SHARES[_CHOSEN])))


def is_thorough() -> bool:
    """Whether to try all examples."""
    return _CHOSEN == "thorough"
