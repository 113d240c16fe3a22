"""The corpus: rows on demand, kept offsets, pages by URL, refusals with file and line; conversion to it."""

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from retriever_rig import refuses, write_rows

from retriever.corpus import containers, layouts, offsets, passages, prepare
from retriever.corpus import rows as corpus_rows
from retriever.corpus.offsets import HEADER, cache_file, load_offsets, save_offsets, scan
from retriever.corpus.pages import Pages
from retriever.corpus.passages import load_corpus, split_contents
from retriever.corpus.prepare import prepare_corpus
from retriever.errors import RetrieverError
from retriever.prepare_corpus import main
from retriever.service.app import make_app

ROOT = Path(__file__).parents[3]
TABLE = b'id\ttext\ttitle\n1\t"It ""is"" so."\tA\n2\t"Two.\nLines"\t"B ""b"""\n'  # as DPR's psgs_w100.tsv


def row(i, text="text"):
    return {"id": str(i), "contents": f'"Title {i}"\n{text} é{i}', "url": f"u{i}"}


@pytest.fixture
def kept_offsets(monkeypatch):
    """Keeps offsets of files of any size."""
    monkeypatch.setattr(passages, "CACHED_FROM", 1)


def test_rows_have_the_order_of_the_file(tmp_path):
    """Indexes of the first version carry the hash: it must not change. The last newline is optional."""
    rows = [row(i) for i in range(50)]
    corpus = load_corpus(write_rows(tmp_path / "c.jsonl", rows))
    assert list(corpus) == rows and corpus[-1] == rows[-1] and corpus[10:13] == rows[10:13]
    with pytest.raises(IndexError):
        corpus[50]
    (tmp_path / "c.jsonl").write_text('{"id": 7, "contents": "a"}\r\n{"id": "8", "contents": "b"}')
    corpus = load_corpus(tmp_path / "c.jsonl")
    assert list(corpus) == [{"id": "7", "contents": "a"}, {"id": "8", "contents": "b"}]
    assert corpus.sha256 == hashlib.sha256(b"7\0a\x008\0b\0").hexdigest()


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ('"A"\nIt is.\nSo.', ("A", "It is.\nSo.")),
        ('"B "b""\nTwo.', ('B "b"', "Two.")),
        ("\nIt is.", ("", "It is.")),
        ("no title", ("no title", "")),
    ],
)
def test_contents_are_split_into_title_and_text(contents, expected):
    assert split_contents(contents) == expected


def test_small_corpus_leaves_no_file_beside_it(tmp_path):
    load_corpus(write_rows(tmp_path / "c.jsonl", [row(1)]))
    assert os.listdir(tmp_path) == ["c.jsonl"]


def test_kept_offsets_replace_the_scan(tmp_path, kept_offsets, monkeypatch):
    path = write_rows(tmp_path / "c.jsonl", [row(i) for i in range(20)])
    first = load_corpus(path)
    monkeypatch.setattr(passages, "scan", None)  # would fail
    again = load_corpus(path)
    assert list(again) == list(first)
    assert again.sha256 == first.sha256


def test_new_time_of_a_corpus_renews_its_offsets(tmp_path, kept_offsets):
    path = write_rows(tmp_path / "c.jsonl", [row(i) for i in range(20)])
    before = load_corpus(path)
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    after = load_corpus(path)
    assert after.sha256 == before.sha256
    assert list(after) == list(before)
    header = (tmp_path / "c.jsonl.offsets").read_bytes()[:HEADER]
    assert json.loads(header)["mtime_ns"] == state.st_mtime_ns + 1


def test_changed_text_of_same_size_and_time_is_read(tmp_path, kept_offsets):
    path = write_rows(tmp_path / "c.jsonl", [row(i) for i in range(20)])
    before = load_corpus(path)
    state = path.stat()
    text = path.read_text(encoding="utf-8").replace("Title 13", "Title 31")
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    after = load_corpus(path)
    assert after.sha256 != before.sha256
    assert after[13]["contents"].startswith('"Title 31"')


