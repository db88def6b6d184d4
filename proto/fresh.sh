#!/usr/bin/env bash
# Fail when the generated code is not what proto/ makes.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
proto/generate.sh "$scratch"
if ! diff -r -x __pycache__ "$scratch/rlharvest/v1" libs/rlharvest/src/rlharvest/v1; then
    echo "libs/rlharvest/src/rlharvest/v1 is not what proto/ makes: run make proto" >&2
    exit 1
fi
