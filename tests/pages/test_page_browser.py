"""The trajectory page in headless Chromium: list, filters, links, keys, and text that stays text."""

import shutil

import numpy as np
import pytest

from benchmarks.generated_run import answer_turn, make_run, make_turn, search_turn, write_run
from benchmarks.inspect_page import measure
from calibadv_jax.config import Config, dump_config
from calibadv_jax.config.kept import add_start
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory
from calibadv_jax.rollout_store.schema import kept_steps

pytestmark = pytest.mark.slow

SHELF = {name: Document(name, f"title {name}", f"text of {name}", 1.0) for name in "ab"}


@pytest.fixture
def small(served, small_run, page):
    """The page of the small run, loaded, without the group that it opens by itself."""
    with served(small_run) as address:
        open_page(page, address)
        page.wait_for_selector("#detail[data-ready='2/0']", state="attached")
        page.keyboard.press("Escape")
        page.wait_for_selector("#detail[data-ready='nothing']", state="attached")
        yield page, address


def open_page(page, address):
    page.goto(address)
    page.wait_for_selector("#list[data-ready]", state="attached")


def open_group(page, address, step, group):
    page.goto(f"{address}/#step={step}&group={group}")
    page.wait_for_selector(f"#detail[data-ready='{step}/{group}']", state="attached")


def count(page):
    return page.inner_text("#count")


def group_of(tokenizer, ways, answers, text="who keeps it?", **fields):
    """A group whose trajectories take these ways, and end in these answers; "ann" is right."""
    question = Question(text, text, ("ann",), "two_hop", ("a",))
    prompt = np.array(tokenizer.encode(text).ids, np.int32)
    trajectories = [
        Trajectory(question, prompt, [*way, answer_turn(tokenizer, "so", answer)], index, **fields)
        for index, (way, answer) in enumerate(zip(ways, answers, strict=True))
    ]
    return Group.from_attempts(question, trajectories)


def test_page_opens_the_most_instructive_group_of_the_newest_step(
    served, page, tokenizer, small_group, tmp_path
):
    """Of the newest step, with its softened trajectory in view; on a telephone too."""
    tied = group_of(tokenizer, [[], []], ["bob", "bob"])
    write_run(tmp_path / "run", [[small_group()], [tied, small_group("one_hop")]], Config(), tokenizer)
    in_view = "e => e.getBoundingClientRect().right <= innerWidth + 1 && e.getBoundingClientRect().left >= 0"
    with served(tmp_path / "run") as address:
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 844})
            page.goto("about:blank")
            open_page(page, address)
            page.wait_for_selector("#detail[data-ready='2/1']")
            chosen = page.locator(".card.chosen")
            assert chosen.get_attribute("data-index") == "1" and chosen.evaluate(in_view)
        assert page.url.endswith("#step=2&group=1&trajectory=1")


def test_group_of_a_run_in_progress_does_not_stop_the_list(served, page, tokenizer, small_group, tmp_path):
    """The group that the page opened by itself stays, while the list goes on to the newest step."""
    folder = tmp_path / "run"
    steps = [[small_group()], [small_group("one_hop")]]
    write_run(folder, steps, Config(), tokenizer, planned=60)
    later = kept_steps(folder)[2]
    later.rename(tmp_path / later.name)
    with served(folder) as address:
        open_page(page, address)
        page.wait_for_selector("#detail[data-ready='1/0']")
        assert page.url.endswith("#follow=newest")
        (tmp_path / later.name).rename(later)
        page.wait_for_selector("#count:text('step 2 of 60')")
        assert "one_hop" in page.locator(".entry .where").inner_text()
        assert page.locator("#detail[data-ready='1/0']").count() == 1
        page.reload()
        page.wait_for_selector("#detail[data-ready='2/0']")


