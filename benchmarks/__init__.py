"""Benchmarks: `python -m benchmarks.NAME` prints what it measured and the bars it must meet, and fails where one is missed."""
