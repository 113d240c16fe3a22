"""Settings of the process for runs on a CPU, made before JAX is loaded.

Environment variables that the user has set are not changed.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec

# Devices of a process: a small matrix product uses no more than one core.
CPU_DEVICES = 2
# Environment variable that glibc reads when a process starts.
TUNABLES = "GLIBC_TUNABLES"
# Without large pages, a quarter of an update's time is page faults.
LARGE_PAGES = "glibc.malloc.hugetlb=1"
# Largest size of JAX's compilation cache on disk.
CACHE_BYTES = 2 * 2**30


def runs_on_cpu() -> bool:
    """Return whether JAX will compute on the CPU.

    JAX_PLATFORMS decides if it is set. Otherwise JAX uses the CPU, unless the plugin of an accelerator is
    installed.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms == "cpu"
    has_accelerator = find_spec("jax_plugins") or find_spec("libtpu")
    return not has_accelerator


def use_large_pages() -> None:
    """Restart this process with large pages, once, if its memory comes from glibc (Linux)."""
    if not runs_on_cpu() or TUNABLES in os.environ:
        return
    libc, _ = platform.libc_ver()
    if libc == "glibc":
        os.environ[TUNABLES] = LARGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def tune_for_cpu(can_use_two_devices: bool) -> None:
    """Set the number of CPU devices and the compilation cache; call it before JAX is imported.

    Args:
        can_use_two_devices: Whether the run can be divided between two devices.
    """
    if "jax" in sys.modules or not runs_on_cpu():
        return
    num_cores = os.cpu_count() or 1
    if can_use_two_devices and num_cores >= CPU_DEVICES:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CPU_DEVICES))
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    has_home = os.path.isabs(caches)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and has_home:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(caches, "calibadv", "jax")
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(CACHE_BYTES))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
