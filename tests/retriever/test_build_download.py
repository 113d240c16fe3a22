"""scripts/download.py: joins, unpacks and checks; files in the folder need no network."""

import gzip
import json
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from retriever_rig import write_flat

from scripts import download as download_script


@pytest.fixture
def download(monkeypatch):
    """The script, with no network."""
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")  # not an attribute of the package until imported
    absent = Mock(side_effect=errors.LocalEntryNotFoundError("no connection"))
    monkeypatch.setattr(hub, "hf_hub_download", absent)
    return download_script


@pytest.fixture
def parts(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((50, 8), dtype=np.float32)
    whole = write_flat(tmp_path / "part_aa", vectors).read_bytes()
    (tmp_path / "part_aa").write_bytes(whole[:1000])
    (tmp_path / "part_ab").write_bytes(whole[1000:])
    return whole


def test_parts_are_joined(download, tmp_path, parts, capsys):
    assert download.main(["index", "--output", str(tmp_path), "--remove_parts"]) == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == parts
    assert [path.name for path in tmp_path.iterdir()] == ["e5_Flat.index"]
    assert capsys.readouterr().out.endswith("e5_Flat.index: 50 vectors\n")


def test_corpus_is_unpacked_and_checked(download, tmp_path, capsys):
    rows = "".join(json.dumps({"id": str(i), "contents": "text"}) + "\n" for i in range(5))
    packed = tmp_path / "wiki-18.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.encode())[:-6])
    assert download.main(["corpus", "--output", str(tmp_path)]) == 2
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "wiki-18.jsonl").exists()
    packed.write_bytes(gzip.compress(rows.encode()))
    assert download.main(["corpus", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "wiki-18.jsonl").read_text() == rows
    assert capsys.readouterr().out.endswith("wiki-18.jsonl: 5 passages\n")


def test_no_network(download, tmp_path, capsys):
    assert download.main(["index", "--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "part_aa of https://huggingface.co/datasets/PeterJinGo/wiki-18-e5-index" in error
    assert f"copy the file to {tmp_path / 'new' / 'part_aa'}" in error


def test_full_disk_and_short_part_are_named(download, tmp_path, parts, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        assert download.main(["index", "--output", str(tmp_path)]) == 2
    assert "needs up to 1,645 bytes more and 10 are free" in capsys.readouterr().err
    (tmp_path / "part_ab").write_bytes(parts[1000:-4])
    assert download.main(["index", "--output", str(tmp_path)]) == 2
    assert "has 1,641 bytes, but 50 vectors of dimension 8 take 1,645" in capsys.readouterr().err