def test_chart_of_the_steps_has_an_axis(small):
    page, _ = small
    assert page.inner_text("#chart figcaption") == "mean score of each step"
    assert page.locator("#scale span").all_inner_texts() == ["1", "0"]
    assert page.locator("#ends span").all_inner_texts() == ["step 1", "step 2"]
    bars = page.locator("#steps .step i").evaluate_all("all => all.map((one) => one.style.height)")
    assert bars == ["25%", "25%"]  # of four finished trajectories one is right


def test_help_opens_at_its_top(small):
    page, _ = small
    page.set_viewport_size({"width": 390, "height": 500})
    page.keyboard.press("?")
    assert page.locator("#help").evaluate("e => e.scrollTop") == 0
    assert page.locator("#help .terms dt").first.is_visible()
    assert page.locator("#help").evaluate("e => e.scrollHeight > e.clientHeight")
    page.keyboard.press("Escape")


def test_group_is_saved_as_a_page_without_scripts(small):
    page, address = small
    open_group(page, address, 1, 1)
    with page.expect_download() as download:
        page.click(".save")
    assert download.value.suggested_filename == "step_1_group_1.html"
    text = download.value.path().read_text(encoding="utf-8")
    assert "who keeps it?&lt;img" in text and "<script" not in text


def test_evaluations_are_shown_question_by_question(served, page, evaluated_run):
    with served(evaluated_run) as address:
        open_page(page, address)
        page.click("#views [data-view='evaluation']")
        page.wait_for_selector("#detail[data-ready='evaluation']")
        assert count(page) == "3 questions · 1 gained, 1 lost"
        assert page.locator(".entry").first.locator(".chip").all_inner_texts() == ["✗", "✓"]
        table = page.locator("#message tbody tr").all_inner_texts()
        assert table == [
            "temperature 0 · nq\t2\t0\t0.5",
            "temperature 0 · two_hop\t1\t1\t0",
            "temperature 1 · nq\t1\t0\t0",
        ]
        page.select_option("#temperature", "")
        assert count(page) == "4 answers · 1 gained, 1 lost"
        for show, number in (("gained", 1), ("lost", 1), ("right", 1), ("wrong", 3), ("", 4)):
            page.select_option("#show", show)
            assert page.locator(".entry").count() == number, show
        page.select_option("#source", "two_hop")
        page.fill("#text", "bob")
        assert page.locator(".entry").count() == 1
        page.fill("#text", "")
        page.locator(".entry").first.click()
        page.wait_for_selector("#detail[data-ready='question/q2']")
        assert page.locator(".card > header b").all_inner_texts() == ["before", "after"]
        assert page.locator(".card .answer b").all_inner_texts() == ["ann", "bob"]
        assert page.locator(".card").first.locator(".document").count() == 2
        link = page.url
        page.goto("about:blank")
        open_page(page, link)
        page.wait_for_selector("#detail[data-ready='question/q2']")
        page.keyboard.press("Escape")
        page.wait_for_selector("#detail[data-ready='evaluation']")
        page.click("#views [data-view='']")
        page.wait_for_selector("#detail[data-ready='2/0']")  # which was open before
        assert page.locator("#chart").is_visible()


def test_group_that_comes_late_does_not_replace_the_evaluations(served, page, evaluated_run):
    held = []
    page.route("**/data/group_2_0.json", lambda route: held.append(route))
    with served(evaluated_run) as address:
        open_page(page, address)
        page.click("#views [data-view='evaluation']")
        page.wait_for_selector("#detail[data-ready='evaluation']")
        with page.expect_response("**/data/group_2_0.json") as response:
            held[0].continue_()
        response.value.finished()
        page.wait_for_timeout(100)
        assert page.locator("#message tbody tr").count() == 3


def test_text_of_evaluations_stays_text(served, page, evaluated_run):
    with served(evaluated_run) as address:
        open_page(page, f"{address}/#view=evaluation&question=0")
        page.wait_for_selector("#detail[data-ready^='question/']")
        page.locator(".document").evaluate_all("all => all.forEach(one => { one.open = true; })")
        for place in ("#detail h2", ".tokens", ".document pre", ".answer b", ".entry .question"):
            assert "<img src=x onerror" in "".join(page.locator(place).all_inner_texts()), place
        assert page.locator("#detail img, #detail script, .entry img").count() == 0
        assert page.evaluate("window.hacked") is None


