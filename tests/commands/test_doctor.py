"""The doctor against files, services and configs that are as they should be, and against others."""

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from config_rig import changed
from http_rig import Handler, serving
from rows_rig import write_rows
from tiny_policy import WIDER

from calibadv_jax.commands import train
from calibadv_jax.config import McpConfig, MeshConfig, RetrieverConfig, ToolConfig
from calibadv_jax.config.sections.credit import JudgeConfig
from calibadv_jax.contrib.cli import doctor
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.data.questions import load_questions
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.run.wiring import check_inputs
from calibadv_jax.snapshots.huggingface import save_folder

SHAPE = WIDER | {"intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16, "vocab_size": 400}


def replying(routes):
    """Base URL of a server with these replies: path -> status and JSON value; 404 elsewhere."""

    def answer(self):
        self.body()
        self.reply(*routes.get(self.path, (404, {})))

    return serving(type("Routes", (Handler,), {"do_GET": answer, "do_POST": answer}))


def question(name, text, source="test"):
    return {"id": name, "question": text, "golden_answers": ["ada"], "data_source": source}


@pytest.fixture
def config(tmp_path):
    """Two question files, a tokenizer and a policy's shape; no service."""
    files = {
        "train": [question("1", "who wrote silent garden ?"), question("2", "who founded x ?", "other")],
        "eval": [question("3", "where is y ?"), question("4", "who wrote it, and where is it ?")],
    }
    for name, rows in files.items():
        write_rows(tmp_path / f"{name}.jsonl", *rows)
    build_word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    policy = {"init": SHAPE, "tokenizer": str(tmp_path / "tokenizer"), "compute_dtype": "float32"}
    return changed(
        run={"dir": str(tmp_path / "run")},
        data={name: str(tmp_path / f"{name}.jsonl") for name in files},
        policy=policy,
        rollout={"max_length": 1024, "max_prompt_length": 512, "questions_per_step": 2},
        learner={"pack_length": 1024, "steps": 100},
        prompt={"template": "short", "chat": "off"},
        mesh={"fsdp": 8},
    )


def working_retriever():
    result = [{"document": {"id": "7", "contents": '"Ada"\nwrote it'}, "score": 1.0}]
    return {"/health": (200, {"status": "ready", "kind": "faiss"}), "/retrieve": (200, {"result": [result]})}


def with_retriever(config, url):
    return changed(config, retriever={"url": url, "patience": 0.3, "timeout": 5.0})


def findings(capsys, config, failed=0, **options):
    """Lines of the doctor's findings, and its last line; `failed`: its exit status."""
    with pytest.raises(SystemExit, match="1") if failed else nullcontext():
        doctor.run(config, **options)
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, last


def test_every_check_passes_and_describes(config, capsys):
    with replying(working_retriever()) as url:
        lines, last = findings(capsys, with_retriever(config, url))
    assert last == "every check passed; warnings: 0, not checked: 0"
    assert all(line.startswith("ok   ") for line in lines)
    output = "\n".join(lines)
    assert "data.train: 2 questions (other, test) with 2 golden" in output and "data.eval: 2 qu" in output
    assert f"ok   retriever: {url}: status ready, kind faiss" in output
    assert ": 'Ada'" in output  # the first document of a real query
    assert "in process, 64 trajectories decoded together" in output
    assert "<search> 1" in output  # the tokenizer has a token for every tag


def test_each_check_is_named_while_it_runs(config, capsys):
    with replying(working_retriever()) as url:
        doctor.run(with_retriever(config, url))
    lines = capsys.readouterr().err.splitlines()
    named = [line for line in lines if line.startswith("checking: ")]
    assert named == [f"checking: {name}" for name in doctor.CHECKS]


def test_offline_checks_of_a_sound_config_pass(config, capsys):
    lines, last = findings(capsys, config, offline=True)
    assert all(line.startswith("ok   ") for line in lines)
    assert last == "every offline check passed; warnings: 0, not checked: 0"


def test_mesh_that_this_machine_lacks_is_not_checked_offline(config, capsys):
    larger = changed(config, mesh={"fsdp": 16}, learner={"microbatch_rows": 16})
    lines, last = findings(capsys, larger, offline=True)
    skipped = "skip policy: memory: the mesh has 16 devices, and this machine 8"
    assert any(line.startswith(skipped) for line in lines)
    assert last == "every offline check passed; warnings: 0, not checked: 1"


def test_failed_check_is_counted_and_others_run(config, capsys):
    broken = changed(config, data={"train": "none.jsonl"})
    with replying(working_retriever()) as url:
        lines, last = findings(capsys, with_retriever(broken, url), failed=1)
    failures = [line for line in lines if line.startswith("FAIL")]
    assert [line.split(":")[0] for line in failures] == ["FAIL questions", "FAIL policy"]
    assert last == "2 of 7 checks failed" and any(line.startswith("ok   retriever: ") for line in lines)


def test_start_and_doctor_name_every_fault_at_once(config, capsys, tmp_path):
    """Without waiting for services: the local faults end the start in any case."""
    broken = changed(
        with_retriever(config, "http://127.0.0.1:9"),
        data={"train": str(tmp_path / "none.jsonl"), "eval": str(tmp_path / "nil.jsonl")},
        policy={"path": str(tmp_path / "nowhere"), "tokenizer": str(tmp_path / "no_words")},
        sampler={"name": "vllm", "urls": ["http://127.0.0.1:9"], "patience": 3600.0},
        retriever={"patience": 3600.0},
        reward={"answer": "nowhere_of_tests:mine"},
        evaluate={"every": 5},
    )
    texts = (
        "none.jsonl: no such file",
        "nowhere/config.json: no such file",
        "no_words: no tokenizer files there",
        "importing nowhere_of_tests failed",
        "nil.jsonl: no such file",
        "retriever http://127.0.0.1:9: cannot be reached",
        "vLLM worker http://127.0.0.1:9: cannot be reached",
    )
    with pytest.raises(UserError) as refused:
        train.run(broken)
    message = str(refused.value)
    assert message.startswith("7 faults: (1) ") and "\n" not in message
    assert [text for text in texts if text not in message] == []
    assert not isinstance(refused.value, EnvironmentFailure)
    assert not (tmp_path / "run/configs").exists()
    lines, last = findings(capsys, broken, failed=1)
    failures = "\n".join(line for line in lines if line.startswith("FAIL"))
    assert [text for text in texts if text not in failures] == []


def test_start_compares_weights_before_it_waits_for_services(config, tmp_path):
    config = with_retriever(with_weights(config, tmp_path / "b", head_dim=None), "http://127.0.0.1:9")
    waiting = changed(config, retriever={"patience": 3600.0})
    with pytest.raises(UserError, match=r"2 faults: \(1\) .*tensor\(s\) do not fit .*\(2\) retriever http"):
        train.run(waiting)


def test_doctor_asks_services_without_questions(config, capsys, tmp_path):
    broken = changed(config, data={"eval": str(tmp_path / "nil.jsonl")})
    with replying(working_retriever()) as url:
        lines, _ = findings(capsys, with_retriever(broken, url), failed=1)
    assert any(line.startswith("ok   retriever: ") for line in lines)


def with_weights(config, folder, **fields):
    """A policy's folder whose tensors have the shapes of SHAPE, and its config with other `fields`."""
    policy = Policy(architecture_from_hf(SHAPE), Numerics())
    params = init_params(policy, make_mesh(MeshConfig(fsdp=8)), 0)
    save_folder(params, SHAPE, folder, "float32", Path(config.policy.tokenizer))
    path = folder / "config.json"
    written = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in written.items() if value is not None}))
    return changed(config, policy={"path": str(folder), "init": {}})


