"""What the system costs a worker: `python -m benchmarks.overhead`; `__main__` says how it is measured."""
