"""Benchmarks: `python -m benchmarks.NAME` prints what it measured, and fails where a bar is missed."""
