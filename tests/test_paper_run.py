"""configs/paper/qwen2.5-3b.yaml on real questions and passages, scaled down by an overlay, with a reranker.

The policy is made here: a chain over classes of words that writes the protocol and answers "no" or "yes". Its
attention and MLP start at zero and are trained. It knows nothing; what is tested is the way.
"""

import gzip
import json
import math
import random
import re
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from packages import need

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from rerank_rig import tiny_cross_encoder
from rows_rig import write_rows
from safetensors.numpy import save_file
from tiny_policy import GROUPED

from calibadv_jax import cli
from calibadv_jax.config import RetrieverConfig
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import hf_shapes
from calibadv_jax.rollout_store.reader import read_columns
from calibadv_jax.services.retriever_process import RetrieverProcess
from scripts.prepare_wiki_sample import train_tokenizer

need("sentence_transformers")

PAPER = Path(__file__).resolve().parent.parent / "configs/paper/qwen2.5-3b.yaml"
SOURCES = {"nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"}
SHAPE = GROUPED | {"hidden_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": False}
# Class of the last token -> what may follow, with its probability. "other" ends prompts and observations.
CHAIN = {
    "other": {"<think>": 1.0},
    "<think>": {"thought": 1.0},
    "thought": {"thought": 0.3, "</think>": 0.7},
    "</think>": {"<search>": 0.55, "<answer>": 0.45},
    "<search>": {"word": 1.0},
    "word": {"word": 0.4, "</search>": 0.6},
    "<answer>": {"reply": 1.0},
    "reply": {"</answer>": 1.0},
}
SMALL = [  # the paper's run: same mesh, advantage, loss and retrieval; other sizes
    *("policy.compute_dtype=float32", "rollout.questions_per_step=6", "rollout.max_prompt_length=256"),
    *("rollout.max_turn_length=16", "rollout.max_observation_length=160", "rollout.max_length=1024"),
    *("sampler.name=jax", "sampler.slots=32", "sampler.decode_chunk=16", "learner.steps=3"),
    *("learner.minibatch_size=15", "learner.pack_length=1024", "learner.optimizer.lr=1e-3"),
    *("learner.optimizer.decay_updates=0", "checkpoint.every=0", "checkpoint.snapshot_dtype=float32"),
    "log.backends=[]",
]


def write_policy(folder, texts):
    """A HuggingFace folder of the chain's policy, with a tokenizer of these texts."""
    tokenizer = train_tokenizer(texts)
    words = [name for name in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{5,}", name)]
    replies = tokenizer.convert_ids_to_tokens([tokenizer.encode(f" {word}")[0] for word in ("no", "yes")])
    members = {"thought": sorted(words)[:40], "word": sorted(words)[40:80], "reply": replies}
    class_of = {name: kind for kind, names in members.items() for name in names}
    kinds = {kind: number for number, kind in enumerate(CHAIN)}
    embedding = np.zeros((len(tokenizer), SHAPE["hidden_size"]), np.float32)
    head = np.full_like(embedding, -30.0)
    for name, token in tokenizer.get_vocab().items():
        kind = class_of.get(name, name if name in kinds else "other")
        embedding[token, kinds[kind]] = 1.0
        for before, after in CHAIN.items():
            share = after.get(name, after.get(kind, 0.0) / len(members.get(kind, [kind])))
            if share and (name in after or kind in members):
                head[token, kinds[before]] = math.log(share)
    config = SHAPE | {"vocab_size": len(tokenizer)}
    shapes = hf_shapes(Policy(architecture_from_hf(config), Numerics()).abstract_params)
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][:] = 0
        if name.endswith("norm.weight"):
            weights[name][:] = 1
    weights["model.embed_tokens.weight"] = embedding
    weights["lm_head.weight"] = head / math.sqrt(SHAPE["hidden_size"])  # the last norm gives that length
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_search_r1(path, rows):
    """The layout of Search-R1's and the CalibAdv authors' preprocessing."""
    columns = [
        {name: row[name] for name in ("data_source", "question", "golden_answers")}
        | {"prompt": [{"role": "user", "content": f"Answer the question: {row['question']}"}]}
        | {"reward_model": {"style": "rule", "ground_truth": {"target": row["golden_answers"]}}}
        for row in rows
    ]
    write_rows(path, *columns)


