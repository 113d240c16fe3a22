"""Rules between keys: each combination that cannot work is refused, its neighbours are not; marks of keys."""

import itertools
from contextlib import nullcontext

import pytest
from config_rig import changed

from calibadv_jax.config import Config, MeshConfig, ToolConfig, known_keys
from calibadv_jax.config.keys import is_among, keys_with_mark
from calibadv_jax.config.sections.section import Mark, normal_url
from calibadv_jax.evaluation.methods import method_config


def check(message, **sections):
    """Build a config and expect this refusal; none: the config is accepted."""
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        changed(**sections)


@pytest.mark.parametrize(
    "sampling", [{}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9, "top_k": 20}], ids=str
)
@pytest.mark.parametrize("name", ["jax", "vllm"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_sampler_and_loss_fit_together(name, staleness, sampling):
    dtypes, precisions = ("", "bfloat16", "float32"), ("bfloat16", "float32")
    for dtype, compute, cap, old in itertools.product(dtypes, precisions, (0, 2), ("recompute", "sampler")):
        is_vllm, is_corrected = name == "vllm", cap > 0 or old == "sampler"
        refusals = {
            "samples on the learner's own devices": staleness and not is_vllm,
            "set loss.importance_cap=2, or rollout.max_staleness=0": staleness and not is_corrected,
            "leave sampler.dtype out, or set sampler.name=vllm": dtype and not is_vllm,
            "importance_cap=2, or leave sampler.dtype": dtype not in ("", compute) and not is_corrected,
            "vLLM reports log-probabilities after top_p and top_k": sampling and is_vllm and is_corrected,
        }
        check(
            next((message for message, is_refused in refusals.items() if is_refused), None),
            rollout=sampling | {"max_staleness": staleness},
            sampler={"name": name, "dtype": dtype},
            policy={"compute_dtype": compute},
            loss={"importance_cap": float(cap), "old_logprobs": old},
        )


LIMITS = {"max_length": 100, "max_prompt_length": 50}


def critic(warmup, base):
    return {"learner": {"steps": 4}, "critic": {"warmup_steps": warmup}, "advantage": {"base": base}}


@pytest.mark.parametrize(
    ("message", "sections"),
    [
        ("pack_length is 99, .*max_length = 100", {"rollout": LIMITS, "learner": {"pack_length": 99}}),
        *((None, {"rollout": LIMITS, "learner": {"pack_length": row}}) for row in (100, 101)),
        ("max_prompt_length is 100, .*below max_le", {"rollout": LIMITS | {"max_prompt_length": 100}}),
        ("max_prompt_length is 101, .*below max_le", {"rollout": LIMITS | {"max_prompt_length": 101}}),
        (None, {"rollout": LIMITS | {"max_prompt_length": 99}}),
        ("urls is http://a, http://a: give each", {"sampler": {"urls": ["http://a", "http://a"]}}),
        ("urls is http://a, http://a/: give each", {"sampler": {"urls": ["http://a", "http://a/"]}}),
        ("urls is .*: give each", {"sampler": {"urls": ["http://Node:8100", "http://node:8100//"]}}),
        ("urls is .*: give each", {"sampler": {"urls": ["http://a:80", "http://b", "HTTP://a"]}}),
        ("worker_devices names 1 workers, but", {"sampler": {"workers": 2, "worker_devices": ["0"]}}),
        *((None, {"sampler": {"workers": 2, "worker_devices": names}}) for names in ([], ["0", "1"])),
        ("critic.warmup_steps is 4, but must be below learner.steps", critic(4, "gae")),
        *((None, critic(*case)) for case in ((0, "gae"), (3, "gae"), (4, "grpo"))),
        ("but checkpoint.every is 0", {"checkpoint": {"every": 0}, "guards": {"action": "rollback"}}),
    ],
    ids=str,
)
def test_bounds_between_keys(message, sections):
    check(message, **sections)


CALLING = {"protocol": "tool_calls"}


@pytest.mark.parametrize(
    ("message", "sections"),
    [
        (None, {"rollout": CALLING}),
        (None, {"rollout": CALLING, "prompt": {"template": "from_data"}}),
        ("set prompt.system and prompt.user", {"rollout": CALLING, "prompt": {"template": "short"}}),
        ("prepend_think is on", {"rollout": CALLING, "prompt": {"prepend_think": True}}),
        ("set it to auto", {"rollout": CALLING, "prompt": {"chat": "off"}}),
        (None, {"rollout": CALLING, "demonstrations": {"file": "demos.jsonl"}}),
        ("must contain {question}", {"prompt": {"user": "Who?"}}),
        *(
            (None, {"rollout": CALLING, "reward": {"answer_from": place}})
            for place in ("tag", "whole", "box")
        ),
        ("answer_from is box, but with rollout.protocol=tags", {"reward": {"answer_from": "box"}}),
        (None, {"reward": {"answer_from": "tag"}}),
        ("format is 'xml': must be one of auto, hermes", {"tool_calls": {"format": "xml"}}),
        (None, {"tool_calls": {"format": "my_package.my_module:Format"}}),
        ("may not hold 'tools'", {"prompt": {"chat_template_kwargs": {"tools": []}}}),
    ],
    ids=str,
)
def test_tool_calls_fit_the_run(message, sections):
    check(message, **sections)


SERVED = {"url": "http://127.0.0.1:1/v1", "model": "m"}
TITLES = {"policy": "initial", "hint": "{titles}"}


@pytest.mark.parametrize(
    ("message", "sections"),
    [
        (None, {"teacher": {"policy": "initial"}}),
        (None, {"teacher": SERVED}),
        ("policy and url both name a teacher", {"teacher": SERVED | {"policy": "initial"}}),
        ("set both for a teacher at a server", {"teacher": {"url": SERVED["url"]}}),
        ("set both for a teacher at a server", {"teacher": {"model": "m"}}),
        ("url holds a user .* TEACHER_TOKEN", {"teacher": SERVED | {"url": "http://me:secret@node/v1"}}),
        ("teaches nothing without a hint", {"teacher": {"policy": "current"}}),
        (None, {"teacher": {"policy": "current", "hint": " ({answer})"}}),
        (r"hint holds \{golden\}, but only", {"teacher": {"policy": "initial", "hint": "{golden}"}}),
        ("coef_steps is 0: set both", {"teacher": {"policy": "initial", "coef_end": 0.5}}),
        (None, {"teacher": {"policy": "initial", "coef_end": 0.5, "coef_steps": 1}}),
        (r"names \{titles\}, but retriever.corpus", {"teacher": TITLES}),
        (None, {"teacher": TITLES, "retriever": {"corpus": "corpus.jsonl"}}),
        ("at temperature 1: set it to 1", {"teacher": SERVED, "rollout": {"temperature": 0.7}}),
        *((None, {"teacher": SERVED, "rollout": {"temperature": float(t)}}) for t in (0, 1)),
        (None, {"teacher": {"policy": "initial"}, "rollout": {"temperature": 0.7}}),
        ("set teacher.acts_on=loss", {"teacher": {"policy": "initial"}, "loss": {"name": "lld"}}),
        (None, {"teacher": {"policy": "initial", "acts_on": "loss"}, "loss": {"name": "lld"}}),
        (None, {"loss": {"name": "lld"}}),
        ("teacher.reward_weight is set, but there is no teacher", {"teacher": {"reward_weight": 0.0}}),
        ("teacher.hint is set, but there is no teacher", {"teacher": {"hint": "{answer}"}}),
    ],
    ids=str,
)
def test_teacher_fits_the_run(message, sections):
    check(message, **sections)


SHOWN, CONTINUED, GAE = {"file": "d.jsonl"}, {"per_group": 2}, {"name": "gae"}


@pytest.mark.parametrize(
    ("message", "sections"),
    [
        (None, {"demonstrations": SHOWN | {"per_group": 2}, "continuations": CONTINUED}),
        (
            "demonstrations.first_steps is set, but there are no demonstrations",
            {"demonstrations": {"first_steps": 9}},
        ),
        ("importance is ratio: set importance=shaped", {"demonstrations": SHOWN | {"gamma": 0.5}}),
        (None, {"demonstrations": SHOWN | {"gamma": 0.5, "importance": "shaped"}}),
        (
            "only_unsolved is set, but continuations.per_group is 0",
            {"continuations": {"only_unsolved": False}},
        ),
        (r"group_size is 5, but demonstrations.per_group = 5:", {"demonstrations": SHOWN | {"per_group": 5}}),
        (
            "demonstrations.per_group = 3 and continuations.per_group = 2: raise",
            {"demonstrations": SHOWN | {"per_group": 3}, "continuations": CONTINUED},
        ),
        ("demonstrations are on, but advantage.name=gae", {"demonstrations": SHOWN, "advantage": GAE}),
        ("continuations are on, but advantage.name=gae", {"continuations": CONTINUED, "advantage": GAE}),
        (None, {"advantage": GAE}),
        (None, {"demonstrations": SHOWN, "teacher": {"policy": "initial"}, "loss": {"kl_coef": 0.1}}),
        (
            None,
            {
                "continuations": CONTINUED,
                "rollout": {"max_staleness": 1},
                "sampler": {"name": "vllm"},
                "loss": {"importance_cap": 2.0},
            },
        ),
    ],
    ids=str,
)
def test_groups_keep_sampled_trajectories(message, sections):
    check(message, **sections)


@pytest.mark.parametrize(
    ("every", "keep", "patience", "needed"),
    [(1, 1, 1, 0), (1, 2, 2, 0), (1, 2, 3, 3), (2, 1, 3, 2), (2, 2, 3, 0), (3, 2, 5, 3), (50, 1, 3, 2)],
)
def test_rollback_keeps_a_checkpoint_before_bad_steps(every, keep, patience, needed):
    """Bad steps are saved too while the guard waits: they must not be all that is kept."""
    checkpoint, guards = {"every": every, "keep": keep}, {"patience_steps": patience, "action": "rollback"}
    check(None, checkpoint=checkpoint, guards={"patience_steps": patience})
    message = rf"action is rollback.* set checkpoint.keep={needed} or more" if needed else None
    check(message, checkpoint=checkpoint, guards=guards)
    check(None, checkpoint=checkpoint | {"keep": needed or keep}, guards=guards)


# A mark that is lost or added changes which runs may go on, or which scores are used again.
EXPECTED = {
    Mark.UNLEARNED: (
        "run.dir", "run.mirror", "mesh", "distributed", "world", "data.columns", "data.train",
        "data.eval", "data.eval_limit", "data.overlong_prompts", "policy.path", "policy.tokenizer",
        "policy.attention", "policy.attention_chunk", "policy.logprob_chunk", "policy.lora.init_from",
        "policy.lora.snapshots", "policy.remat", "rollout.max_concurrency", "rollout.max_failed_share",
        "rollout.time_limit", "sampler", "retriever", "learner.microbatch_rows", "learner.pack_length",
        "learner.row_widths", "learner.share_prefixes", "learner.optimizer.offload",
        "critic.optimizer.offload", "sft", "checkpoint", "evaluate", "guards", "export", "log",
        "advantage.probes", "reward.judge.url", "reward.judge.timeout", "reward.judge.patience",
        "reward.judge.max_concurrency", "teacher.url", "teacher.timeout", "teacher.patience",
        "teacher.max_concurrency",
    ),
    Mark.LEARNED: (
        "sampler.name", "retriever.encoder", "retriever.topk",
        "retriever.rerank_candidates", "retriever.reranker", "retriever.page_address", "retriever.model",
    ),
    Mark.COLD_START: (
        "run.seed", "policy.init", "policy.lora", "world", "prompt", "rollout.protocol", "tools",
        "tool_calls", "reward.answer_from", "sft",
    ),
    Mark.PER_RUN: (
        "run", "world.dir", "world.seed", "mesh", "distributed", "data.eval", "data.eval_limit",
        "retriever.url", "sampler.urls", "checkpoint", "evaluate", "export", "log",
    ),
    Mark.NO_ANSWER: (
        "rollout.questions_per_step", "rollout.group_size", "rollout.temperature",
        "rollout.max_concurrency", "rollout.max_failed_share", "rollout.time_limit",
        "rollout.max_staleness", "rollout.dynamic_sampling", "retriever.url", "retriever.index",
        "retriever.timeout", "retriever.patience", "retriever.start_timeout", "retriever.threads",
        "reward.judge.url", "reward.judge.timeout", "reward.judge.patience", "reward.judge.max_concurrency",
        "reward.shuffle", "reward.evidence", "reward.search_cost", "teacher.url", "teacher.timeout",
        "teacher.patience", "teacher.max_concurrency",
    ),
    Mark.OUTPUT: (
        "run.dir", "world.dir", "retriever.index", "sft.output", "evaluate.output", "export.output",
        "export.adapter_output",
    ),
    Mark.PLACE: (
        "data", "policy.path", "policy.tokenizer", "policy.lora.init_from", "run", "teacher.policy",
        "demonstrations.file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mark", Mark)
def test_keys_have_their_marks(mark):
    keys = known_keys()
    assert all(is_among(keys_with_mark(mark), key) == is_among(EXPECTED[mark], key) for key in keys)


def test_mark_of_section_holds_for_its_keys():
    assert is_among(keys_with_mark(Mark.UNLEARNED), "sft.phases.0.steps")
    assert not is_among(["run"], "runs.dir")


def test_mark_of_a_key_does_not_hold_for_its_neighbours():
    unlearned = keys_with_mark(Mark.UNLEARNED)
    assert is_among(unlearned, "data.train")
    assert not is_among(unlearned, "data.weights")


def test_marks_are_no_part_of_a_value():
    assert Config() == Config()
    assert known_keys()["mesh"] is MeshConfig


def test_derived_settings():
    own = ToolConfig("examples.own_tool:Calculator")
    for tools, is_needed in (([own], False), ([own, ToolConfig("access")], True)):
        config = Config(tools=tools)
        assert config.asks_retriever == config.has_retriever == is_needed
    assert MeshConfig(data=2, tensor=2).sizes_on(8) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert MeshConfig(data=2).sizes_on(1) == {"data": 2, "fsdp": 1, "tensor": 1}


def test_addresses_of_one_server_have_one_normal_form():
    """Two servers stay two: other ports, paths, and hosts."""
    same = ["http://[::1]:8100", "http://[::1]:8100/", " HTTP://[::1]:8100// "]
    assert {normal_url(url) for url in same} == {"http://[::1]:8100"}
    distinct = [
        "http://a",
        "https://a",
        "http://a:8100",
        "http://a/one",
        "http://a/One",
        "http://b",
        "a",
        "b/",
    ]
    distinct += ["http://[::1", "http://a:x"]
    assert len({normal_url(url) for url in distinct}) == len(distinct)
    assert normal_url("https://A:443/v1/") == "https://a/v1" and normal_url("http://a:443") == "http://a:443"


@pytest.mark.parametrize("method", ["direct", "rag"])
def test_single_turn_methods_answer_in_tags(method):
    config = changed(rollout=CALLING, reward={"answer_from": "box"}, evaluate={"method": method})
    answering = method_config(config)
    assert (answering.rollout.protocol, answering.answer_from) == ("tags", "tag")
    assert method_config(changed(config, evaluate={"method": "agent"})).answer_from == "box"