def test_shapes_of_tensors_are_checked(config, tmp_path):
    assert "35 tensors in 1 file(s)" in doctor.check_policy(with_weights(config, tmp_path / "a"))[1]
    with pytest.raises(UserError, match=r"tensor\(s\) do not fit config.json: .* instead of \[128\]"):
        doctor.check_policy(with_weights(config, tmp_path / "b", head_dim=None))  # which is 128 then


def test_questions_that_are_in_both_files_are_warning(config, tmp_path):
    config = changed(config, data={"weights": {"test": 1.0, "other": 2.0}})  # of data.train
    assert not any("warning" in line for line in doctor.check_questions(config))
    with (tmp_path / "eval.jsonl").open("a") as file:
        file.write(json.dumps(question("5", "who founded x ?")) + "\n")
    assert doctor.check_questions(config)[-1].startswith("warning: 1 questions are in both files")


def test_questions_that_are_asked_too_often_are_a_warning(config):
    assert not any("warning" in line for line in doctor.check_questions(config))
    *_, last = doctor.check_questions(changed(config, learner={"steps": 1000}))
    assert last.startswith(
        "warning: data.train's 2 questions are asked 1,000 times each in learner.steps=1000"
    )


def test_overlong_prompts_are_counted_or_refused(config):
    """Three of the four questions are shorter."""
    tokenizer = build_word_tokenizer()
    (line,) = doctor.prompt_lines(config, tokenizer)
    assert "where is it" in line and f"of {config.rollout.max_prompt_length} tokens" in line
    longest = int(line.split(" tokens")[0].split()[-3])
    short = changed(config, rollout={"max_prompt_length": longest - 1})
    with pytest.raises(UserError, match=r"data.eval: the prompts of 1 of 2 questions .*'4'"):
        doctor.prompt_lines(short, tokenizer)
    warning, _ = doctor.prompt_lines(changed(short, data={"overlong_prompts": "leave_out"}), tokenizer)
    assert warning.startswith("warning: data.eval: the prompts of 1 of 2 questions")