def test_list_shows_every_group_and_trajectory_ending(small):
    page, _ = small
    assert count(page) == "15 trajectories in 3 groups"
    assert page.locator(".entry").count() == 3
    chips = page.locator(".entry").first.locator(".chip").all_inner_texts()
    assert chips == ["✓", "✗", "✗", "!", "–"]
    assert "softened turn" in page.locator(".entry").first.locator(".chip").nth(1).get_attribute("title")


def test_each_filter_alone(small):
    """Text is searched in questions, answers and queries."""
    page, _ = small
    same = ("softened", "repeated", "invalid", "failed", "right")
    for number, shows in {6: ("wrong-good",), 3: same, 9: ("wrong",), 0: ("unfinished",), 15: ("",)}.items():
        for show in shows:
            page.select_option("#show", show)
            assert count(page) == f"{number} trajectories in {3 if number else 0} groups", show
    numbers = {"BOB": 6, "bob keeps": 6, "ann": 15, "query": 15, "nobody": 0, "onerror bob": 2}
    for text, number in numbers.items():
        page.fill("#text", text)
        assert count(page).startswith(f"{number} trajector"), text


def test_filters_go_together_and_are_cleared(small):
    page, _ = small
    page.select_option("#source", "one_hop")
    assert count(page) == "5 trajectories in 1 group" and not page.locator("#empty").is_visible()
    page.fill("#from", "2")
    page.select_option("#show", "softened")
    assert count(page) == "1 trajectory in 1 group" and page.locator(".chip.matching").count() == 1
    page.fill("#to", "1")
    page.fill("#text", "nobody <b>")
    shown = page.inner_text("#empty")
    assert "text “nobody <b>”, “softened turn”" in shown and "from 1 to 2" in shown
    for clear in ("#reset", "#empty button"):
        page.fill("#text", "nobody <b>")
        page.click(clear)
        assert count(page) == "15 trajectories in 3 groups" and not page.locator("#empty").is_visible()
        assert page.input_value("#text") == "" and page.input_value("#from") == ""


def test_softened_turn_is_found_and_explained(small):
    page, _ = small
    page.select_option("#show", "softened")
    page.locator(".entry").first.locator(".chip.matching").click()
    page.wait_for_selector("#detail[data-ready='1/0']")
    assert page.locator(".card").count() == 5
    turn = page.locator(".card.chosen .turn").first
    assert turn.locator(".mark.softened").inner_text() == "softened"
    assert "−0.500 × (1 − 0.667) = −0.167" in turn.locator(".why p").text_content()
    assert turn.locator(".why summary").inner_text() == "2 of 3 silver, new → penalty × 0.333"
    assert turn.locator(".number").inner_text() == "−0.500 → −0.167"
    assert turn.locator(".document.silver .star").all_inner_texts() == ["★ silver 1, new"] * 2
    invalid = page.locator(".card[data-index='3'] .flaw").all_inner_texts()
    assert invalid == ["Invalid: no action: none of <search>, <answer>."]
    shared = page.locator(".group .why li").all_text_contents()  # of the whole group: in no column again
    columns = "".join(page.locator(".card .why").all_text_contents())
    assert shared[0].startswith("Scores of") and not [words for words in shared if words in columns]


