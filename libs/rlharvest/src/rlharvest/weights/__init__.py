"""Versions of weights: what one is (manifest), how it is published (publisher) and pulled (puller)."""
