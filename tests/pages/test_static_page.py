"""Groups as one HTML file, and as lines for a terminal: what is shown, and that text stays text."""

from html.parser import HTMLParser

import pytest

from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.contrib.pages.static_page import render_groups, shade
from calibadv_jax.contrib.pages.terminal import group_lines


class Tags(HTMLParser):
    """Names and attributes of all tags, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.attributes = set()
        self.text = ""
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        values = dict(attributes)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def site(small_run):
    return Site(small_run)


def test_page_shows_turns_credit_and_documents(site):
    page = Tags(render_groups("runs/a", [site.group(1, 0)]))
    words = " ".join(page.text.split())
    assert "Trajectories of runs/a" in words and "accepted: ann" in words
    assert "Scores 1, 0, 0, 0 → (score − 0.25) / 0.5" in words
    assert "2 of 3 silver, new → penalty × 0.333" in words and "−0.500 → −0.167" in words
    assert "★ silver 1, new" in words and "supports the answer" in words
    assert "retriever: gone" in words and "Invalid format" in words
    assert page.tags.count("article") == 5


def test_page_of_several_groups_may_show_single_trajectories(site):
    page = Tags(render_groups("a", [site.group(1, 0), site.group(2, 0)], only={0: 1}))
    assert page.tags.count("article") == 1 + 5
    assert page.tags.count("h2") == 2


def test_text_of_questions_documents_and_policy_is_never_markup(site, markup):
    """The hostile group has markup in every text; the name of the run is hostile too."""
    text = render_groups(f"runs/{markup}", [site.group(1, 1)])
    page = Tags(text)
    assert page.text.count(markup) > 20  # as text: in question, thoughts, queries, documents, answer, error
    assert not {"script", "img", "iframe", "object", "link", "base", "form"} & set(page.tags)
    assert not [name for name in page.attributes if name.startswith("on") or name in ("src", "href")]
    rules = page.policy.split("; ")
    assert "default-src 'none'" in rules and not [rule for rule in rules if rule.startswith("script-src")]


@pytest.mark.slow
def test_page_runs_and_loads_nothing_in_a_browser(site, page, markup, tmp_path):
    file = tmp_path / "group.html"
    file.write_text(render_groups(markup, [site.group(1, 1), site.group(1, 0)]), encoding="utf-8")
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        page.goto(file.as_uri())
        page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.hacked") is None
    assert set(requests) == {file.as_uri()}
    assert page.locator(".card").count() == 10 and page.locator(".token.minus").first.is_visible()


@pytest.mark.parametrize(
    ("raw", "advantage", "classes"),
    [
        (-1.0, 0.0, "zero spared"),
        (0.0, 0.0, "zero"),
        (None, None, "zero"),
        (0.2, 0.2, "plus shade1"),
        (-2.0, -0.75, "minus shade3"),
        (2.0, 2.0, "plus shade5"),
    ],
)
def test_shades_are_those_of_the_served_page(raw, advantage, classes):
    assert shade({"advantage_raw": raw, "advantage": advantage}) == classes


def test_lines_show_every_turn_with_its_credit(site):
    lines = list(group_lines(site.rows(1, 0), site.group(1, 0)))
    assert lines[:3] == ["step 1 · group 0 · two_hop · qtwo_hop", "question  who keeps it?", "accepted  ann"]
    assert "✓ trajectory 0: right, score 1, advantage +1.500" in lines
    assert "  1 search  −0.500 → −0.167  2 of 3 silver, new → penalty × 0.333" in lines
    assert "    ★  [1]   title a: text of a" in lines
    assert "      answer  ann" in lines
    assert "– trajectory 4: failed, score 0, advantage –" in lines
    assert "  failed:  retriever: gone" in lines


def test_one_trajectory_can_be_chosen(site):
    lines = list(group_lines(site.rows(1, 0), site.group(1, 0), only=2))
    assert [line for line in lines if " trajectory " in line] == [
        "✗ trajectory 2: wrong, score 0, advantage −0.500"
    ]


def test_control_characters_do_not_reach_the_terminal(site):
    rows = site.rows(1, 0)
    group = site.group(1, 0)
    evil = "\x1b]0;owned\x07\x9b2J\r\u202eabc"
    group["question"] = group["data_source"] = group["question_id"] = evil
    group["golden_answers"] = [evil]
    for row, trajectory in zip(rows, group["trajectories"], strict=True):
        trajectory["error"] = evil
        for kept, turn in zip(row["turns"], trajectory["turns"], strict=True):
            kept["think"] = kept["query"] = kept["text"] = kept["answer"] = turn["flaw"] = evil
            for document in turn["documents"]:
                document["title"] = document["text"] = evil
    text = "\n".join(group_lines(rows, group))
    assert "owned" in text
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(text)