def test_offsets_are_kept_until_the_corpus_changes(tmp_path, kept_offsets, monkeypatch):
    rows = [row(i) for i in range(21)]
    path, side = write_rows(tmp_path / "c.jsonl", rows[:20]), tmp_path / "c.jsonl.offsets"
    before = load_corpus(path)
    with monkeypatch.context() as patch:
        patch.setattr(passages, "scan", None)  # would fail
        assert list(load_corpus(path)) == rows[:20]
    for damaged in (b"junk", side.read_bytes()[:-8]):
        side.write_bytes(damaged)
        assert load_corpus(path).sha256 == before.sha256 and list(load_corpus(path)) == rows[:20]
    after = load_corpus(write_rows(path, rows))
    assert list(after) == rows and after.sha256 != before.sha256
    assert json.loads(side.read_bytes()[:HEADER])["mtime_ns"] == path.stat().st_mtime_ns


def test_offsets_of_read_only_folder_are_cached(tmp_path, kept_offsets, monkeypatch):
    path = write_rows(tmp_path / "c.jsonl", [row(1)])
    monkeypatch.setattr(offsets.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_corpus(path)
    assert len(os.listdir(tmp_path / "cache" / "retriever")) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    refuses("set XDG_CACHE_HOME", load_corpus, path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *[(empty, "empty row") for empty in (b"", b"   ")],
        (b'{"id": "9"}', "expected an object with a non-empty string 'contents'"),
        (b'{"id": "9", "contents": " "}', "expected an object with a non-empty string 'contents'"),
        (b'["9"]', "expected an object"),
        (b"{", "not valid JSON"),
        *[(b'{%s"contents": "x"}' % start, "field 'id'") for start in (b"", b'"id": true, ')],
        (b'{"id": "9", "contents": "\xff"}', "not valid UTF-8"),
        (b'{"id": "9", "contents": "\\ud800"}', "holds half a surrogate pair; remove it"),
        (b'{"id": "9", "contents": "x", "more": ["\\uD800"]}', "holds half a surrogate pair; remove it"),
        *[
            (b'{"id": "9", "contents": "x", "a": [%s]}' % a, "not valid JSON .* finite")
            for a in (b"NaN", b"1e999")
        ],
        (b'{"id": 0, "contents": "x"}', "id '0' was used before, in line 1"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply; remove the field"),
        (b'{"id": ' + b"9" * 5000, "not valid JSON"),
    ],
    ids=range(16),
)
def test_malformed_row_names_file_and_line(tmp_path, line, message):
    (tmp_path / "c.jsonl").write_bytes(json.dumps(row(0)).encode() + b"\n" + line + b"\n")
    refuses(f"c.jsonl:2: {message}", load_corpus, tmp_path / "c.jsonl")


def test_gzip_and_plain_corpora_are_the_same(tmp_path):
    path = write_rows(tmp_path / "c.jsonl", [row(i) for i in range(2000)])  # more than the head
    packed = table_of(tmp_path, "c.jsonl", path.read_bytes(), True)
    assert load_corpus(packed).sha256 == load_corpus(path).sha256
    packed.write_bytes(packed.read_bytes()[:-20])
    refuses("broken gzip file", load_corpus, packed)
    path.write_text("")
    refuses("no passages", load_corpus, path)
    for read, message in ((load_corpus, "no such corpus"), (Pages, "no such file of pages")):
        refuses(f"d.jsonl: {message}; ", read, tmp_path / "d.jsonl")


def parquet(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def table_of(folder, name, content, packed=False):
    path = folder / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


def test_table_equals_the_corpus_of_its_rows(tmp_path):
    rows = [{"id": "1", "contents": '"A"\nIt "is" so.'}, {"id": "2", "contents": '"B "b""\nTwo.\nLines'}]
    same = load_corpus(write_rows(tmp_path / "c.jsonl", rows))
    for packed in (False, True):
        corpus = load_corpus(table_of(tmp_path, "c.tsv", TABLE, packed), progress=False)
        assert list(corpus) == rows and corpus[-1] == rows[1]
        assert corpus.sha256 == same.sha256  # so that one index fits both
    assert not list(tmp_path.glob("*.offsets"))
    file = parquet(tmp_path / "p", {"_id": 1, "title": "A", "text": "x", "url": "u"})
    assert list(load_corpus(file)) == [{"id": "1", "contents": '"A"\nx', "url": "u"}]
    (tmp_path / "t").write_bytes(b"0\tIt is.\n1\tSo.\n")
    assert [row["contents"] for row in load_corpus(tmp_path / "t")] == ["\nIt is.", "\nSo."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'id,text\n1,"a\nb"\n1,c\n', r":4: id '1' was used before, at .*c.csv(.gz)?:3"),
        (b"id,text\n1,a\n2,\n", ":3: no text; python -m retriever.prepare_corpus .* drops it"),
        (b"title,text\na,b\n", ":2: no id; python -m retriever.prepare_corpus .* --number_ids"),
        (b"id,text\n", ": no passages in it"),
        (b"id,text\n1\n", ":2: 1 columns, but the first row has 2"),
    ],
)
def test_malformed_table_names_its_place(tmp_path, content, message):
    for packed in (False, True):
        refuses(rf"c.csv(.gz)?{message}", load_corpus, table_of(tmp_path, "c.csv", content, packed))


