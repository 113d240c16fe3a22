"""A whole cold start, small: its phases, its rows of metrics, and what it leaves behind."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from calibadv_jax import sft
from calibadv_jax.config import Config, MeshConfig, OptimizerConfig, PromptConfig, SftPhase
from calibadv_jax.data.word_tokenizer import build_word_tokenizer
from calibadv_jax.run_folder import check_cold_start
from calibadv_jax.snapshots.huggingface import read_hf_config

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}
PHASES = [SftPhase(steps=3, kind="drills"), SftPhase(steps=2, kind="drills")]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The config of a cold start, and the batches that it trained on."""
    folder = tmp_path_factory.mktemp("run")
    build_word_tokenizer().save_pretrained(folder / "tokenizer")
    plain = Config(prompt=PromptConfig(template="short", chat="off"), mesh=MeshConfig(fsdp=8))
    optimizer = OptimizerConfig(lr=0.01, schedule="linear", warmup_steps=1)
    config = replace(
        plain,
        run=replace(plain.run, dir=str(folder), seed=3),
        policy=replace(plain.policy, init=SHAPE, tokenizer=str(folder / "tokenizer")),
        log=replace(plain.log, backends=[], progress=False),
        sft=replace(
            plain.sft,
            demonstrations="world",
            phases=PHASES,
            rows=8,
            row_length=64,
            optimizer=optimizer,
            output=str(folder / "sft"),
        ),
    )
    batches, update = [], sft.Learner.update

    def noted(self, state, packed, *rest):
        batches.extend(packed)
        return update(self, state, packed, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft.Learner, "update", noted)
        sft.run(config)
    return config, folder, batches


def test_every_step_of_every_phase_is_a_row(started):
    config, folder, batches = started
    rows = [json.loads(line) for line in (folder / "sft_metrics/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # One schedule over all phases: up in one update, then down to nothing.
    assert [row["sft/lr"] for row in rows] == pytest.approx([0, 0.01, 0.0075, 0.005, 0.0025])
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    assert [row["sft/tokens"] for row in rows] == [float((b.segment_ids > 0).sum()) for b in batches]


def test_phases_of_one_kind_see_other_demonstrations(started):
    _, _, batches = started
    assert len(batches) == 5
    for one, other in itertools.combinations(batches, 2):
        assert not np.array_equal(one.tokens, other.tokens)


def test_another_seed_sees_other_demonstrations(started):
    config, folder, batches = started
    tokenizer = build_word_tokenizer()
    same = next(sft._batches(config, PHASES[0], (), tokenizer, seed=3))
    np.testing.assert_array_equal(same.tokens, batches[0].tokens)
    assert not np.array_equal(next(sft._batches(config, PHASES[0], (), tokenizer, 4)).tokens, same.tokens)


def test_no_demonstration_is_lost_between_two_batches(started):
    """All that was drawn is trained, in the order in which it was drawn."""
    config, _, _ = started
    tokenizer = build_word_tokenizer()
    drawn = sft._demonstrations(config, PHASES[0], (), 7)
    expected = [
        sft.encode_demonstration(demonstration, config, tokenizer, "sampled").tokens.tobytes()
        for demonstration in itertools.islice(drawn, 400)
    ]
    seen = []
    for batch in itertools.islice(sft._batches(config, PHASES[0], (), tokenizer, 7), 3):
        pieces = [
            (row, segment)
            for row in range(len(batch.tokens))
            for segment in range(1, batch.segment_ids[row].max() + 1)
        ]
        seen.append(sorted(batch.tokens[row][batch.segment_ids[row] == n].tobytes() for row, n in pieces))
    start = 0
    for one in seen:
        assert one == sorted(expected[start : start + len(one)])
        start += len(one)
    assert start > 40


def test_what_it_leaves_behind(started):
    config, folder, _ = started
    written = read_hf_config(folder / "sft")
    assert written["vocab_size"] == 398 and written["hidden_size"] == 16
    assert (folder / "sft/model.safetensors").is_file() and (folder / "sft/tokenizer.json").is_file()
    assert yaml.safe_load((folder / "sft.yaml").read_text())["run"]["seed"] == 3
    check_cold_start(config)  # the same settings: it need not be made again
