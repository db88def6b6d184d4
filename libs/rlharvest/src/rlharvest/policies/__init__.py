"""Decisions, pure: no I/O, no clock, no global state. The coordinator and the simulator call the same functions."""
