"""What the papers report, against what the simulator says."""
