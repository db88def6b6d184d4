"""Everything on one machine without containers: `rlharvest up` and `rlharvest doctor`.

A launcher owns one data directory and runs NATS, Valkey and the services as its children. Modules: `datadir` (lock and
records), `ports`, `plan` (which programs, with which environment), `child` (one process), `restarts` (when one is
started again), `launcher` (order of start and stop), `control` (commands while it runs), `stale` (what a killed
launcher left), `logview` (log lines for people), `doctor`.
"""
