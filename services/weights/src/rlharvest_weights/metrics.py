"""Prometheus metrics of the weight service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

SENT_BYTES = Counter("rlharvest_weights_sent_bytes_total", "Bytes of blobs that were sent to workers.")
RECEIVED_BYTES = Counter("rlharvest_weights_received_bytes_total", "Bytes of blobs that were uploaded and verified.")
REQUESTS = Counter("rlharvest_weights_requests_total", "HTTP requests.", ["method", "status"])
PUBLISHED = Counter("rlharvest_weights_published_total", "Versions that were published.")
FREED_BYTES = Counter("rlharvest_weights_freed_bytes_total", "Bytes of blobs that were deleted.")
UNANNOUNCED = Counter("rlharvest_weights_unannounced_total", "Announcements that an older one's successor replaced.")
VERSIONS = Gauge("rlharvest_weights_versions", "Versions that can be pulled.")
VERSION_BYTES = Gauge("rlharvest_weights_version_bytes", "Bytes of the blobs that versions name.")
FREE_BYTES = Gauge("rlharvest_weights_free_bytes", "Space that uploads may take.")
