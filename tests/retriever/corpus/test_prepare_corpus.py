"""Other people's corpora become ours: layouts, ids, what is dropped, and nothing half-written."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from retriever_rig import refuses

from retriever.corpus import layouts, prepare
from retriever.corpus import passages as offsets
from retriever.corpus.passages import load_corpus
from retriever.corpus.prepare import prepare_corpus
from retriever.errors import RetrieverError
from retriever.prepare_corpus import main


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def converted(tmp_path, content, **options):
    """The rows of the corpus that a file of this content becomes."""
    (tmp_path / "input").write_bytes(content)
    prepare_corpus([str(tmp_path / "input")], tmp_path / "out.jsonl", progress=False, **options)
    return list(load_corpus(tmp_path / "out.jsonl"))


def parquet(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lines({"id": 7, "title": "A  b", "text": " It is. "}), ("7", '"A b"\nIt is.')),
        (lines({"_id": "d", "title": "A", "text": "It is.", "metadata": {}}), ("d", '"A"\nIt is.')),  # BEIR
        (lines({"_id": "d1", "title": "", "text": "It is."}) + b" \n", ("d1", "\nIt is.")),
        (lines({"id": "0", "contents": '"A"\nIt is.'}), ("0", '"A"\nIt is.')),
        (lines({"id": "0", "title": "A", "contents": '"A"\nIt is.'}), ("0", '"A"\nIt is.')),
        (lines({"id": "0", "title": "A", "contents": "It is."}), ("0", '"A"\nIt is.')),
        (lines({"pid": "m_1", "passage": "It is."}), ("m_1", "\nIt is.")),  # MS MARCO v2
        (lines({"docid": "x", "title": "A", "text": ["It is.", "So."]}), ("x", '"A"\nIt is. So.')),
        (b'id\ttext\ttitle\n1\t"It ""is"" so."\tA\n', ("1", '"A"\nIt "is" so.')),  # DPR psgs_w100
        (b'0\tIt "is so.\n', ("0", '\nIt "is so.')),  # MS MARCO passages
        (b"D1\thttp://x\tA\tIt is.\n", ("D1", '"A"\nIt is.', "http://x")),  # MS MARCO documents
        (gzip.compress(b"0\tIt is.\n", mtime=0), ("0", "\nIt is.")),
        (b'id,title,text\n1,A,"It ""is"", so.\nYes."\n', ("1", '"A"\nIt "is", so.\nYes.')),
        (b'\xef\xbb\xbf"Title",TEXT , Id\r\nA,It is.,7\r\n', ("7", '"A"\nIt is.')),
        (b'id,contents\n1,"""A""\nIt is."\n', ("1", '"A"\nIt is.')),
        (b'id\tcontents\n1\t"""A""\nIt is."\n', ("1", '"A"\nIt is.')),
        (b"title\ttext\tdocid\nA\tIt is.\t1\n", ("1", '"A"\nIt is.')),
        (gzip.compress(b"id,text\n1,It is.\n", mtime=0), ("1", "\nIt is.")),
        (b"\xef\xbb\xbf" + lines({"id": 1, "title": "A", "text": "x"}), ("1", '"A"\nx')),
        (b'{"id": 1, "text": "a\\ud800b", "url": "u"}\n', ("1", "\na\ufffdb", "u")),
    ],
)
def test_row_of_every_layout_is_converted(tmp_path, content, expected):
    (row,) = converted(tmp_path, content)
    assert row == dict(zip(("id", "contents", "url"), expected, strict=False))


def test_parquet_is_read_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "BATCH", 2)
    rows = [{"_id": n, "title": f"T{n}", "text": f"x{n}", "vector": [0.5] * 3} for n in range(5)]
    results = converted(tmp_path, parquet(tmp_path / "p", *rows))
    assert results == [{"id": str(n), "contents": f'"T{n}"\nx{n}'} for n in range(5)]
    with pytest.raises(RetrieverError, match="input: no known column among a, b"):
        converted(tmp_path, parquet(tmp_path / "p", {"a": 1, "b": 2}))


def test_several_files_and_patterns_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"part-{name}.jsonl").write_bytes(lines({"id": name, "title": "A", "text": "x"}))
    (tmp_path / "first.tsv").write_bytes(b"0\tIt is.\n\n")  # a blank line is no row
    inputs = [str(tmp_path / "first.tsv"), str(tmp_path / "part-*.jsonl")]
    prepare_corpus(inputs, tmp_path / "out.jsonl", progress=False)
    assert [row["id"] for row in load_corpus(tmp_path / "out.jsonl")] == ["0", "a", "b"]
    for row, expected in ((lines({"contents": "x"}), True), (b'{"id": "0", "te', False)):
        (tmp_path / "c.jsonl").write_bytes(row)
        assert layouts.is_convertible(tmp_path / "c.jsonl") is expected