def test_tokens_and_legend_show_the_chosen_shade(small):
    page, address = small
    open_group(page, address, 1, 0)
    legend = page.locator("#detail .scales")
    assert "wavy line: negative" in legend.inner_text() and legend.locator(".token").count() == 8

    def style(selector):
        names = "e => [getComputedStyle(e).textDecorationStyle, getComputedStyle(e).backgroundColor]"
        return page.locator(selector).first.evaluate(names)

    good, bad = ".card[data-index='0'] .token", ".card[data-index='1'] .token"
    assert style(good)[0] == "solid" and style(bad)[0] == "wavy"
    assert style(good)[1] != style(bad)[1]
    failed = page.locator(".card[data-index='4'] .token").first
    assert failed.evaluate("e => getComputedStyle(e).textDecorationLine") == "none"
    text = page.locator(".card[data-index='1'] .tokens").first.inner_text()
    assert text == "<think> one </think> <search> query </search>"
    page.locator(bad).first.hover()
    assert "advantage −0.167" in page.inner_text("#tip") and "id " in page.inner_text("#tip")
    before = style(bad)
    page.select_option("#shade", "surprise")
    assert "−log probability" in legend.inner_text() and legend.locator(".token").count() == 5
    assert style(bad)[0] == "wavy" and style(bad)[1] != before[1]  # the sign stays
    page.select_option("#shade", "mismatch")
    assert "learner and sampler" in legend.inner_text()
    assert "shade3" in page.locator(bad).first.get_attribute("class")
    page.locator(good).first.hover()
    assert "ratio 1.07" in page.inner_text("#tip")
    page.select_option("#shade", "advantage")
    assert "wavy line: negative" in legend.inner_text()


def test_new_address_draws_its_group_once(small):
    page, address = small
    page.evaluate(
        """() => {
            window.drawn = [];
            const seen = () => window.drawn.push(document.getElementById("detail").dataset.ready);
            new MutationObserver(seen).observe(document.getElementById("detail"), {childList: true});
        }"""
    )
    open_group(page, address, 1, 0)
    open_group(page, address, 1, 1)  # long after the first, whatever the browser still had to do for that
    page.wait_for_load_state("networkidle")
    assert page.evaluate("window.drawn") == ["1/0", "1/1"]


def test_turn_that_is_spared_altogether_does_not_look_untrained(served, page, tokenizer, tmp_path):
    """The second trajectory found silver documents only: its penalty is gone, and that can be seen."""
    ways = [
        [search_turn(tokenizer, "first", "query", [SHELF["a"], SHELF["b"]])],
        [search_turn(tokenizer, "other", "query", [SHELF["b"], SHELF["a"]])],
    ]
    group = group_of(tokenizer, ways, ["ann", "bob"])
    first = group.trajectories[0]
    last = [answer_turn(tokenizer, "so", "bob")]
    failed = Trajectory(group.question, first.prompt_ids, last, 2, error="retriever: gone")
    write_run(
        tmp_path / "run",
        [[Group.from_attempts(group.question, [*group.trajectories, failed])]],
        Config(),
        tokenizer,
    )
    with served(tmp_path / "run") as address:
        open_group(page, address, 1, 0)
        spared = page.locator(".card[data-index='1'] .turn").first
        assert spared.locator(".mark.softened").inner_text() == "softened to 0"
        line = "e => [getComputedStyle(e).textDecorationLine, getComputedStyle(e).textDecorationStyle]"
        assert spared.locator(".token").first.evaluate(line) == ["underline", "dotted"]
        assert page.locator(".card[data-index='2'] .token").first.evaluate(line)[0] == "none"


def test_dark_and_light_differ(small):
    page, _ = small
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


def test_narrow_screen_shows_the_list_where_no_group_is_open(small):
    page, _ = small
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.locator("#side").is_visible()
    assert not page.locator("#detail").is_visible()


def test_ten_thousand_trajectories(served, tmp_path, page):
    """The list holds only the groups in view."""
    make_run(tmp_path / "run", 10_000)
    with served(tmp_path / "run") as address:
        milliseconds = measure(page, address)
        assert set(milliseconds) == {"load_ms", "filter_ms", "open_ms"}
        assert count(page).endswith("groups")
        assert 0 < page.locator(".entry").count() < 40


