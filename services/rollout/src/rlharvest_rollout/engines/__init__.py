"""Engines of a rollout worker, each behind `rlharvest.engine.Engine`."""