def test_large_table_or_gz_is_refused(tmp_path, monkeypatch):
    table = table_of(tmp_path, "c.tsv", TABLE)
    packed = table_of(tmp_path, "c.jsonl", (json.dumps(row(1)) + "\n").encode(), True)
    assert (len(load_corpus(table)), len(load_corpus(packed))) == (2, 1)
    monkeypatch.setattr(passages, "GZIP_LIMIT", 30)
    refuses(r"more than 30 bytes.*prepare_corpus .*c.tsv --output", load_corpus, table)
    refuses(r"c.jsonl.gz: more than 30 bytes; unpack it", load_corpus, packed)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 50))
def test_duplicates_are_found_whatever_the_hashes(ids, buckets):
    """Few buckets make many ids share a hash: only equal ids count."""
    keys = np.array([i % buckets for i in ids], np.int64)
    repeated = ((ids.index(name), place, str(name)) for place, name in enumerate(ids) if name in ids[:place])
    assert offsets.find_duplicate(keys, lambda i: str(ids[i])) == next(repeated, None)


def test_distant_duplicate_id_is_found(tmp_path):
    rows = [row(i) for i in range(3000)]
    random.Random(0).shuffle(rows)
    rows.append(rows[17])
    path = write_rows(tmp_path / "c.jsonl", rows)
    refuses(r":3001: id .* was used before, in line 18", load_corpus, path)


def test_overlong_line_is_refused(tmp_path, monkeypatch):
    class Endless(io.BytesIO):
        """One endless line; whoever reads all of it fills the memory."""

        def readline(self, size=-1):
            assert size == 2**24 + 1
            return b"x" * size

    refuses("c:1: longer than 16,777,216 bytes", next, corpus_rows.read_lines(Endless(), "c"))
    monkeypatch.setattr(corpus_rows, "MAX_LINE", 200)
    rows = [{"id": n, "url": f"u{n}", "contents": "a" * length} for n, length in enumerate((140, 300))]
    path = write_rows(tmp_path / "c.jsonl", rows)
    packed = table_of(tmp_path, "c.jsonl", path.read_bytes(), True)
    for read, file in ((load_corpus, path), (load_corpus, packed), (Pages, path)):
        refuses(f"{file.name}:2: longer than 200 bytes; cut the passage", read, file)


@pytest.fixture
def corpus(tmp_path):
    """200 KiB: all of it is fingerprinted."""
    rows = ({"id": number, "contents": f'"T"\n{number:0180}'} for number in range(900))
    path = write_rows(tmp_path / "corpus.jsonl", rows)
    with path.open("rb") as file:
        save_offsets(path, scan(file, b"", path))
    return path


