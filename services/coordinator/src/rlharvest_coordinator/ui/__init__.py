"""The status page at `/`: jobs, one job, workers. Pages are shells that scripts fill from REST every two seconds."""
