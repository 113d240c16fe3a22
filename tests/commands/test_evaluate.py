"""Evaluation: sampling, policy, retriever, prompts, output files, resuming."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
from contextlib import contextmanager

import pytest
from evaluation_rig import QUESTIONS, Rig, Scripted, Shelf, Stopped
from http_rig import Handler, serving

from calibadv_jax.commands.evaluate import choose_policy
from calibadv_jax.config import Config, EvaluateConfig, PolicyConfig, RunConfig
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.evaluation.methods import METHODS
from calibadv_jax.evaluation.report import table_rows
from calibadv_jax.run.fingerprints import describe_policy
from calibadv_jax.run.model import PolicySource


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Rig(tmp_path, monkeypatch)


def rows(run):
    return [json.loads(line) for line in run.file(".jsonl").read_text().splitlines()]


def drawn(prompt, seed):
    """Right in about half of all draws; another word for every seed otherwise."""
    return "yes" if seed % 2 else f"no {seed}"


def test_evaluation_uses_its_own_sampling_settings(run):
    report, sampler = run(evaluate={"temperatures": [0.0, 0.7], "samples": 3}, reward={"shuffle": True})
    by_temperature = {
        temperature: {s for s, sampling in sampler.asked if sampling.temperature == temperature}
        for temperature in (0.0, 0.7)
    }
    assert {sampling.temperature for _, sampling in sampler.asked} == {0.0, 0.7}
    assert [len(sessions) for sessions in by_temperature.values()] == [8, 24]
    assert not by_temperature[0.0] & by_temperature[0.7]  # sessions of their own
    seeds = [sampling.seed for _, sampling in sampler.asked if sampling.temperature == 0.7]
    assert len(set(seeds)) == len(seeds) == 48
    assert list(report.means) == ["0", "0.7"]
    for name, count in (("0", 1), ("0.7", 3)):
        for source, right in (("a", 1), ("b", 0), ("all", 0.5), ("average", 0.5)):
            result = report.means[name][source]
            assert [result[metric] for metric in ("f1", "em", "cover_em")] == [right] * 3
            assert (result["format"], result["answered"], result["searches"]) == (1, 1, 1)
            questions = 8 if source in ("all", "average") else 4
            assert (result["questions"], result["trajectories"], result["failed"]) == (
                questions, questions * count, 0
            )  # fmt: skip
    assert sampler.loaded == [0]


def test_tokens_are_those_that_the_policy_sampled(run):
    report, _ = run()
    output = [len("<think>t</think><search>a 0</search>"), len("<think>t</think><answer>yes</answer>")]
    assert report.means["0"]["a"]["tokens"] == sum(output)


def test_seeds_depend_on_the_run_seed_only(run):
    def seeds(seed):
        _, sampler = run(run={"seed": seed}, evaluate={"temperatures": [1.0]})
        run.file(".jsonl").unlink()
        return sorted(sampling.seed for _, sampling in sampler.asked)

    assert seeds(0) == seeds(0) != seeds(1)


def test_repeated_temperature_is_sampled_once(run):
    report, sampler = run(evaluate={"temperatures": [0.0, 0.0]})
    assert report.means["0"]["all"]["questions"] == 8 and len(sampler.asked) == 16


def test_limit_takes_from_all_sources(run):
    report, sampler = run(data={"eval_limit": 4})
    assert {source: report.means["0"][source]["trajectories"] for source in "ab"} == {"a": 2, "b": 2}
    assert len(sampler.asked) == 2 * 4


def test_every_question_is_kept_with_its_transcripts(run):
    run(evaluate={"temperatures": [1.0], "samples": 2})
    row = rows(run)[0]
    assert (row["temperature"], row["data_source"], row["id"], row["question"]) == ("1", "a", "a0", "a 0")
    assert row["golden_answers"] == ["yes"] and row["scores"]["mean@2"] == 1
    search, answer = row["trajectories"][1]["turns"]
    assert search["text"] == "<think>t</think><search>a 0</search>"
    assert search["document_ids"] == ["a 0/0", "a 0/1"] and "text a 0 1" in search["observation"]
    assert answer["kind"] == "answer" and row["trajectories"][1]["answer"] == "yes"


def test_report_and_tables_agree(run):
    report, _ = run(Scripted(drawn), evaluate={"temperatures": [0.0, 1.0], "samples": 4, "confidence": 0.9})
    written = json.loads(run.file(".json").read_text())
    assert written["scores"] == report.means
    low, high = written["intervals"]["1"]["a"]["em"]
    mean = report.means["1"]["a"]["em"]
    assert low < mean < high and report.intervals["1"]["a"]["em"] == (low, high)
    assert written["method"] == "agent" and written["policy"]["path"] == str(run.folder / "policy")
    table = run.file(".md").read_text()
    assert f"| {mean:.3f} [{low:.3f}, {high:.3f}] |" in table and "90% bootstrap intervals" in table
    assert len(table.splitlines()) == 2 + 2 * 4 + 2
    lines = list(csv.DictReader(run.file(".csv").open()))
    (line,) = [line for line in lines if (line["temperature"], line["data"]) == ("1", "a")]
    assert (float(line["em"]), float(line["em_low"]), float(line["em_high"])) == (mean, low, high)
    assert (line["questions"], line["trajectories"], line["failed"]) == ("4", "16", "0")
    greedy = [line for line in lines if line["temperature"] == "0"]
    assert {line["pass@4"] for line in greedy} == {""} != {line["pass@4"]}
    headers, cells = table_rows(report)
    assert headers[:5] == ["temperature", "data", "f1", "em", "cover_em"] and len(cells) == 2 * 4


def test_without_resamples_there_are_no_intervals(run):
    report, _ = run(evaluate={"resamples": 0})
    assert report.intervals["0"]["all"] == {} and "[" not in run.file(".md").read_text()


def test_failed_trajectories_are_counted_and_sampled_again(run):
    """The retriever fails for one question of a; at temperature 0 that question has no score."""
    run.shelf = Shelf({"a 1": RequestFailed("retriever", "gone")})
    report, _ = run(rollout={"max_failed_share": 0.2})
    result = report.means["0"]["a"]
    assert (result["em"], result["questions"], result["trajectories"], result["failed"]) == (1, 3, 3, 1)
    assert rows(run)[1]["scores"] == {} and rows(run)[1]["trajectories"][0]["error"] == "retriever: gone"
    run.shelf = Shelf()
    report, sampler = run(rollout={"max_failed_share": 0.2})
    assert len(sampler.asked) == 2  # turns of the one question
    assert report.means["0"]["a"]["questions"] == 4 and report.means["0"]["a"]["failed"] == 0


def test_too_many_failures_end_it_and_lose_nothing(run):
    run.shelf = Shelf({"b 3": RequestFailed("retriever", "gone")})
    with pytest.raises(UserError, match="1 of 8 trajectories failed, more than rollout.max_failed_share=0"):
        run(rollout={"max_failed_share": 0.0, "max_concurrency": 1})
    assert not run.file(".json").exists() and len(rows(run)) == 8
    run.shelf = Shelf()
    report, sampler = run(rollout={"max_failed_share": 0.0, "max_concurrency": 1})
    assert len(sampler.asked) == 2 and report.means["0"]["all"]["questions"] == 8


def test_failed_source_has_no_means(run):
    run.shelf = Shelf({f"a {n}": RequestFailed("retriever", "gone") for n in range(4)})
    report, _ = run(rollout={"max_failed_share": 0.5})
    assert report.means["0"]["a"] == {"questions": 0, "trajectories": 0, "failed": 4}
    assert "em" not in report.means["0"]["average"] and report.means["0"]["all"]["em"] == 0
    [cells] = [cells for cells in table_rows(report)[1] if cells[1] == "a"]
    assert cells[2:] == ["-"] * 7 + [0, 0, 4]


def same_files(run, folder):
    return [run.file(end).read_bytes() == (folder / f"evaluation{end}").read_bytes() for end in ENDS]


ENDS = (".json", ".md", ".csv", ".jsonl")


@pytest.mark.parametrize("stop_after", [0, 1, 7, 20, 47])
def test_interrupted_evaluation_resumes_to_the_same_table(run, tmp_path, stop_after):
    keys = {"evaluate": {"temperatures": [0.0, 1.0], "samples": 2}, "rollout": {"max_concurrency": 3}}
    run(Scripted(drawn), **keys)
    whole = tmp_path / "whole"
    whole.mkdir()
    for end in ENDS:
        os.rename(run.file(end), whole / f"evaluation{end}")
    with pytest.raises(Stopped):
        run(Scripted(drawn, stop_after=stop_after), **keys)
    assert not run.file(".json").exists()
    kept = len(rows(run))
    with run.file(".jsonl").open("a") as file:  # the machine went down while a line was written
        file.write('{"evaluation": "cut he')
    _, sampler = run(Scripted(drawn), **keys)
    trajectories = {session for session, _ in sampler.asked}
    assert len(trajectories) == 8 * (1 + 2) - sum(1 if n < 8 else 2 for n in range(kept))
    assert same_files(run, whole) == [True] * 4
    _, sampler = run(Scripted(drawn), **keys)
    assert sampler.asked == [] and same_files(run, whole) == [True] * 4


@pytest.mark.timeout(60)
def test_signal_keeps_the_answers_so_far(run, capfd):
    asked = []

    def reply(prompt, seed):
        asked.append(prompt)
        if len(asked) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return drawn(prompt, seed)

    with pytest.raises(SystemExit) as ended:
        run(Scripted(reply), rollout={"max_concurrency": 1})
    printed = capfd.readouterr().err
    assert ended.value.code == 130 and not run.file(".json").exists()
    assert "Ctrl-C: the answers so far are kept; a second Ctrl-C ends at once\n" in printed
    assert printed.endswith("stopped; the same command goes on with the questions that are left\n")
    kept = len(rows(run))
    assert kept >= 3
    _, sampler = run(Scripted(drawn), rollout={"max_concurrency": 1})
    assert len({session for session, _ in sampler.asked}) == 8 - kept


@pytest.mark.parametrize(
    "changed",
    [
        {"run": {"seed": 1}},
        {"evaluate": {"method": "empty_retriever"}},
        {"rollout": {"max_searches": 1}},
        {"retriever": {"topk": 5}},
        {"prompt": {"template": "Tell: {question}"}},
        {"tools": ["search", "access"]},
        {"reward": {"answer": "examples.own_reward:short_way"}},
    ],
    ids=str,
)
def test_another_evaluation_is_not_continued(run, changed):
    run()
    _, sampler = run(**changed)
    assert len({session for session, _ in sampler.asked}) == 8
    assert len(rows(run)) == 8


@pytest.mark.parametrize(
    "changed",
    [{"retriever": {"index": "elsewhere", "patience": 3}}, {"rollout": {"max_concurrency": 2}}],
    ids=str,
)
def test_speed_and_place_do_not_make_it_another(run, changed):
    run()
    assert run(**changed)[1].asked == []


@pytest.mark.parametrize("seed", [1, 2, 77])
def test_limit_chooses_questions_independent_of_seed(run, seed):
    run.questions = {"eval.jsonl": [Question(str(n), f"a {n}", ("yes",), "a") for n in range(50)]}
    run(data={"eval_limit": 5})
    first = [row["id"] for row in rows(run)]
    run(data={"eval_limit": 5}, run={"seed": seed})
    assert [row["id"] for row in rows(run)] == first


def test_changed_and_new_questions_are_sampled(run):
    run()
    changed = dataclasses.replace(QUESTIONS[0], golden_answers=("no",))
    run.questions = {"eval.jsonl": [changed, *QUESTIONS[1:], Question("c0", "c 0", ("no",), "c")]}
    report, sampler = run()
    assert len({session for session, _ in sampler.asked}) == 2
    assert report.means["0"]["a"]["em"] == 0.75 and report.means["0"]["c"]["em"] == 1


def test_output_in_another_run_is_refused(run, tmp_path):
    other = tmp_path / "old/configs/0.json"
    other.parent.mkdir(parents=True)
    for path in (other, other.with_suffix(".yaml")):
        path.write_text("{}")
    with pytest.raises(UserError, match="^evaluate.output=.*scores.json lies in the folder of another run, "):
        run(evaluate={"output": str(tmp_path / "old/scores.json")})


def test_foreign_file_is_not_overwritten(run):
    run.file(".jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(UserError, match=r"evaluation.jsonl:1: no evaluation, content, .*give another file"):
        run()
    assert run.file(".jsonl").read_text() == '{"id": "1"}\n'


def test_validation_is_a_fixed_sample_and_writes_nothing(run):
    keys = {"evaluate": {"sample_size": 4, "temperatures": [0.0, 1.0], "samples": 5, "method": "direct"}}
    means, sampler = run.validate(Scripted(drawn), **keys)
    counts = {name: means["1"][name]["trajectories"] for name in ("all", "a", "b")}
    assert counts == {"all": 4, "a": 2, "b": 2}
    assert means["0"]["all"]["searches"] == 1  # the agent, whatever is evaluated afterwards
    again, other = run.validate(Scripted(drawn), **keys)
    assert again == means and sorted(other.prompts) == sorted(sampler.prompts)
    assert not run.file(".jsonl").exists()
    whole, _ = run.validate(evaluate={"sample_size": 0})
    assert whole["0"]["all"]["questions"] == 8


def test_policy_is_named_trained_or_initial(tmp_path):
    start, named = tmp_path / "start", tmp_path / "named"
    for folder in (start, named):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({}))
    config = dataclasses.replace(
        Config(), run=RunConfig(dir=str(tmp_path / "run")), policy=PolicyConfig(path=str(start))
    )
    assert choose_policy(config).path == start
    with pytest.raises(UserError, match="has no checkpoint; set evaluate.policy or policy.path"):
        choose_policy(dataclasses.replace(config, policy=PolicyConfig()))
    (tmp_path / "run/checkpoints/3").mkdir(parents=True)
    assert choose_policy(config).path == tmp_path / "run/checkpoints"
    chosen = dataclasses.replace(config, evaluate=EvaluateConfig(policy=str(named)))
    assert choose_policy(chosen).path == named


def test_newest_checkpoint_is_pinned_by_step(tmp_path):
    for step in (3, 20):
        (tmp_path / f"checkpoints/{step}").mkdir(parents=True)
    source = PolicySource(tmp_path / "checkpoints", "checkpoint")
    newest = source.at_step()
    (tmp_path / "checkpoints/21").mkdir()
    assert newest == dataclasses.replace(source, step=20) == newest.at_step()
    assert describe_policy(newest)["step"] == 20
    assert describe_policy(dataclasses.replace(source, step=3))["step"] == 3


def test_unusable_policy_replaces_nothing(run, monkeypatch):
    run()
    before = run.file(".jsonl").read_text()

    def refuse(source, policy, mesh):
        raise UserError("no weights")

    monkeypatch.setattr(type(run.source), "params", refuse)
    with pytest.raises(UserError, match="no weights"):
        run(run={"seed": 1})
    assert run.file(".jsonl").read_text() == before


def test_output_must_be_a_json_file():
    with pytest.raises(ValueError, match=r"output is 'scores.jsonl': it must end in .json"):
        EvaluateConfig(output="scores.jsonl")


def test_several_files_are_one_evaluation(run):
    run.questions = {"a.jsonl": QUESTIONS[:4], "b.jsonl": QUESTIONS[4:]}
    report, _ = run()
    assert list(report.means["0"]) == ["all", "average", "a", "b"]
    assert [row["id"] for row in rows(run)] == [question.id for question in QUESTIONS]


def test_weights_overwritten_in_place_are_asked_again(run):
    """The folder keeps its time; that of the file alone tells."""
    weights = run.folder / "policy/model.safetensors"
    weights.write_text("1")
    for seconds in (1, 2):
        for path, time in ((weights, seconds), (weights.parent, 0)):
            os.utime(path, ns=(time * 10**9, time * 10**9))
        assert len(run()[1].asked) == 16
    assert run()[1].asked == []


SERVICE = {"status": "ready", "corpus_sha256": "c1", "encoder": "hashed", "model": "", "reranker": ""}


@contextmanager
def service(**health):
    """URL of a service that says this of itself and answers nothing."""

    class Health(Handler):
        def do_GET(self):
            self.reply(200, health)

    with serving(Health) as url:
        yield {"retriever": {"url": url}}


@pytest.mark.parametrize(
    "other", [{"corpus_sha256": "c2"}, {"encoder": "e5"}, {"reranker": "m"}, {"identity": "i2"}], ids=str
)
def test_another_service_is_another_evaluation(run, other):
    moved = SERVICE | {"status": "loading"}
    with service(**SERVICE) as first, service(**moved) as same, service(**SERVICE | other) as second:
        assert len(run(**first)[1].asked) == 16 and run(**same)[1].asked == []
        assert len(run(**second)[1].asked) == 16
        assert {row["retriever"].get("corpus_sha256") for row in rows(run)} == {
            other.get("corpus_sha256", "c1")
        }


def test_service_without_description_is_its_address(run):
    with service() as first, service() as second:
        run(**first)
        assert run(**first)[1].asked == []
        assert len(run(**second)[1].asked) == 16
        assert rows(run)[0]["retriever"] == json.loads(run.file(".json").read_text())["retriever"]
        assert rows(run)[0]["retriever"] == second["retriever"]


@pytest.mark.parametrize("method", ["direct", "empty_retriever"])
def test_method_without_search_asks_no_service(run, method):
    keys = {"evaluate": {"method": method}}
    run(**keys, retriever={"url": "http://127.0.0.1:9"})
    assert run(**keys, retriever={"url": "http://127.0.0.1:10"})[1].asked == []


def test_rewritten_corpus_or_pages_are_another_evaluation(run, tmp_path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("corpus", "pages")}
    keys = {"retriever": {name: str(path) for name, path in files.items()}}
    for path in files.values():
        path.write_text("one\n")
    for path in files.values():
        assert len(run(**keys)[1].asked) == 16 and run(**keys)[1].asked == []
        os.utime(path, ns=(1, 1))
    assert len(run(**keys)[1].asked) == 16


def test_waiting_for_a_service_is_reported(run, capsys):
    with pytest.raises(UserError, match="cannot be reached"):
        run(retriever={"url": "http://127.0.0.1:9", "patience": 0.3})
    assert "retriever http://127.0.0.1:9" in "".join(capsys.readouterr())


LONG = Question("long", "why " * 40, ("yes",), "a")


def test_overlong_prompt_is_refused_before_sampling(run):
    run.questions = {"eval.jsonl": [*QUESTIONS, LONG]}
    sampler = Scripted()
    words = r"data.eval: the prompts of 1 of 9 questions are longer than .*=100, .* 171 tokens \(.*'long'\)"
    with pytest.raises(UserError, match=words):
        run(sampler, rollout={"max_prompt_length": 100})
    assert sampler.asked == sampler.loaded == []


def test_overlong_prompts_are_left_out_and_reported(run, capsys):
    run.questions = {"eval.jsonl": [LONG, *QUESTIONS]}
    keys = {"rollout": {"max_prompt_length": 100}, "data": {"overlong_prompts": "leave_out"}}
    report, _ = run(**keys)
    assert report.means["0"]["all"]["questions"] == 8
    result = json.loads(run.file(".json").read_text())["overlong_prompts"]
    assert result.startswith("data.eval: the prompts of 1 of 9 questions") and result.endswith("are left out")
    assert result in " ".join(capsys.readouterr().err.split())
    assert run(**keys)[1].asked == []
    means, _ = run.validate(**keys)
    assert means["0"]["all"]["questions"] == 8


def test_passages_are_cut_to_the_prompt_length(run):
    """Two passages of a million letters, and room for 300 and the question."""
    run.shelf = Shelf()
    run.shelf.documents = [Document("1", "first", "word " * 200_000), Document("2", "second", "x")]
    config = {"max_prompt_length": 200, "max_observation_length": 400, "max_length": 4000}
    _, sampler = run(Scripted(searches=False), evaluate={"method": "rag"}, rollout=config)
    assert {len(prompt) for prompt in sampler.prompts} == {600}
    assert all('Passage 1: "first" word word' in prompt for prompt in sampler.prompts)
    assert not any("second" in prompt for prompt in sampler.prompts)
    assert [prompt.strip()[-3:] for prompt in sampler.prompts] == [question.text for question in QUESTIONS]


def test_question_without_room_gets_no_passages(run):
    bare = len(METHODS["rag"].template.format(question="Question: a 0"))
    config = {"max_prompt_length": bare - 10, "max_observation_length": 15, "max_length": 4000}
    _, sampler = run(Scripted(searches=False), evaluate={"method": "rag"}, rollout=config)
    assert {len(prompt) for prompt in sampler.prompts} == {bare + 5}
    config |= {"max_observation_length": 10}
    run.file(".jsonl").unlink()
    _, sampler = run(Scripted(searches=False), evaluate={"method": "rag"}, rollout=config)
    assert {len(prompt) for prompt in sampler.prompts} == {bare}
