"""`calibadv ask`: what a person sees of a policy's turns, which config it takes, and errors in a line."""

import io
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
from serving_rig import SEARCH, Script, Shelf
from tiny_policy import Letters

from calibadv_jax import cli
from calibadv_jax.config import Config, JudgeConfig, PromptConfig, RewardConfig, RolloutConfig
from calibadv_jax.contrib.cli import ask
from calibadv_jax.core.errors import QueryRefused, RequestFailed, UserError
from calibadv_jax.core.tags import QUERY_REFUSED
from calibadv_jax.core.trajectory import Document
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.model import find_policy

ANSWER = "<think>so</think><answer>Ann</answer>"
LIMITS = RolloutConfig(temperature=0.7, max_searches=1)
CONFIG = Config(prompt=PromptConfig(template="short", chat="off"), rollout=LIMITS)
FOUND = [Document("1", "Ann", "word " * 100), Document("2", "\x1b[2JBob\u202e", "b\x07")]


def rollouts_of(sampler, retriever, prompt=CONFIG.prompt):
    return Rollouts(RolloutContext(sampler, retriever, Letters(), CONFIG.rollout, prompt), 0)


def talk(*texts, retriever=None, prompt=CONFIG.prompt):
    """The printed lines, the trajectory and the sampler, which writes the texts one after the other."""
    output, sampler = [], Script(texts)
    with rollouts_of(sampler, retriever or Shelf(FOUND), prompt) as rollouts:
        trajectory = ask.answer(rollouts, "ask0", "who?", output.append)
    return output, trajectory, sampler


def test_turns_and_folded_documents_are_said_in_order():
    output, trajectory, sampler = talk(SEARCH, ANSWER)
    assert output[:2] == ["think   look for Ann", "search  who"]
    assert output[2].startswith("  [1]   Ann: word word") and output[2].endswith("…")
    assert len(output[2]) == 120
    assert output[3] == "  [2]   [2JBob: b"  # control characters do not reach the terminal
    assert output[4:] == ["think   so"] and ask.answer_line(trajectory) == "answer  Ann"
    assert sampler.released == ["ask0"] and [each.temperature for _, each in sampler.sampled] == [0.7, 0.7]
    opened = (text.removeprefix("<think>") for text in (SEARCH, ANSWER))  # by the prompt
    assert talk(*opened, prompt=replace(CONFIG.prompt, prepend_think=True))[0] == output


@pytest.mark.parametrize(
    ("texts", "retriever", "line", "end"),
    [
        (["rambling"], None, "invalid  rambling", "no answer: its last turn neither searches nor answers"),
        ([SEARCH, ANSWER], Shelf(error=QueryRefused("no")), f"        {QUERY_REFUSED}", "answer  Ann"),
        ([SEARCH, ANSWER], Shelf([]), "        No results found.", "answer  Ann"),
    ],
    ids=["invalid", "refused", "empty"],
)
def test_missing_answers_and_documents_say_why(texts, retriever, line, end):
    output, trajectory, _ = talk(*texts, retriever=retriever)
    assert line in output and ask.answer_line(trajectory).startswith(end)


def test_search_beyond_the_last_one_allowed_is_no_answer():
    output, trajectory, _ = talk(SEARCH, SEARCH)
    assert ask.answer_line(trajectory).startswith("no answer: its last search had no turn or no room left")
    assert output[-2:] == ["think   look for Ann", "search  who"]


def test_invalid_turn_is_the_only_line():
    output, *_ = talk("rambling")
    assert output == ["invalid  rambling"]


@pytest.fixture
def answer(monkeypatch):
    """The printed lines about questions to a policy that is there, while its retriever is not."""

    def answer(questions, *texts):
        sampler = Script(texts)
        rollouts = rollouts_of(sampler, Shelf(error=RequestFailed("retriever", "gone\x07")))
        monkeypatch.setattr(ask, "build_model", MagicMock())
        monkeypatch.setattr(ask, "open_rollouts", lambda *_: rollouts)
        output = []
        ask.ask(CONFIG, MagicMock(), questions, output.append)
        assert "\udcff" not in "".join(prompt for prompt, _ in sampler.sampled)
        return output

    return answer


def test_failed_question_ends_command_unless_typed(answer, monkeypatch):
    with pytest.raises(UserError, match="retriever: gone"):
        answer(["who?"], SEARCH)
    monkeypatch.setattr("sys.stdin", io.StringIO("who?\n\n  where \udcff? \n"))  # half an emoji
    lines = ["think   look for Ann", "search  who", "failed: retriever: gone", "think   so", "answer  Ann"]
    assert answer(ask.typed_questions(), SEARCH, ANSWER) == lines