def pick(data):
    """Training questions (half of them with yes or no for an answer), test questions, and their passages."""
    train, test = read(data / "train.jsonl"), read(data / "test.jsonl")
    rng = random.Random(0)
    plain = [row for row in train if {"yes", "no"} & {answer.lower() for answer in row["golden_answers"]}]
    train = plain[:20] + rng.sample(train, 20)
    test = [row for name in sorted(SOURCES) for row in [q for q in test if q["data_source"] == name][:3]]
    with gzip.open(data / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        corpus = [json.loads(line) for line in file]
    ids = {name for row in train + test for name in row["supporting_ids"]}
    passages = [row for row in corpus if row["id"] in ids] + corpus[:2000]
    train, passages = ({row["id"]: row for row in rows}.values() for rows in (train, passages))
    return list(train), test, passages


def reranked(url):
    """How many queries the service has reranked."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=250).read().decode()
    return float(re.search(r"^retriever_reranked_queries_total (\S+)", text, re.MULTILINE)[1])


def run(command, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.calibadv([command, *arguments])
    assert end.value.code == 0


@pytest.mark.slow
def test_papers_config_trains_and_evaluates_with_a_reranker(shared, tmp_path):
    train, test, passages = pick(shared / "data/wiki_sample")
    write_search_r1(tmp_path / "train.parquet", train)
    for source in SOURCES:
        own = [row for row in test if row["data_source"] == source]
        names = ("id", "question", "golden_answers")  # as FlashRAG's files
        write_rows(tmp_path / f"{source}.jsonl", *({name: row[name] for name in names} for row in own))
    write_rows(tmp_path / "corpus.jsonl", *passages)
    texts = [row["contents"] for row in passages]
    write_policy(tmp_path / "policy", [*texts, " yes no" * 50])
    cross = tiny_cross_encoder(tmp_path / "cross", " ".join(texts[:200]).split())
    evaluated = ", ".join(f"{source}: {tmp_path}/{source}.jsonl" for source in sorted(SOURCES))
    arguments = ["--config", str(PAPER), *SMALL, f"run.dir={tmp_path}/run", f"policy.path={tmp_path}/policy"]
    arguments += [f"data.train={tmp_path}/train.parquet", f"data.eval={{{evaluated}}}"]
    places = {"corpus": str(tmp_path / "corpus.jsonl"), "index": str(tmp_path / "index")}
    service = RetrieverConfig(**places, reranker=str(cross), rerank_candidates=20, topk=3)
    with RetrieverProcess(service, tmp_path / "retriever.log") as process:
        arguments.append(f"retriever.url={process.url}")
        run("train", *arguments)
        in_training = reranked(process.url)
        run("evaluate", *arguments)
        in_evaluation = reranked(process.url) - in_training

    rows = read(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and any(row["reward/mean"] > 0 for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    kept = [tmp_path / f"run/rollouts/step_{step}.parquet" for step in (1, 2, 3)]
    trajectories = [row for path in kept for row in read_columns(path).to_pylist()]
    assert len(trajectories) == 3 * 6 * 5
    searches = [turn for trajectory in trajectories for turn in trajectory["turns"] if turn.get("documents")]
    counts = [len(turn["documents"]) for turn in searches]  # a rare word is in fewer than three passages
    assert len(searches) > 40 and max(counts) == 3 and counts.count(3) > len(counts) / 2
    shown = {document["id"] for turn in searches for document in turn["documents"]}
    assert shown <= {row["id"] for row in passages}
    assert in_training == len(searches), "every search of the trainer is reranked, once"

    report = json.loads((tmp_path / "run/evaluation.json").read_text())["scores"]["0"]
    assert report.keys() == SOURCES | {"all", "average"}
    # Greedily this policy always searches: four searches, and a fifth in the last turn, which has none.
    assert report["all"]["searches"] == 5 and in_evaluation == 4 * len(test) == 84
