"""The coordinator service of rlharvest."""
