"""The embedded engine: plain torch, continuous batching, and a mode whose continuations are exact to the bit.

Small models on a CPU are what it is for; it runs on a GPU too. From the bottom up: `architecture` and `checkpoint`
read a Hugging Face directory, `numerics` says how to compute so that bits do not depend on the batch, `attention`,
`kv_cache` and `model` compute logits, `sampler` and `stops` turn them into tokens and ends, `scheduler` decides who
runs, `runner` does one step, `outbox` carries tokens to the event loop, and `engine` is the thread around it all.
"""
