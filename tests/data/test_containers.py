"""Files as people keep them: packed, tables of Arrow, folders of datasets, other encodings; or refused."""

import bz2
import datetime
import decimal
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

from calibadv_jax.core.errors import UserError
from calibadv_jax.data import containers
from calibadv_jax.data.questions import load_questions
from retriever.corpus.layouts import read_passages
from retriever.errors import RetrieverError

ROWS = [
    {"question": "Wer wohnt in Köln?", "answer": "Ada"},
    {"question": "Who, then; or | what?", "answer": "Bo"},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
ROOT = Path(__file__).resolve().parents[2]


def packed_by_arrow(codec, content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def zipped(**files):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, content in files.items():
            writer.writestr(name, content)
    return archive.getvalue()


def stream_of(rows):
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def arrow_file_of(rows):
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def written_by(write, rows):
    sink = io.BytesIO()
    write(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def table_of(delimiter, head=""):
    lines = [delimiter.join(["question", "answer"])]
    lines += [delimiter.join(f'"{cell}"' for cell in row.values()) for row in ROWS]
    return (head + "\r\n".join([*lines, delimiter]) + "\r\n").encode()


def tar_of(content):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writer:
        member = tarfile.TarInfo("q.jsonl")
        member.size = len(content)
        writer.addfile(member, io.BytesIO(content))
    return archive.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(LINES),
        bz2.compress(LINES),
        lzma.compress(LINES),
        packed_by_arrow("zstd", LINES),
        packed_by_arrow("lz4", LINES),
        zipped(**{"q.jsonl": LINES}),
        zipped(**{"data/": b"", "data/q.jsonl": LINES, "README.md": b"x", "__MACOSX/q.jsonl": b"x"}),
        zipped(**{"../../escaped.jsonl": LINES}),
        zipped(**{"q.csv": table_of(";")}),
        LINES.decode().encode("utf-16"),
        LINES.decode().encode("utf-16-le"),
        LINES.decode().encode("utf-16-be"),
        LINES.decode().encode("utf-32"),
        json.dumps(ROWS).encode("utf-16"),
        gzip.compress(table_of("\t").decode().encode("utf-16")),
        table_of(","),
        table_of(";"),
        table_of("|"),
        table_of(";", "sep=;\r\n"),
        "\ufeff".encode() + table_of(";"),
        json.dumps({"version": "1.0", "data": ROWS}, indent=1).encode(),
        json.dumps(
            {
                "features": [{"feature_idx": 0}],
                "rows": [{"row_idx": n, "row": row} for n, row in enumerate(ROWS)],
            }
        ).encode(),
        json.dumps({"rows": [{"row_idx": n, "row": row} for n, row in enumerate(ROWS)]}).encode(),
        json.dumps({"data": [{"title": "x", "paragraphs": [{"context": "y", "qas": ROWS}]}]}).encode(),
        json.dumps({"header": {"dataset": "x"}}).encode() + b"\n" + json.dumps({"qas": ROWS}).encode(),
        stream_of(ROWS),
        arrow_file_of(ROWS),
        written_by(pq.write_table, ROWS),
        written_by(feather.write_feather, ROWS),
        written_by(orc.write_table, ROWS),
    ],
)
def test_same_questions_in_every_container(tmp_path, content):
    path = tmp_path / "sub" / "q.jsonl"
    path.parent.mkdir()
    path.write_bytes(content)
    questions = load_questions(path)
    assert [question.text for question in questions] == [row["question"] for row in ROWS]
    assert [question.golden_answers for question in questions] == [("Ada",), ("Bo",)]
    assert [file.name for file in tmp_path.rglob("*")] == ["sub", "q.jsonl"], "nothing is unpacked to disk"


def save_to_disk(folder, rows, name="data-00000-of-00001.arrow", **state):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / Path(name).name).write_bytes(stream_of(rows))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]} | state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_folder_of_save_to_disk_is_read(tmp_path):
    folder = save_to_disk(tmp_path / "nq" / "train", ROWS)
    questions = load_questions(folder)
    assert [question.golden_answers for question in questions] == [("Ada",), ("Bo",)]
    assert questions[0].data_source == "nq"
    (tmp_path / "nq" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(load_questions(tmp_path / "nq")) == 2
    (tmp_path / "nq" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="nq: a folder of several splits; name one of .*nq/train, .*nq/test"):
        load_questions(tmp_path / "nq")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"name": "../outside.arrow"}, "'../outside.arrow' is no name of a file in the folder"),
        ({"_indices_data_files": [{"filename": "i"}]}, "save it again with dataset.flatten_indices"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow: missing, though .*state.json names it"),
        ({"_data_files": []}, "a folder, but none that save_to_disk .* such as '.*/\\*.jsonl'"),
    ],
)
def test_other_folder_is_refused(tmp_path, state, message):
    save_to_disk(tmp_path / "saved", ROWS, **state)
    with pytest.raises(UserError, match=message):
        load_questions(tmp_path / "saved")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid x\n", "a Git LFS pointer.*run git lfs pull"),
        (b"  <!DOCTYPE html><html>", "an HTML page.*download the file itself"),
        (b'<?xml version="1.0"?>', "an XML file; convert it"),
        (tar_of(LINES), "a tar archive; unpack it"),
        (gzip.compress(tar_of(LINES)), "a tar archive; unpack it"),
        (b"7z\xbc\xaf\x27\x1c" + b"x" * 9, "a 7z archive"),
        (b"FEA1" + b"x" * 9, "an old Feather file; write its rows to parquet"),
        (b"SQLite format 3\0" + b"x" * 9, "an SQLite database; export its table"),
        (b"\xd0\xcf\x11\xe0" + b"x" * 9, "an old or encrypted Office file; save its sheet as CSV UTF-8"),
        (
            zipped(**{"[Content_Types].xml": b"x", "xl/workbook.xml": b"x"}),
            "a workbook.*save its sheet as CSV",
        ),
        (zipped(**{"a.jsonl": LINES, "b.jsonl": LINES}), r"2 data files \('a.jsonl', 'b.jsonl'\).*unpack it"),
        (zipped(**{"a\x1b[2J.jsonl": LINES, "b": LINES}), r"'a\\x1b\[2J.jsonl'"),
        (
            zipped(**{"a.parquet": written_by(pq.write_table, ROWS)}),
            "a table or another packed file inside it",
        ),
        (gzip.compress(gzip.compress(LINES)), "a table or another packed file inside it"),
        (b"\x80\x04\x95" + b"x" * 9, "a Python pickle, which may run code"),
        ("wer;Köln\n".encode("latin-1"), "not UTF-8 text .*iconv -f WINDOWS-1252 -t UTF-8 q"),
        (bz2.compress(LINES)[:-9], "broken bzip2 file"),
        (lzma.compress(LINES)[:-9], "broken xz file"),
        (packed_by_arrow("zstd", LINES * 9)[:-9], "broken zstd file"),
        (zipped(**{"q.jsonl": LINES})[:-30], "broken zip file"),
        (stream_of(ROWS)[:-60], "broken Arrow or ORC file"),
    ],
)
def test_other_files_are_refused_with_a_way_out(tmp_path, content, message):
    (tmp_path / "q").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_questions(tmp_path / "q")
    assert str(caught.value).startswith(str(tmp_path / "q")) and "\n" not in str(caught.value)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lambda content: zipped(q=content)])
