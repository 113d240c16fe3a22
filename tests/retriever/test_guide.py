"""docs/retriever.md: its first example gives what it says, its options exist, its arithmetic is right."""

import json
import re
import shlex
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from retriever.indexes.faiss_build import vector_bytes
from retriever.indexes.faiss_gpu import NORM_BYTES, WORKSPACE
from retriever.options import make_parser, parse
from retriever.service.assembly import load

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "retriever.md").read_text(encoding="utf-8")
ROWS = 21_015_324
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


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("CPU, Flat", vector_bytes(ROWS, 768, "Flat")),
        ("SQ8`", vector_bytes(ROWS, 768, "SQ8")),
        ("IVF4096,PQ64`", vector_bytes(ROWS, 768, "IVF4096,PQ64")),
        ("HNSW32`", vector_bytes(ROWS, 768, "HNSW32")),
        ("one GPU of 80 GB", ROWS * (2 * 768 + NORM_BYTES) + WORKSPACE),
        ("four GPUs", ROWS // 4 * (2 * 768 + NORM_BYTES) + WORKSPACE),
        ("Qdrant, float32", ROWS * 768 * 4 * 1.5),
        ("Qdrant, `int8`", ROWS * 768 * 1.5),
        ("Qdrant, three nodes", ROWS * 768 * 1.5 * 2 / 3),
    ],
)
def test_documented_sizes_are_computed(name, size):
    (row,) = [line for line in TEXT.splitlines() if line.startswith("|") and name in line.split("|")[1]]
    assert row.split("|")[2].split()[0] == f"{size / 1e9:.1f}"
