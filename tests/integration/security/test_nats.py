"""What a real NATS server lets each credential do. Every refusal is the server's own, not our client's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from nats.aio.client import Client
from rlharvest import bus
from rlharvest.accounts import Account, Candidate, Credential, new_seed
from rlharvest.errors import Unavailable
from rlharvest.grants import SERVICES, grant
from rlharvest.keyring import Keyring
from rlharvest.testing.servers import NatsServer

JOB = "rljob_a"


class Guest:
    """A client, and what the server said to it."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name
        self.refusals: list[str] = []

    async def refused(self, act: Callable[[], Awaitable[object]]) -> bool:
        """Whether the server refuses an act as a violation of permissions."""
        before = len(self.refusals)
        await act()
        try:
            async with asyncio.timeout(20):
                while not any("permissions violation" in said.lower() for said in self.refusals[before:]):
                    await self.client.flush()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True


Enter = Callable[[Credential], Awaitable[Guest]]


@pytest.fixture
async def enter(nats: NatsServer) -> AsyncIterator[Enter]:
    guests: list[Guest] = []

    async def one(credential: Credential) -> Guest:
        client = await bus.connect(nats.url, credential.name, credential=credential, timeout_s=30)
        guest = Guest(client, credential.name)

        async def heard(error: Exception) -> None:
            guest.refusals.append(str(error))

        client._error_cb = heard
        guests.append(guest)
        return guest

    yield one
    for guest in guests:
        await guest.client.close()


@pytest.fixture
async def streams(nats: NatsServer) -> AsyncIterator[Client]:
    """A client that may do everything; the four streams are there."""
    client = await bus.connect(nats.url, "tester", credential=nats.credential)
    await bus.ensure_streams(client.jetstream())
    yield client
    await client.close()


def worker(keyring: Keyring, *, seconds: float = 3600.0) -> Credential:
    candidate = Candidate()
    given = grant("worker", candidate.name)
    return Credential(keyring.account().user(candidate.name, candidate.key, given, seconds=seconds), candidate.seed)


async def test_a_worker_can_do_its_work(streams: Client, enter: Enter, keyring: Keyring) -> None:
    """Its spans are stored and acknowledged, its heartbeats heard; orders reach it and are answered."""
    guest = await enter(worker(keyring))
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def note(message: object) -> None:
        await heard.put(message.subject)  # type: ignore[attr-defined]  # nats's message

    async def answer(message: object) -> None:
        await guest.client.publish(message.reply, b"yes")  # type: ignore[attr-defined]

    await streams.subscribe(bus.subject("beat", "*", "*"), cb=note)
    await streams.flush()
    for kind in ("lease", "assign"):
        await guest.client.subscribe(bus.subject(kind, "*", guest.name), cb=answer)
    for kind in ("abort", "acks", "rejoin", "drain"):
        await guest.client.subscribe(bus.subject(kind, "*", guest.name), cb=note)
    await guest.client.subscribe(bus.subject("resend", "*"), cb=note)
    await guest.client.flush()
    for kind in ("spans", "events"):
        stored = await guest.client.jetstream().publish(bus.subject(kind, JOB, guest.name), b"x", timeout=30)
        assert stored.seq
    await guest.client.publish(bus.subject("beat", JOB, guest.name), b"x")
    assert await asyncio.wait_for(heard.get(), 30) == bus.subject("beat", JOB, guest.name)
    for kind in ("lease", "assign"):
        assert (await streams.request(bus.subject(kind, JOB, guest.name), b"", timeout=30)).data == b"yes"
    for kind in ("abort", "acks", "rejoin", "drain"):
        await streams.publish(bus.subject(kind, JOB, guest.name), b"")
        assert await asyncio.wait_for(heard.get(), 30) == bus.subject(kind, JOB, guest.name)
    await streams.publish(bus.subject("resend", JOB), b"")
    assert await asyncio.wait_for(heard.get(), 30) == bus.subject("resend", JOB)
    assert guest.refusals == []


async def test_a_worker_cannot_publish_in_another_s_name(streams: Client, enter: Enter, keyring: Keyring) -> None:
    """Nor anything that only services say: transitions, scores, requests for scores, orders, groups, versions."""
    guest = await enter(worker(keyring))
    before = (await streams.jetstream().stream_info(bus.LEDGER)).state.messages
    others = [bus.subject(kind, JOB, "wkr_other") for kind in ("spans", "events", "beat")]
    services = [
        bus.subject(kind, JOB, who)
        for kind in ("ledger", "score", "scored", "groups", "acks", "resend", "lease", "assign", "abort", "version")
        for who in ("coordinator", "reward", "weights", guest.name, "wkr_other")
    ]
    orders = [bus.subject(kind, who="wkr_other") for kind in ("rejoin", "drain")]
    for subject in (*others, *services, *orders):
        assert await guest.refused(lambda subject=subject: guest.client.publish(subject, b"x")), subject
    assert (await streams.jetstream().stream_info(bus.LEDGER)).state.messages == before


async def test_a_worker_cannot_hear_what_is_not_for_it(streams: Client, enter: Enter, keyring: Keyring) -> None:
    """Assignments hold prompts; acknowledgements, tokens' numbers; replies, whatever was asked."""
    guest = await enter(worker(keyring))
    subjects = [
        bus.subject(kind, job, who)
        for kind in ("assign", "lease", "abort", "acks", "spans", "ledger", "scored", "score", "beat", "events")
        for job, who in (("*", "wkr_other"), ("*", "*"), (JOB, "wkr_other"))
    ]
    for subject in (
        *subjects,
        ">",
        "rlharvest.>",
        "rlharvest.v1.*.*.*",
        "_INBOX.>",
        "_INBOX.wkr_other.>",
        "$JS.>",
        "$SYS.>",
    ):
        assert await guest.refused(lambda subject=subject: guest.client.subscribe(subject)), subject


