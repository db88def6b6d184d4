"""What a new version costs the responses that run: the pause, and how far their log-probabilities are off after it."""
