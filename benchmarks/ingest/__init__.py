"""How fast tokens come into the ledger: `python -m benchmarks.ingest`; `__main__` says how it is measured."""
