# Sourced by the other scripts: the repository root, a suitable Python, a virtual environment.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Container images often set it: then each process that is started compiles thousands of modules again.
unset PYTHONDONTWRITEBYTECODE

fail() {
  echo "error: $*" >&2
  exit 2
}

is_suitable() { # a command that exists but fails (a pyenv shim, say) is not
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

has_venv() {
  "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# Prints the first suitable Python. PYTHON, when set, is the only candidate.
find_python() {
  local candidate without_venv=""
  for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
    is_suitable "$candidate" || continue
    if has_venv "$candidate"; then
      echo "$candidate"
      return
    fi
    without_venv="$candidate"
  done
  if [[ -n "$without_venv" ]]; then
    fail "$without_venv has no venv module; install it (Debian and Ubuntu: the package python3-venv)"
  elif [[ -n "${PYTHON:-}" ]]; then
    fail "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13"
  else
    fail "no Python 3.11, 3.12 or 3.13 found; install one, or name it: PYTHON=/path/to/python3 $0"
  fi
}

# ensure_venv DIR EXTRAS: a virtual environment with this project's EXTRAS, made or renewed only where
# pyproject.toml, the extras or the place of the repository have changed. The stamp is written last,
# so that an interrupted installation is completed by the next run.
ensure_venv() {
  local dir="$1" extras="$2" python wanted
  local stamp="$dir/installed"
  wanted="$root[$extras]"$'\n'"$(<"$root/pyproject.toml")"
  if is_suitable "$dir/bin/python" && [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
    return
  fi
  if ! is_suitable "$dir/bin/python"; then
    python="$(find_python)"
    "$python" -m venv --clear "$dir" || fail "$python could not make a virtual environment in $dir"
  fi
  echo "installing into $dir ($("$dir/bin/python" --version)); later runs skip this" >&2
  "$dir/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --editable "$root[$extras]" ||
    fail "installation into $dir failed; see above, then run the same command again"
  printf '%s\n' "$wanted" >"$stamp"
}

# forget_unused DIR: removes the files that nothing has read for two weeks. For folders of compiled programs:
# JAX's own bound (jax_compilation_cache_max_size) reads a file of every entry whenever it adds one.
forget_unused() {
  find "$1" -type f -atime +14 -delete 2>/dev/null || true # no such folder, or another process does the same
}
