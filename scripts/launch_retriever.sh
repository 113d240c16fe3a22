#!/usr/bin/env bash
# Starts the retrieval service in the foreground; every option of `python -m retriever.serve` works.
#
#   scripts/launch_retriever.sh --corpus_path wiki-18.jsonl --index_path wiki-18.index --build_if_missing
#   scripts/launch_retriever.sh --config configs/retriever.yaml --port 8001
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
exec "$python" -m retriever.serve "$@"
