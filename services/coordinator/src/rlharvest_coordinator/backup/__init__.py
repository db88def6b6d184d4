"""Backup and restore of a system that runs: SQL, checkpoints and the numbers of versions, in one tar file.

NATS and Valkey are not in it. They hold live responses, which a restored system generates anew; the datasets are
tokenised again, and weights are published again from the checkpoint.

Three stores are read one after the other while the system goes on, so each may be newer than the one before. The order
makes that harmless:

1. Checkpoints first: SQL then has every batch that a checkpoint's steps were made from.
2. SQL next, in one snapshot.
3. The weight service's numbers last: none that SQL knows is given out again.

What has happened since is undone by `restore`: a group is `trained` only if a restored checkpoint covers it, and the
numbers that fence off an older owner (the coordinator's epoch, a trainer's claim) jump past any that can have been used.
"""
