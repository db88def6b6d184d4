"""The log-in page in a real browser: a link with a token logs in, a wrong one gets one clear sentence."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import FakeLive, Served

TOKEN = "token-of-this-test-0123456789"
REFUSAL = "This is not a token of this server."

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")


@pytest.fixture
def locked(tmp_path: Path, live: FakeLive) -> Iterator[Served]:
    server = Served(tmp_path, live, token=TOKEN)
    server.start()
    yield server
    server.stop()


def shown(directory: Path, url: str) -> str:
    """Return the words of the page at which the browser ends up, and its title first."""
    assert BROWSER is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    command = [BROWSER, *options, f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=5000"]
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, timeout=120, check=True)
    return " ".join(html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", done.stdout.decode())).split())


def test_the_link_logs_in_and_the_next_visit_needs_none(tmp_path: Path, locked: Served) -> None:
    """The part behind # is sent once, by the page itself; the cookie is kept."""
    assert "No jobs yet" in shown(tmp_path, f"{locked.url}/login#{TOKEN}")
    assert "No jobs yet" in shown(tmp_path, locked.url)


@pytest.mark.parametrize("token", ["wrong", "100%"])
def test_a_wrong_token_gets_one_sentence(tmp_path: Path, locked: Served, token: str) -> None:
    words = shown(tmp_path, f"{locked.url}/login#{token}")
    assert words.count(REFUSAL) == 1
    assert "RLHARVEST_API_TOKEN" in words, "where the right one is"
    assert "No jobs yet" not in words


def test_the_page_asks_for_a_token_and_offers_nothing_that_needs_one(tmp_path: Path, locked: Served) -> None:
    words = shown(tmp_path, locked.url)
    assert "API token" in words
    assert REFUSAL not in words
    assert "Workers" not in words
