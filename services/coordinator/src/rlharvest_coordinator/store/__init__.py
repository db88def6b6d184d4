"""SQL, one noun a module: jobs, events, steps, checkpoints, samples, workers.

Invariants: every function takes a session factory and is one transaction; what may be called twice (a lost reply, a
message delivered again) is idempotent and says so. A function with `epoch` writes only while no newer leader took over
(fence.py); None leaves that out. All of it behaves the same on SQLite and PostgreSQL.
"""
