"""What the page is told of a run: the index with its flags, and the transcripts."""

import json
import re
import shutil

import pytest

from benchmarks.generated_run import make_turn, write_run
from calibadv_jax.config import AdvantageConfig, Config, PromptConfig
from calibadv_jax.contrib.pages import site as index
from calibadv_jax.contrib.pages.site import RunFiles, Site
from calibadv_jax.contrib.pages.transcript import observation_parts
from calibadv_jax.core.errors import UserError


@pytest.fixture(scope="module")
def site(small_run):
    return Site(RunFiles(small_run))


def test_index_lists_every_trajectory_of_every_step(site):
    output = json.loads(site.get("data/index.json"))
    assert output["advantage"]["name"] == "calibadv"
    assert [step["step"] for step in output["steps"]] == [1, 2]
    groups, rows = output["steps"][0]["groups"], output["steps"][0]["rows"]
    assert groups["group"] == [0, 1]
    assert groups["question"][0] == "who keeps it?" and groups["golden"][0] == ["ann"]
    assert groups["source"] == ["two_hop", "two_hop"] and output["steps"][1]["groups"]["source"] == ["one_hop"]
    assert groups["silver"][0] == 3
    assert rows["group"] == [0] * 5 + [1] * 5 and rows["index"] == [0, 1, 2, 3, 4] * 2
    assert rows["score"][:5] == [1, 0, 0, 0, 0] and rows["searches"][:5] == [1, 2, 1, 1, 1]
    shown = json.loads(site.get("data/group_1_0.json"))["trajectories"]
    sampled = [sum(len(turn["ids"]) for turn in trajectory["turns"]) for trajectory in shown]
    assert rows["length"][:5] == sampled and len(set(sampled)) > 3
    assert output["planned"] == 2
    assert rows["advantage"][:5] == [1.5, -0.5, -0.5, -0.5, None]
    assert rows["answer"][:5] == ["ann", "bob", "bob", None, None] and rows["queries"][1] == "query\nquery"


def test_flags_say_what_a_trajectory_is(site):
    flags = json.loads(site.get("data/index.json"))["steps"][0]["rows"]["flags"][:5]
    wrong = index.WRONG
    assert flags == [
        index.GOOD_SEARCH,
        wrong | index.GOOD_SEARCH | index.SOFTENED | index.REPEATED,
        wrong,
        wrong | index.FORMAT_INVALID | index.INVALID | index.GOOD_SEARCH,  # it found the supporting document
        index.FAILED,
    ]


def test_script_names_the_same_flags(site):
    output = dict(re.findall(r"(\w+): (\d+)", site.static()["records.js"].decode().split("};")[0]))
    assert {name: int(bit) for name, bit in output.items()} == {
        "failed": index.FAILED,
        "formatInvalid": index.FORMAT_INVALID,
        "invalid": index.INVALID,
        "unfinished": index.UNFINISHED,
        "wrong": index.WRONG,
        "goodSearch": index.GOOD_SEARCH,
        "softened": index.SOFTENED,
        "repeated": index.REPEATED,
    }


def test_transcript_has_every_token_and_marks_silver_documents(site):
    output = json.loads(site.get("data/group_1_0.json"))
    assert output["silver"] == {"a": 1, "b": 1, "c": 1} and output["prompt"] == "who keeps it?"
    each = output["trajectories"][1]
    turn = each["turns"][0]
    assert "".join(turn["pieces"]) == "<think> one </think> <search> query </search>"
    assert len(turn["pieces"]) == len(turn["ids"]) == len(turn["logprobs"])
    assert (
        turn["softened"]
        and turn["correctness"] == pytest.approx(2 / 3)
        and turn["why"].startswith("Softened.")
    )
    marks = [(d["id"], d["weight"], d["is_new"], d["is_seen"], d["is_supporting"]) for d in turn["documents"]]
    assert marks == [
        ("a", 1, True, False, True),
        ("b", 1, True, False, False),
        ("d", None, False, False, False),
    ]
    assert turn["learner_logprobs"][3] == pytest.approx(turn["logprobs"][3] + 0.07, abs=2e-4)
    assert output["trajectories"][4]["turns"][0]["learner_logprobs"] is None
    second = each["turns"][1]
    assert second["repeated"] == "documents of turn 1"
    assert [d["is_seen"] for d in second["documents"]] == [True, True, False]
    assert [part["document"] for part in turn["observation"]] == [None, 0, 1, 2, None]
    assert turn["observation"][2]["text"] == 'Doc 2(Title: "title b") text of b\n'
    assert output["trajectories"][4]["error"] == "retriever: gone"


