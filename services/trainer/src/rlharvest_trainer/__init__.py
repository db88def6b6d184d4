"""The trainer service of rlharvest."""
