#!/usr/bin/env bash
# The experiments of experiments/evidence.md: runs what is not done yet (arguments: --help).
#
#   bash experiments/evidence.sh OUTPUT                  # everything, the most telling first: many hours
#   bash experiments/evidence.sh OUTPUT --part short     # GRPO and CalibAdv, two seeds, one picture
#
# PYTHON names a Python that has the project and its extras cpu and report; else .venv is set up.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"

if [[ -z "${PYTHON:-}" ]]; then
  ensure_venv "${VENV:-$root/.venv}" cpu,report
  PYTHON="${VENV:-$root/.venv}/bin/python"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # the command may be given in another folder
exec "$PYTHON" -m experiments.runs "$@"