def test_invalid_turns_and_formats_say_why(tmp_path, tokenizer, small_group):
    group = small_group()
    flaws = {
        "<think> a </think> <search> amber": "<search> is not closed",
        "<think> a </think> <browse> amber </browse>": (
            "unknown action <browse>: there are <search>, <answer>, written exactly so"
        ),
        "<think> a </think> <search> </search>": "<search> is empty",
    }
    for trajectory, text in zip(group.trajectories, flaws, strict=False):
        trajectory.turns[-1] = make_turn(tokenizer, text, kind="invalid")
    write_run(tmp_path / "run", [[group]], Config(), tokenizer)
    shown = json.loads(Site(RunFiles(tmp_path / "run")).get("data/group_1_0.json"))["trajectories"]
    assert [each["turns"][-1]["flaw"] for each in shown[:3]] == list(flaws.values())
    assert [each["turns"][0]["flaw"] for each in shown] == [""] * 5
    assert shown[0]["why"] == "Invalid format: turn 2: <search> is not closed."


@pytest.mark.parametrize(("name", "is_judged"), [("calibadv", True), ("querygroup", True), ("grpo", False)])
def test_correctness_is_shown_where_searches_are_judged(tmp_path, tokenizer, small_group, name, is_judged):
    config = Config(advantage=AdvantageConfig(name=name))
    write_run(tmp_path / "run", [[small_group()]], config, tokenizer)
    assert json.loads(Site(RunFiles(tmp_path / "run")).get("data/group_1_0.json"))["is_judged"] is is_judged


def test_thought_that_the_environment_opened_is_no_flaw(tmp_path, tokenizer, small_group):
    group = small_group()
    for turn in group.trajectories[0].turns:
        turn.text = turn.text.removeprefix("<think>")
    config = Config(prompt=PromptConfig(prepend_think=True))
    group.trajectories[0].opening = "<think>"
    write_run(tmp_path / "run", [[group]], config, tokenizer)
    shown = json.loads(Site(RunFiles(tmp_path / "run")).get("data/group_1_0.json"))["trajectories"]
    assert [turn["flaw"] for turn in shown[0]["turns"]] == ["", ""]
    assert shown[1]["turns"][0]["flaw"] == "<think> is not closed before <think>"


def test_run_in_progress_names_the_planned_steps(tmp_path, tokenizer, small_group):
    write_run(tmp_path / "run", [[small_group()]], Config(), tokenizer, planned=60)
    assert json.loads(Site(RunFiles(tmp_path / "run")).get("data/index.json"))["planned"] == 60
    assert json.loads(Site(RunFiles(tmp_path / "run", 1, 1)).get("data/index.json"))["planned"] == 1


def test_cut_observation_shows_documents_that_are_in_it():
    documents = [{"title": name} for name in ("a", "b", "c")]
    text = '\n\n<information>Doc 1(Title: "a") x\nDoc 2(Title: "b") y</information>\n\n'
    parts = observation_parts(text, documents)
    assert [part["document"] for part in parts] == [None, 0, 1, None]
    assert "".join(part["text"] for part in parts) == text
    assert observation_parts("My previous action is invalid.", []) == [
        {"text": "My previous action is invalid.", "document": None}
    ]
    assert observation_parts("", []) == []


def test_addresses_that_do_not_exist(site):
    for address in ("data/group_1_9.json", "data/group_7_0.json", "nothing.js", "../pages/site.py", "data/"):
        assert site.get(address) is None


def test_step_that_appears_later_is_found(tmp_path, small_run):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    later = (folder / "rollouts/step_2.parquet").rename(tmp_path / "later.parquet")
    site = Site(RunFiles(folder))
    assert [step["step"] for step in site.steps()] == [1]
    later.rename(folder / "rollouts/step_2.parquet")
    assert [step["step"] for step in site.steps()] == [1, 2]


def test_step_that_is_written_again_is_read_again(tmp_path, small_run, tokenizer, small_group):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    site = Site(RunFiles(folder))
    assert len(site.steps()[1]["groups"]["group"]) == 1 and site.get("data/group_2_1.json") is None
    other = tmp_path / "other"
    write_run(other, [[small_group()], [small_group(), small_group("comparison")]], Config(), tokenizer)
    (other / "rollouts/step_2.parquet").replace(folder / "rollouts/step_2.parquet")
    assert len(site.steps()[1]["groups"]["group"]) == 2
    assert json.loads(site.get("data/group_2_1.json"))["data_source"] == "comparison"


def test_only_the_steps_asked_for(small_run):
    assert list(RunFiles(small_run, 2, 9).paths()) == [2]
    assert RunFiles(small_run, 2, 9).group(1, 0) == []
    with pytest.raises(UserError, match="keeps steps 1 to 2"):
        RunFiles(small_run, 3)


def test_folder_without_rollouts_is_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        RunFiles(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no rollouts/step_N.parquet there"):
        RunFiles(tmp_path)


def test_damaged_step_is_named(tmp_path, small_run):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    (folder / "rollouts/step_1.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="step_1.parquet: cannot be read"):
        Site(RunFiles(folder)).steps()