def flip_byte(path, place):
    """Size and time stay."""
    state, content = path.stat(), bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("probes", [64, 3])  # with 3 as if the file were larger
def test_change_is_noticed(corpus, monkeypatch, probes):
    monkeypatch.setattr(offsets, "PROBES", probes)
    with corpus.open("rb") as file:
        save_offsets(corpus, scan(file, b"", corpus))
    size = corpus.stat().st_size
    for place in (*(range(0, size, 4000) if probes > 3 else (0, size // 2)), size - 1):
        flip_byte(corpus, place)
        assert load_offsets(corpus) is None, place
        flip_byte(corpus, place)
        assert load_offsets(corpus).starts[-1] == size


@pytest.mark.parametrize("name", ["version", "size", "mtime_ns", "fingerprint", "last offset"])
def test_each_part_of_the_identity_counts(corpus, name):
    path = cache_file(corpus)
    whole = path.read_bytes()
    state = {"last offset": 0} | json.loads(whole[:HEADER])
    whole = whole[:-8] + bytes(8) if name == "last offset" else whole
    state[name] = "another" if name == "fingerprint" else state[name] + 1
    path.write_bytes(json.dumps(state).encode().ljust(HEADER) + whole[HEADER:])
    assert load_offsets(corpus) is None


@pytest.mark.parametrize("missing_bytes", [8, 1])
def test_truncated_offsets_are_not_used(corpus, missing_bytes):
    path = cache_file(corpus)
    path.write_bytes(path.read_bytes()[:-missing_bytes])
    assert load_offsets(corpus) is None


def test_kept_offsets_are_where_the_lines_start(corpus):
    lengths = [len(line) for line in corpus.read_bytes().splitlines(keepends=True)]
    np.testing.assert_array_equal(load_offsets(corpus).starts, np.cumsum([0, *lengths]))


def test_unreadable_page_is_refused_at_the_start(tmp_path):
    """Else each trajectory that asks for it would fail, and with enough of them the run."""
    path, expected = tmp_path / "pages.jsonl", "expected a JSON object with 'url' and 'contents'"
    for line, message in (
        *[(text, expected) for text in ('{"url": "b"}', '{"contents": ""}', '{"url": ' + "[" * 200_000)],
        ('{"url": 3, "contents": ""}', "field 'url' must be a string, got 3"),
        ('{"url": "b", "contents": null}', "field 'contents' must be a string, got None"),
        ('{"url": "b", "contents": "a \\ud83d b"}', "holds half a surrogate pair; remove it"),
        ('{"url": "b", "contents": "", "more": "\\uD83D"}', "holds half a surrogate pair; remove it"),
    ):
        path.write_text('{"url": "a", "contents": "A \\ud83d\\ude00"}\n\n\n' + line + "\n")
        refuses(f"pages.jsonl:4: {message}", Pages, path)


def test_pages_by_url(index, tmp_path):
    rows = [{"url": "https://w/index.php?title=A", "contents": "a"}, {"url": "u", "contents": "ü"}]
    lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in rows]
    for between in ("", "\n", "  \n\n"):  # blank lines move nothing
        (tmp_path / "pages").write_text(between + between.join(lines), encoding="utf-8")
        with TestClient(make_app(index, 1, pages=Pages(tmp_path / "pages"))) as client:
            reply = client.post("/access", json={"urls": ["u", "https://w/index.php/A", "nowhere"]})
            assert reply.json() == {"result": [*rows[::-1], None]}
    with TestClient(make_app(index, 1)) as client:
        refused = client.post("/access", json={"urls": ["u"]}).json()
        assert "start the service with --pages_path" in refused["error"]


def test_replaced_pages_stay_and_rewritten_ones_are_noticed(tmp_path):
    rows = [{"url": name, "contents": name * 9} for name in "abc"]
    path, other = write_rows(tmp_path / "pages.jsonl", rows), tmp_path / "other.jsonl"
    pages = Pages(path)
    other.write_text('{"url": "b", "contents": "other"}\n')
    other.replace(path)
    assert [pages.access(name) for name in "cab"] == [rows[2], rows[0], rows[1]]

    pages = Pages(path)
    for changed in ('{"url": "c", "contents": "third"}\n', "{", ""):
        path.write_text(changed)
        refuses("pages.jsonl: changed while it is served", pages.access, "b")


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def converted(tmp_path, content, **options):
    """The rows of the corpus that a file of this content becomes."""
    (tmp_path / "input").write_bytes(content)
    prepare_corpus([str(tmp_path / "input")], tmp_path / "out.jsonl", progress=False, **options)
    return list(load_corpus(tmp_path / "out.jsonl"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lines({"id": 7, "title": "A  b", "text": " It is. "}), ("7", '"A b"\nIt is.')),
        (lines({"_id": "d", "title": "A", "text": "It is.", "metadata": {}}), ("d", '"A"\nIt is.')),  # BEIR
        (lines({"_id": "d1", "title": "", "text": "It is."}) + b" \n", ("d1", "\nIt is.")),
        (lines({"id": "0", "contents": '"A"\nIt is.'}), ("0", '"A"\nIt is.')),
        (lines({"id": "0", "title": "A", "contents": "It is."}), ("0", '"A"\nIt is.')),
        (lines({"id": "0", "title": "A", "contents": '"A"\nIt is.'}), ("0", '"A"\nIt is.')),
        (lines({"pid": "m_1", "passage": "It is."}), ("m_1", "\nIt is.")),  # MS MARCO v2
        (lines({"docid": "x", "title": "A", "text": ["It is.", "So."]}), ("x", '"A"\nIt is. So.')),
        (b'id\ttext\ttitle\n1\t"It ""is"" so."\tA\n', ("1", '"A"\nIt "is" so.')),  # DPR psgs_w100
        (b'0\tIt "is so.\n', ("0", '\nIt "is so.')),  # MS MARCO passages
        (b"D1\thttp://x\tA\tIt is.\n", ("D1", '"A"\nIt is.', "http://x")),  # MS MARCO documents
        (gzip.compress(b"0\tIt is.\n", mtime=0), ("0", "\nIt is.")),
        (b'id,title,text\n1,A,"It ""is"", so.\nYes."\n', ("1", '"A"\nIt "is", so.\nYes.')),
        (b'\xef\xbb\xbf"Title",TEXT , Id\r\nA,It is.,7\r\n', ("7", '"A"\nIt is.')),
        (b'id,contents\n1,"""A""\nIt is."\n', ("1", '"A"\nIt is.')),
        (b"\xef\xbb\xbf" + lines({"id": 1, "title": "A", "text": "x"}), ("1", '"A"\nx')),
        (b'{"id": 1, "text": "a\\ud800b", "url": "u"}\n', ("1", "\na\ufffdb", "u")),
    ],
)
def test_row_of_every_layout_is_converted(tmp_path, content, expected):
    (row,) = converted(tmp_path, content)
    assert row == dict(zip(("id", "contents", "url"), expected, strict=False))


def test_parquet_is_read_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "BATCH_ROWS", 2)
    rows = [{"_id": n, "title": f"T{n}", "text": f"x{n}", "vector": [0.5] * 3} for n in range(5)]
    results = converted(tmp_path, parquet(tmp_path / "p", *rows).read_bytes())
    assert results == [{"id": str(n), "contents": f'"T{n}"\nx{n}'} for n in range(5)]
    unknown = parquet(tmp_path / "p", {"a": 1, "b": 2}).read_bytes()
    refuses("input: no known column among a, b", converted, tmp_path, unknown)


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


