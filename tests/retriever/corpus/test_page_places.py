"""Each URL's own row is read, whatever stands between the rows."""

import json

import pytest

from retriever.corpus.passages import Pages
from retriever.errors import RetrieverError

ROWS = [{"url": f"u{number}", "contents": "é" * number} for number in range(5)]


@pytest.mark.parametrize("between", ["", "\n", "  \n\n"])
def test_blank_lines_move_nothing(tmp_path, between):
    path = tmp_path / "pages.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    path.write_text(between + between.join(lines), encoding="utf-8")
    pages = Pages(path)
    assert len(pages) == 5
    assert [pages.access(row["url"]) for row in reversed(ROWS)] == ROWS[::-1]
    assert pages.access("u5") is None


def test_a_mistake_is_named_by_its_line_of_the_file(tmp_path):
    path = tmp_path / "pages.jsonl"
    path.write_text('{"url": "a", "contents": ""}\n\n\n{"url": 3, "contents": ""}\n')
    with pytest.raises(RetrieverError, match="pages.jsonl:4: field 'url' must be a string, got 3"):
        Pages(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"url": "b"}', "expected a JSON object with 'url' and 'contents'"),
        ('{"url": "b", "contents": null}', "field 'contents' must be a string, got None"),
        ('{"url": "b", "contents": "a \\ud83d b"}', "holds half a surrogate pair; remove it"),
        ('{"url": "b", "contents": "", "more": "\\uD83D"}', "holds half a surrogate pair; remove it"),
    ],
)
def test_a_page_that_no_client_could_read_is_named_at_the_start(tmp_path, row, message):
    """Else each trajectory that asks for it would fail, and with enough of them the run."""
    path = tmp_path / "pages.jsonl"
    path.write_text('{"url": "a", "contents": "A \\ud83d\\ude00"}\n' + row + "\n")
    with pytest.raises(RetrieverError, match=f"pages.jsonl:2: {message}"):
        Pages(path)
