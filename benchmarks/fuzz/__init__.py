"""What no one should send, at every entrance, while a job runs. See __main__ for the long runs."""
