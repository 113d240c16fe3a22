"""Each URL's own row is read, whatever stands between the rows."""

import json

import pytest

from retriever.corpus.pages import Pages
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
    path.write_text('{"url": "a"}\n\n\n{"url": 3}\n')
    with pytest.raises(RetrieverError, match="pages.jsonl:4: field 'url' must be a string, got 3"):
        Pages(path)
