"""`calibadv ask`: what a person sees of a policy's turns, which config it takes, and errors in a line."""

import io
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
from tiny_policy import Letters

from calibadv_jax import cli
from calibadv_jax.config import Config, JudgeConfig, PromptConfig, RewardConfig, RolloutConfig
from calibadv_jax.contrib import asking
from calibadv_jax.contrib.commands import ask
from calibadv_jax.core.errors import QueryRefused, RequestFailed, UserError
from calibadv_jax.core.interfaces import Completion
from calibadv_jax.core.tags import QUERY_REFUSED
from calibadv_jax.core.trajectory import Document
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.model import find_policy


class Script:
    """A sampler that says one text after the other; notes the temperature."""

    def __init__(self, *texts):
        self.texts, self.temperatures = list(texts), []

    async def generate(self, token_ids, sampling, session):
        self.temperatures.append(sampling.temperature)
        text = self.texts.pop(0)
        return Completion([ord(letter) for letter in text], [-1.0] * len(text), "stop", (0,))

    def release(self, session):
        self.released = session

    async def close(self):
        pass


class Shelf:
    """A retriever with two documents, or with these, or with an error."""

    def __init__(self, error=None, documents=None):
        self.error, self.documents = error, documents

    async def search(self, queries):
        if self.error:
            raise self.error
        if self.documents is not None:
            return [self.documents]
        return [[Document("1", "Ann", "word " * 100), Document("2", "\x1b[2JBob\u202e", "b\x07")]]

    async def close(self):
        pass


SEARCH, ANSWER = "<think>look</think><search>who</search>", "<think>so</think><answer>Ann</answer>"
CONFIG = Config(prompt=PromptConfig(template="short", chat="off"), rollout=RolloutConfig(max_searches=1))


def rollouts_of(sampler, retriever, prompt=CONFIG.prompt):
    return Rollouts(RolloutContext(sampler, retriever, Letters(), CONFIG.rollout, prompt), 0)


def talk(sampler, retriever, temperature=0.0, prompt=CONFIG.prompt):
    """The printed lines, and the trajectory."""
    output = []
    with rollouts_of(sampler, retriever, prompt) as rollouts:
        trajectory = ask.answer(rollouts, "ask0", "who?", temperature, output.append)
    return output, trajectory


def test_turns_and_folded_documents_are_said_in_order(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    sampler = Script(SEARCH, ANSWER)
    output, trajectory = talk(sampler, Shelf())
    assert output[:2] == ["think   look", "search  who"]
    assert output[2].startswith("  [1]   Ann: word word") and output[2].endswith("…") and len(output[2]) == 70
    assert output[3] == "  [2]   [2JBob: b"  # control characters do not reach the terminal
    assert output[4:] == ["think   so"]
    assert ask.ending(trajectory) == "answer  Ann"
    assert sampler.released == "ask0"


def test_thought_that_the_prompt_opened_is_shown():
    sampler = Script(SEARCH.removeprefix("<think>"), ANSWER.removeprefix("<think>"))
    output, _ = talk(sampler, Shelf(), prompt=replace(CONFIG.prompt, prepend_think=True))
    assert [line for line in output if line.startswith("think")] == ["think   look", "think   so"]


def test_temperature_is_the_one_asked_for():
    sampler = Script(ANSWER)
    talk(sampler, Shelf(), temperature=0.7)
    assert sampler.temperatures == [0.7]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["rambling"], "no answer: its last turn neither searches nor answers"),
        ([SEARCH, SEARCH], "no answer: its last search came after the last one allowed"),
    ],
)
def test_missing_answer_says_why(texts, reason):
    output, trajectory = talk(Script(*texts), Shelf())
    assert ask.ending(trajectory).startswith(reason)
    assert len(texts) > 1 or output == ["invalid  rambling"]


@pytest.mark.parametrize(
    ("retriever", "line"),
    [(Shelf(QueryRefused("no")), QUERY_REFUSED), (Shelf(documents=[]), "No results found.")],
    ids=["refused", "empty"],
)
def test_search_without_documents_is_printed(retriever, line):
    output, trajectory = talk(Script(SEARCH, ANSWER), retriever)
    assert f"        {line}" in output and trajectory.answer == "Ann"


@pytest.fixture
def answer(monkeypatch):
    """What is said to questions by a policy that is there, while its retriever is not."""

    def answer(questions, *texts):
        class Loaded(Script):
            async def load(self, version, params):
                pass

        rollouts = rollouts_of(Loaded(*texts), Shelf(RequestFailed("retriever", "gone\x07")))
        monkeypatch.setattr(asking, "build_model", MagicMock())
        monkeypatch.setattr(asking, "open_rollouts", lambda *_: rollouts)
        output = []
        ask.ask(CONFIG, MagicMock(), questions, 0.0, output.append)
        return output

    return answer


def test_only_question_fails_the_command(answer):
    with pytest.raises(UserError, match="retriever: gone"):
        answer(["who?"], SEARCH)


def test_typed_half_of_an_emoji_is_replaced(answer, monkeypatch):
    questions = []

    async def note(context, question, *others):
        questions.append(question.text)
        return MagicMock(error=None, answer="Ann")

    monkeypatch.setattr(asking, "run_trajectory", note)
    assert answer(["who \udcff?"]) == ["answer  Ann"] and questions == ["who \ufffd?"]


