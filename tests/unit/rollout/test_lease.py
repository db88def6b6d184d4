"""Epochs, leases, and which version is pulled when."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.v1 import fleet_pb2
from rlharvest_rollout.lease import RETRY_MOST_S, Fence, Pull, Pulls, Target, engine_for, target_of


def test_a_lower_epoch_and_another_incarnation_are_refused():
    fence = Fence()
    fence.joined(epoch=3, incarnation=8)
    assert fence.refusal(3, 8) is None
    assert fence.refusal(5, 8) is None
    assert "epoch 4" in (fence.refusal(4, 8) or "")
    assert "incarnation 7" in (fence.refusal(9, 7) or "")
    assert fence.epoch == 5, "a message for another incarnation teaches nothing"


def lease(**fields: object) -> fleet_pb2.Lease:
    base = {"job": "rljob_1", "engine": "stub", "weights_url": "http://w", "target_version": 3, "context": 64}
    return fleet_pb2.Lease(**{**base, **fields})


def test_a_lease_becomes_a_target_with_the_jobs_settings():
    rollout = json.dumps({"stub": {"step_s": 1}, "kv": "keep", "max_inflight_per_worker": 4})
    target = target_of(lease(rollout_json=rollout), offered=("stub",), slots=9)
    assert isinstance(target, Target)
    assert (target.version, target.config.slots, target.config.kv) == (3, 4, "keep")
    assert target.config.options == {"step_s": 1}
    newer = target_of(lease(rollout_json=rollout, target_version=4), offered=("stub",), slots=9)
    assert isinstance(newer, Target)
    assert newer.same_service(target), "a newer version needs no new start"


def test_a_lease_that_cannot_be_served_says_why():
    assert "'vllm' is not offered" in target_of(lease(engine="vllm"), offered=("torch", "stub"), slots=1)
    assert "slot" in target_of(lease(rollout_json='{"slots": 1}'), offered=("stub",), slots=1)


@given(st.lists(st.sampled_from(["newer", "step", "load", "end", "fail"]), max_size=60))
def test_the_version_only_rises_and_newer_targets_never_starve_a_pull(events):
    """No version is served that was not pulled; of two pulls in a row at most one is given up."""
    pulls = Pulls(0)
    newest, given_up = 0, 0
    for event in events:
        before = pulls.loaded
        if event == "newer":
            newest += 1
            pulls.want(newest)
            pulls.want(newest - 1)
            assert pulls.target == newest
        elif event == "step":
            decision = pulls.decide()
            if decision is Pull.REPLACE:
                given_up += 1
                assert not pulls.loading
                assert given_up == 1, "the pull that replaced another is run to its end"
            if decision is not Pull.WAIT:
                assert pulls.start() == newest
        elif event == "load" and pulls.pulling is not None:
            pulls.loading = True
        elif event == "end" and pulls.pulling is not None:
            pulls.succeeded()
            given_up = 0
        elif event == "fail" and pulls.pulling is not None:
            assert 0 < pulls.failed() <= RETRY_MOST_S
            given_up = 0
        if before is not None:
            assert pulls.loaded is not None
            assert pulls.loaded >= before
    if pulls.pulling is None and pulls.loaded == newest:
        assert pulls.decide() is Pull.WAIT


def test_auto_is_the_best_engine_that_can_do_what_is_asked():
    everything = ("vllm", "torch", "stub")
    assert engine_for("auto", everything, batch_invariant=False) == "vllm"
    assert engine_for("auto", everything, batch_invariant=True) == "torch"
    assert engine_for("auto", ("vllm", "stub"), batch_invariant=True) == "vllm"
    assert engine_for("auto", ("torch", "stub"), batch_invariant=False) == "torch"
    assert engine_for("auto", ("stub",), batch_invariant=False) is None
    assert engine_for("stub", everything, batch_invariant=True) == "stub"