def test_offsets_of_converted_corpus_are_kept(tmp_path, kept_offsets, monkeypatch):
    """The conversion has read every row already: the service needs no scan."""
    monkeypatch.setattr(prepare, "CACHED_FROM", 1)
    monkeypatch.setattr(passages, "scan", None)  # would fail
    rows = [{"id": str(n), "text": f"x{n}"} for n in range(9)]
    expected = [{"id": str(n), "contents": f"\nx{n}"} for n in range(9)]
    assert converted(tmp_path, lines(*rows)) == expected


def test_numbers_replace_missing_or_repeated_ids(tmp_path, monkeypatch):
    twice = lines({"id": "a", "text": "x"}, {"id": "a", "text": "y"})
    refuses("the result:2: id 'a' was used before, in line 1.*--number_ids", converted, tmp_path, twice)
    assert [row["id"] for row in converted(tmp_path, twice, number_ids=True)] == ["0", "1"]
    refuses("input:1: no id; --number_ids gives every passage", converted, tmp_path, lines({"text": "x"}))
    for module in (passages, prepare):
        monkeypatch.setattr(module, "CACHED_FROM", 1)
    monkeypatch.setattr(passages, "scan", None)  # would fail: offsets are kept, nothing is scanned again
    assert len(converted(tmp_path, lines(*({"id": n, "text": f"x{n}"} for n in range(9))))) == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines({"id": 1, "text": "x"}) + b"{nope\n", "input:2: not valid JSON"),
        (lines({"id": 1, "text": "x"}) + b'{"id": ' + b"[" * 200_000, "input:2: not valid JSON"),
        (lines({"id": 1, "text": "x"}) + b"[1]\n", "input:2: expected a JSON object, got list"),
        (
            lines({"id": 1, "name": "x"}),
            "input:1: no text: expected 'contents', or one of .*the keys are id, name",
        ),
        (lines({"id": True, "text": "x"}), "input:1: the id must be a text or a number, got True"),
        (lines({"id": 1, "text": 3}), "input:1: key 'text' must be text, got 3"),
        (b"id\ttext\ttitle\n1\tx\n", "input:2: 2 columns, but the first row has 3"),
        (b"0\tx\n1\tx\ty\n", "input:2: 3 columns, but the first row has 2"),
        (b"a\tb\tc\n", "input:1: 3 columns and no header"),
        (b"plain words\n", "input: neither JSON Lines nor a tsv, a csv with a header or parquet"),
        (b'id,text\n1,"x\n2,y\n', "input: not a csv or tsv .unexpected end of data"),
        (b'id\ttext\n1\t"x\n2\ty\n3\t"z" z\n', "input: not a csv or tsv .line 4: a cell holds rows"),
        (b"id,text\n,x\n", "input:2: no id; --number_ids"),
        (b'{"id": 1, "text": "\xff"}\n', "input: not valid UTF-8"),
        (b"\x1f\x8bnope", "input: broken gzip file"),
        (b"PAR1nope", "input: broken parquet file"),
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


