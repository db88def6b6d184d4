"""TLS of one process: the certificate that its servers show, and whom its clients believe.

Invariants: off unless files are named; with a CA every gRPC call is encrypted and verified (other protocols say so in
their URL: https, tls, rediss); at least TLS 1.2; host names are checked. Files are read at the start; one that cannot be
used raises InvalidField.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from rlharvest.errors import InvalidField


@dataclass(frozen=True)
class Tls:
    """Files in PEM form."""

    ca: Path | None = None
    """Certificates that clients of this process believe; None: those of the system."""
    certificate: Path | None = None
    """Chain that servers of this process show."""
    key: Path | None = None

    @functools.cached_property
    def client(self) -> ssl.SSLContext:
        """For clients; reading the certificates takes some 50 ms."""
        with _named("tls_ca", self.ca):
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    @property
    def server(self) -> ssl.SSLContext | None:
        """For HTTP servers; None: they speak plain text."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with _named("tls_cert", self.certificate):
            context.load_cert_chain(self.certificate, self.key)
        return context

    @property
    def channel(self) -> grpc.ChannelCredentials | None:
        """For gRPC clients; None: they speak plain text."""
        if self.ca is None:
            return None
        with _named("tls_ca", self.ca):
            return grpc.ssl_channel_credentials(self.ca.read_bytes())

    @property
    def listener(self) -> grpc.ServerCredentials | None:
        """For gRPC servers; None: they speak plain text."""
        if self.certificate is None or self.key is None:
            return None
        with _named("tls_cert", self.certificate):
            return grpc.ssl_server_credentials([(self.key.read_bytes(), self.certificate.read_bytes())])


@contextmanager
def _named(field: str, path: Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        fix = "Name a file in PEM form that this user may read, with the key that belongs to it."
        raise InvalidField(f"RLHARVEST_{field.upper()}", str(path), str(error), fix) from error
