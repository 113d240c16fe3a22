"""Settings of the process for runs on a CPU, made before JAX is loaded. What the user set stays."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec

CPU_DEVICES = 2  # small matrix products fill no more than a core
TUNABLES = "GLIBC_TUNABLES"  # read when a process begins
LARGE_PAGES = "glibc.malloc.hugetlb=1"  # else a quarter of an update is page faults
CACHE_BYTES = 2 * 2**30


def runs_on_cpu() -> bool:
    """Return whether JAX will compute on the CPU: no platform is named, and no plugin is installed."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return platforms == "cpu" if platforms else not (find_spec("jax_plugins") or find_spec("libtpu"))


def use_large_pages() -> None:
    """Begin this process again with large pages, once; only where glibc allocates (Linux)."""
    if runs_on_cpu() and TUNABLES not in os.environ and platform.libc_ver()[0] == "glibc":
        os.environ[TUNABLES] = LARGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def tune_for_cpu(can_use_two_devices: bool) -> None:
    """Set the number of CPU devices and the compilation cache; call it before JAX is imported."""
    if "jax" in sys.modules or not runs_on_cpu():
        return
    if can_use_two_devices and (os.cpu_count() or 1) >= CPU_DEVICES:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CPU_DEVICES))
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and os.path.isabs(caches):  # else there is no home
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(caches, "calibadv", "jax")
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(CACHE_BYTES))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