def test_link_leads_back_to_the_same_view(small):
    page, address = small
    page.select_option("#show", "softened")
    page.fill("#text", "bob")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.wait_for_selector("#detail[data-ready='1/0']")
    page.keyboard.press("l")
    page.keyboard.press("l")
    link = page.url
    page.goto("about:blank")
    open_page(page, link)
    page.wait_for_selector(".card.chosen[data-index='1']")
    assert page.input_value("#text") == "bob" and page.input_value("#show") == "softened"
    assert page.locator(".entry.chosen").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail[data-ready='nothing']")
    page.go_back()
    page.wait_for_selector("#detail[data-ready='1/0']")


def test_keys(small):
    page, _ = small
    for key, group in (("j", "1/0"), ("j", "1/1"), ("k", "1/0")):
        page.keyboard.press(key)
        page.wait_for_selector(f"#detail[data-ready='{group}']")
    for key, chosen in (("l", "0"), ("l", "1"), ("h", "0")):
        page.keyboard.press(key)
        assert page.locator(".card.chosen").get_attribute("data-index") == chosen
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.keyboard.press("/")
    page.keyboard.type("jk")  # goes into the field
    assert page.input_value("#text") == "jk" and page.locator(".card").count() == 5
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail[data-ready='nothing']")


def test_keys_stay_with_trajectories_that_pass_filters(small):
    page, _ = small
    page.select_option("#show", "invalid")  # trajectory 3 alone
    page.locator(".entry .question").first.click()
    page.wait_for_selector("#detail[data-ready='1/0']")
    chosen = page.locator(".card.chosen")
    for show, keys in (("invalid", {"l": "3", "lh": "3"}), ("wrong", {"h": "2", "hhh": "1", "ll": "3"})):
        page.select_option("#show", show)  # wrong: 1, 2, 3
        for presses, index in keys.items():
            for key in presses:
                page.keyboard.press(key)
            assert chosen.get_attribute("data-index") == index, (show, presses)
    page.locator(".card[data-index='0'] > header").click()  # which does not pass: it can be clicked
    for key, index in (("h", "0"), ("l", "1")):
        page.keyboard.press(key)
        assert chosen.get_attribute("data-index") == index


def test_action_is_shown_with_name_and_reply(served, page, tokenizer, tmp_path):
    turns = [search_turn(tokenizer, "first", "ann", [SHELF["a"]])]
    for kind, query, reply, documents in (
        ("access", "kilo mint", 'Doc 1(Title: "title b") text of b', (SHELF["b"],)),
        ("calculate", "1879 - 1848", "31", ()),
    ):
        text, shown = (
            f"<think> now </think> <{kind}> {query} </{kind}>",
            f"<information>{reply}</information>",
        )
        more = {"kind": kind, "think": "now", "query": query, "documents": documents}
        turns.append(make_turn(tokenizer, text, f"\n\n{shown}\n\n", **more))
    group = group_of(tokenizer, [turns, turns], ["ann", "bob"], actions=("search", "access", "calculate"))
    write_run(tmp_path / "run", [[group]], Config(), tokenizer)
    with served(tmp_path / "run") as address:
        open_group(page, address, 1, 0)
        turns = page.locator(".card[data-index='1'] .turn")
        assert turns.locator(".kind").all_inner_texts() == ["1 search", "2 access", "3 calculate", "4 answer"]
        # The page that the best trajectory read is silver; a sum brings no document and has correctness 0.
        shown = turns.locator(".correctness").all_inner_texts()
        assert shown == ["correctness 1", "correctness 1", "correctness 0"]
        assert turns.nth(1).locator(".document .title").all_inner_texts() == ["title b"]
        assert "1879 - 1848" in turns.nth(2).inner_text() and "31" in turns.nth(2).inner_text()


