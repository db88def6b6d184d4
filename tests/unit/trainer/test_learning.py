"""A model learns: GRPO on its own samples raises a synthetic reward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from rlharvest.spans import Finish, ids_bytes
from rlharvest.v1 import batches_pb2
from rlharvest_trainer.batches import decode_group
from rlharvest_trainer.losses import Objective
from rlharvest_trainer.optimizer import AdamWConfig
from rlharvest_trainer.step import Learner, StepConfig

VOCAB, LENGTH, N, GROUPS = 32, 6, 8, 4


def sample(model: torch.nn.Module, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and log-probabilities of LENGTH tokens after each prompt."""
    ids = torch.from_numpy(prompts)
    logprobs = []
    with torch.no_grad():
        for _ in range(LENGTH):
            rows = torch.log_softmax(model(input_ids=ids).logits[:, -1].float(), -1)
            new = torch.multinomial(rows.exp(), 1)
            logprobs.append(rows.gather(-1, new)[:, 0])
            ids = torch.cat([ids, new], 1)
    return ids[:, prompts.shape[1] :].numpy(), torch.stack(logprobs, 1).numpy()


def test_the_share_of_even_tokens_rises(make_model: Callable[..., torch.nn.Module]) -> None:
    torch.manual_seed(1)
    model = make_model()
    learner = Learner(
        model,
        StepConfig(
            objective=Objective(epsilon=0.2, epsilon_high=0.2, beta=0.0),
            adamw=AdamWConfig(),
            temperature=1.0,
            vocab=0,
            micro_batch_tokens=512,
        ),
    )
    source = np.random.default_rng(0)
    rewards = []
    for _step in range(24):
        groups = []
        for ordinal in range(GROUPS):
            prompt = source.integers(0, VOCAB, 4)
            ids, logprobs = sample(model, np.tile(prompt, (N, 1)))
            message = batches_pb2.BatchGroup(group=ordinal, prompt_ids=ids_bytes(prompt))
            for place in range(N):
                message.samples.add(
                    handle=ordinal * N + place,
                    ids=ids_bytes(ids[place]),
                    logprobs=logprobs[place].astype("<f4").tobytes(),
                    run_n=[LENGTH],
                    run_version=[0],
                    reward=float((ids[place] % 2 == 0).mean()),
                    finish=Finish.LENGTH.value,
                )
            groups.append(decode_group(message, vocab=VOCAB, scale_rewards=True, mask_truncated=False))
        learner.accumulate(groups)
        rewards.append(learner.apply(2e-2).metrics["reward"])
    assert np.mean(rewards[:3]) < 0.65
    assert np.mean(rewards[-3:]) > 0.9
