"""Which GPUs train and which roll out, and how: AReaL-Hex's placement (arXiv 2511.00796), made exact.

Pure. Needs scipy (extra `planner`).
"""
