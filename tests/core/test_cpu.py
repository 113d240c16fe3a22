"""Settings of the process for runs on a CPU."""

import os
import sys

import pytest

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.core import cpu

VARIABLES = ("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    for name in (*VARIABLES, cpu.TUNABLES, "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "x")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


@pytest.mark.parametrize("plugin", ["jax_plugins", "libtpu", ""])
def test_plugin_is_an_accelerator(monkeypatch, plugin):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(cpu, "find_spec", lambda name: name == plugin)
    assert cpu.runs_on_cpu() == (plugin == "")


def test_cpu_runs_have_two_devices_and_a_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.tune_for_cpu(True)
    assert [os.environ[name] for name in VARIABLES] == ["2", str(tmp_path / "calibadv/jax"), str(2**31)]
    for name in VARIABLES:
        monkeypatch.setenv(name, "8")
    cpu.tune_for_cpu(True)
    assert all(os.environ[name] == "8" for name in VARIABLES), "what the user set stays"


@pytest.mark.parametrize("why", ["one core", "indivisible", "accelerator", "JAX is loaded", "no home"])
def test_number_of_devices_or_cache_stays(monkeypatch, why):
    monkeypatch.setattr(os, "cpu_count", lambda: 1 if why == "one core" else 4)
    if why == "no home":
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    if why == "accelerator":
        monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    if why == "JAX is loaded":
        monkeypatch.setitem(sys.modules, "jax", object())
    cpu.tune_for_cpu(why != "indivisible")
    assert ("JAX_NUM_CPU_DEVICES" in os.environ) == (why == "no home")
    assert ("JAX_COMPILATION_CACHE_DIR" in os.environ) == (why in ("one core", "indivisible"))


def test_process_begins_again_with_large_pages_once(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execv", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.39"))
    cpu.use_large_pages()
    assert calls == [(sys.executable, [sys.executable, *sys.orig_argv[1:]])]
    assert os.environ[cpu.TUNABLES] == cpu.LARGE_PAGES
    cpu.use_large_pages()
    assert len(calls) == 1


def test_quickstart_divides_by_two_devices():
    assert cli._divides_by(2, load_config("quickstart"))
    numbers = ("learner.microbatch_rows=3", "sft.rows=3", "mesh.data=1", "distributed.num_processes=2")
    for override in (*numbers, "policy.init.hidden_size=2048", "policy.init.hidden_size=wide"):
        assert not cli._divides_by(2, load_config("quickstart", [override])), override
