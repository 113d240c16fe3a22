#!/usr/bin/env bash
# Writes requirements/*.txt anew: for each platform one version of every package, found by uv for Python 3.11 to 3.13.
#   pip install uv && scripts/lock.sh             # as pyproject.toml and the package index stand today
#   scripts/lock.sh --upgrade-package transformers # this one newer, the others as they are
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v uv >/dev/null || { echo "error: no uv: pip install uv" >&2 && exit 2; }
lock() { # FILE EXTRA …
  local file="$1" extras=()
  shift
  for extra in "$@"; do extras+=(--extra "$extra"); done
  uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate "${extras[@]}" \
    "${options[@]}" pyproject.toml --output-file "requirements/$file.txt"
}
options=("$@")
lock cpu cpu report
lock gpu gpu dense report s3 gcs
lock tpu tpu report s3 gcs
