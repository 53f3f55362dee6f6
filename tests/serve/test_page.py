"""The built-in page in a headless Chromium, where one is installed: what a person does and sees."""

import base64
import json
import shutil
from dataclasses import replace

import pytest

from rille.serve.schema import EngineStats
from rille.text.images import ImageConfig
from tests.serve.scripted import reply_ids, small_tokenizer
from tests.serve.served import serving
from tests.serve.test_api_chat import PIXEL, TOOL
from tests.serve.test_chat import CALL

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the path")


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def server(tokenizer):
    media = tokenizer.specials["<|media_pad|>"]
    with serving(tokenizer, images=ImageConfig(), media_id=media) as served:
        yield served


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    page = browser.new_page()
    page.set_default_timeout(15_000)
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Security Policy" in message.text else None)
    page.goto(server.url)
    page.wait_for_selector("#model option", state="attached")
    yield page
    page.close()
    assert not faults


def count(page, selector: str, number: int) -> None:
    """Wait until so many are there."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_count(number, timeout=15_000)


def say(page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def test_a_conversation_with_thinking(page, server, tokenizer):
    server.say(reply_ids(tokenizer, reasoning_content="Hm, é", content="<b>Hello</b> 🙂"), cached=3)
    say(page, "hi <i>there</i>")
    page.wait_for_selector(".note")
    assert page.inner_text(".user") == "hi <i>there</i>"
    assert page.inner_text(".thinking pre") == "Hm, é"
    assert page.inner_text(".answer") == "<b>Hello</b> 🙂", "what a model writes is text"
    assert "3 of" in page.inner_text(".note")
    server.say(reply_ids(tokenizer, thinking=False, content="again"))
    page.select_option("#effort", "none")
    say(page, "more")
    count(page, ".note", 2)
    assert "<b>Hello</b>" in server.prompt() and "thinking_effort=" not in server.prompt()


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_reaches_beyond_the_sides(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.click("#settings summary")
    page.evaluate("""() => {
        const thinking = document.createElement("details");
        thinking.className = "thinking";
        thinking.open = true;
        thinking.append(document.createElement("pre"));
        thinking.firstChild.textContent = "long".repeat(500);
        document.querySelector("#talk").append(thinking);
    }""")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    parts = '[...document.querySelectorAll("main, #talk, .thinking pre")]'
    assert page.evaluate(f"{parts}.filter(part => part.scrollWidth > part.clientWidth).length") == 0


def test_tools_ask_the_person(page, server, tokenizer):
    page.click("#settings summary")
    page.fill("#tools", json.dumps([TOOL]))
    server.say(reply_ids(tokenizer, reasoning_content="", content="", tool_calls=[CALL]))
    say(page, "twice 21?")
    page.fill(".call textarea", "forty-two")
    assert page.inner_text(".call pre") == '{"number": 21}'
    server.say(reply_ids(tokenizer, reasoning_content="", content="It is 42."))
    page.click(".call button")
    page.wait_for_selector("text=It is 42.")
    assert "forty-two" in server.prompt() and 'role="tool"' in server.prompt()


def test_a_picture_goes_along(page, server, tokenizer):
    dot = base64.b64decode(PIXEL.partition(",")[2])
    page.set_input_files("#file", {"name": "dot.png", "mimeType": "image/png", "buffer": dot})
    page.wait_for_selector("#pictures img")
    server.say(reply_ids(tokenizer, content="a dot"))
    say(page, "what is it?")
    page.wait_for_selector("text=a dot")
    assert page.locator(".user img").count() == 1 and len(server.request.images) == 1


def test_stop_and_errors(page, server, tokenizer):
    server.say(reply_ids(tokenizer, content="on and on")[:-4], hold=True)
    say(page, "go")
    page.wait_for_selector(".assistant")
    before = len(server.engine.aborted)
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    page.wait_for_timeout(100)
    assert len(server.engine.aborted) > before
    page.click("#settings summary")
    page.fill("#temperature", "-1")
    say(page, "again")
    page.wait_for_selector(".wrong")
    assert "temperature is -1" in page.inner_text(".wrong")


def test_what_the_server_has_refused_is_given_back(page, server, tokenizer):
    """Else it would be refused again with whatever comes after it."""
    page.click("#settings summary")
    for field, wrong, right in (("#temperature", "-1", ""), ("#tools", "[{", "")):
        page.fill(field, wrong)
        say(page, "once more")
        page.wait_for_selector(".wrong")
        page.wait_for_function("document.getElementById('text').value == 'once more'")
        page.fill(field, right)
        server.say(reply_ids(tokenizer, content="yes"))
        page.press("#text", "Enter")
        page.wait_for_selector(".answer:has-text('yes')")
        page.wait_for_selector("#send:visible")
        assert server.prompt().count("once more") == 1 and server.request.params.temperature == 1
        page.click("#reset")


def test_a_new_conversation_has_nothing_of_the_one_that_was_left(page, server, tokenizer):
    server.say(reply_ids(tokenizer, thinking=False, content="on and on")[:-10], hold=True)
    page.select_option("#effort", "none")
    say(page, "go")
    page.wait_for_selector(".answer")
    page.click("#reset")
    page.wait_for_selector("#send:visible")
    server.say(reply_ids(tokenizer, thinking=False, content="hello"))
    say(page, "fresh")
    page.wait_for_selector("text=hello")
    assert "fresh" in server.prompt() and "on and" not in server.prompt()


def test_results_that_come_too_late_are_not_asked_for(page, server, tokenizer):
    """Calls that were cut off are no calls; those that the person passes over stay without a result."""
    page.click("#settings summary")
    page.fill("#tools", json.dumps([TOOL]))
    page.select_option("#effort", "none")
    ids = reply_ids(tokenizer, thinking=False, content="I ask.", tool_calls=[CALL])
    server.engine.is_checking = False
    server.say(ids[:-16], hold=True)
    say(page, "twice 21?")
    page.wait_for_selector(".call")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    count(page, ".result", 0)
    server.say(ids)
    say(page, "now")
    page.wait_for_selector(".result")
    assert "I ask." in server.prompt() and 'call tool="' not in server.prompt()
    server.say(reply_ids(tokenizer, thinking=False, content="never mind"))
    say(page, "leave it")
    page.wait_for_selector("text=never mind")
    count(page, ".result", 0)
    assert 'call tool="' in server.prompt() and "leave it" in server.prompt()


def points(page) -> list[str]:
    return page.get_attribute("#speed polyline", "points").split()


def test_live_figures(page, server):
    server.engine.figures = EngineStats(
        running=2,
        pages_total=100,
        pages_used=25,
        pages_cached=50,
        generated_tokens=100,
        cache_hits=60,
        misses={"cold": 40},
    )
    count(page, "#pool .used", 25)
    assert page.locator("#pool .hit").count() == 50 and page.locator("#pool .free").count() == 25
    assert "60" in page.inner_text("#misses") and "40" in page.inner_text("#misses")
    server.engine.figures = replace(server.engine.figures, generated_tokens=5_000)
    count(page, "#figures dd:has-text('5,000')", 1)
    assert any(float(y) < 28 for _, y in (point.split(",") for point in points(page))), "the line went up"
    assert "least cacheable length" in page.text_content("#about")
