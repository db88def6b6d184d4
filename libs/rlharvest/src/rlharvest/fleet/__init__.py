"""The fleet: the life of a worker as the coordinator sees it."""
