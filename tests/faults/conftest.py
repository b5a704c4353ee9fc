"""The profile of `make faults`: as many examples as have time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("faults", max_examples=1000)