def test_start_checks_the_services_that_are_named(config):
    with pytest.raises(UserError, match="retriever http://127.0.0.1:9: cannot be reached"):
        check_inputs(with_retriever(config, "http://127.0.0.1:9"))
    away = {"name": "vllm", "urls": ["http://127.0.0.1:9"], "patience": 0.3}
    with pytest.raises(UserError, match="vLLM worker http://127.0.0.1:9: cannot be reached"):
        check_inputs(changed(config, sampler=away))
    check_inputs(changed(config, sampler=away | {"name": "jax"}))  # which uses none of them


def test_policy_check_refuses_overlong_prompts(config):
    short = changed(config, rollout={"max_prompt_length": 4})
    with pytest.raises(UserError, match="data.train: the prompts of 2 of 2 questions"):
        doctor.check_policy(short)


def test_start_checks_evaluation_questions_only_if_it_evaluates(config):
    missing = changed(config, data={"eval": "none.jsonl"})
    check_inputs(changed(missing, evaluate={"every": 0}))
    with pytest.raises(UserError, match="none.jsonl: no such file"):
        check_inputs(changed(missing, evaluate={"every": 5}))


def test_every_worker_is_asked(config):
    good = {"/weight_info": (200, {"weight_version": "abc/3"})}
    with replying(good) as first, replying({}) as second:
        workers = changed(config, sampler={"name": "vllm", "urls": [first, second]})
        with pytest.raises(UserError, match=f"{second}: no /weight_info"):
            doctor.check_sampler(workers)


def test_search_without_a_retriever_fails(config):
    with pytest.raises(UserError, match="retriever.url is empty"):
        doctor.check_retriever(replace(config, retriever=RetrieverConfig()))


def test_mesh_that_shares_all_heads_has_no_warning(config):
    shared = changed(config, mesh={"fsdp": 4, "tensor": 2})
    assert not any("warning" in line for line in doctor.check_policy(shared))


def test_worker_is_asked_what_it_serves(config):
    with replying({"/weight_info": (200, {"weight_version": "abc/3"})}) as url:
        lines = doctor.check_sampler(changed(config, sampler={"name": "vllm", "urls": [url]}))
    assert lines == [f"{url}: serves weights 'abc/3'"]


