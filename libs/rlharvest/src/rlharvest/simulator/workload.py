"""How long the prompts and responses are.

The logarithm of a length is a mean, plus an effect of the prompt (the same whenever it is sampled), plus one of the sample,
plus a drift with each optimizer step, cut off at the cap: a lognormal with p99 / median = 10 has a standard deviation of
0.99, and the longest of 1,024 is then 22 to 24 medians long.

Invariants (property-tested): lengths are in 1 .. cap; the same seed gives the same lengths, in whatever order they are asked
for; a group's lengths do not depend on the strategy that samples it.
"""

from __future__ import annotations

import math

import numpy as np

from rlharvest.simulator.scenario import Workload


class Lengths:
    """Draws the lengths of a scenario."""

    def __init__(self, spec: Workload, seed: int) -> None:
        self.spec = spec
        self.seed = seed

    def prompt_of(self, group: int) -> int:
        """Return the prompt of the group of this ordinal: each epoch goes through all of them in an order of its own."""
        epoch, place = divmod(group, self.spec.prompts)
        # A permutation without a table: an affine map with a factor that has no divisor in common with the modulus.
        rng = np.random.default_rng((self.seed, 1, epoch))
        factor = int(rng.integers(1, self.spec.prompts + 1))
        while math.gcd(factor, self.spec.prompts) != 1:
            factor = factor % self.spec.prompts + 1
        return (factor * place + int(rng.integers(self.spec.prompts))) % self.spec.prompts

    def draw(self, group: int) -> list[int]:
        """Return the lengths of a group's responses, tokens."""
        spec = self.spec
        effect = np.random.default_rng((self.seed, 2, self.prompt_of(group))).normal(0.0, spec.prompt_sigma)
        samples = np.random.default_rng((self.seed, 3, group)).normal(0.0, spec.sample_sigma, spec.num_generations)
        drift = math.log1p(spec.drift_per_step) * (group // spec.prompts_per_step)
        lengths = np.exp(math.log(spec.median_tokens) + effect + samples + drift)
        return [int(length) for length in np.clip(np.round(lengths), 1, spec.max_tokens)]