def test_config_is_that_of_newest_start_of_run(tmp_path):
    run = tmp_path / "run"
    for folder in ("checkpoints", "configs"):
        (run / folder).mkdir(parents=True)
    for name in ("0.yaml", "2.yaml", "10.yaml", "notes.yaml"):
        (run / "configs" / name).write_text("run: {seed: 1}\n")
    for policy in (run, run / "checkpoints", run / "checkpoints/7", run / "snapshots/v3"):
        assert ask.run_config(find_policy(policy)) == run / "configs/10.yaml"
    with pytest.raises(UserError, match="no config of a run beside it; name one with --config"):
        ask.run_config(find_policy(tmp_path / "elsewhere/model"))


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """Runs the command with a policy; gives status, errors, and the config, source and questions asked."""
    calls = []
    monkeypatch.setattr(ask, "ask", lambda *arguments: calls.append(arguments[:3]))

    def asked(*words):
        calls.clear()
        with pytest.raises(SystemExit) as end:
            cli.calibadv(["ask", *words, "--policy", str(tmp_path)])
        return end.value.code, capsys.readouterr().err, *(calls[0] if calls else [None] * 3)

    return asked


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("ask --policy nowhere who?", "nowhere: no such folder"),
        ("ask --policy . who is it?", "3 questions were given; put quotes"),
        ("ask --policy . --temperature -1 who?", "argument --temperature: -1: give 0 or more"),
        ("ask --policy . --temperature nan who?", "argument --temperature: nan: give 0 or more"),
        ("ask --policy . --config no.yaml who?", "no.yaml: no such config file"),
        ("ask who?", "the following arguments are required: --policy"),
        (
            "serve --policy . --host 0.0.0.0",
            "--host 0.0.0.0 is open to the network: protect it with --token-file",
        ),
        ("serve --policy . --token-file none", "--token-file none: no such file, or an empty one"),
        ("serve --policy . --slots 0", "argument --slots: 0: give 1 or more"),
        ("serve --policy . --time-limit nan", "argument --time-limit: nan: give 1 or more"),
        ("serve --policy nowhere", "nowhere: no such folder"),
    ],
)
def test_mistakes_are_one_line(line, output, capsys, monkeypatch):
    if line.startswith("serve"):
        pytest.importorskip("uvicorn")
    monkeypatch.delenv("CALIBADV_TOKEN", raising=False)
    with pytest.raises(SystemExit) as end:
        cli.calibadv(line.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith(f"error: {output}") and error.count("\n") == 1


@pytest.mark.parametrize("own", [True, False])
def test_overrides_and_own_tokenizer_reach_the_policy(asked, tmp_path, own):
    """The config's tokenizer may be gone, or another since; one that is named on the command line counts."""
    config = tmp_path / "run.yaml"
    config.write_text("policy: {tokenizer: elsewhere}\n")
    if own:
        (tmp_path / "tokenizer.json").touch()
    status, _, read, source, questions = asked("who wrote a=b?", "run.seed=5", "--config", str(config))
    assert status == 0 and read.run.seed == 5 and questions == ["who wrote a=b?"]
    assert source == find_policy(tmp_path) and read.policy.tokenizer == ("" if own else "elsewhere")
    assert read.rollout.temperature == 0
    *_, read, _, _ = asked("who?", "policy.tokenizer=mine", "--config", str(config), "--temperature", "0.5")
    assert read.policy.tokenizer == "mine" and read.rollout.temperature == 0.5
    *_, read, _, _ = asked("who?", "rollout.temperature=0.7", "--config", str(config))
    assert read.rollout.temperature == 0.7


def test_commands_of_a_run_config_need_a_flag(asked, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "checkpoints").mkdir()
    config_file = tmp_path / "configs" / "0.yaml"
    config_file.write_text("tools: [search, {mcp: {command: 'sh -c true'}}]\n")
    own_config = tmp_path / "own.yaml"
    own_config.write_text(config_file.read_text())
    for words in ([], ["--config", str(config_file)]):
        status, error, config, *_ = asked("who?", *words)
        assert status == 2 and config is None and error.count("\n") == 1
        assert "calibadv ask would start the program 'sh -c true' (tools)" in error
    for words, tools in (
        (["--trust-run"], 2),
        (["--config", str(own_config)], 2),
        (["tools=[search]"], 1),
    ):
        status, _, config, *_ = asked("who?", *words)
        assert status == 0 and len(config.tools) == tools


def test_config_for_a_person(tmp_path):
    judge = JudgeConfig(url="http://127.0.0.1:1/v1", model="m", prompt="gone.txt")
    reward = RewardConfig(answer={"f1": 0.5, "judge": 0.5}, judge=judge)
    for patience, expected in ((900.0, 10), (2.0, 2)):
        config = replace(Config(), reward=reward, retriever=replace(Config().retriever, patience=patience))
        alone = ask.for_people(config, str(tmp_path), 1)
        assert alone.run.dir == str(tmp_path) and alone.retriever.patience == expected
        assert alone.reward.judge.url == ""  # the judge of a run that has ended is gone
