"""Fixtures of all tests."""

pytest_plugins = ["rlharvest.testing.fixtures", "rlharvest.testing.postgres"]
