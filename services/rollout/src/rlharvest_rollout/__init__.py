"""The rollout service of rlharvest."""
