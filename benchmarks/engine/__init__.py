"""Engines against each other: ours, Hugging Face `generate` and bare vLLM, on one real small model."""
