"""vLLM behind the engine protocol: an engine process of its own, weights exchanged in flight, known faults guarded."""
