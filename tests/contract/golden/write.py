"""Write the golden payload of each message that has a JSON form here and no bytes yet. Bytes that exist are never touched:
they stand for what older processes have put into streams.

    python tests/contract/golden/write.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf import json_format, symbol_database
from rlharvest.v1 import batches_pb2, events_pb2, fleet_pb2, ledger_pb2, scores_pb2, spans_pb2

HERE = Path(__file__).parent
FILES = (batches_pb2, events_pb2, fleet_pb2, ledger_pb2, scores_pb2, spans_pb2)


def main() -> None:
    symbols = symbol_database.Default()
    for source in sorted(HERE.glob("*.json")):
        target = source.with_suffix(".bin")
        if target.exists():
            continue
        message = symbols.GetSymbol(f"rlharvest.v1.{source.stem}")()
        json_format.Parse(source.read_text(encoding="utf-8"), message)
        target.write_bytes(message.SerializeToString(deterministic=True))
        sys.stdout.write(f"wrote {target.name}\n")


if __name__ == "__main__":
    main()
