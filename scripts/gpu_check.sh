#!/usr/bin/env bash
# The checks that need a CUDA GPU: attention, update and sampler beside the CPU, then the device benchmarks at the shapes
# of Qwen2.5-0.5B, 1.5B, 3B and SmolLM2-135M. What fails is named at the end. A pretrained policy on real questions:
# scripts/gpu_real.sh.
#
#   bash scripts/gpu_check.sh [OUTPUT_FOLDER]
#
# Needs Python 3.12 with JAX for CUDA, the packages of pyproject.toml, pytest, pytest-timeout and hypothesis; no vLLM,
# no FAISS. Installs nothing. PEAK_TFLOPS is the card's dense bfloat16 peak (H100/H200: 989).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-${OUT:-gpu_check}}
python=${PYTHON:-python3}
peak=${PEAK_TFLOPS:-989}
mkdir -p "$out"

"$python" - <<'PY'
import sys
import jax
if jax.default_backend() != "gpu":
    sys.exit(f"error: JAX sees {jax.default_backend()} only; install jax[cuda13] and check nvidia-smi")
print("devices:", jax.devices(), "jax", jax.__version__)
PY
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | tee "$out/gpu.txt"

failed=()
rm -f "$out/tests.txt"
tests() { # PRECISION FILE: products of float32 in this precision
  JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION="$1" "$python" -m pytest -q -p no:cacheprovider "$2" 2>&1 |
    tee -a "$out/tests.txt" || failed+=("$2")
}
tests default tests/policy/test_on_gpu.py
tests highest tests/sampler/test_jax_sampler.py # they ask for a thousandth

bench() { # NAME ARGS…
  local name=$1
  shift
  echo "== $name"
  "$python" -m benchmarks.device --peak_tflops "$peak" --json "$out/$name.json" "$@" | tee "$out/$name.txt" ||
    failed+=("$name")
}
bench qwen2.5-0.5b --shape qwen2.5-0.5b --rows 16 --microbatch 8 --length 8192 --slots 256 --prompt 1024 --new 256
bench qwen2.5-0.5b-xla --shape qwen2.5-0.5b --attention xla --rows 16 --microbatch 8 --length 8192 \
  --slots 256 --prompt 1024 --new 256 --repeats 3
bench qwen2.5-1.5b --shape qwen2.5-1.5b --rows 8 --microbatch 4 --length 8192 --slots 192 --prompt 1024 --new 256
# Parameters, moments and gradients of 3B alone take 46 GiB.
XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 bench qwen2.5-3b --shape qwen2.5-3b --rows 8 --microbatch 4 \
  --length 8192 --slots 128 --prompt 1024 --new 256
bench smollm2-135m --shape smollm2-135m --rows 32 --microbatch 16 --length 4096 --slots 320 --prompt 600 --new 128
"$python" -m benchmarks.credit_assignment --json "$out/credit.json" | tee "$out/credit.txt" || failed+=(credit)

# The retriever's flat index on GPUs, where FAISS is built for them.
if "$python" -c 'import faiss, sys; sys.exit(not getattr(faiss, "get_num_gpus", lambda: 0)())' 2>/dev/null; then
  "$python" -m benchmarks.retrieval.gpu --folder "$out/vectors" --rows "${ROWS:-5000000}" \
    --json "$out/retriever.json" | tee "$out/retriever.txt" || failed+=(retriever)
  rm -rf "$out/vectors"
else
  echo "retriever on GPUs: left out, no FAISS with GPU support (pip install faiss-gpu)"
fi
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
