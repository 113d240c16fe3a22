"""What the fields of the config say of themselves: the rules of resume, report, evaluation and model card."""

import pytest

from calibadv_jax.config import Config, known_keys
from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.sections.section import Mark

# A mark that is lost or added changes which runs may go on, or which scores are used again.
EXPECTED = {
    Mark.UNLEARNED: (
        "run.dir", "run.mirror", "mesh", "distributed", "world", "data.columns", "data.train",
        "data.eval", "data.eval_limit", "data.overlong_prompts", "policy.path", "policy.tokenizer",
        "policy.attention", "policy.attention_chunk", "policy.logprob_chunk", "policy.lora.init_from",
        "policy.lora.snapshots", "policy.remat", "rollout.max_concurrency", "rollout.max_failed_share",
        "rollout.time_limit", "sampler", "retriever", "learner.microbatch_rows", "learner.row_length",
        "learner.row_widths", "learner.share_prefixes", "learner.optimizer.offload",
        "critic.optimizer.offload", "sft", "checkpoint", "evaluate", "guards", "export", "log",
        "advantage.probes", "reward.judge.url", "reward.judge.timeout", "reward.judge.patience",
        "reward.judge.max_concurrency",
    ),
    Mark.LEARNED: (
        "sampler.name", "retriever.encoder", "retriever.topk", "retriever.retrieval_topk",
        "retriever.rerank_topk", "retriever.reranker", "retriever.page_address", "retriever.model",
    ),
    Mark.TUNED: ("learner", "critic", "loss", "rollout", "sampler", "retriever", "data.weights"),
    Mark.COLD_START: ("run.seed", "policy.init", "policy.lora", "world", "prompt", "tools", "sft"),
    Mark.PER_RUN: (
        "run", "world.dir", "world.seed", "mesh", "distributed", "data.eval", "data.eval_limit",
        "retriever.url", "sampler.urls", "checkpoint", "evaluate", "export", "log",
    ),
    Mark.NO_ANSWER: (
        "rollout.questions_per_step", "rollout.group_size", "rollout.temperature",
        "rollout.max_concurrency", "rollout.max_failed_share", "rollout.time_limit",
        "rollout.max_staleness", "rollout.replace_tied", "retriever.url", "retriever.index",
        "retriever.timeout", "retriever.patience", "retriever.start_timeout", "retriever.threads",
        "reward.judge.url", "reward.judge.timeout", "reward.judge.patience", "reward.judge.max_concurrency",
        "reward.shuffle",
    ),
    Mark.OUTPUT: (
        "run.dir", "world.dir", "retriever.index", "sft.output", "evaluate.output", "export.output",
        "export.adapter_output",
    ),
    Mark.PLACE: ("data", "policy.path", "policy.tokenizer", "policy.lora.init_from", "run"),
}  # fmt: skip


@pytest.mark.parametrize("mark", Mark)
def test_every_key_has_the_marks_that_it_must_have(mark):
    keys = known_keys()
    assert {key for key in keys if among(marked(mark), key)} == {
        key for key in keys if among(EXPECTED[mark], key)
    }


def test_a_mark_of_a_section_holds_for_its_keys():
    assert among(marked(Mark.UNLEARNED), "sft.phases.0.steps")
    assert among(marked(Mark.TUNED), "data.weights.nq") and not among(marked(Mark.TUNED), "data.train")
    assert not among(["run"], "runs.dir")


def test_marks_are_no_part_of_a_value():
    assert Config() == Config() and known_keys()["mesh"].__name__ == "MeshConfig"
