"""Data, tokens, files and server of the trajectory page."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import sys
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from benchmarks.generated_run import make_turn, write_run
from calibadv_jax.config import Config, PromptConfig, dump_config
from calibadv_jax.config.kept import add_start
from calibadv_jax.contrib.pages import notebook
from calibadv_jax.contrib.pages.page_server import POLICY, make_server
from calibadv_jax.contrib.pages.site import FLAGS, Site
from calibadv_jax.contrib.pages.transcript import Pieces, observation_parts
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.rollout_store.schema import kept_steps


@pytest.fixture(scope="module")
def site(small_run):
    return Site(small_run)


def test_index_lists_every_trajectory_of_every_step(site):
    output = json.loads(site.get("data/index.json"))
    assert output["advantage"]["name"] == "calibadv" and output["planned"] == 2
    first, second = output["steps"]
    groups, rows = first["groups"], first["rows"]
    assert (first["step"], second["step"]) == (1, 2) and groups["group"] == [0, 1]
    assert groups["question"][0] == "who keeps it?" and groups["golden"][0] == ["ann"]
    assert groups["source"] == ["two_hop"] * 2 and second["groups"]["source"] == ["one_hop"]
    assert groups["silver"][0] == 3
    assert rows["group"] == [0] * 5 + [1] * 5 and rows["index"] == [0, 1, 2, 3, 4] * 2
    shown = json.loads(site.get("data/group_1_0.json"))["trajectories"]
    sampled = [sum(len(turn["ids"]) for turn in trajectory["turns"]) for trajectory in shown]
    columns = {
        "score": [1, 0, 0, 0, 0],
        "searches": [1, 2, 1, 1, 1],
        "length": sampled,
        "advantage": [1.5, -0.5, -0.5, -0.5, None],
        "answer": ["ann", "bob", "bob", None, None],
    }
    assert {name: rows[name][:5] for name in columns} == columns and len(set(sampled)) > 3
    assert rows["queries"][1] == "query\nquery"


def test_flags_say_what_a_trajectory_is(site):
    """The script names the same bits."""
    bits = re.findall(r"(\w+): (\d+)", site.get("records.js").decode().split("};")[0])
    assert [(name, int(bit)) for name, bit in bits] == [(name, 1 << n) for n, name in enumerate(FLAGS)]
    flags = json.loads(site.get("data/index.json"))["steps"][0]["rows"]["flags"][:5]
    assert [{name for name, bit in bits if flag & int(bit)} for flag in flags] == [
        {"goodSearch"},
        {"wrong", "goodSearch", "softened", "repeated"},
        {"wrong"},
        {"wrong", "formatInvalid", "invalid", "goodSearch"},  # it found the supporting document
        {"failed"},
    ]


def test_transcript_has_every_token_and_marks_silver_documents(site):
    output = json.loads(site.get("data/group_1_0.json"))
    assert output["silver"] == {"a": 1, "b": 1, "c": 1} and output["prompt"] == "who keeps it?"
    each = output["trajectories"][1]
    turn = each["turns"][0]
    assert "".join(turn["pieces"]) == "<think> one </think> <search> query </search>"
    assert len(turn["pieces"]) == len(turn["ids"]) == len(turn["logprobs"])
    assert turn["softened"] and turn["why"].startswith("Softened.")
    assert turn["correctness"] == pytest.approx(2 / 3)
    marks = [(d["id"], d["weight"], d["is_new"], d["is_seen"], d["is_supporting"]) for d in turn["documents"]]
    new = [("a", 1, True, False, True), ("b", 1, True, False, False)]
    assert marks == [*new, ("d", None, False, False, False)]
    assert turn["learner_logprobs"][3] == pytest.approx(turn["logprobs"][3] + 0.07, abs=2e-4)
    assert output["trajectories"][4]["turns"][0]["learner_logprobs"] is None
    second = each["turns"][1]
    assert second["repeated"] == "documents of turn 1"
    assert [d["is_seen"] for d in second["documents"]] == [True, True, False]
    assert [part["document"] for part in turn["observation"]] == [None, 0, 1, 2, None]
    assert turn["observation"][2]["text"] == 'Doc 2(Title: "title b") text of b\n'
    assert output["trajectories"][4]["error"] == "retriever: gone"


@pytest.fixture
def content(tmp_path, tokenizer):
    """The transcript of a group, the only one of its run."""

    def content(group, config=None):
        write_run(tmp_path / "run", [[group]], config or Config(), tokenizer)
        return json.loads(Site(tmp_path / "run").get("data/group_1_0.json"))

    return content


def test_invalid_turns_and_formats_say_why(content, tokenizer, small_group):
    group = small_group()
    unknown = "no action: none of <search>, <answer>"
    flaws = {"<search> amber": "<search> is not closed", "<browse> amber </browse>": unknown}
    flaws |= {"<search> </search>": "<search> is empty"}
    for trajectory, text in zip(group.trajectories, flaws, strict=False):
        trajectory.turns[-1] = make_turn(tokenizer, f"<think> a </think> {text}", kind="invalid")
    shown = content(group)["trajectories"]
    assert [each["turns"][-1]["flaw"] for each in shown[:3]] == list(flaws.values())
    assert [each["turns"][0]["flaw"] for each in shown] == [""] * 5
    assert shown[0]["why"] == "Invalid format: turn 2: <search> is not closed."


def test_thought_that_the_environment_opened_is_no_flaw(content, small_group):
    group = small_group()
    for turn in group.trajectories[0].turns:
        turn.text = turn.text.removeprefix("<think>")
    group.trajectories[0].opening = "<think>"
    shown = content(group, Config(prompt=PromptConfig(prepend_think=True)))["trajectories"]
    assert [turn["flaw"] for turn in shown[0]["turns"]] == ["", ""]
    assert shown[1]["turns"][0]["flaw"] == "<think> is not closed before <think>"


def test_run_in_progress_names_the_planned_steps(tmp_path, tokenizer, small_group):
    write_run(tmp_path, [[small_group()]], Config(), tokenizer, planned=60)
    assert json.loads(Site(tmp_path).get("data/index.json"))["planned"] == 60


def test_run_whose_config_plans_no_steps_names_none(small_run, monkeypatch):
    site = Site(small_run)
    monkeypatch.setattr(site, "_config", dict)
    index = json.loads(site.get("data/index.json"))
    assert (index["planned"], index["advantage"]) == (0, {})


def test_cut_observation_shows_documents_that_are_in_it():
    text = '\n\n<information>Doc 1(Title: "a") x\nDoc 2(Title: "b") y</information>\n\n'
    parts = observation_parts(text)
    assert [part["document"] for part in parts] == [None, 0, 1, None]
    assert "".join(part["text"] for part in parts) == text
    assert observation_parts("invalid") == [{"text": "invalid", "document": None}]
    assert observation_parts("") == []


@pytest.mark.parametrize(
    ("num_documents", "places"), [(0, [None]), (1, [None, 0, None]), (2, [None, 0, 1, None])]
)
def test_observation_with_more_headers_than_documents_names_no_missing_document(num_documents, places):
    text = '\n\n<information>Doc 1(Title: "a") x\nDoc 2(Title: "b") y</information>\n\n'
    parts = observation_parts(text, num_documents)
    assert [part["document"] for part in parts] == places
    assert "".join(part["text"] for part in parts) == text


def test_index_is_sent_once_for_each_new_step(tmp_path, small_run, served):
    """From before the first step on; the answer without a body has the headers that guard the page."""
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    add_start(folder, dump_config(Config()), {})
    later = [path.rename(tmp_path / path.name) for path in kept_steps(folder).values()]
    with served(folder) as address:
        ask, steps, tags = partial(ask_server, address), [], [""]
        for path in (None, *later):
            if path:
                path.rename(folder / "rollouts" / path.name)
            status, headers, body = ask("/data/index.json", **{"If-None-Match": tags[-1]})
            assert status == 200
            steps.append([step["step"] for step in json.loads(body)["steps"]])
            tags.append(headers["ETag"])
            status, headers, body = ask("/data/index.json", **{"If-None-Match": tags[-1]})
            assert (status, body, headers["ETag"]) == (304, b"", tags[-1])
            assert headers["Content-Security-Policy"] and "Content-Length" not in headers
            assert ask("/data/index.json", Host="evil.example", **{"If-None-Match": tags[-1]})[0] == 403
        assert steps == [[], [1], [1, 2]] and ask("/data/group_1_0.json")[0] == 200


def test_step_that_is_written_again_is_read_again(tmp_path, small_run, tokenizer, small_group):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    site = Site(folder)
    assert len(site.steps()[1]["groups"]["group"]) == 1 and site.get("data/group_2_1.json") is None
    other = tmp_path / "other"
    write_run(other, [[small_group()], [small_group(), small_group("comparison")]], Config(), tokenizer)
    (other / "rollouts/step_2.parquet").replace(folder / "rollouts/step_2.parquet")
    assert len(site.steps()[1]["groups"]["group"]) == 2
    assert json.loads(site.get("data/group_2_1.json"))["data_source"] == "comparison"
    assert len(site._steps) == 2  # not the replaced one


def test_settings_that_are_no_longer_allowed_are_shown(small_run, monkeypatch):
    site = Site(small_run)
    metadata = site._metadata()
    older = json.loads(metadata["advantage"]) | {"name": "early", "softening": "early", "gone": 1}
    monkeypatch.setattr(site, "_metadata", lambda: metadata | {"advantage": json.dumps(older)})
    words = json.loads(site.get("data/group_1_0.json"))["why"]
    assert "Advantage by early: a function of the run's own." in words


def test_folders_without_rollouts_are_named(tmp_path):
    (tmp_path / "none").mkdir()
    add_start(tmp_path / "none", "log: {rollouts: none}\n", {})
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "none"):
        with pytest.raises(UserError, match="no rollouts/step_N.parquet there"):
            Site(folder)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Pieces(folder)


def test_character_of_several_tokens_belongs_to_the_last(pieces, tokenizer):
    ids = tokenizer.encode("<think> basin cedar</think>aé日😀b").ids
    text = ["<think>", " basin", " cedar", "</think>", "a", "", "é", "", "", "日", "", "", "", "😀", "b"]
    assert pieces.pieces(ids) == text and pieces.pieces([]) == []
    ids = tokenizer.encode("😀b").ids
    cut = pieces.pieces([ids[0], ids[-1], ids[1], ids[2]])  # invalid bytes
    assert len(cut) == 4 and "b" in "".join(cut) and "\ufffd" in cut[-1]
    assert "".join(cut) == pieces.text([ids[0], ids[-1], ids[1], ids[2]])


@settings(max_examples=200)
@given(data=st.data())
def test_any_tokens_make_their_whole_text(pieces, tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    cut = pieces.pieces(ids)
    assert len(cut) == len(ids) and "".join(cut) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.timeout(60)  # a policy may repeat a byte
def test_bytes_that_make_no_character_have_pieces(tmp_path):
    """Also where a byte changes the text of those before it, as in Llama 2's tokenizer."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"b": 256}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces = Pieces(tmp_path).pieces
    assert pieces([256, 0x41, 0xE2, 256, 0xC3, 0xA9, 256]) == ["b", "\ufffd", "", "\ufffdb", "", "é", "b"]
    assert "".join(pieces([0xE2] * 50_000)) == "\ufffd" * 50_000