def test_help_needs_no_package_at_all():
    """`python -S` hides everything that is installed."""
    command = [sys.executable, "-S", "-m", "retriever.prepare_corpus", "--help"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert answer.returncode == 0
    assert "--number_ids" in answer.stdout


def quoted(text):
    """A cell of a tsv as DPR writes it."""
    escaped = text.replace('"', '""')
    return f'"{escaped}"'


@pytest.mark.medium
def test_real_passages_survive_every_layout(shared, tmp_path):
    corpus = load_corpus(shared / "data/wiki_sample/corpus.jsonl.gz", progress=False)
    rows = corpus[:300]
    objects = []
    tsv = "id\ttext\ttitle\n"
    for passage in rows:
        title, text = split_contents(passage["contents"])
        objects.append({"_id": passage["id"], "title": title, "text": text})
        tsv += f"{passage['id']}\t{quoted(text)}\t{quoted(title)}\n"
    table = parquet(tmp_path / "p", *objects).read_bytes()
    for content in (lines(*objects), table, tsv.encode()):
        assert converted(tmp_path, content) == rows


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"pid": "P1", "docid": "D1", "passage": "One."}, "P1"),  # MS MARCO v2
        ({"doc_id": "D1", "chunk_id": "C1", "text": "One."}, "C1"),
        ({"document_id": "D1", "passage_id": "C1", "text": "One."}, "C1"),
        ({"docno": "N1", "docid": "D1", "text": "One."}, "N1"),
        ({"docid": "D1", "id": 1.0, "text": "One."}, "1"),
        ({"docid": "D1", "id": float("nan"), "text": "One."}, "D1"),
        ({"ID": "x", "Text": "One."}, "x"),
        ({"text": "One.", "metadata": {"id": "x"}}, "x"),
    ],
)
def test_id_of_passage_wins_over_that_of_its_document(row, expected):
    assert layouts.to_passage(row, "f:1").id == expected