def test_typed_question_that_fails_lets_next_one_come(answer):
    output = answer(iter(["who?", "where?"]), SEARCH, ANSWER)
    assert output == ["think   look", "search  who", "failed: retriever: gone", "think   so", "answer  Ann"]


def test_typed_questions_are_lines_until_the_end(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("who?\n\n  where? \n"))
    assert list(ask.typed_questions()) == ["who?", "where?"]


def test_config_is_that_of_newest_start_of_run(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "configs").mkdir()
    for name in ("0.yaml", "2.yaml", "10.yaml", "notes.yaml"):
        (run / "configs" / name).write_text("run: {seed: 1}\n")
    (run / "configs/11.yaml").touch()  # of a start on a full disk
    for policy in (run, run / "checkpoints", run / "checkpoints/7", run / "snapshots/v3"):
        assert asking.run_config(find_policy(policy)) == run / "configs/10.yaml"
    with pytest.raises(UserError, match="no config of a run beside it; name one with --config"):
        asking.run_config(find_policy(tmp_path / "elsewhere/model"))


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--policy", "nowhere", "who?"], "error: nowhere: no such folder"),
        (["--policy", ".", "who", "is", "it?"], "error: 3 questions were given; put quotes"),
        (
            ["--policy", ".", "--temperature", "-1", "who?"],
            "error: argument --temperature: -1: give 0 or more",
        ),
        (
            ["--policy", ".", "--temperature", "nan", "who?"],
            "error: argument --temperature: nan: give 0 or more",
        ),
        (["--policy", ".", "--config", "no.yaml", "who?"], "error: no.yaml: no such config file"),
        (["who?"], "error: the following arguments are required: --policy"),
    ],
)
def test_mistakes_are_one_line(arguments, output, capsys):
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["ask", *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(output) and error.count("\n") == 1


def test_questions_and_overrides_stand_in_any_order(tmp_path, monkeypatch):
    calls = []
    config = tmp_path / "run.yaml"
    config.write_text("run: {seed: 1}\n")
    monkeypatch.setattr(ask, "ask", lambda *arguments: calls.append(arguments))
    line = ["who wrote a=b?", "--policy", str(tmp_path), "run.seed=5", "--config", str(config)]
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["ask", *line])
    assert end.value.code == 0
    (asked, source, questions, temperature, _) = calls[0]
    assert asked.run.seed == 5 and questions == ["who wrote a=b?"] and temperature == 0
    assert source == find_policy(tmp_path)


def test_commands_of_a_run_config_need_a_flag(tmp_path, monkeypatch, capsys):
    configs = []
    monkeypatch.setattr(ask, "ask", lambda config, *_: configs.append(config))
    (tmp_path / "configs").mkdir()
    (tmp_path / "checkpoints").mkdir()
    kept = tmp_path / "configs" / "0.yaml"
    kept.write_text("tools: [search, {mcp: {command: 'sh -c true'}}]\n")
    line = ["ask", "who?", "--policy", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        cli.calibadv(line)
    assert end.value.code == 2 and not configs
    error = capsys.readouterr().err
    assert "starts a program, 'sh -c true'; --start-programs allows" in error and error.count("\n") == 1
    for allowed in (["--start-programs"], ["--config", str(kept)], ["tools=[search]"]):
        with pytest.raises(SystemExit) as end:
            cli.calibadv([*line, *allowed])
        assert end.value.code == 0
    assert [len(config.tools) for config in configs] == [2, 2, 1]


@pytest.mark.parametrize("own", [True, False])
def test_tokenizer_beside_policy_is_preferred(tmp_path, monkeypatch, own):
    """The config's may be gone, or another since; one that is named on the command line counts."""
    calls = []
    config = tmp_path / "run.yaml"
    config.write_text("policy: {tokenizer: elsewhere}\n")
    if own:
        (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr(ask, "ask", lambda asked, *_: calls.append(asked.policy.tokenizer))
    line = ["ask", "who?", "--policy", str(tmp_path), "--config", str(config)]
    for words in (line, [*line, "policy.tokenizer=mine"]):
        with pytest.raises(SystemExit):
            cli.calibadv(words)
    assert calls == ["" if own else "elsewhere", "mine"]


def test_config_for_a_person(tmp_path):
    patient = replace(Config().retriever, patience=900.0)
    config = replace(Config(), run=replace(Config().run, dir="runs/mine"), retriever=patient)
    judge = JudgeConfig(url="http://127.0.0.1:1/v1", model="m", prompt="gone.txt")
    config = replace(config, reward=RewardConfig(answer={"f1": 0.5, "judge": 0.5}, judge=judge))
    alone = asking.for_people(config, str(tmp_path), 1)
    assert alone.run.dir == str(tmp_path) and alone.retriever.patience == 10
    assert alone.reward.judge.url == ""  # the judge of a run that has ended is gone
    hasty = replace(config, retriever=replace(patient, patience=2.0))
    assert asking.for_people(hasty, str(tmp_path), 1).retriever.patience == 2
