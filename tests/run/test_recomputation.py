"""`policy.remat=auto`: the fastest setting that fits by the compiler's plan, the same in all processes."""

import pytest
from config_rig import changed
from trainer_rig import MODEL

from calibadv_jax.contrib.planning import compiled, memory
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.run import recomputation
from calibadv_jax.run.recomputation import USABLE_SHARE, fits, least_recomputation, with_chosen_remat

CONFIG = changed(
    policy={"remat": "auto", "compute_dtype": "float32", "attention": "xla"},
    learner={"pack_length": 256, "microbatch_rows": 8},
    rollout={"max_length": 128, "max_prompt_length": 64},
    sampler={"slots": 2},
)


def test_fastest_setting_that_fits_is_taken_and_the_last_is_not_tried():
    tried = []

    def fits(remat):
        tried.append(remat)
        return remat == "attention"

    assert least_recomputation(fits) == "attention"
    assert tried == ["none", "dots", "attention"]
    assert least_recomputation(lambda remat: False) == "full"
    assert tried == ["none", "dots", "attention"]


def test_setting_that_is_named_is_kept():
    config = changed(CONFIG, policy={"remat": "dots"})
    assert with_chosen_remat(config, MODEL, ProcessGroup(), pytest.fail) is MODEL


class SecondOfTwo(ProcessGroup):
    """Another process has room for less."""

    process_count = 2

    def all_gather(self, name, value):
        assert name == "policy.remat"
        return ["attention", value]


@pytest.mark.parametrize(
    ("own", "group", "chosen"),
    [("none", ProcessGroup(), "none"), ("none", SecondOfTwo(), "attention"), ("full", SecondOfTwo(), "full")],
)
def test_all_processes_take_the_choice_of_the_one_with_the_least_room(monkeypatch, own, group, chosen):
    monkeypatch.setattr(recomputation, "fits", lambda config, model, remat, limit: remat == own)
    said = []
    model = with_chosen_remat(CONFIG, MODEL, group, said.append)
    assert model.policy.numerics.remat == chosen
    assert model.policy.architecture == MODEL.policy.architecture
    assert said[0].startswith(f"policy.remat=auto: {chosen}, the least recomputation that fits ")


def test_device_of_unknown_memory_recomputes_everything(monkeypatch):
    monkeypatch.setattr(memory, "device_limit", lambda devices: 0.0)
    said = []
    model = with_chosen_remat(CONFIG, MODEL, ProcessGroup(), said.append)
    assert model.policy.numerics.remat == "full"
    assert said == ["policy.remat=auto: full, since the device does not say how much memory it has"]


def needed(remat, config=CONFIG, name="update"):
    """Bytes by the compiler's plan, with all that lies beside."""
    config = changed(config, policy={"remat": remat})
    architecture = MODEL.policy.architecture
    estimate = memory.estimate_memory(config, architecture, dict(MODEL.mesh.shape))
    program = compiled.lowered_program(config, architecture, MODEL.mesh, name)
    beside = memory.memory_beside(estimate, name)
    return compiled.compiled_figures(program, beside)["needed"] * memory.GIB


@pytest.mark.medium
def test_choice_is_by_the_plan_of_the_compiler(monkeypatch):
    least = needed("none")
    assert fits(CONFIG, MODEL, "none", least)
    assert not fits(CONFIG, MODEL, "none", least - 1)
    monkeypatch.setattr(memory, "device_limit", lambda devices: least / USABLE_SHARE + 1)
    model = with_chosen_remat(CONFIG, MODEL, ProcessGroup(), lambda line: None)
    assert model.policy.numerics.remat == "none"


@pytest.mark.medium
def test_update_of_a_critic_must_fit_too():
    config = changed(CONFIG, advantage={"name": "gae"})
    most = max(needed("attention", config, name) for name in ("update", "critic's update"))
    assert fits(config, MODEL, "attention", most)
    assert not fits(config, MODEL, "attention", most - 1)


def test_setting_that_is_far_too_large_is_not_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "compiled_figures", pytest.fail)
    assert not fits(CONFIG, MODEL, "none", 1e6)


def test_program_that_the_compiler_refuses_does_not_fit(monkeypatch):
    monkeypatch.setattr(compiled, "compiled_figures", lambda program, beside: {"refused": "out of memory"})
    assert not fits(CONFIG, MODEL, "none", 1e15)
