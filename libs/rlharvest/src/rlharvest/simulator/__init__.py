"""A discrete-event world that drives the policies as the coordinator does: what a run takes and costs, before it runs."""