async def test_a_worker_cannot_touch_streams_or_consumers(streams: Client, enter: Enter, keyring: Keyring) -> None:
    """Not purge, delete, read, change or make them, and no consumer on them; by the API's raw subjects."""
    guest = await enter(worker(keyring))
    verbs = ("INFO", "CREATE", "UPDATE", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE", "SNAPSHOT", "RESTORE")
    calls = [f"STREAM.{verb}.{stream}" for stream in bus.STREAMS for verb in verbs]
    calls += [f"CONSUMER.CREATE.{bus.LEDGER}", f"CONSUMER.DURABLE.CREATE.{bus.LEDGER}.mine"]
    calls += [f"CONSUMER.CREATE.{bus.LEDGER}.mine.rlharvest.v1.spans.*.*", f"CONSUMER.MSG.NEXT.{bus.SCORES}.reward"]
    calls += [f"CONSUMER.DELETE.{bus.SCORES}.reward", f"DIRECT.GET.{bus.LEDGER}", "STREAM.CREATE.MINE", "INFO"]
    for call in calls:
        assert await guest.refused(lambda call=call: guest.client.publish(f"$JS.API.{call}", b"{}")), call
    assert await guest.refused(lambda: guest.client.publish(f"$JS.ACK.{bus.SCORES}.reward.1.1.1.1.1", b"+ACK"))
    assert len(await streams.jetstream().streams_info()) == len(bus.STREAMS)


async def test_a_worker_cannot_make_the_server_write_for_it(streams: Client, enter: Enter, keyring: Keyring) -> None:
    """A PubAck goes wherever the publisher wants its reply; in the ledger it is no transition that anybody would apply."""
    guest = await enter(worker(keyring))
    target = bus.subject("ledger", JOB)
    await guest.client.publish(bus.subject("spans", JOB, guest.name), b"x", reply=target)
    await guest.client.flush()
    await streams.flush()
    info = await streams.jetstream().stream_info(bus.LEDGER, subjects_filter=target)
    found = (info.state.subjects or {}).get(target, 0)
    if found:
        message = await streams.jetstream().get_last_msg(bus.LEDGER, target)
        assert (message.data or b"").startswith(b'{"stream"')


@pytest.mark.parametrize("kind", ["none", "another account", "over", "another key"])
async def test_who_was_not_admitted_is_not_let_in(nats: NatsServer, keyring: Keyring, kind: str) -> None:
    credential = None
    if kind == "another account":
        credential = Account(new_seed("account")).credential("coordinator", grant("coordinator", "coordinator"))
    elif kind == "over":
        credential = worker(keyring, seconds=-10)
    elif kind == "another key":
        credential = Credential(worker(keyring).jwt, new_seed("user"))
    # Who is refused asks again until the time is over. Three seconds are enough for one answer of a machine at rest.
    for timeout_s in (3, 12, 48):
        with pytest.raises(Unavailable) as refused:
            await bus.connect(nats.url, "stranger", credential=credential, timeout_s=timeout_s)
        if "does not answer" not in str(refused.value):
            break
    assert "does not know this client" in str(refused.value)


@pytest.mark.parametrize("role", SERVICES)
async def test_a_service_hears_only_its_own_replies(enter: Enter, keyring: Keyring, role: str) -> None:
    text = (keyring.path / role / "nats_credentials").read_text()
    guest = await enter(Credential.parse(text))
    for subject in ("_INBOX.>", "_INBOX.other.>", "rlharvest.>", "rlharvest.v1.assign.*.*"):
        assert await guest.refused(lambda subject=subject: guest.client.subscribe(subject)), subject


@pytest.mark.parametrize("role", ["reward", "trainer", "weights"])
async def test_only_the_coordinator_writes_transitions_and_empties_streams(
    streams: Client, enter: Enter, keyring: Keyring, role: str
) -> None:
    guest = await enter(Credential.parse((keyring.path / role / "nats_credentials").read_text()))
    for subject in (
        bus.subject("ledger", JOB),
        bus.subject("spans", JOB, "wkr_a"),
        bus.subject("assign", JOB, "wkr_a"),
        f"$JS.API.STREAM.PURGE.{bus.LEDGER}",
        f"$JS.API.STREAM.DELETE.{bus.LEDGER}",
        f"$JS.API.STREAM.MSG.GET.{bus.LEDGER}",
        f"$JS.API.CONSUMER.CREATE.{bus.LEDGER}",
    ):
        assert await guest.refused(lambda subject=subject: guest.client.publish(subject, b"{}")), subject


async def test_a_worker_that_renews_its_credential_stays_past_its_end(
    streams: Client, nats: NatsServer, keyring: Keyring
) -> None:
    """The server ends a connection with the credential that it began with; a new one is taken at the next."""
    candidate = Candidate()
    account, given = keyring.account(), grant("worker", candidate.name)
    credential = Credential(account.user(candidate.name, candidate.key, given, seconds=600), candidate.seed)
    client = await bus.connect(nats.url, candidate.name, credential=credential)
    first = client.client_id
    credential.jwt = account.user(candidate.name, candidate.key, given, seconds=1200)
    await client.force_reconnect()
    async with asyncio.timeout(60):
        while not client.is_connected or client.client_id == first:  # noqa: ASYNC110 - nats-py has no event for it
            await asyncio.sleep(0.05)
    stored = await client.jetstream().publish(bus.subject("spans", JOB, candidate.name), b"x", timeout=30)
    assert stored.stream == bus.LEDGER
    await client.close()
