"""The response ledger: which tokens of which response exist, and who may add the next ones.

`book` is the pure fold of the log, `store` keeps it in Redis or Valkey. The log itself is the LEDGER stream.
"""
