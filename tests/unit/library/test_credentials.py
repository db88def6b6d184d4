"""Tokens: which are taken, how they are replaced, and which may guard an address that others reach."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.credentials import SHORTEST, Tokens, bearer, check_exposure, is_loopback, weakness
from rlharvest.errors import InvalidField

STRONG = "Zk3_u8Qe0vLw1sTnYcRb"

words = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=40)


@given(st.lists(words, min_size=1, max_size=4), words)
def test_exactly_the_tokens_that_are_listed_are_taken(values: list[str], other: str) -> None:
    tokens = Tokens(values)
    assert all(tokens.takes(value) for value in values)
    assert tokens.takes(other) == (other in values)
    assert not tokens.takes("")
    assert tokens.current == values[0]


@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_are_just_wrong(data: bytes) -> None:
    """As HTTP servers hand them over."""
    assert not Tokens(["right"]).takes(data.decode(errors="surrogateescape") + "?")


def test_a_file_of_tokens_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """Rotation: the new token is put before the old one, both are good, then the old one goes. Nothing is restarted."""
    file = tmp_path / "token"
    file.write_text("old\n")
    tokens = Tokens(file=file)
    assert (tokens.current, tokens.takes("new")) == ("old", False)
    _replace(file, "# two are good\nnew\n\nold\n")
    assert tokens.current == "new"
    assert tokens.takes("old")
    _replace(file, "new\n")
    assert tokens.takes("new")
    assert not tokens.takes("old")


def test_a_file_that_is_lost_or_emptied_locks_nobody_out(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    tokens = Tokens(file=file)
    _replace(file, "\n# nothing\n")
    assert tokens.takes("one")
    file.unlink()
    assert tokens.takes("one")
    file.write_text("two\n")
    assert tokens.takes("two")
    assert not tokens.takes("one")


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n"])
def test_no_token_is_no_setting(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match="no token"):
        Tokens(file=tmp_path / "token")


def test_a_token_is_shown_nowhere(tmp_path: Path) -> None:
    tokens = Tokens([STRONG])
    assert STRONG not in repr(tokens)
    with pytest.raises(InvalidField) as refused:
        check_exposure("api_host", "0.0.0.0", "api_token", Tokens(["weak-one"]))
    assert "weak-one" not in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "rl.example", "[2001:db8::1]", ""])
@pytest.mark.parametrize("token", [None, "rlharvest", "changeme", "RLHARVEST", "password123", "x" * 40, "a1b2c3"])
def test_defaults_and_guessable_tokens_are_refused_where_others_reach(host: str, token: str | None) -> None:
    with pytest.raises(InvalidField, match=r"rlharvest secrets"):
        check_exposure("api_host", host, "api_token", None if token is None else Tokens([token]))


def test_every_token_of_a_list_must_be_strong() -> None:
    with pytest.raises(InvalidField, match="weak"):
        check_exposure("api_host", "10.0.0.7", "api_token", Tokens([STRONG, "changeme"]))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "api.localhost"])
def test_a_loopback_address_needs_none(host: str) -> None:
    assert is_loopback(host)
    check_exposure("api_host", host, "api_token", None)


def test_a_strong_token_may_be_reached() -> None:
    assert len(STRONG) >= SHORTEST
    assert weakness(STRONG) is None
    check_exposure("api_host", "0.0.0.0", "api_token", Tokens([STRONG]))


@pytest.mark.parametrize(
    ("header", "token"), [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", ""), ("abc", ""), ("", "")]
)
def test_the_token_of_a_header(header: str, token: str) -> None:
    assert bearer(header) == token


def _replace(file: Path, text: str) -> None:
    """As an editor or `rlharvest secrets` does: another file under the same name."""
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)
