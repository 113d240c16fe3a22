#!/usr/bin/env bash
# The runs of experiments/quickstart.md: the long quickstart with CalibAdv and with GRPO from the same cold start on every
# seed given (default 3 4 5), and on the first seed two controls: shuffled rewards, and further SFT instead of RL.
#
#   bash benchmarks/quickstart_results.sh OUTPUT_FOLDER [SEED…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
shift
seeds=("$@")
[ $# -gt 0 ] || seeds=(3 4 5)
python=${PYTHON:-.venv/bin/python}
export JAX_NUM_CPU_DEVICES="${JAX_NUM_CPU_DEVICES:-2}"

arm() { # NAME SEED CONFIG OVERRIDES…: one run from the seed's cold start, in its own folder
  local dir="$out/$1-$2" seed=$2 config=$3
  shift 3
  mkdir -p "$dir"
  [ -d "$dir/sft" ] || { [ ! -d "$out/calibadv-$seed/sft" ] || cp -r "$out/calibadv-$seed/sft" "$dir/sft"; }
  [ -f "$dir/quickstart.json" ] || "$python" -m calibadv_jax quickstart --config "$config" \
    run.dir="$dir" run.seed="$seed" world.seed="$seed" "$@" >"$dir/log.txt" 2>&1
}

more_sft() { # SEED: a thousand further steps on fresh imperfect demonstrations, then the same evaluation
  local dir="$out/moresft-$1" common
  common=(--config configs/quickstart_long.yaml run.dir="$dir" world.seed="$1")
  mkdir -p "$dir"
  cp -r "$out/calibadv-$1/world" "$dir/"
  "$python" -m calibadv_jax sft "${common[@]}" run.seed=$(($1 + 100)) sft.init_from="$out/calibadv-$1/sft" \
    sft.optimizer.lr=0.01 "sft.phases=[{steps: 1000, kind: imperfect}]" >"$dir/log.txt" 2>&1
  "$python" -m calibadv_jax evaluate "${common[@]}" run.seed="$1" policy.path="$dir/sft" >>"$dir/log.txt" 2>&1
}

for seed in "${seeds[@]}"; do
  arm calibadv "$seed" configs/quickstart_long.yaml
  arm grpo "$seed" configs/quickstart_long.yaml advantage.name=grpo
done
arm shuffled "${seeds[0]}" configs/quickstart_long.yaml reward.shuffle=true
[ -f "$out/moresft-${seeds[0]}/evaluation.json" ] || more_sft "${seeds[0]}"
