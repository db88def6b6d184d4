"""Fixtures of all tests, and the profile of hypothesis: a busy machine makes no example a failure."""

from hypothesis import settings

pytest_plugins = ["rlharvest.testing.fixtures", "rlharvest.testing.postgres"]

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
