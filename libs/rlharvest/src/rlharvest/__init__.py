"""What every process of rlharvest shares: contracts, ledger, policies, clients."""
