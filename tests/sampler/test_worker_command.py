"""What vLLM's server is started with: each of these options keeps the sampler and the learner comparable."""

from importlib.metadata import PackageNotFoundError

import pytest

from calibadv_jax.sampler import vllm_worker
from calibadv_jax.sampler.vllm_worker import parse, server_command


def command(*arguments, port=8123):
    return server_command(parse(["--model", "folder", *arguments]), port)


def value_of(words, option):
    return words[words.index(option) + 1]


GPU = ("--flavour", "gpu")


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        ((), "--logprobs-mode", "processed_logprobs"),  # at the sampling temperature
        ((), "--generation-config", "vllm"),  # no defaults out of the model's folder
        ((), "--dtype", "bfloat16"),
        (("--dtype", "float32"), "--dtype", "float32"),
        ((), "--weight-transfer-config", '{"backend": "orbax"}'),
        ((), "--load-format", "dummy"),  # weights come from swaps
        (("--load_weights",), "--load-format", "auto"),
        ((), "--model", "folder"),
        ((), "--served-model-name", "policy"),
        ((), "--port", "8123"),
        ((), "--host", "127.0.0.1"),
        ((), "--max-model-len", None),
        (("--max_model_len", "512"), "--max-model-len", "512"),
        (("--max_num_seqs", "7"), "--max-num-seqs", "7"),
        (("--tensor_parallel_size", "2"), "--tensor-parallel-size", "2"),
        (("--seed", "3"), "--seed", "3"),
        (("--", "--enable-x", "1"), "--enable-x", "1"),
        ((*GPU, "--gpu_memory_utilization", "0.5"), "--gpu-memory-utilization", "0.5"),
        (("--flavour", "tpu"), "--gpu-memory-utilization", None),
    ],
)
def test_options_reach_the_server(arguments, option, value):
    words, environment = command(*arguments)
    assert (value_of(words, option) if option in words else None) == value
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"  # without it there are no routes to swap by
    assert arguments[:2] != GPU or not {"--enforce-eager", "VLLM_CPU_KVCACHE_SPACE"} & {*words, *environment}


@pytest.mark.parametrize(
    ("package", "version", "flavour"),
    [
        ("vllm-cpu", "0.32.0", "cpu"),
        ("vllm", "0.32.0+cpu", "cpu"),
        ("vllm-tpu", "0.32.0", "tpu"),
        ("vllm", "0.32.0", "gpu"),
        ("vllm", "0.32.0+cu130", "gpu"),
    ],
)
def test_installed_build_is_used(package, version, flavour, monkeypatch):
    def version_of(name):
        if name != package:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(vllm_worker, "version", version_of)
    assert vllm_worker.installed_flavour() == flavour
    _, environment = command()
    assert ("VLLM_CPU_KVCACHE_SPACE" in environment) == (flavour == "cpu")
    assert "VLLM_CPU_KVCACHE_SPACE" not in command("--flavour", "gpu")[1]


@pytest.mark.parametrize(("length", "whole"), [(512, "2048"), (20000, "20000")])
def test_cpu_prefills_a_prompt_in_one_part(length, whole, monkeypatch):
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    arguments = ("--flavour", "cpu", "--max_model_len", str(length), "--kv_cache_gib", "3")
    words, environment = command(*arguments)
    assert "--no-enable-chunked-prefill" in words
    assert value_of(words, "--max-num-batched-tokens") == whole
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("OMP_NUM_THREADS", "17")  # the user's own wins
    assert command(*arguments)[1]["OMP_NUM_THREADS"] == "17"
