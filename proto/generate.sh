#!/usr/bin/env bash
# Generate protobuf and gRPC code with its types from proto/ into the shared library. `make proto` runs it, CI checks that
# it changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-libs/rlharvest/src}
mkdir -p "$out"
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I proto \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
    proto/rlharvest/v1/*.proto 2>/dev/null
# Files that define no service get no gRPC module.
grep -L '^class ' "$out"/rlharvest/v1/*_pb2_grpc.py | while read -r empty; do rm "$empty" "${empty}i"; done
printf '"""Generated from proto/rlharvest/v1 by `make proto`; do not edit."""\n' > "$out/rlharvest/v1/__init__.py"