def test_text_of_documents_questions_and_answers_stays_text(small):
    page, address = small
    open_group(page, address, 1, 1)
    shown = page.inner_text("#detail h2")
    assert "<script>window.hacked=1</script>" in shown and "onerror" in shown
    page.locator(".document").evaluate_all("all => all.forEach(one => { one.open = true; })")
    places = (".document pre", ".document .title", ".answer b", ".error", ".token", ".question")
    for place in (*places, ".golden b"):
        assert "<img src=x onerror" in "".join(page.locator(place).all_inner_texts()), place
    assert page.locator("#detail img, #detail script, .entry img, .entry script").count() == 0
    assert page.evaluate("window.hacked") is None
    open_page(page, f"{address}/#text=<img src=x onerror=window.hacked=1>&show=<script>&step=1&group=1")
    assert page.evaluate("window.hacked") is None


def test_narrow_screens_show_list_group_or_help(small):
    page, _ = small
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator(".entry .question").first.click()
    page.wait_for_selector(".card")
    assert not page.locator("#side").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#detail .words")
    assert page.locator("#help").evaluate(
        "e => e.scrollWidth <= e.clientWidth && e.offsetWidth <= innerWidth"
    )
    page.keyboard.press("Escape")
    page.click(".back")
    assert page.locator("#side").is_visible() and not page.locator("#detail").is_visible()


def test_terms_are_explained_in_place_and_in_help(small):
    page, address = small
    open_group(page, address, 1, 0)
    words = page.locator("#detail [data-term]")
    names = set(words.evaluate_all("all => all.map((one) => one.dataset.term)"))
    assert {"silver document", "correctness", "policy", "advantage", "score", "softened", "em"} <= names
    assert all(len(text) > 20 for text in words.evaluate_all("all => all.map((one) => one.title)"))
    page.locator("[data-term='correctness']").first.click()
    in_view = "e => e.getBoundingClientRect().top >= 0 && e.getBoundingClientRect().bottom <= innerHeight"
    assert page.locator("#term-correctness").evaluate(in_view)
    assert names <= set(page.locator("#help .terms dt").all_inner_texts())


def test_link_that_leads_nowhere_says_so(small):
    page, address = small
    for link, words in (
        ("#step=1&group=7&from=x", "keeps no group 7 of step 1; the steps that are kept go from 1 to 2. The"),
        ("#step=1&group=0&trajectory=9", "The group has no trajectory 9."),
        ("#step=<b>&group=0", "The address holds step=<b>, which is no number."),
        ("#show=nothing&sort=age", "There is no choice “nothing” under Show: all are shown. There is no"),
        ("#run=other/run&from=1&to=1", "the link is for other/run: calibadv inspect its folder."),
    ):
        page.goto("about:blank")
        open_page(page, f"{address}/{link}")
        page.wait_for_selector("#detail[data-ready]", state="attached")
        assert words in page.inner_text("#notice")
        page.click("#reset")
        if "trajectory" not in link:
            page.wait_for_selector("#notice", state="hidden")


def test_lost_step_is_reported(served, browser, small_run, tmp_path):
    shutil.copytree(small_run, tmp_path / "run")
    page = browser.new_page()  # the fixture refuses the line that a browser logs of a missing file
    with served(tmp_path / "run") as address:
        open_page(page, address)
        (tmp_path / "run/rollouts/step_1.parquet").unlink()
        page.locator(".entry .question").first.click()
        page.wait_for_selector("#message[role='alert']")
        assert "not kept any more (log.rollouts_keep). Load the page again." in page.inner_text("#message")
    page.close()


def test_list_answers_arrows_home_end_and_enter(small):
    page, _ = small
    page.keyboard.press("ArrowDown")
    moves = {"ArrowDown": "1/1", "End": "2/0", "ArrowUp": "1/1", "Home": "1/0", "ArrowRight": "1/0"}
    for key, group in moves.items():
        page.keyboard.press(key)
        page.wait_for_selector(f"#detail[data-ready='{group}']")
        chosen = page.locator(".entry.chosen").get_attribute("id")
        assert page.get_attribute("#list", "aria-activedescendant") == chosen
    for key, focus in (("Enter", "detail"), ("ArrowDown", "detail"), ("Escape", "list")):  # the group scrolls
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == focus
        assert focus == "list" or page.locator("#detail[data-ready='1/0']").count() == 1