def test_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(containers, "UNPACKED_BYTES", 2**20)
    (tmp_path / "q.jsonl").write_bytes(pack(b'{"question": "' + b"x" * 2**24))
    with pytest.raises(UserError, match="q.jsonl: unpacks to more than"):
        load_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize("beginning", ['{"question": "', "question,answer\nx,", "["])
def test_endless_line_is_refused(tmp_path, monkeypatch, beginning):
    monkeypatch.setattr("calibadv_jax.data.row_files.MAX_LINE", 2**10)
    monkeypatch.setattr(containers, "MAX_LINE", 2**10)
    (tmp_path / "q").write_text(beginning + "x" * 2**12)
    with pytest.raises(UserError, match="q(:[12])?: (longer than 1,024 characters|not valid JSON)"):
        load_questions(tmp_path / "q")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime.date(1999, 5, 1), "1999-05-01"),
        (datetime.datetime(1999, 5, 1), "1999-05-01"),
        (datetime.datetime(1999, 5, 1, 12, 30), "1999-05-01 12:30:00"),
        (datetime.time(12, 30), "12:30:00"),
        (decimal.Decimal("5.00"), "5"),
        (decimal.Decimal("2.50"), "2.5"),
        (decimal.Decimal("100"), "100"),
        ("Köln".encode(), "Köln"),
        ([b"Ada"], "Ada"),
    ],
)
def test_values_of_tables_are_texts(tmp_path, value, expected):
    row = {"id": decimal.Decimal("7"), "question": b"Who?", "answer": value, "picture": b"\xff\xd8"}
    for name, content in (("q.arrow", stream_of([row])), ("q.parquet", written_by(pq.write_table, [row]))):
        (tmp_path / name).write_bytes(content)
        (question,) = load_questions(tmp_path / name)
        assert (question.id, question.text, question.golden_answers) == ("q_7", "Who?", (expected,))


def test_value_that_cannot_be_read_is_named(tmp_path):
    late = pa.table({"question": ["Who?"], "answer": pa.array([10**9], pa.int32()).cast(pa.date32())})
    pq.write_table(late, tmp_path / "q.parquet")
    with pytest.raises(UserError, match="q.parquet: a value cannot be read .*write the column as text"):
        load_questions(tmp_path / "q.parquet")


def test_table_whose_header_begins_as_orc_is_text(tmp_path):
    (tmp_path / "q.csv").write_text("ORCID,question,answer\n1,Who?,Ada\n")
    assert load_questions(tmp_path / "q.csv")[0].golden_answers == ("Ada",)


def test_passages_come_from_the_same_containers(tmp_path):
    rows = [{"id": "1", "title": "Old Mill", "text": "Built; in 1702."}]
    lines = json.dumps(rows[0]).encode() + b"\n"
    contents = [
        lines,
        packed_by_arrow("zstd", lines),
        zipped(**{"c.jsonl": lines}),
        lines.decode().encode("utf-16"),
    ]
    contents += [stream_of(rows), written_by(orc.write_table, rows), json.dumps(rows).encode()]
    contents.append(b'id;title;text\n1;Old Mill;"Built; in 1702."\n')
    for content in contents:
        (tmp_path / "c").write_bytes(content)
        ((_, passage),) = read_passages(tmp_path / "c")
        assert (passage.id, passage.contents) == ("1", '"Old Mill"\nBuilt; in 1702.')
    ((_, passage),) = read_passages(save_to_disk(tmp_path / "saved", rows))
    assert passage.id == "1"
    (tmp_path / "c").write_bytes(tar_of(lines))
    with pytest.raises(RetrieverError, match="a tar archive; unpack it"):
        list(read_passages(tmp_path / "c"))


def test_both_packages_read_containers_alike():
    ours = (ROOT / "calibadv_jax/data/containers.py").read_text()
    theirs = (ROOT / "retriever/corpus/containers.py").read_text()
    imports = (
        "from calibadv_jax.core.errors import UserError as",
        "from retriever.errors import RetrieverError as",
    )
    assert ours.replace(*imports) == theirs
