"""What must hold between keys: each combination that cannot work is refused, its neighbours are not."""

import itertools
from dataclasses import replace

import pytest

from calibadv_jax.config import Config, RolloutConfig, SamplerConfig


def build(**sections):
    plain = Config()
    return Config(**{name: replace(getattr(plain, name), **values) for name, values in sections.items()})


SETTINGS = {
    "top_p": (1.0, 0.9),
    "top_k": (0, 20),
    "sampler": ("jax", "vllm"),
    "importance_cap": (0.0, 2.0),
    "old_logprobs": ("recompute", "sampler"),
}


@pytest.mark.parametrize("top_p", SETTINGS["top_p"])
@pytest.mark.parametrize("top_k", SETTINGS["top_k"])
@pytest.mark.parametrize("sampler", SETTINGS["sampler"])
def test_vllms_log_probabilities_are_used_only_where_nothing_is_cut_off(top_p, top_k, sampler):
    for cap, old in itertools.product(SETTINGS["importance_cap"], SETTINGS["old_logprobs"]):
        sections = {
            "rollout": {"top_p": top_p, "top_k": top_k},
            "sampler": {"name": sampler},
            "loss": {"importance_cap": cap, "old_logprobs": old},
        }
        is_cut, is_used = top_p < 1 or top_k > 0, cap > 0 or old == "sampler"
        if is_cut and is_used and sampler == "vllm":
            with pytest.raises(ValueError, match="vLLM reports log-probabilities after top_p and top_k"):
                build(**sections)
        else:
            build(**sections)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("sampler", SETTINGS["sampler"])
def test_only_what_corrects_for_stale_trajectories_may_run_ahead(staleness, sampler):
    for cap, old in itertools.product(SETTINGS["importance_cap"], SETTINGS["old_logprobs"]):
        sections = {
            "rollout": {"max_staleness": staleness},
            "sampler": {"name": sampler},
            "loss": {"importance_cap": cap, "old_logprobs": old},
        }
        message = (
            "samples on the learner's own devices"
            if sampler == "jax"
            else "does not correct for"
            if not cap and old == "recompute"
            else None
        )
        if staleness and message:
            with pytest.raises(ValueError, match=message):
                build(**sections)
        else:
            build(**sections)


@pytest.mark.parametrize(("row_length", "is_enough"), [(99, False), (100, True), (101, True)])
def test_the_longest_trajectory_fits_a_row(row_length, is_enough):
    sections = {
        "rollout": {"max_length": 100, "max_prompt_length": 50},
        "learner": {"row_length": row_length},
    }
    if is_enough:
        build(**sections)
    else:
        with pytest.raises(ValueError, match="learner.row_length is 99, .* rollout.max_length = 100"):
            build(**sections)


@pytest.mark.parametrize(("prompt", "is_short_enough"), [(99, True), (100, False), (101, False)])
def test_a_prompt_leaves_room_for_a_token(prompt, is_short_enough):
    if is_short_enough:
        RolloutConfig(max_prompt_length=prompt, max_length=100)
    else:
        with pytest.raises(ValueError, match=rf"max_prompt_length is {prompt}, .*below max_length"):
            RolloutConfig(max_prompt_length=prompt, max_length=100)


@pytest.mark.parametrize(("devices", "fits"), [([], True), (["0", "1"], True), (["0"], False)])
def test_every_worker_has_its_devices(devices, fits):
    if fits:
        SamplerConfig(workers=2, worker_devices=devices)
    else:
        with pytest.raises(ValueError, match="worker_devices names 1 workers, but workers is 2"):
            SamplerConfig(workers=2, worker_devices=devices)


@pytest.mark.parametrize("dtype", ["", "bfloat16", "float32"])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize("sampler", SETTINGS["sampler"])
def test_a_sampler_of_another_precision_needs_a_loss_that_corrects_for_it(dtype, compute, sampler):
    for cap, old in itertools.product(SETTINGS["importance_cap"], SETTINGS["old_logprobs"]):
        sections = {
            "policy": {"compute_dtype": compute},
            "sampler": {"name": sampler, "dtype": dtype},
            "loss": {"importance_cap": cap, "old_logprobs": old},
        }
        if dtype and sampler == "jax":
            message = "leave sampler.dtype out, or set sampler.name=vllm"
        elif dtype not in ("", compute) and not cap and old == "recompute":
            message = "set loss.importance_cap=2, or leave sampler.dtype out"
        else:
            build(**sections)
            continue
        with pytest.raises(ValueError, match=message):
            build(**sections)


@pytest.mark.parametrize(("warmup", "fits"), [(0, True), (3, True), (4, False)])
@pytest.mark.parametrize("base", ["gae", "grpo"])
def test_a_critics_warm_up_leaves_steps_for_the_policy(base, warmup, fits):
    sections = {
        "learner": {"steps": 4},
        "critic": {"warmup_steps": warmup},
        "advantage": {"base": base},
    }
    if fits or base == "grpo":
        build(**sections)
    else:
        with pytest.raises(ValueError, match="critic.warmup_steps is 4, but the run has learner.steps = 4"):
            build(**sections)


@pytest.mark.parametrize(
    ("every", "keep", "patience", "needed"),
    [(1, 1, 1, 0), (1, 2, 2, 0), (1, 2, 3, 3), (2, 1, 3, 2), (2, 2, 3, 0), (3, 2, 5, 3), (50, 1, 3, 2)],
)
def test_a_rollback_finds_a_checkpoint_of_before_the_bad_steps(every, keep, patience, needed):
    """Bad steps are saved too while the guard waits: they must not be all that is kept."""
    sections = {"checkpoint": {"every": every, "keep": keep}, "guards": {"patience": patience}}
    build(**sections)
    sections["guards"]["action"] = "rollback"
    if needed:
        with pytest.raises(ValueError, match=rf"action is rollback.* set checkpoint.keep={needed} or more"):
            build(**sections)
        sections["checkpoint"]["keep"] = needed
    build(**sections)


def test_a_rollback_needs_checkpoints():
    with pytest.raises(ValueError, match="action is rollback, but checkpoint.every is 0"):
        build(checkpoint={"every": 0}, guards={"action": "rollback"})
