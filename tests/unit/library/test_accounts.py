"""Credentials for NATS: names are bound to keys, statements to their signer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.accounts import Account, BadCredential, Candidate, Credential, new_seed, owns, public_key
from rlharvest.grants import ROLES, ROUTES, Role, grant, inbox

BROADCASTS = ("rlharvest.v1.resend.", "rlharvest.v1.version.")
ACCOUNT = Account(new_seed("account"))


def test_a_worker_owns_its_name() -> None:
    candidate = Candidate()
    assert len(candidate.name) == len("wkr_") + 26
    assert owns(candidate.name, candidate.key, candidate.proof)


@given(st.integers(0, 25), st.sampled_from("0123456789abcdefghjkmnpqrstvwxyz"))
@settings(max_examples=60)
def test_no_other_name_is_owned(place: int, letter: str) -> None:
    candidate = Candidate()
    index = len("wkr_") + place
    other = candidate.name[:index] + letter + candidate.name[index + 1 :]
    assert owns(other, candidate.key, candidate.proof) == (other == candidate.name)


def test_who_does_not_hold_the_key_does_not_get_the_name() -> None:
    """Knowing another worker's name and public key, which are no secrets, is not enough."""
    victim, thief = Candidate(), Candidate()
    assert not owns(victim.name, victim.key, thief.proof)
    assert not owns(victim.name, thief.key, thief.proof)


@given(st.text(max_size=60), st.text(max_size=60), st.binary(max_size=80))
def test_garbage_owns_nothing(name: str, key: str, proof: bytes) -> None:
    assert not owns(name, key, proof)
    candidate = Candidate()
    assert not owns(candidate.name, candidate.key, proof)


def test_a_worker_is_known_by_what_its_account_signed_until_it_is_over() -> None:
    candidate = Candidate()
    given = grant("worker", candidate.name)
    jwt = ACCOUNT.user(candidate.name, candidate.key, given, seconds=60)
    assert ACCOUNT.worker_of(jwt) == candidate.name
    assert Account(new_seed("account")).worker_of(jwt) is None
    assert ACCOUNT.worker_of(ACCOUNT.user(candidate.name, candidate.key, given, seconds=-1)) is None
    head, body, signature = jwt.split(".")
    for forged in (f"{head}.{body[:-2]}.{signature}", f"{head}.{body}.{signature[::-1]}", f"{body}.{head}.{signature}"):
        assert ACCOUNT.worker_of(forged) is None


def test_a_service_is_no_worker() -> None:
    assert ACCOUNT.worker_of(ACCOUNT.credential("reward", grant("reward", "reward")).jwt) is None


@given(st.text(max_size=200))
def test_garbage_is_no_worker_and_no_credential(text: str) -> None:
    assert ACCOUNT.worker_of(text) is None
    with pytest.raises(BadCredential):
        Credential.parse(text)


def test_a_credential_survives_its_file() -> None:
    made = ACCOUNT.credential("trainer", grant("trainer", "trainer"))
    read = Credential.parse(made.text())
    assert read == made
    assert read.name == "trainer"
    assert made.seed not in repr(made)


def test_a_seed_that_is_none_is_refused() -> None:
    for seed in ("", "x", "SUAX", "A" * 56):
        with pytest.raises(BadCredential, match="rlharvest secrets"):
            Account(seed)


def test_the_server_is_told_the_account_and_nothing_secret() -> None:
    seed = new_seed("account")
    text = Account(seed).server_config()
    assert public_key(seed) in text
    assert seed not in text


@pytest.mark.parametrize("role", ROLES)
def test_a_grant_has_the_names_of_its_holder_alone(role: Role) -> None:
    """The rule for workers in one line: every subject that it may publish or hear ends with its name."""
    given = grant(role, "wkr_a")
    if role == "worker":
        own = [subject for subject in (*given.publish, *given.subscribe) if not subject.startswith(BROADCASTS)]
        assert all(subject.endswith(".wkr_a") or subject == f"{inbox('wkr_a')}.>" for subject in own)
        assert not any(subject.startswith("$JS") for subject in given.publish)
    assert ">" not in (*given.publish, *given.subscribe)


def test_only_the_coordinator_writes_the_ledger_and_orders_workers() -> None:
    for kind in ("ledger", "lease", "assign", "abort", "acks", "resend", "rejoin", "drain", "groups", "score"):
        assert ROUTES[kind].senders == ("coordinator",)


def test_time_is_read_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = Candidate()
    jwt = ACCOUNT.user(candidate.name, candidate.key, grant("worker", candidate.name), seconds=100)
    later = time.time() + 101
    monkeypatch.setattr(time, "time", lambda: later)
    assert ACCOUNT.worker_of(jwt) is None
