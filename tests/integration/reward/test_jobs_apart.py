"""Jobs share no process, even where they have the same rewards."""

from __future__ import annotations

import json
from pathlib import Path

from rlharvest.v1 import scores_pb2
from rlharvest_reward.scoring import Scorer
from rlharvest_reward.settings import RewardSettings


async def test_no_process_serves_two_jobs(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("import os\ndef compute_score(solution_str): return os.getpid()")
    scorer = Scorer(RewardSettings(roots=[tmp_path], data_dir=tmp_path / "data", processes=4))

    async def process_of(job: str) -> float:
        request = scores_pb2.ScoreRequest(
            job=job, handle=1, reward_digest="d" * 64, rewards_json=json.dumps([{"path": "rewards.py"}]), completion="x"
        )
        result = await scorer.score(request)
        assert not result.HasField("error"), result.error.message
        return result.reward

    try:
        first, second, again = [await process_of(job) for job in ("rljob_a", "rljob_b", "rljob_a")]
    finally:
        await scorer.close()
    assert first != second
    assert first == again