def test_tokenizer_is_read_or_named_as_damaged(tmp_path):
    for words in ("tokenizer.json: no such file", "no tokenizer can be loaded"):
        with pytest.raises(UserError, match=words):
            Pieces(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
    words = build_word_tokenizer()
    words.save_pretrained(tmp_path)
    ids = words.encode("<think> find maple optics </think>", add_special_tokens=False)
    assert Pieces(tmp_path).pieces(ids) == ["<think>", " find", " maple", " optics", " </think>"]


def ask_server(address, path, method="GET", **headers):
    """Status, headers and body of a server's answer."""
    with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=250)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


@pytest.fixture
def ask(served, small_run):
    with served(small_run) as address:
        yield partial(ask_server, address)


def test_answers_have_types_and_forbid_foreign_scripts(ask):
    types = {"/": "text/html", "/app.js": "text/javascript", "/style.css": "text/css"}
    types |= dict.fromkeys(("/data/index.json", "/data/group_1_0.json"), "application/json")
    absent = ("data/group_1_9.json", "data/group_7_0.json", "nothing.js", "../pages/site.py", "data/")
    for path, kind in (types | {f"/{path}": "text/plain" for path in absent}).items():
        status, headers, body = ask(path)
        assert status == (200 if path in types else 404) and headers["Content-Type"].startswith(kind) and body
        rules = headers["Content-Security-Policy"]
        assert "default-src 'none'" in rules and "script-src 'self';" in rules and "unsafe" not in rules
        assert "frame-ancestors 'none'" in rules and headers["X-Content-Type-Options"] == "nosniff"
    assert f'content="{POLICY}"' in ask("/")[2].decode()  # the page itself, for other servers
    assert ask("/", method="POST")[0] == 501