def test_mcp_program_that_ends_is_named(config, capsys, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(doctor, "CHECKS", {"calibration": doctor.CHECKS["calibration"]})
    tool = ToolConfig(mcp=McpConfig(command=f"{sys.executable} /nowhere/server.py"))
    (line,), _ = findings(capsys, replace(config, tools=[tool]), failed=1)
    assert line.startswith("FAIL calibration: MCP server") and "correct tools[].mcp.command" in line
    assert "can't open file '/nowhere/server.py'" in line


def test_retriever_without_health_or_results_is_described(config):
    with replying({"/retrieve": (200, {"result": [[]]})}) as url:
        lines = doctor.check_retriever(with_retriever(config, url))
    assert lines[0] == f"{url}: answers, but has no /health that names its corpus and index"
    (question, *_) = load_questions(config.data.eval)
    assert f"warning: nothing found for {question.text!r}; does the corpus fit data.eval?" in lines
    for status, message in (
        (404, "set retriever.url to a retrieval service"),
        (503, "no answer .status 503"),
    ):
        silent = working_retriever() | {"/retrieve": (status, {})}
        with replying(silent) as url, pytest.raises(UserError, match=message):
            doctor.check_retriever(changed(with_retriever(config, url), retriever={"patience": 600.0}))
    own = replace(config, tools=[ToolConfig("examples.own_tool:Calculator")])
    assert doctor.check_retriever(own) == ["none: no action of tools asks it"]


def test_too_small_host_fails_and_names_keys(config, capsys, monkeypatch):
    """The devices of a CPU share what the host has; offline the run may be meant for another machine."""
    monkeypatch.setattr("calibadv_jax.contrib.planning.memory.host_memory", lambda: 2.0**20)
    with replying(working_retriever()) as url:
        lines, last = findings(capsys, with_retriever(config, url), failed=1)
    (failure,) = (line for line in lines if line.startswith("FAIL policy"))
    assert "do not fit: this host has 0.0 GiB for 8 device(s)" in failure and "sampler.slots" in failure
    assert any(line.startswith("ok   policy: tokens of each tag") for line in lines)  # the rest is said too
    assert last == "1 of 7 checks failed"
    lines, last = findings(capsys, changed(config, mesh={"fsdp": 2, "tensor": 4}), offline=True)
    for words in ("do not fit", "mesh.tensor is 4, which does not divide the policy's 2"):
        assert any(line.startswith("warn policy: ") and words in line for line in lines)
    assert last.startswith("every offline check passed; warnings: ")
    lines, last = findings(capsys, changed(config, policy={"init": {}}), offline=True)
    assert lines[-1].startswith("skip policy: memory") and last.endswith("warnings: 0, not checked: 1")


class Judging(Handler):
    """Says yes to golden answers, or to every answer."""

    says_yes_to_all = False

    def do_POST(self):
        system, user = (message["content"] for message in json.loads(self.body())["messages"])
        request, key = json.loads(user), re.findall(r"the key (\w+)", system)[-1]
        is_right = self.says_yes_to_all or request["answer"] in request["golden_answers"]
        content = f"{key} {'yes' if is_right else 'no'}"
        self.reply(200, {"choices": [{"message": {"content": content}}]})


def judged_by(config, url):
    return changed(config, reward={"judge": JudgeConfig(url=f"{url}/v1", model="m")})


def test_generous_judge_is_named_with_its_question(config):
    with serving(type("Kind", (Judging,), {"says_yes_to_all": True})) as url:
        _, warning = doctor.check_judge(judged_by(config, url))
    assert warning == "warning: it misjudges these answers to 'where is y ?'; see reward.judge.prompt"


def test_judge_is_asked_about_right_and_wrong_answer(config):
    assert doctor.check_judge(config) == []
    with serving(Judging) as url:
        (line,) = doctor.check_judge(judged_by(config, url))
    assert line == f"{url}/v1: m gives 'ada' 1 and 'I do not know' 0"
    with serving(type("Kind", (Judging,), {"says_yes_to_all": True})) as url:
        _, warning = doctor.check_judge(judged_by(config, url))
    assert warning.startswith("warning: ") and "reward.judge.prompt" in warning
    with pytest.raises(UserError, match=f"judge {url}/v1: no answer .*, or correct reward.judge.url"):
        doctor.check_judge(judged_by(config, url))


def test_teacher_is_checked(config, tmp_path):
    assert doctor.check_teacher(config) == []
    folder = with_weights(config, tmp_path / "teacher").policy.path
    (line,) = doctor.check_teacher(changed(config, teacher={"policy": folder}))
    assert line == f"teacher {folder}: has the policy's vocabulary"
    with pytest.raises(UserError, match=r"teacher\.policy=.*lost"):
        doctor.check_teacher(changed(config, teacher={"policy": str(tmp_path / "lost")}))
    away = changed(config, teacher={"url": "http://127.0.0.1:1/v1", "model": "m"})
    with pytest.raises(UserError, match=r"teacher http.*no answer .*correct teacher\.url"):
        doctor.check_teacher(away)
