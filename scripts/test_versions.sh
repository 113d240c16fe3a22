#!/usr/bin/env bash
# Runs scripts/test.sh on the oldest and on the newest JAX within pyproject.toml's bounds, for a scheduled job:
#   scripts/test_versions.sh --fast
# Arguments go to scripts/test.sh. OLDEST and NEWEST name the two Pythons (default: python3.11 and python3.13).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$root"
constraints="$(mktemp)"
trap 'rm -f "$constraints"' EXIT
echo "jax==0.10.2" >"$constraints" # the last one for Python 3.11; with it jaxlib of the same version

# Of the newest versions of today: an environment of an earlier run has those of its day.
rm -rf "$root/.venv-newest"

failed=()
PYTHON="${OLDEST:-python3.11}" VENV="$root/.venv-oldest" PIP_CONSTRAINT="$constraints" scripts/test.sh "$@" ||
  failed+=(oldest)
PYTHON="${NEWEST:-python3.13}" VENV="$root/.venv-newest" scripts/test.sh "$@" || failed+=(newest)
[[ ${#failed[@]} == 0 ]] || fail "the suite failed on the ${failed[*]} versions; see above"