def test_group_is_served_as_json(ask):
    status, headers, body = ask("/data/group_1_0.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert int(headers["Content-Length"]) == len(body)
    assert json.loads(body)["group"] == 0


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/data/index.json", 200), ("/nothing.js", 404)])
def test_head_is_answered_without_a_body(ask, path, status):
    _, headers, content = ask(path)
    head_status, head_headers, body = ask(path, method="HEAD")
    assert (head_status, body) == (status, b"")
    for name in ("Content-Length", "Content-Type", "ETag", "Content-Security-Policy"):
        assert head_headers[name] == headers[name]
    assert int(head_headers["Content-Length"]) == len(content)


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/data/../../metrics.jsonl", "//etc/passwd"])
def test_files_outside_the_page_are_not_served(ask, path):
    assert ask(path)[0] == 404


def test_only_the_notebooks_pages_frame_it(small_run, monkeypatch):
    pytest.importorskip("IPython")
    shown = []

    def policy(host):
        status, headers, _ = ask_server(f"127.0.0.1:{shown[-1]}", "/", Host=host)
        return status, headers["Content-Security-Policy"].partition("frame-ancestors ")[2]

    monkeypatch.setattr("IPython.display.display", lambda frame: shown.append(urlsplit(frame.src).port))
    notebook.show(small_run)
    assert policy("localhost:1") == (200, notebook.JUPYTER) and policy("evil.example")[0] == 403
    colab = SimpleNamespace(serve_kernel_port_as_iframe=lambda port, height: shown.append(port))
    monkeypatch.setitem(sys.modules, "google.colab.output", colab)
    notebook.show(small_run)
    assert policy("8000-m-s.us-central1-0.prod.colab.dev") == (200, notebook.COLAB)


def test_foreign_name_that_points_here_is_refused(ask, small_run):
    for host in ("evil.example:80", "[", "", "[::1]:9", "localhost:9"):
        status = 200 if host.endswith(":9") else 403  # through a tunnel the port differs
        assert ask("/data/index.json", Host=host)[0] == status, host
    site = Site(small_run)
    with make_server(site, 0) as server:
        address, port = server.server_address
        assert address == "127.0.0.1"
        with pytest.raises(UserError, match=f"port {port}: .*choose another one with --port"):
            make_server(site, port)


def test_damaged_step_is_named(served, small_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    with served(folder) as address:
        (folder / "rollouts/step_1.parquet").write_bytes(b"PAR1 and no more")
        for path in ("/data/group_1_0.json", "/data/index.json"):
            status, _, body = ask_server(address, path)
            assert status == 500 and b"step_1.parquet: cannot be read" in body
