"""The page of `calibadv serve` in headless Chromium: turns, keyboard, phone, failures, forged text."""

import pytest
from packages import need

need("starlette", "uvicorn")

from serving_rig import FORGED, served  # noqa: E402

from calibadv_jax.core.errors import RequestFailed  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def agent():
    with served() as agent:
        yield agent


def ask(page, question):
    page.fill("#question", question)
    page.keyboard.press("Enter")
    return page.locator(".attempt").first


def test_keyboard_alone_asks_and_reads(agent, page):
    page.goto(agent.url)
    page.keyboard.type("who wrote it?")  # the field has the focus
    page.keyboard.press("Enter")
    attempt = page.locator(".attempt").first
    attempt.locator(".result").wait_for()
    assert attempt.locator(".thought").all_inner_texts() == ["look for Ann", "so"]
    assert attempt.locator(".query").inner_text() == "search: who"
    assert attempt.locator(".result strong").inner_text() == "Ann"
    assert attempt.locator(".result .title").all_inner_texts() == ["Ann"]  # the document that holds it
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first document
    assert attempt.locator("details").first.get_attribute("open") is not None
    assert page.locator("[aria-live] .attempt").count() == 1


def test_turns_appear_before_the_answer_and_stop_cancels(agent, page):
    page.goto(agent.url)
    attempt = ask(page, "slow?")
    assert page.locator("#state").inner_text() == "The agent is working …"
    page.click("#stop")
    attempt.get_by_text("Stopped.").wait_for()
    assert not agent.sampler.is_open and page.locator("#ask").is_visible()
    ask(page, "who?").locator(".result").wait_for()
    assert page.locator(".attempt h2").all_inner_texts() == ["who?", "slow?"] and not agent.service.attempts


def test_forged_texts_stay_texts(agent, page):
    page.goto(agent.url)
    ask(page, 'forged? <img src=x onerror="window.hacked=1">').locator(".result").wait_for()
    assert page.evaluate("window.hacked") is None and page.locator("#attempts :is(img, script)").count() == 0
    assert "<script>" in page.locator(".result strong").inner_text()


def test_missing_answer_fits_a_phone(agent, page):
    page.goto(agent.url)
    page.set_viewport_size({"width": 390, "height": 844})
    ask(page, "rambling " + "w" * 76).locator(".result.none").get_by_text("no answer: ").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_examples_are_asked_by_a_click(agent, page):
    agent.service.examples = ["who wrote it?", f"who {FORGED}?"]
    page.goto(agent.url)
    buttons = page.locator("#examples button")
    buttons.nth(1).wait_for()
    assert "<script>" in buttons.nth(1).inner_text()
    buttons.first.click()
    assert page.locator(".attempt h2").inner_text() == "who wrote it?"
    page.locator(".result").wait_for()
    assert not page.locator("#examples").is_visible() and page.evaluate("window.hacked") is None


@pytest.mark.parametrize("width", [390, 1280])
def test_answer_stands_above_the_trace(agent, page, width):
    """On a phone it was below several screens of documents."""
    page.goto(agent.url)
    page.set_viewport_size({"width": width, "height": 844})
    attempt = ask(page, "who wrote it?")
    attempt.locator(".result").wait_for()
    places = [attempt.locator(name).bounding_box()["y"] for name in ("h2", ".result", ".trace")]
    assert places == sorted(places) and places[1] < 844 / 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_failure_in_the_middle_is_told(agent, page):
    agent.shelf.error = RequestFailed("retriever", "no answer for 10 s")
    page.goto(agent.url)
    assert ask(page, "who?").locator(".problem").inner_text() == "retriever: no answer for 10 s"
    agent.shelf.error = None
    assert ask(page, "who?").locator(".result strong").inner_text() == "Ann"


def test_page_asks_for_the_token(browser):
    context = browser.new_context()  # the fixture `page` takes the status 401 for an error
    page = context.new_page()
    with served(token="secret-1") as agent:
        page.goto(agent.url)
        assert "needs a token" in ask(page, "who?").locator(".problem").inner_text()
        page.keyboard.type("secret-1")  # its field has the focus now
        page.keyboard.press("Enter")
        page.locator(".result").wait_for()
    context.close()