@pytest.mark.parametrize(
    "row",
    [
        {"wikipedia_title": "Old Mill", "text": ["Old Mill\n", "Built in 1702.\n"]},  # KILT
        {"title": "Old Mill", "text": [["Built", " in"], [" 1702."]]},  # HotpotQA's Wikipedia
        {"name": "Old Mill", "text": "Built in 1702."},
        {"headline": "Old Mill", "body": "Built in 1702."},
        {"doc_title": "Old Mill", "segment": "Built in 1702."},
        {"Title": "Old Mill", "Text": "Built in 1702."},
        {"title": "", "page_title": None, "wiki_title": "Old Mill", "text": "Built in 1702."},
        {"page_content": "Built in 1702.", "metadata": {"title": "Old Mill", "source": "x"}},  # LangChain
        {"content": "Built in 1702.", "meta": {"name": "Old Mill"}},  # Haystack
        {"_source": {"title": "Old Mill", "text": "Built in 1702."}},  # Elasticsearch
        {"text": "Built in 1702.", "metadata": '{"title": "Old Mill"}'},
        {"title": "Old Mill", "abstract": "Built in 1702."},
        {"title": "Old Mill", "text": None, "contents": None, "body": "Built in 1702."},
    ],
)
def test_title_is_read_under_its_usual_keys(row):
    assert layouts.to_passage({"id": "1"} | row, "f:1").contents == '"Old Mill"\nBuilt in 1702.'


def test_number_may_be_a_title():
    assert (
        layouts.to_passage({"id": 1, "title": 1984, "text": "A novel."}, "f:1").contents == '"1984"\nA novel.'
    )


@pytest.mark.parametrize("text", [None, "", float("nan"), [], " "])
def test_passage_without_text_is_left_out(tmp_path, text):
    rows = {"id": "1", "title": "A", "text": text}, {"id": "2", "title": "B", "text": "Some."}
    (tmp_path / "c.jsonl").write_bytes(lines(*rows))
    counts = prepare_corpus([str(tmp_path / "c.jsonl")], tmp_path / "out.jsonl", progress=False)
    assert (counts.written, counts.untitled, dict(counts.dropped)) == (1, 0, {"no text": 1})


def test_passages_without_titles_are_announced_and_keys_can_be_named(tmp_path, capsys):
    row = {"nr": "1", "label": "Old Mill", "words": "Built in 1702."}
    (tmp_path / "c.jsonl").write_bytes(lines(row))
    command = [str(tmp_path / "c.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--id", "nr"]
    assert main([*command, "--text", "words"]) == 0
    assert "warning: 1 of 1 passages have no title; if a key holds" in capsys.readouterr().err
    assert main([*command, "--text", "words", "--title", "label"]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "out.jsonl").read_text())["contents"] == '"Old Mill"\nBuilt in 1702.'
    assert main([*command, "--text", "none"]) == 2
    assert (
        "c.jsonl:1: no key 'none': the keys are nr, label, words; correct --text" in capsys.readouterr().err
    )
    assert main(command) == 2
    assert "name it (python -m retriever.prepare_corpus --text KEY)" in capsys.readouterr().err


def test_service_says_that_its_corpus_has_no_titles(tmp_path, capsys):
    (tmp_path / "c.csv").write_text("id,text\n1,Built in 1702.\n")
    assert len(load_corpus(tmp_path / "c.csv", progress=False)) == 1
    assert "c.csv: no passage has a title" in capsys.readouterr().err
