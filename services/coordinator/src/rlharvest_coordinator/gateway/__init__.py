"""The OpenAI-compatible gateway: completions that are sampled by the workers of a running job."""
