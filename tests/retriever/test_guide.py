"""docs/retriever.md: its first example gives what it says, its options exist."""

import json
import re
import shlex
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from retriever.options import make_parser, parse
from retriever.service.server import load

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "retriever.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(
    r"```bash\ncat > corpus.jsonl <<'EOF'\n(.*?)EOF\npython -m retriever.serve (.*?) &\ncurl .*?-d '(.*?)'\n"
    r"```\n\n```json\n(.*?)```",
    re.DOTALL,
)


def test_first_example_gives_the_documented_reply(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus, command, body, output = EXAMPLE.search(TEXT).groups()
    Path("corpus.jsonl").write_text(corpus)
    with TestClient(load(parse(shlex.split(command)))) as client:
        header = {"content-type": "application/json"}
        reply = client.post("/retrieve", content=body, headers=header).json()
    (((hit,),), ((documented,),)) = reply["result"], json.loads(output)["result"]
    assert hit == documented | {"score": pytest.approx(documented["score"], rel=1e-4)}


def test_documented_options_exist():
    existing = set(make_parser()._option_string_actions)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", TEXT))
    assert len(named) > 25
    others = {"--retry", "--retry-all-errors", "--output"}  # curl, scripts/download.py
    assert named - existing == others
