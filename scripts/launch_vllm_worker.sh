#!/usr/bin/env bash
# Starts one rollout worker in the foreground; every option of `python -m calibadv_jax.sampler.vllm_worker`
# works. Give the trainer its address: sampler.name=vllm sampler.urls=[http://127.0.0.1:8100]
#
#   scripts/launch_vllm_worker.sh --model /path/to/Qwen2.5-3B --port 8100 --max_model_len 16384
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
exec "$python" -m calibadv_jax.sampler.vllm_worker "$@"