def test_dropped_passages_are_counted(tmp_path):
    rows = [("1", "x"), ("2", " "), ("3", "x"), ("4", "y")]
    (tmp_path / "in.jsonl").write_bytes(lines(*({"id": n, "title": "A", "text": text} for n, text in rows)))
    report = prepare_corpus([str(tmp_path / "in.jsonl")], tmp_path / "out.jsonl", progress=False)
    assert (report.read, report.written, dict(report.dropped)) == (4, 3, {"no text": 1})
    report = prepare_corpus([str(tmp_path / "in.jsonl")], tmp_path / "out.jsonl", False, True, False)
    assert (report.written, dict(report.dropped)) == (2, {"no text": 1, "duplicate": 1})
    assert [row["id"] for row in load_corpus(tmp_path / "out.jsonl")] == ["1", "4"]


def test_numbers_replace_missing_or_repeated_ids(tmp_path, monkeypatch):
    twice = lines({"id": "a", "text": "x"}, {"id": "a", "text": "y"})
    refuses("the result:2: id 'a' was used before, in line 1.*--number_ids", converted, tmp_path, twice)
    assert [row["id"] for row in converted(tmp_path, twice, number_ids=True)] == ["0", "1"]
    refuses("input:1: no id; --number_ids gives every passage", converted, tmp_path, lines({"text": "x"}))
    for module in (offsets, prepare):
        monkeypatch.setattr(module, "CACHED_FROM", 1)
    monkeypatch.setattr(offsets, "scan", None)  # would fail: offsets are kept, nothing is scanned again
    assert len(converted(tmp_path, lines(*({"id": n, "text": f"x{n}"} for n in range(9))))) == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines({"id": 1, "text": "x"}) + b"{nope\n", "input:2: not valid JSON"),
        (lines({"id": 1, "text": "x"}) + b"[1]\n", "input:2: expected a JSON object, got list"),
        (lines({"id": 1, "name": "x"}), "input:1: no text: expected .*the keys are id, name"),
        (lines({"id": True, "text": "x"}), "input:1: the id must be a text or a number, got True"),
        (lines({"id": 1, "text": 3}), "input:1: key 'text' must be text, got 3"),
        (b"id\ttext\ttitle\n1\tx\n", "input:2: 2 columns, but the first row has 3"),
        (b"0\tx\n1\tx\ty\n", "input:2: 3 columns, but the first row has 2"),
        (b"a\tb\tc\n", "input:1: 3 columns and no header"),
        (b"plain words\n", "input: neither JSON Lines nor a tsv, a csv with a header or parquet"),
        (b"name,body of it\n1,x\n", "input: neither JSON Lines"),
        (b"id,text\n1,x,y\n", "input:2: 3 columns, but the first row has 2"),
        (b'id,text\n1,"x\n2,y\n', "input: not a csv or tsv .unexpected end of data"),
        (b'id\ttext\n1\t"x\n2\ty\n3\t"z" z\n', "input: not a csv or tsv .line 4: a cell holds rows"),
        (b"id,text\n,x\n", "input:2: no id; --number_ids"),
        (b'{"id": 1, "text": "\xff"}\n', "input: not valid UTF-8"),
        (b"\x1f\x8bnope", "input: broken file"),
        (b"PAR1nope", "input: broken file"),
        (b"", "no passage is left of 0"),
        (lines({"id": 1, "text": " "}), "no passage is left of 1"),
    ],
)
def test_bad_file_is_named_and_leaves_nothing(tmp_path, content, message):
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(RetrieverError, match=message) as caught:
        converted(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input", "out.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_command_reports_counts_and_errors(tmp_path, capsys):
    (tmp_path / "in.tsv").write_bytes(b"0\tIt is.\n1\t \n")
    assert main([str(tmp_path / "in.tsv"), "--output", str(tmp_path / "out.jsonl")]) == 0
    output = capsys.readouterr().out
    assert output == f"2 passages read, 1 dropped (no text), 1 written to {tmp_path / 'out.jsonl'}\n"
    for arguments, message in (
        ([str(tmp_path / "none"), "--output", "x.jsonl"], "none: no such file of passages"),
        ([str(tmp_path / "*.none"), "--output", str(tmp_path / "x.jsonl")], "*.none: no file matches"),
        ([str(tmp_path / "in.tsv"), "--output", "x.txt"], "x.txt: the output must end in .jsonl"),
        ([str(tmp_path / "in.tsv"), "--output", f"{tmp_path}/in.tsv/x.jsonl"], "cannot be written"),
    ):
        assert main(arguments) == 2
        output = capsys.readouterr().err
        assert message in output and output.startswith("error: ") and output.count("\n") == 1
