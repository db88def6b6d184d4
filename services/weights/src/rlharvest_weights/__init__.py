"""The weights service of rlharvest."""
