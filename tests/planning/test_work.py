"""Costs of a step beside XLA's counts, and the keys that a plan proposes."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from plan_rig import SHAPE, small

from calibadv_jax.contrib.commands.plan import changed, memory_of, remedy
from calibadv_jax.contrib.planning.compiled import OF_CRITIC, TRAINED, lowered_program, programs_of
from calibadv_jax.contrib.planning.hardware import find_target, placed_on, sampler_of
from calibadv_jax.contrib.planning.memory import GIB, peak_memory
from calibadv_jax.contrib.planning.work import Costs, Part, expected_rollouts, step_of
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh

pytestmark = pytest.mark.medium

FEW = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 512}
ARCHITECTURE = architecture_from_hf(SHAPE)
TARGET = find_target(gpu="h100", topology="1x1x4")
TWO = {"sampler__name": "vllm", "sampler__workers": 2, "sampler__worker_devices": "['0,1','2,3']"}
PARTS = [  # GPUs, changes, and of some parts operations, bytes of memory and bytes received
    ("1x1x4", {"mesh__data": 2, "mesh__fsdp": 2, "policy__remat": "none"}, {
        "update": (5.3773e12, 6.97753e9, 3.9337e8), "optimizer's step": (7.86739e8, 3.14696e8, 0),
        "prefill": (1.25043e12, 1.81371e9, 0), "decode": (1.38936e11, 4.7529e9, 0),
    }),
    # Two hosts: each has a sampler. A reference policy needs a pass of its own.
    ("1x2x2", {"mesh__fsdp": 2, "mesh__tensor": 2, "policy__remat": "dots", "loss__kl_coef": 0.1}, {
        "log-probabilities": (1.56337e12, 2.41071e9, 1.73555e8), "update": (5.65218e12, 7.38947e9, 3.86446e8),
        "optimizer's step": (3.9337e8, 1.57348e8, 0), "prefill": (1.25043e12, 1.02482e9, 0),
        "decode": (1.38936e11, 4.7529e9, 0),
    }),
    # No gradients of the base's weights; the logits are computed once.
    ("1x1x4", {"policy__lora__rank": 4, "policy__logprob_chunk": 2048}, {
        "update": (4.55267e12, 8.72818e9, 2.36894e8), "optimizer's step": (2.90816e6, 1.16326e6, 0),
        "decode": (1.38936e11, 2.78605e9, 0),
    }),
    ("1x1x4", {"advantage__name": "gae", "learner__epochs": 2, "learner__minibatch_size": 12}, {
        **dict.fromkeys(["log-probabilities", "critic's values"], (1.56337e12, 2.22095e9, 1.18011e8)),
        **dict.fromkeys(["update", "critic's update"], (1.43796e13, 2.01655e10, 7.96573e8)),
        "optimizer's step": (4.72044e9, 1.88817e9, 0),
    }),
    # vLLM's workers: two of one device with three slots each, two of two devices, and more slots than work.
    ("1x1x4", {"sampler__name": "vllm", "sampler__urls": "[http://a:1,http://b:1]", "sampler__slots": 3}, {
        "prefill": (1.25043e12, 3.62742e9, 0), "decode": (1.38936e11, 2.26181e10, 0),
    }),
    ("1x1x4", TWO | {"rollout__max_concurrency": 10}, {
        "prefill": (1.25043e12, 1.81371e9, 0), "decode": (1.38936e11, 7.11311e9, 0),
    }),
    ("1x1x4", {"sampler__slots": 64, "sampler__name": "vllm"}, {"decode": (1.38936e11, 7.2105e9, 0)}),
]  # fmt: skip


def step(folder, rollouts=(), **changed):
    config = placed_on(small(folder, **changed), TARGET)
    return step_of(config, ARCHITECTURE, expected_rollouts(config, *rollouts), TARGET)


FEW_ROWS = {"learner__row_length": 256, "rollout__max_length": 256, "rollout__max_prompt_length": 128}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_operations_are_those_that_xla_counts(tmp_path, remat):
    """Of layers without a loop, and rows of one block and one chunk: XLA counts the body of a loop once."""
    keys = {"policy__compute_dtype": "float32", "policy__remat": remat, "mesh__fsdp": 1} | FEW_ROWS
    config = small(tmp_path, **keys, policy__attention="xla", policy__attention_chunk=256)
    architecture = architecture_from_hf(SHAPE | FEW)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    costs, positions = Costs(config, architecture, 256), 4 * 256
    expected = {"update": costs.update(positions), "log-probabilities": costs.forward("", positions)}
    for name, part in expected.items():
        counted = lowered_program(config, architecture, mesh, name).cost_analysis()["flops"]
        assert 1 / 1.15 < part.flops / counted < 1.15, (name, part.flops, counted)


def test_every_program_of_a_run_is_lowered(tmp_path):
    """A critic's and the sampler's too."""
    config = small(tmp_path, mesh__fsdp=1, advantage__name="gae", **FEW_ROWS)
    mesh, names = make_mesh(config.mesh, jax.devices()[:1]), programs_of(config)
    assert set(names) == {*TRAINED, *OF_CRITIC, "prefill", "decode"}
    for name in names:
        assert lowered_program(config, architecture_from_hf(SHAPE | FEW), mesh, name).as_text()


def test_step_computes_full_rows_and_reports_fill(tmp_path):
    """32 trajectories: two in a row of 2,048 tokens, four rows a microbatch."""
    full = step(tmp_path, (1024, 100), learner__row_widths=1)
    assert full.fill == 1.0 and full.trained == 32 * 1024
    few = {"learner__minibatch_size": 2, "learner__row_widths": 1}  # a row in each microbatch of four
    assert step(tmp_path, (1024, 100), **few).fill == 0.25
    # Only several updates need the log-probabilities from before the first.
    assert "log-probabilities" not in {part.name for part in full.parts}


def test_part_takes_as_long_as_its_slowest_bound():
    chip = TARGET.chip
    part = Part("one", 4 * chip.flops, chip.bandwidth / 2, chip.links / 4, 4)
    assert part.seconds(TARGET, 1.0) == 1.0 and part.seconds(TARGET, 0.5) == 2.0
    assert replace(part, memory=3 * chip.bandwidth).seconds(TARGET, 1.0) == 3.0
    assert replace(part, received=5 * chip.links).seconds(TARGET, 1.0) == 5.0


def test_rollouts_and_update_overlap_on_separate_devices_only(tmp_path):
    asynchronous = {"sampler__name": "vllm", "rollout__max_staleness": 1, "loss__importance_cap": 2}
    apart = step(tmp_path, sampler__urls="[http://a:1]", **asynchronous)
    here = step(tmp_path, **asynchronous)
    assert apart.overlap and not here.overlap
    for each in (apart, here):
        times = {part.name: part.seconds(TARGET, 0.4) for part in each.parts}
        sampling, rest = times.pop("prefill") + times.pop("decode"), sum(times.values())
        expected = max(sampling, rest) if each.overlap else sampling + rest
        assert each.seconds(TARGET, 0.4) == pytest.approx(expected)


def test_expected_trajectories_are_the_longest_by_default(tmp_path):
    config = small(tmp_path)
    longest = expected_rollouts(config)
    assert (longest.trajectories, longest.tokens) == (32, 2048) and longest.sampled < 2048
    assert expected_rollouts(config, 1000, 50).sampled == 50
    assert expected_rollouts(small(tmp_path, rollout__max_searches=1)).sampled == 2 * 256  # and an answer
    for tokens, sampled in ((2049, 0), (100, 100)):
        with pytest.raises(UserError, match="--tokens 2049|--sampled 100"):
            expected_rollouts(config, tokens, sampled)


@pytest.mark.parametrize(("target", "changed", "expected"), PARTS, ids=range(len(PARTS)))
def test_operations_and_bytes_of_each_part(tmp_path, target, changed, expected):
    """Of 32 trajectories of 1,000 tokens, 100 sampled."""
    target = find_target(gpu="h100", topology=target)
    config = placed_on(small(tmp_path, **changed), target)
    parts = step_of(config, ARCHITECTURE, expected_rollouts(config, 1000, 100), target).parts
    counted = {part.name: (part.flops, part.memory, part.received) for part in parts}
    assert len(counted) == len(parts) and counted.keys() >= expected.keys()
    for name, values in expected.items():
        assert counted[name] == pytest.approx(values, rel=1e-5), name


def needed(config, target):
    return peak_memory(memory_of(config, ARCHITECTURE, target))


def changes_of(line):
    """The overrides that a line proposes."""
    keys = [word.partition("=") for word in line.split() if "=" in word]
    return {key: int(value) if value.isdigit() else value for key, _, value in keys}


def remedied(config, target, limit, scale=1.0):
    """The line of the remedy, and its overrides, which fit."""
    line = remedy(config, ARCHITECTURE, target, limit, scale)
    assert line.startswith("would fit: ")
    assert needed(changed(config, changes_of(line)), target) * scale <= limit
    return line, changes_of(line)


ROWS, OFFLOAD, SLOTS = "learner.microbatch_rows", "learner.optimizer.offload", "sampler.slots"


@pytest.mark.parametrize(
    ("keys", "changes", "expected"),
    [  # of a run that may need what it needs with these changes: the cheapest remedy
        ({"policy__remat": "none", "learner__microbatch_rows": 1}, *[{"policy.remat": "full"}] * 2),
        ({}, *[{ROWS: 1, OFFLOAD: "host", SLOTS: 5}] * 2),
        # The dearest is relaxed first.
        ({"learner__optimizer__offload": "host"}, {ROWS: 2, SLOTS: 8}, {ROWS: 1, SLOTS: 12}),
    ],
    ids=str,
)
def test_remedy_is_the_cheapest_that_fits(tmp_path, keys, changes, expected):
    """No part of it fits, and no milder value."""
    target = find_target(gpu="h100", topology="1x1x1")
    config = placed_on(small(tmp_path, **{"learner__microbatch_rows": 4} | keys), target)
    limit = needed(changed(config, changes), target)
    line, result = remedied(config, target, limit)
    assert result == expected
    for key in expected:
        part = {name: value for name, value in expected.items() if name != key}
        assert not part or needed(changed(config, part), target) > limit
    assert f" ({needed(changed(config, expected), target) / GIB:.1f} GiB by the formula" in line


def test_least_memory_is_named_where_nothing_fits(tmp_path):
    target = find_target(tpu="v5e:2x2")
    config = placed_on(small(tmp_path), target)
    line = remedy(config, ARCHITECTURE, target, needed(config, target) / 100)
    assert "take more devices or larger ones" in line and "adapters" not in line
    assert line.startswith("no combination of ") and "(the least: 0.1 GiB)" in line
    strongest = {"learner.optimizer.offload": "host", "mesh.fsdp": 2, "mesh.tensor": 2}
    strongest |= {"sampler.name": "vllm", "learner.microbatch_rows": 2}
    least = needed(changed(config, strongest), target)
    line = remedy(config, ARCHITECTURE, target, least * 0.9)
    assert ", or train adapters: policy.lora.rank=16" in line
    assert needed(changed(config, changes_of(line.partition("adapters:")[2])), target) <= least * 0.9


def test_compilers_count_and_gaps_are_in_the_line(tmp_path):
    target = find_target(tpu="v5e:2x2")
    config = placed_on(small(tmp_path), target)
    limit = needed(config, target) - 1
    line, _ = remedied(config, target, limit * 1.25, 1.25)
    assert "by the formula, times 1.25 as the compiler counts; programs may need up to 1.6 times" in line


def test_each_host_has_a_sampler_of_its_own(tmp_path):
    """Its weights lie on the devices of the host, and it has a share of the slots."""
    two, single = find_target(gpu="h100", topology="1x2x4"), find_target(gpu="h100", topology="1x1x8")
    config = small(tmp_path, learner__microbatch_rows=8)
    apart, together = (memory_of(placed_on(config, to), ARCHITECTURE, to) for to in (two, single))
    assert apart["sampler weights"] == pytest.approx(2 * together["sampler weights"], rel=0.01)  # but norms
    assert apart["kv cache"] == together["kv cache"]
    assert apart["parameters"] == together["parameters"]
    odd = placed_on(small(tmp_path, learner__microbatch_rows=8, sampler__slots=9), two)
    assert sampler_of(odd, two).sampler.slots == 5
    slow = placed_on(small(tmp_path, sampler__slots=1, learner__microbatch_rows=8, policy__remat="full"), two)
    strongest = {"learner.optimizer.offload": "host", "mesh.fsdp": 4, "mesh.tensor": 2, ROWS: 4}
    vllm = {"sampler.name": "vllm", "sampler.workers": 2}
    _, result = remedied(slow, two, needed(changed(slow, strongest | vllm), two))
    assert result.items() >= vllm.items()
