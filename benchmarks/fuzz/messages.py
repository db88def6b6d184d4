"""Messages that nobody should send: of the right shape with made-up values, and bytes that are no message any more.

Everything is a function of a seed, so that what broke something can be sent again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Known = Mapping[str, Sequence[Any]]
"""Values that mean something, by the name of the field: the id of a running job, the name of a worker."""

T = TypeVar("T")

_TEXTS = ["", "\0", " ", "*", ">", "a.b", "_", "../../etc/passwd", "ä" * 300, "\N{ZERO WIDTH JOINER}", "{}", "[" * 5000]
_DEPTH = 3
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def drawn(strategy: SearchStrategy[T], n: int, *, of: int) -> list[T]:
    """Return `n` values of a strategy: the same for the same seed `of`."""
    found: list[T] = []

    @seed(of)
    @settings(
        max_examples=n,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(value: T) -> None:
        found.append(value)

    take()
    return found[:n]


def messages(kind: type[Message], known: Known) -> SearchStrategy[Message]:
    """Return a strategy for messages of any type, of which some fields are unset, some known, and some wild."""
    descriptor: Any = kind.DESCRIPTOR
    return _fields(descriptor, known, _DEPTH).map(lambda fields: kind(**fields))


def _fields(descriptor: Descriptor, known: Known, depth: int) -> SearchStrategy[dict[str, Any]]:
    optional = {
        field.name: _value(field, known, depth) for field in descriptor.fields if depth or field.message_type is None
    }
    return st.fixed_dictionaries({}, optional=optional)


def _value(field: FieldDescriptor, known: Known, depth: int) -> SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return st.dictionaries(_value(key, known, 0), _value(value, known, depth - 1), max_size=3)
    one = _one(field, known, depth)
    return st.lists(one, max_size=4) if field.is_repeated else one


def _one(field: FieldDescriptor, known: Known, depth: int) -> SearchStrategy[Any]:
    if field.message_type is not None:
        within = GetMessageClass(field.message_type)
        return _fields(field.message_type, known, depth - 1).map(lambda fields: within(**fields))
    wild = _wild(field)
    values = [value for value in known.get(field.name, ()) if _fits(field, value)]
    return st.one_of(st.sampled_from(values), st.sampled_from(values), wild) if values else wild


def _wild(field: FieldDescriptor) -> SearchStrategy[Any]:
    if field.cpp_type in _INTEGERS:
        least, most = _INTEGERS[field.cpp_type]
        edges = [value for value in (0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**63, least, most) if least <= value <= most]
        return st.one_of(st.sampled_from(edges), st.integers(least, most))
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_STRING:
            return st.one_of(st.sampled_from(_TEXTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
        case FieldDescriptor.TYPE_BYTES:
            return st.one_of(st.binary(max_size=40), st.just(b"\0" * 4096))
        case FieldDescriptor.TYPE_ENUM:
            assert field.enum_type is not None
            return st.one_of(st.sampled_from([value.number for value in field.enum_type.values]), st.just(2**31 - 1))
        case FieldDescriptor.TYPE_FLOAT:
            return st.floats(width=32)
        case _:
            return st.floats()


def _fits(field: FieldDescriptor, value: Any) -> bool:
    if field.cpp_type in _INTEGERS:
        least, most = _INTEGERS[field.cpp_type]
        return isinstance(value, int) and least <= value <= most
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return isinstance(value, str)
        case FieldDescriptor.TYPE_BYTES:
            return isinstance(value, bytes)
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return isinstance(value, float)
        case _:
            return False


def broken(data: bytes, source: random.Random) -> Iterator[bytes]:
    """Yield what becomes of a message on a bad way: cut, with bits turned over, doubled, with something in between."""
    yield data[: source.randrange(len(data) + 1)]
    if data:
        turned = bytearray(data)
        for _ in range(source.choice([1, 1, 2, 8])):
            turned[source.randrange(len(turned))] ^= 1 << source.randrange(8)
        yield bytes(turned)
        at = source.randrange(len(data))
        yield data[:at] + source.randbytes(source.randrange(1, 9)) + data[at:]
        yield data[:at] + data[min(len(data), at + source.randrange(1, 9)) :]
    yield data + data
    yield data + source.randbytes(8)


def garbage(source: random.Random) -> list[bytes]:
    """Return bytes that are no message at all, or one of nothing."""
    deep = b""
    for _ in range(200):
        deep = b"\x0a" + varint(len(deep)) + deep
    return [
        b"",
        b"\0",
        b"\xff" * 64,
        b"{}",
        b"\x0a\x02\xc3\x28",  # a string that is not UTF-8
        b"\x0a\xff\xff\xff\xff\x0f",  # a string longer than the message
        b"\x0b" * 300,  # groups that never end
        deep,
        source.randbytes(source.randrange(1, 400)),
    ]


def varint(number: int) -> bytes:
    """Return a number as protobuf writes lengths."""
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)
