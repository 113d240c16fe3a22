#!/usr/bin/env bash
# The quickstart with CalibAdv and with GRPO from the same cold start, on the seeds given (default 0 1 2).
# The controls of docs/results.md are not run here; their commands stand there.
#
#   bash benchmarks/quickstart_results.sh OUTPUT_FOLDER [SEED…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
shift
python=${PYTHON:-.venv/bin/python}

arm() { # NAME SEED CONFIG OVERRIDES…: one run from the seed's cold start, in its own folder
  local dir="$out/$1-$2" seed=$2 config=$3
  shift 3
  mkdir -p "$dir"
  [ -d "$dir/sft" ] || { [ ! -d "$out/calibadv-$seed/sft" ] || cp -r "$out/calibadv-$seed/sft" "$dir/sft"; }
  [ -f "$dir/quickstart.json" ] || "$python" -m calibadv_jax.quickstart --config "$config" \
    run.dir="$dir" run.seed="$seed" world.seed="$seed" "$@" >"$dir/log.txt" 2>&1
}

for seed in "${@:-0 1 2}"; do
  for number in $seed; do
    arm calibadv "$number" configs/quickstart.yaml
    arm grpo "$number" configs/quickstart_grpo.yaml
  done
done
