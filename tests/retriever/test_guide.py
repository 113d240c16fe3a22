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
from retriever.service.limits import Limits
from retriever.service.middleware import BodyLimit
from retriever.service.protocol import MAX_HEAD
from retriever.service.search_engine import MAX_QUERY_LENGTH

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


def test_documented_limits_are_the_defaults():
    """Of the options, and of services that are made without them."""
    options, limits = parse(["--corpus_path", "c", "--index_path", "i"]), Limits()
    sizes = [MAX_HEAD // 2**10, limits.max_body // 2**20, limits.max_bodies // 2**20]
    assert f"| head, body, all bodies | {sizes[0]} KiB, {sizes[1]} MB, {sizes[2]} MB |" in TEXT
    assert f"| queries of a request | `--max_queries` ({limits.max_queries}) |" in TEXT
    assert f"| queries × documents | `--max_results` ({limits.max_results:,}); more get 422 |" in TEXT
    assert f"| characters of a query | {MAX_QUERY_LENGTH:,}; longer ones are cut" in TEXT
    assert f"`--request_seconds` ({limits.request_seconds:g})" in TEXT
    assert f"`--max_connections` ({options.max_connections})" in TEXT
    for name in ("max_batch", "max_queue", "max_queries", "max_results", "request_seconds"):
        assert getattr(options, name) == getattr(limits, name), name
    body_limit = BodyLimit(None, limits.max_body)
    assert (body_limit.max_bodies, body_limit.seconds) == (limits.max_bodies, limits.request_seconds)


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
