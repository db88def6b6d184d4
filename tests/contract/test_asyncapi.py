"""proto/asyncapi.yaml, the subject builder, the streams, the messages and the committed payloads say the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import pytest
import yaml
from google.protobuf import json_format, symbol_database
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from rlharvest import bus, spans
from rlharvest.testing.servers import NatsServer
from rlharvest.v1 import batches_pb2, events_pb2, fleet_pb2, ledger_pb2, scores_pb2, spans_pb2

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "proto" / "asyncapi.yaml").read_text(encoding="utf-8"))
CHANNELS: dict[str, Any] = {name: each for name, each in DOCUMENT["channels"].items() if each["address"] is not None}
MESSAGES: list[str] = list(DOCUMENT["components"]["messages"])
PROTO_MODULES = (batches_pb2, events_pb2, fleet_pb2, ledger_pb2, scores_pb2, spans_pb2)

SERVICES = ["coordinator", "rollout", "reward", "trainer", "weights"]


def _reference(start: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"$ref": {"type": "string", "pattern": f"^{start}"}},
        "required": ["$ref"],
        "additionalProperties": False,
    }


_NAMES = {"type": "array", "items": {"enum": SERVICES}, "minItems": 1, "uniqueItems": True}

SHAPE = {
    "type": "object",
    "required": ["asyncapi", "info", "servers", "x-streams", "channels", "operations", "components"],
    "additionalProperties": False,
    "properties": {
        "asyncapi": {"const": "3.0.0"},
        "info": {"type": "object", "required": ["title", "version", "description", "license"]},
        "defaultContentType": {"const": "application/x-protobuf"},
        "servers": {
            "type": "object",
            "additionalProperties": {"type": "object", "required": ["host", "protocol"]},
        },
        "x-streams": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": [
                    *("description", "retention", "storage", "discard"),
                    *("max_bytes", "max_age_s", "duplicate_window_s"),
                ],
                "additionalProperties": False,
                "properties": {
                    "description": {"type": "string"},
                    "retention": {"enum": ["limits", "workqueue"]},
                    "storage": {"const": "file"},
                    "discard": {"enum": ["new", "old"]},
                    "max_bytes": {"type": "integer", "minimum": 1},
                    "max_age_s": {"type": "integer", "minimum": 0},
                    "duplicate_window_s": {"type": "number", "minimum": 1},
                },
            },
        },
        "channels": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["address", "summary", "messages", "x-publishers", "x-subscribers"],
                "additionalProperties": False,
                "properties": {
                    "address": {"type": ["string", "null"]},
                    "summary": {"type": "string", "minLength": 10},
                    "parameters": {
                        "type": "object",
                        "required": ["job", "who"],
                        "additionalProperties": {
                            "type": "object",
                            "required": ["description"],
                            "additionalProperties": False,
                            "properties": {
                                "description": {"type": "string"},
                                "enum": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                            },
                        },
                    },
                    "messages": {
                        "type": "object",
                        "minProperties": 1,
                        "maxProperties": 1,
                        "additionalProperties": _reference("#/components/messages/"),
                    },
                    "x-publishers": _NAMES,
                    "x-subscribers": _NAMES,
                    "x-jetstream": {
                        "type": "object",
                        "required": ["stream", "msg_id"],
                        "additionalProperties": False,
                        "properties": {"stream": {"enum": list(bus.STREAMS)}, "msg_id": {"type": "string"}},
                    },
                },
            },
        },
        "operations": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["action", "channel", "messages"],
                "additionalProperties": False,
                "properties": {
                    "action": {"const": "send"},
                    "channel": _reference("#/channels/"),
                    "messages": {"type": "array", "items": _reference("#/channels/"), "minItems": 1, "maxItems": 1},
                    "bindings": {"type": "object"},
                    "reply": {"type": "object", "required": ["address", "channel", "messages"]},
                },
            },
        },
        "components": {
            "type": "object",
            "required": ["messages"],
            "additionalProperties": False,
            "properties": {
                "messages": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "required": ["name", "contentType", "payload"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string", "pattern": r"^rlharvest\.v1\.[A-Z]\w+$"},
                            "contentType": {"const": "application/x-protobuf"},
                            "payload": {
                                "type": "object",
                                "required": ["schemaFormat", "schema"],
                                "properties": {
                                    "schemaFormat": {"const": "application/vnd.google.protobuf;version=3"},
                                    "schema": _reference("rlharvest/v1/"),
                                },
                            },
                        },
                    },
                }
            },
        },
    },
}


def _empty(name: str) -> Message:
    message = symbol_database.Default().GetSymbol(f"rlharvest.v1.{name}")()
    assert isinstance(message, Message)
    return message


def _message_of(channel: str) -> str:
    return str(next(iter(DOCUMENT["channels"][channel]["messages"])))


def _concrete(kind: str) -> str:
    """Return a subject of a channel, its free parameters filled in."""
    parameters = CHANNELS[kind]["parameters"]
    job = parameters["job"].get("enum", ["rljob_01"])[0]
    who = parameters["who"].get("enum", ["wkr_01"])[0]
    return bus.subject(kind, job, who)  # type: ignore[arg-type]  # the document's kinds are checked to be Kinds


def _captures(pattern: str, subject: str) -> bool:
    wanted, found = pattern.split("."), subject.split(".")
    return len(wanted) == len(found) and all(a in ("*", b) for a, b in zip(wanted, found, strict=True))


def _resolved(reference: str) -> Any:
    node: Any = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        node = node[step]
    return node


def test_the_document_has_the_shape_of_an_asyncapi_3_document() -> None:
    jsonschema.Draft202012Validator.check_schema(SHAPE)
    jsonschema.validate(DOCUMENT, SHAPE)


def test_every_reference_leads_somewhere() -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if "$ref" in node else []
            return own + [found for each in node.values() for found in references(each)]
        return [found for each in node for found in references(each)] if isinstance(node, list) else []

    found = references(DOCUMENT)
    assert found
    for reference in found:
        if reference.startswith("#/"):
            assert _resolved(reference)
        else:
            assert (ROOT / "proto" / reference).is_file(), reference


def test_every_kind_is_in_the_document_and_no_other() -> None:
    assert set(CHANNELS) == set(get_args(bus.Kind))
    assert set(DOCUMENT["operations"]) == set(CHANNELS)


def test_every_message_of_the_document_is_used_by_a_channel() -> None:
    assert sorted(_message_of(channel) for channel in DOCUMENT["channels"]) == sorted(MESSAGES)


@pytest.mark.parametrize("kind", CHANNELS)
def test_the_builder_makes_the_address_of_the_channel(kind: str) -> None:
    filled = CHANNELS[kind]["address"].format(job="rljob_01", who="wkr_01")
    built = bus.subject(kind, "rljob_01", "wkr_01")  # type: ignore[arg-type]  # as above
    assert filled == built
    assert bus.parse_subject(built) == (kind, "rljob_01", "wkr_01")


@pytest.mark.parametrize("kind", CHANNELS)
def test_the_operation_of_a_channel_names_its_message_and_its_reply(kind: str) -> None:
    operation = DOCUMENT["operations"][kind]
    assert operation["channel"]["$ref"] == f"#/channels/{kind}"
    assert operation["messages"] == [{"$ref": f"#/channels/{kind}/messages/{_message_of(kind)}"}]
    reply = f"{kind}_reply"
    assert ("reply" in operation) == (reply in DOCUMENT["channels"])
    if "reply" in operation:
        assert operation["reply"]["messages"] == [{"$ref": f"#/channels/{reply}/messages/{_message_of(reply)}"}]
        assert DOCUMENT["channels"][reply]["x-publishers"] == CHANNELS[kind]["x-subscribers"]


@pytest.mark.parametrize("kind", CHANNELS)
def test_exactly_the_stream_that_the_channel_names_captures_it(kind: str) -> None:
    captured_by = [
        name
        for name, config in bus.STREAMS.items()
        if any(_captures(pattern, _concrete(kind)) for pattern in config.subjects or [])
    ]
    stream = CHANNELS[kind].get("x-jetstream", {}).get("stream")
    assert captured_by == ([] if stream is None else [stream])


def test_the_streams_are_configured_as_the_document_says() -> None:
    assert set(DOCUMENT["x-streams"]) == set(bus.STREAMS)
    for name, written in DOCUMENT["x-streams"].items():
        config = bus.STREAMS[name]
        assert config.retention is not None
        assert config.storage is not None
        assert config.discard is not None
        configured = {
            "retention": config.retention.value,
            "storage": config.storage.value,
            "discard": config.discard.value,
            "max_bytes": config.max_bytes,
            "max_age_s": config.max_age or 0,
            "duplicate_window_s": config.duplicate_window,
        }
        assert configured == {key: value for key, value in written.items() if key != "description"}, name


@pytest.mark.parametrize("kind", CHANNELS)
def test_the_proto_file_says_the_same_about_the_message(kind: str) -> None:
    """The comment above a message gives its subject, and for a stream the stream and the message id."""
    name = _message_of(kind)
    file = DOCUMENT["components"]["messages"][name]["payload"]["schema"]["$ref"]
    text = (ROOT / "proto" / file).read_text(encoding="utf-8")
    match = re.search(rf"((?:^//[^\n]*\n)+)message {name} \{{", text, re.MULTILINE)
    assert match is not None, f"{file} has no commented message {name}"
    comment = re.sub(r"\s*\n//\s*", " ", match.group(1))
    assert f"rlharvest.v1.{kind}." in comment
    stream = CHANNELS[kind].get("x-jetstream")
    if stream is None:
        assert "core NATS" in comment
        assert ("request" in comment) == ("reply" in DOCUMENT["operations"][kind])
    else:
        assert f"stream {stream['stream'].removeprefix('RLHARVEST_')}" in comment
        identity = stream["msg_id"] if stream["msg_id"] != "<id>" else "= id"
        assert "Nats-Msg-Id" in comment
        assert identity in comment


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message_exists_in_the_generated_code(name: str) -> None:
    written = DOCUMENT["components"]["messages"][name]
    descriptor = _empty(name).DESCRIPTOR
    assert written["name"] == descriptor.full_name
    assert written["payload"]["schema"]["$ref"] == descriptor.file.name


@pytest.mark.parametrize("name", MESSAGES)
def test_old_bytes_decode_to_the_same_values(name: str) -> None:
    payload = GOLDEN / f"{name}.bin"
    assert payload.exists(), f"{name} has no golden payload: write {name}.json and run tests/contract/golden/write.py"
    expected, decoded = _empty(name), _empty(name)
    json_format.Parse((GOLDEN / f"{name}.json").read_text(encoding="utf-8"), expected)
    decoded.ParseFromString(payload.read_bytes())
    assert decoded == expected
    assert len(UnknownFieldSet(decoded)) == 0, "a field number that old bytes use is gone"


def test_there_are_golden_payloads_of_the_document_only() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.bin")) == sorted(MESSAGES)
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == sorted(MESSAGES)


def test_the_golden_spans_are_read_as_spans() -> None:
    flush = spans.unpack((GOLDEN / "TokenSpans.bin").read_bytes())
    assert (flush.worker, flush.incarnation, flush.number, flush.final) == ("wkr_a", 3 << 32 | 1, 17, True)
    assert [span.ids.tolist() for span in flush.spans] == [[1, 2, 2**32 - 1], [11], []]
    assert [span.logprobs.tolist() for span in flush.spans] == [[-0.5, -1.25, 0.0], [-2.0], []]
    assert flush.spans[0].runs == (spans.Run(2, 8), spans.Run(1, 9))
    assert [span.finish for span in flush.spans] == [spans.Finish.NONE, spans.Finish.EOS, spans.Finish.LENGTH]


async def test_a_real_server_stores_golden_payloads_in_the_named_streams(nats_server: NatsServer) -> None:
    nc = await bus.connect(nats_server.url, "contract")
    js = nc.jetstream()
    created = await bus.ensure_streams(js)
    for name, info in created.items():
        written = DOCUMENT["x-streams"][name]
        assert (info.config.max_bytes, info.config.max_age) == (written["max_bytes"], written["max_age_s"])
    for kind, channel in CHANNELS.items():
        if "x-jetstream" not in channel:
            continue
        payload = (GOLDEN / f"{_message_of(kind)}.bin").read_bytes()
        ack = await js.publish(_concrete(kind), payload, headers={"Nats-Msg-Id": f"golden-{kind}"})
        assert ack.stream == channel["x-jetstream"]["stream"]
        stored = await js.get_msg(ack.stream, ack.seq)
        assert stored.data == payload
    await nc.close()