def test_groups_are_sorted_by_score_length_and_searches(served, page, tokenizer, tmp_path):
    """Three groups of one trajectory, whose score, length and searches go in different orders."""
    groups = []
    for thought, searches, answer in (("a", 2, "bob"), ("b " * 60, 1, "ann"), ("c", 3, "ann lee")):
        way = [search_turn(tokenizer, thought, f"query {n}", [SHELF["a"]]) for n in range(searches)]
        groups.append(group_of(tokenizer, [way], [answer], f"question {len(groups)}"))
    write_run(tmp_path / "run", [groups], Config(), tokenizer)
    with served(tmp_path / "run") as address:
        open_page(page, address)
        for sort, order, first in (
            *(("reward-high", "120", "score 1"), ("reward-low", "021", "score 0"), ("long", "120", "tokens")),
            *(("short", "021", "tokens"), ("searches-many", "201", "searches 3")),
            *(("searches-few", "102", "searches 1"), ("", "012", "step 1")),
        ):
            page.select_option("#sort", sort)
            shown = page.locator(".entry .question").all_inner_texts()
            assert [text[-1] for text in shown] == list(order), sort
            assert first in page.locator(".entry .where").first.inner_text()
        page.keyboard.press("Escape")
        page.select_option("#sort", "searches-many")
        page.reload()
        page.wait_for_selector("#list[data-ready]", state="attached")
        assert page.input_value("#sort") == "searches-many"
        page.keyboard.press("j")
        page.wait_for_selector("#detail[data-ready='1/2']")


def test_page_follows_a_run(served, page, tokenizer, small_group, tmp_path):
    """From before its first step; what is open, chosen or typed stays, and the focus with it."""
    folder = tmp_path / "run"
    steps = [[small_group()], [small_group("one_hop")] * 2, [small_group("one_hop")]]
    write_run(folder, steps, Config(), tokenizer, planned=60)
    add_start(folder, dump_config(Config()), {})
    coming = [path.rename(tmp_path / path.name) for path in kept_steps(folder).values()]

    def come(selector):
        path = coming.pop(0)
        path.rename(folder / "rollouts" / path.name)
        page.wait_for_selector(selector)

    with served(folder) as address:
        open_page(page, address)
        assert "no step yet" in page.inner_text("#empty") and not page.locator("#notice").is_visible()
        come("#count:text('step 1 of 60')")
        assert count(page) == "5 trajectories in 1 group · step 1 of 60"
        for key in "jll":
            page.keyboard.press(key)
            page.wait_for_selector("#detail[data-ready='1/0']")
        page.evaluate("document.querySelector('.card').marked = true")
        come("#count:text('step 2 of 60')")
        assert page.locator(".entry.chosen").count() == 1 and count(page).startswith("5 trajectories")
        assert page.locator("#steps .step").count() == 2 and page.locator("#source option").count() == 3
        assert page.evaluate("document.querySelector('.card').marked") is True  # it was not drawn again
        page.keyboard.press("l")
        assert page.locator(".card.chosen").get_attribute("data-index") == "2"
        page.keyboard.press("Escape")
        assert count(page) == "10 trajectories in 2 groups · step 2 of 60"
        page.focus("#text")
        page.keyboard.type("an")
        come("#count:text('step 3 of 60')")
        page.keyboard.type("n")
        assert page.input_value("#text") == "ann" and count(page).startswith("5 trajectories in 1 group")
        page.select_option("#show", "softened")
        page.reload()
        page.wait_for_selector("#list[data-ready]", state="attached")
        assert count(page) == "1 trajectory in 1 group · step 3 of 60"
        assert "at step 3 of 60: still running, or stopped early" in page.inner_text("#message")
        page.click("#reset")
        assert count(page) == "20 trajectories in 4 groups"
        page.goto("about:blank")
        open_page(page, f"{address}/#from=1&to=1")
        assert count(page) == "5 trajectories in 1 group"
        page.goto("about:blank")
