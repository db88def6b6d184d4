"""The reward service of rlharvest."""
