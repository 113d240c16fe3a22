#!/usr/bin/env bash
# Sets up .venv and trains a search agent from nothing on the CPU. Arguments are passed on:
#   scripts/quickstart.sh run.seed=1 learner.steps=20
# PYTHON names the Python to use, VENV another folder for the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$root"
venv="${VENV:-$root/.venv}"
ensure_venv "$venv" cpu,report # report: the page of curves that the quickstart names at its end
export JAX_NUM_CPU_DEVICES="${JAX_NUM_CPU_DEVICES:-2}" # small matrix products fill no more than a core
# Linux, glibc: large pages for the memory that XLA takes anew at every call, else a quarter of an update is
# page faults.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
# What evaluation and training both compile is compiled once, and a second run finds it.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$venv/jax_cache}"
forget_unused "$venv/jax_cache"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0}"
exec "$venv/bin/python" -m calibadv_jax quickstart "$@"
