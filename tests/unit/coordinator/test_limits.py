"""Bounds that must fit into one another: what is allowed by count can always be sent."""

from __future__ import annotations

from rlharvest import rpc
from rlharvest.bus import MAX_PAYLOAD_BYTES
from rlharvest.jobs import model
from rlharvest.v1 import batches_pb2, ledger_pb2
from rlharvest_coordinator import batches, harvest, run

LARGEST_PROMPT = 1_000_000


def test_a_transition_of_the_most_changes_fits_into_a_message() -> None:
    """Of the kind that takes the most bytes, with the longest name of a worker."""
    widest = ledger_pb2.Change(
        assign=ledger_pb2.Assign(handle=2**32 - 1, attempt=2**64 - 1, worker="w" * 100, incarnation=2**64 - 1)
    )
    transition = ledger_pb2.Transition(epoch=2**63, number=2**63, changes=[widest] * run.MOST_CHANGES)
    assert transition.ByteSize() < MAX_PAYLOAD_BYTES - harvest.HEADROOM_BYTES


def test_a_reply_with_the_largest_group_fits_into_a_grpc_message() -> None:
    """A reply ends after the group with which it passes REPLY_BYTES, and a group is never cut."""
    n, tokens = 4, model.MOST_GROUP_TOKENS // 4
    sample = batches_pb2.BatchSample(
        handle=2**32 - 1, response_id="r" * 60, ids=bytes(4 * tokens), logprobs=bytes(4 * tokens)
    )
    group = batches_pb2.BatchGroup(prompt_ids=bytes(4 * LARGEST_PROMPT), samples=[sample] * n)
    assert batches.REPLY_BYTES + group.ByteSize() < rpc.MAX_MESSAGE_BYTES * 0.9, "some room is left for version runs"
