"""The HTTP side of the real service: ranges, entity tags, uploads, errors."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from datetime import datetime

import blake3
import pytest

DATA = bytes(range(256)) * 40


def _digest(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


def _path(data: bytes = DATA) -> str:
    return f"/v1/blobs/{_digest(data)}"


def _error(body: bytes) -> dict[str, object]:
    error = json.loads(body)["error"]
    assert set(error) == {"code", "message", "param", "type"}
    return error


def test_put_get_head_and_ranges(shared_service) -> None:
    assert shared_service.request("GET", _path())[0] == 404
    status, headers, _ = shared_service.request("PUT", _path(), body=DATA)
    assert (status, headers["etag"]) == (201, f'"{_digest(DATA)}"')
    assert shared_service.request("PUT", _path(), body=DATA)[0] == 200

    status, headers, body = shared_service.request("GET", _path())
    assert (status, body) == (200, DATA)
    assert headers["etag"] == f'"{_digest(DATA)}"'
    assert headers["accept-ranges"] == "bytes"
    assert "immutable" in headers["cache-control"]
    assert headers["content-type"] == "application/octet-stream"

    status, headers, body = shared_service.request("HEAD", _path())
    assert (status, body, headers["content-length"]) == (200, b"", str(len(DATA)))
    status, headers, body = shared_service.request("HEAD", _path(), headers={"Range": "bytes=0-9"})
    assert (status, body, headers["content-length"]) == (206, b"", "10")

    for asked, start, end in [
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=10000-", 10000, len(DATA)),
        ("bytes=-7", len(DATA) - 7, len(DATA)),
        ("bytes=5-99999999", 5, len(DATA)),
    ]:
        status, headers, body = shared_service.request("GET", _path(), headers={"Range": asked})
        assert (status, body) == (206, DATA[start:end])
        assert headers["content-range"] == f"bytes {start}-{end - 1}/{len(DATA)}"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Range": "bytes=0-9", "If-Range": f'"{_digest(DATA)}"'}, 206),
        ({"Range": "bytes=0-9", "If-Range": '"other"'}, 200),
        ({"Range": "bytes=0-9", "If-Range": f'W/"{_digest(DATA)}"'}, 200),
        ({"Range": "bytes=0-9", "If-Range": "Wed, 30 Nov 2050 10:00:00 GMT"}, 200),
        ({"Range": "bytes=0-9,20-29"}, 200),
        ({"Range": "bytes=9-0"}, 200),
        ({"Range": "lines=0-9"}, 200),
        ({"Range": f"bytes={len(DATA)}-"}, 416),
        ({"Range": "bytes=-0"}, 416),
        ({"Range": f"bytes={len(DATA)}-", "If-Range": '"other"'}, 200),
        ({"If-None-Match": f'"x", W/"{_digest(DATA)}"'}, 304),
        ({"If-None-Match": '"x"'}, 200),
        ({"Accept-Encoding": "gzip, br"}, 200),
    ],
)
def test_conditions(shared_service, headers: dict[str, str], status: int) -> None:
    shared_service.request("PUT", _path(), body=DATA)
    got, reply, body = shared_service.request("GET", _path(), headers=headers)
    assert got == status
    assert reply["etag"] == f'"{_digest(DATA)}"'
    assert "content-encoding" not in reply
    if status == 200:
        assert body == DATA
    if status == 416:
        assert reply["content-range"] == f"bytes */{len(DATA)}"
        assert _error(body)["param"] == "Range"


def test_an_empty_blob(shared_service) -> None:
    assert shared_service.request("PUT", _path(b""), body=b"")[0] == 201
    assert shared_service.request("GET", _path(b""))[::2] == (200, b"")
    assert shared_service.request("GET", _path(b""), headers={"Range": "bytes=0-"})[0] == 416


def test_refusals_have_the_envelope_and_leave_nothing(shared_service) -> None:
    other = DATA + b"refused"
    status, _, body = shared_service.request("PUT", _path(other), body=DATA)
    assert status == 400
    assert _digest(other) in str(_error(body)["message"])
    for method, path, wanted, param in [
        ("GET", "/v1/blobs/xyz", 400, "digest"),
        ("PUT", f"/v1/blobs/{'A' * 64}", 400, "digest"),
        ("GET", "/v1/blobs/..%2f..%2fetc%2fpasswd", 400, "digest"),
        ("GET", "/v1/jobs/rljob_x/versions/0", 404, None),
        ("GET", "/v1/jobs/rljob_x/versions/first", 400, "version"),
        ("GET", "/v1/jobs/a%2fb/versions", 400, "job"),
        ("GET", "/nowhere", 404, None),
        ("POST", _path(), 405, None),
    ]:
        status, _, body = shared_service.request(method, path)
        assert (status, _error(body)["param"]) == (wanted, param), path
    assert shared_service.request("PUT", _path(other), body=other, headers={"Content-Encoding": "gzip"})[0] == 415
    assert shared_service.request("HEAD", _path(other))[0] == 404
    assert list((shared_service.files / "incoming").iterdir()) == []
    assert json.loads(shared_service.request("GET", "/v1/jobs/rljob_x/versions")[2]) == {"object": "list", "data": []}


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_uploads_are_refused(start_service, chunked: bool) -> None:
    service = start_service(max_blob_bytes=1000)
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
    body = iter([DATA]) if chunked else DATA
    connection.request(
        "PUT", _path(), body=body, encode_chunked=chunked, headers={"Transfer-Encoding": "chunked"} if chunked else {}
    )
    reply = connection.getresponse()
    assert reply.status == 413
    assert "RLHARVEST_MAX_BLOB_BYTES" in str(_error(reply.read())["message"])
    connection.close()
    assert list((service.files / "incoming").iterdir()) == []


def test_no_space_is_507_and_what_is_there_stays(service) -> None:
    service.request("PUT", _path(), body=DATA)
    service.stop()
    service.settings["min_free_bytes"] = 1 << 60
    service.start()
    assert "disk" in json.loads(service.request("GET", "/readyz")[2])["failed"]
    status, _, body = service.request("PUT", _path(b"more"), body=b"more")
    assert (status, _error(body)["type"]) == (507, "server_error")
    assert service.request("GET", _path())[::2] == (200, DATA)


def test_an_upload_that_breaks_off_leaves_nothing(shared_service) -> None:
    other = DATA + b"cut"
    with socket.create_connection(("127.0.0.1", shared_service.port)) as connection:
        connection.sendall(f"PUT {_path(other)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(other)}\r\n\r\n".encode())
        connection.sendall(other[:5000])
        _until(lambda: list((shared_service.files / "incoming").iterdir()))
    _until(lambda: not list((shared_service.files / "incoming").iterdir()))
    assert shared_service.request("HEAD", _path(other))[0] == 404


def test_sigterm_drains_in_less_than_two_seconds(service) -> None:
    """With an idle connection and a download that does not move; exit code 0, and it says that it drains."""
    large = os.urandom(64 << 20)
    assert service.request("PUT", _path(large), body=large)[0] == 201
    address = ("127.0.0.1", service.port)
    with socket.create_connection(address), socket.create_connection(address) as stuck:
        stuck.sendall(f"GET {_path(large)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert stuck.recv(100)
        service.process.terminate()
        assert service.process.wait(20) == 0
    # By its own log, since the time that the interpreter takes to exit says how busy this machine is.
    lines = [json.loads(line) for line in (service.directory / "log").read_text().splitlines()]
    at = {line["event"]: datetime.fromisoformat(line["timestamp"]) for line in lines}
    assert (at["stopped"] - at["signal"]).total_seconds() < 2
    assert "draining" in at


def test_metrics_and_health(service) -> None:
    service.request("PUT", _path(), body=DATA)
    service.request("GET", _path())
    text = service.request("GET", "/metrics")[2].decode()
    assert f"rlharvest_weights_received_bytes_total {float(len(DATA))}" in text
    assert f"rlharvest_weights_sent_bytes_total {float(len(DATA))}" in text
    assert service.request("GET", "/livez")[0] == 200


def _until(condition, *, timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
