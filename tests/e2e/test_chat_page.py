"""The chat page in headless Chromium against `penstock serve` with the demo model."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NO_PLAYWRIGHT = "playwright is not installed (the extra dev); last run recorded in docs/learn/testing.md"
pytest.importorskip("playwright", reason=NO_PLAYWRIGHT)
from factories.servers.chat_page import Reader, find_chromium, running_chromium, served_page  # noqa: E402
from playwright.sync_api import Browser, FloatRect, Locator, expect  # noqa: E402

pytestmark = pytest.mark.clients
QUESTION = "What is Penstock?"
# Text of an answer, without the thought that the demo model may have before it.
SAID = ":not(.reasoning) > .markdown"
WEATHER = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Paris"\}\}\n</tool_call>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on the path; last run recorded in docs/learn/testing.md")
    with running_chromium(path) as running:
        yield running


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_page() as address:
        yield address


@pytest.fixture
def reader(browser: Browser, url: str) -> Iterator[Reader]:
    reader = Reader.open(browser, url)
    yield reader
    reader.page.context.close()
    assert reader.complaints == []


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """An answer of the API, without the page."""
    request = urllib.request.Request(
        f"{url}v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def metrics(url: str) -> str:
    """The gateway's metrics."""
    with urllib.request.urlopen(f"{url}metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def sent(reader: Reader) -> list[dict[str, Any]]:
    """Bodies of the chats that the page sends from now on."""
    bodies: list[dict[str, Any]] = []
    reader.page.on(
        "request", lambda request: bodies.append(request.post_data_json) if "/chat/" in request.url else None
    )
    return bodies


def box_of(element: Locator) -> FloatRect:
    """Place and size of an element that is shown, in pixels of the window."""
    box = element.bounding_box()
    assert box is not None
    return box


def test_a_chat_shows_the_apis_answer_and_its_figures(reader: Reader, url: str) -> None:
    reader.set("temperature", "0")
    answer = reader.ask(QUESTION)
    expected = post(url, {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    expect(answer.locator(SAID)).to_have_text(expected["choices"][0]["message"]["content"])
    expect(answer.locator(".figures")).to_contain_text(
        re.compile(rf"first token.*tok/s.*{expected['usage']['completion_tokens']} tokens.*total")
    )
    expect(answer.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile(r"^Stages: Template [\d.]+ m?s, .*Queue .*Prefill .*Decode ")
    )
    answer.locator(".timings summary").click()
    expect(answer.locator(".timings")).to_contain_text("prompt tokens")
    expect(reader.page).to_have_title(f"{QUESTION} – Penstock")


def test_stop_keeps_what_came_and_frees_the_request(reader: Reader, url: str) -> None:
    reader.set("max_new_tokens", "3500")
    reader.set("ignore_eos", "true")
    reader.send("Count from 1 to 20.")
    expect(reader.answers.last.locator(SAID)).to_contain_text("1, 2, 3")
    reader.page.get_by_role("button", name="Stop").click()
    reader.await_end()
    expect(reader.answers.last.locator(".note")).to_have_text("Stopped.")
    expect(reader.answers.last.locator(SAID)).to_contain_text("1, 2, 3")
    expect(reader.page.locator("#ask")).to_be_focused()
    deadline = time.monotonic() + 60
    while not re.search(r"^penstock_gateway_http_requests_in_flight 0", metrics(url), re.MULTILINE):
        assert time.monotonic() < deadline
    assert re.search(r"^penstock_gateway_readers_left_total [1-9]", metrics(url), re.MULTILINE)


def test_escape_stops_too(reader: Reader) -> None:
    reader.set("max_new_tokens", "3500")
    reader.set("ignore_eos", "true")
    reader.send("Count from 1 to 20.")
    expect(reader.answers.last.locator(SAID)).to_contain_text("1")
    reader.page.keyboard.press("Escape")
    reader.await_end()
    expect(reader.answers.last.locator(".note")).to_have_text("Stopped.")


def test_a_retry_is_a_version_beside_the_first(reader: Reader) -> None:
    answer = reader.ask(QUESTION)
    answer.get_by_role("button", name="Retry").click()
    reader.await_end()
    expect(reader.answers).to_have_count(1)
    expect(reader.answers.locator(".branches")).to_contain_text("2/2")
    reader.answers.get_by_role("button", name="Earlier version").click()
    expect(reader.answers.locator(".branches")).to_contain_text("1/2")


def test_an_edited_question_is_asked_anew_and_the_first_stays(reader: Reader) -> None:
    reader.ask(QUESTION)
    reader.page.locator("#ask").press("ArrowUp")
    box = reader.page.get_by_role("textbox", name="Text of the turn")
    expect(box).to_be_focused()
    expect(box).to_have_value(QUESTION)
    box.fill("Count from 1 to 20.")
    box.press("Enter")
    expect(reader.page.locator(".asked")).to_have_text("Count from 1 to 20.")
    reader.await_end()
    expect(reader.answers.locator(SAID)).to_contain_text("1, 2, 3")
    reader.page.locator(".turn.user").get_by_role("button", name="Earlier version").click()
    expect(reader.page.locator(".asked")).to_have_text(QUESTION)
    expect(reader.answers.locator(SAID)).to_contain_text("Penstock")


def test_two_sets_of_options_answer_side_by_side_and_one_is_kept(reader: Reader) -> None:
    reader.switch("Compare A and B")
    reader.page.get_by_role("button", name="Set B").click()
    reader.set("max_new_tokens", "3")
    bodies = sent(reader)
    reader.ask(QUESTION)
    assert [body.get("max_new_tokens") for body in bodies] == [None, 3]
    left, right = (reader.page.locator(".pair .turn").nth(side) for side in (0, 1))
    expect(left.locator(".side")).to_have_text("A")
    expect(right.locator(".figures")).to_contain_text("3 tokens")
    first, second = box_of(left), box_of(right)
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] <= second["x"]
    right.get_by_role("button", name="Go on with this").click()
    expect(reader.page.locator(".pair")).to_have_count(0)
    kept = reader.answers.locator(SAID).inner_text()
    reader.switch("Compare A and B")
    reader.ask("Why?")
    assert bodies[-1]["messages"][1] == {"role": "assistant", "content": kept}


def test_probabilities_are_shown_on_hover_and_by_arrow_keys(reader: Reader) -> None:
    reader.switch("Token probabilities")
    answer = reader.ask(QUESTION)
    answer.locator(".token").first.hover()
    tip = answer.locator(".tip")
    expect(tip.locator(".tip-head")).to_have_text(re.compile(r'^"Pen.*\d%$'))
    expect(tip.locator("li")).to_have_count(5)
    answer.locator(".tokens").focus()
    answer.locator(".tokens").press("ArrowRight")
    expect(answer.locator(".token.chosen")).to_have_attribute("data-at", "1")
    answer.locator(".tokens").press("Escape")
    expect(tip).to_be_hidden()


def test_a_character_of_several_tokens_is_whole(reader: Reader) -> None:
    reader.switch("Token probabilities")
    reader.structure("choice", "Hi 👋 you")
    expect(reader.ask("Hello").locator(".tokens")).to_contain_text(re.compile("Hi ·*👋"))


def test_structured_output_is_sent_and_obeyed(reader: Reader) -> None:
    reader.structure("regex", "(yes|no), because [a-z]{3,9}\\.")
    expect(reader.ask("Is it?").locator(SAID)).to_have_text(re.compile(r"^(yes|no), because [a-z]{3,9}\.$"))
    # Without other properties, which a small model would not end.
    schema = {"type": "object", "properties": {"gpu": {"type": "boolean"}}, "required": ["gpu"]}
    reader.structure("json_schema", json.dumps({**schema, "additionalProperties": False}))
    answer = reader.ask("A GPU?").locator(".code pre")
    assert isinstance(json.loads(answer.inner_text())["gpu"], bool)


def test_a_structure_that_is_wrong_is_not_sent(reader: Reader) -> None:
    bodies = sent(reader)
    reader.structure("json_schema", '{"type": ')
    reader.send(QUESTION)
    expect(reader.page.get_by_text("Not sent: the JSON schema: not JSON")).to_be_visible()
    expect(reader.page.locator("#ask")).to_have_value(QUESTION)
    assert bodies == []


def test_a_tool_call_is_shown_and_its_result_is_answered(reader: Reader) -> None:
    tools = reader.part("tools")
    tools.get_by_role("button", name="Put in an example").click()
    # So that it calls whatever the model would rather say.
    reader.structure("regex", WEATHER)
    answer = reader.ask("What is the weather in Paris?")
    card = answer.get_by_role("region", name="Call of get_weather")
    expect(card.locator("pre")).to_have_text(re.compile(r'"city": "Paris"'))
    reader.structure("none")
    bodies = sent(reader)
    card.get_by_role("textbox", name="Result of get_weather").fill('{"temperature": 21}')
    answer.get_by_role("button", name="Send the result").click()
    expect(reader.answers).to_have_count(2)
    reader.await_end()
    call, result = bodies[0]["messages"][-2:]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": '{"temperature": 21}'}
    expect(reader.answers.first.locator(".card")).to_contain_text("result")


def test_html_of_the_model_stays_text(reader: Reader) -> None:
    """The model is forced to say it."""
    said = "**bold** <img src=x onerror=document.title=1> <script>document.title=2</script> [a](javascript:alert(1))"
    reader.structure("choice", said)
    answer = reader.ask("Say it").locator(SAID)
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer).to_contain_text("<img src=x onerror=document.title=1> <script>document.title=2</script>")
    assert answer.locator("img, script, a[href^=javascript]").count() == 0
    expect(reader.page).to_have_title("Say it – Penstock")


def test_the_policy_stops_scripts_that_got_in(reader: Reader) -> None:
    script = "try { document.body.innerHTML = '<b>x</b>'; return 'taken'; } catch (error) { return error.name; }"
    assert reader.page.evaluate(f"() => {{ {script} }}") == "TypeError"
    reader.complaints.clear()


def test_an_error_of_the_server_has_reason_and_field_and_leads_to_it(reader: Reader) -> None:
    reader.set("assistant_model", "nowhere")
    problem = reader.ask(QUESTION).get_by_role("alert")
    expect(problem).to_contain_text("NOT_FOUND")
    expect(problem).to_contain_text("assistant_model")
    problem.get_by_role("button", name="Show assistant_model").click()
    expect(reader.option("assistant_model")).to_be_focused()


def test_a_value_out_of_bounds_is_told_beside_its_field(reader: Reader) -> None:
    bodies = sent(reader)
    reader.set("top_p", "3")
    reader.send(QUESTION)
    told = reader.page.locator('[data-option="top_p"] .field-error')
    expect(told).to_have_text("top_p must be at least 0, at most 1")
    expect(reader.option("top_p")).to_be_focused()
    assert bodies == []


def test_every_option_of_sampling_and_decoding_has_a_field(reader: Reader, url: str) -> None:
    with urllib.request.urlopen(f"{url}options", timeout=30) as answer:
        rows = json.load(answer)["data"]
    shown = set(
        reader.page.locator("[data-option]").evaluate_all("fields => fields.map(field => field.dataset.option)")
    )
    assert shown >= {row["name"] for row in rows if row["section"] in ("config", "stop")}


def test_a_seed_with_all_digits_gives_the_same_answer_again(reader: Reader) -> None:
    reader.set("temperature", "1.5")
    reader.set("seed", "9223372036854775807")
    first = reader.ask("Tell me something.").locator(SAID).inner_text()
    answer = reader.answers.last
    answer.get_by_role("button", name="Retry").click()
    expect(answer.locator(".branches")).to_contain_text("2/2")
    reader.await_end()
    expect(answer.locator(SAID)).to_have_text(first, use_inner_text=True)
    answer.locator(".timings summary").click()
    expect(answer.locator(".timings")).to_contain_text("seed 9223372036854775807")


def test_the_system_prompt_and_a_line_by_shift_are_sent(reader: Reader) -> None:
    bodies = sent(reader)
    reader.part("system").get_by_role("textbox").fill("Be brief.")
    box = reader.page.locator("#ask")
    box.fill("one")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    box.press("Enter")
    expect(reader.answers).to_have_count(1)
    reader.await_end()
    system, user = bodies[0]["messages"]
    assert (system, user["content"]) == ({"role": "system", "content": "Be brief."}, "one\ntwo")


def test_conversations_outlive_a_reload(reader: Reader) -> None:
    said = reader.ask(QUESTION).locator(SAID).inner_text()
    reader.page.reload()
    reader.await_model()
    expect(reader.answers.locator(SAID)).to_have_text(said)
    reader.page.get_by_role("button", name="New conversation").click()
    expect(reader.answers).to_have_count(0)
    reader.page.get_by_role("button", name=QUESTION, exact=True).click()
    expect(reader.answers.locator(SAID)).to_have_text(said)


def test_a_reload_while_an_answer_streams_keeps_what_came(reader: Reader) -> None:
    reader.set("max_new_tokens", "3500")
    reader.set("ignore_eos", "true")
    reader.send("Count from 1 to 20.")
    expect(reader.answers.last.locator(SAID)).to_contain_text("1, 2, 3")
    reader.page.reload()
    reader.await_model()
    reader.await_end()
    expect(reader.answers).to_have_count(1)
    expect(reader.answers.locator(SAID)).to_contain_text("1, 2, 3")
    expect(reader.answers.locator(".note")).to_have_text("Stopped.")
    # And it goes on: the question is asked again beside it.
    reader.show_all_settings()
    reader.set("max_new_tokens", "4")
    reader.answers.get_by_role("button", name="Retry").click()
    expect(reader.answers.locator(".branches")).to_contain_text("2/2")
    reader.await_end()


def test_a_conversation_longer_than_the_context_goes_on_without_its_older_half(reader: Reader) -> None:
    # A few questions fill the demo model's context.
    question = "Penstock serves beams. " * 300
    reader.set("max_new_tokens", "8")
    bodies = sent(reader)
    for _ in range(12):
        answer = reader.ask(question)
        if answer.get_by_role("alert").count():
            break
    problem = reader.answers.last.get_by_role("alert")
    expect(problem.get_by_role("button", name="Leave out the older half and try again")).to_be_visible()
    asked = len(bodies[-1]["messages"])
    problem.get_by_role("button", name="Leave out the older half and try again").click()
    reader.await_end()
    expect(reader.answers.last.locator(SAID)).not_to_be_empty()
    assert 0 < len(bodies[-1]["messages"]) < asked
    # A line tells it, and every turn is still there to read.
    expect(reader.page.get_by_text("Context: ")).to_be_visible()
    assert reader.page.locator(".asked").count() == (asked + 1) // 2


def test_the_model_summarises_the_older_half_on_request_and_the_summary_is_sent(reader: Reader) -> None:
    summarise = reader.page.get_by_role("button", name="Summarise the older half")
    reader.set("max_new_tokens", "8")
    bodies = sent(reader)
    # From half of the context on the page offers it.
    for _ in range(12):
        assert reader.ask("Penstock serves beams. " * 100).get_by_role("alert").count() == 0
        if summarise.is_visible():
            break
    summarise.click()
    line = reader.page.locator(".left-out p")
    expect(line).to_contain_text("The turns above are sent as this summary: ")
    reader.await_end()
    asked = bodies[-1]["messages"]
    assert asked[-1]["content"].startswith("Summarise our conversation")
    # The older half and the wish.
    assert 2 < len(asked) < len(bodies[-2]["messages"]) + 1
    summary = line.inner_text().partition(": ")[2]
    assert summary
    reader.ask(QUESTION)
    first = bodies[-1]["messages"][0]
    assert first["role"] == "system"
    assert " ".join(first["content"].split()) == " ".join(f"The conversation before, in short: {summary}".split())
    assert len(bodies[-1]["messages"]) < len(bodies[-3]["messages"]) + 2
    # It outlives a reload, and the turns can be sent again.
    reader.page.reload()
    reader.await_model()
    expect(line).to_contain_text(summary)
    reader.page.get_by_role("button", name="Send them again").click()
    expect(line).to_have_count(0)
    reader.ask(QUESTION)
    assert [message["role"] for message in bodies[-1]["messages"]] == ["user", "assistant"] * (
        len(reader.answers.all()) - 1
    ) + ["user"]


def test_a_stopped_answer_has_its_tokens_and_their_speed(reader: Reader) -> None:
    reader.set("max_new_tokens", "3500")
    reader.set("ignore_eos", "true")
    reader.send("Count from 1 to 20.")
    expect(reader.answers.last.locator(SAID)).to_contain_text("1, 2, 3")
    reader.page.get_by_role("button", name="Stop").click()
    reader.await_end()
    expect(reader.answers.last.locator(".figures")).to_contain_text(re.compile(r"tok/s.*[1-9]\d* tokens"))


def test_mathematics_stays_as_typed_and_text_runs_in_its_own_direction(reader: Reader) -> None:
    said = "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643\n\nEuler: \\(e^{i\\pi} * 2 * 3\\) done"
    reader.structure("choice", said.replace("\n\n", " ")[:9])
    arabic = reader.ask("Say it").locator(f"{SAID} [dir=auto]").first
    assert arabic.evaluate("element => getComputedStyle(element).direction") == "rtl"
    reader.structure("choice", "Euler: \\(e^{i\\pi} * 2 * 3\\) done")
    answer = reader.ask("Say it").locator(SAID)
    expect(answer.locator(".math")).to_have_text("\\(e^{i\\pi} * 2 * 3\\)")
    assert answer.locator("p").first.evaluate("element => getComputedStyle(element).direction") == "ltr"


def test_what_is_typed_in_the_settings_stays_when_an_answer_ends(reader: Reader) -> None:
    reader.send(QUESTION)
    reader.option("temperature").fill("0.")
    expect(reader.answers).to_have_count(1)
    reader.await_end()
    expect(reader.option("temperature")).to_be_focused()
    expect(reader.option("temperature")).to_have_value("0.")


def test_light_and_dark_are_chosen_and_kept(reader: Reader) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = reader.page.evaluate(ground)
    reader.page.get_by_role("button", name="Theme: light").click()
    dark = reader.page.evaluate(ground)
    reader.page.reload()
    assert light != dark == reader.page.evaluate(ground)


def test_a_new_conversation_shows_the_model_and_begins_with_a_click(reader: Reader) -> None:
    welcome = reader.page.locator(".welcome")
    expect(welcome).to_contain_text("penstock-demo")
    expect(welcome.get_by_role("button")).to_have_count(3)
    welcome.get_by_role("button").first.click()
    expect(reader.answers).to_have_count(1)
    reader.await_end()
    expect(reader.page.get_by_text("Context: ")).to_be_visible()


def test_simple_settings_leave_out_what_is_not_set(reader: Reader) -> None:
    reader.set("num_beams", "2")
    reader.page.get_by_role("searchbox", name="Search options").fill("")
    reader.page.get_by_role("button", name="Simple", exact=True).click()
    expect(reader.page.locator('[data-part="tools"]')).to_be_hidden()
    titles = reader.page.locator(".group > summary").all_text_contents()
    assert [title.partition("1 changed")[0] for title in titles] == ["Common", "Beams and searches"]


def test_a_server_with_tokens_asks_for_one_and_says_when_it_is_wrong(browser: Browser, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("good-token-of-the-test\n")
    with served_page("--auth-token-file", str(tokens)) as address:
        page = browser.new_context().new_page()
        page.goto(address)
        tries = (("wrong", "This server wants a bearer token."), ("good-token-of-the-test", "refused this token"))
        for token, told in tries:
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text(told)
            dialog.get_by_label("Token").fill(token)
            dialog.get_by_role("button", name="Continue").click()
        reader = Reader(page)
        reader.await_model()
        expect(reader.ask(QUESTION).locator(SAID)).to_contain_text("Penstock")
        page.context.close()


@pytest.mark.parametrize("width", [1280, 700, 360])
def test_nothing_leaves_the_window_with_its_sides_closed(browser: Browser, url: str, width: int) -> None:
    reader = Reader.open(browser, url, viewport={"width": width, "height": 740}, has_touch=True)
    settings = reader.page.get_by_role("button", name="Settings", exact=True)
    if not reader.page.locator("#settings").is_visible():
        settings.click()
    reader.part("tools").get_by_role("button", name="Put in an example").click()
    reader.structure("regex", WEATHER)
    reader.page.get_by_role("button", name="Close the settings").or_(settings).last.click()
    expect(reader.page.locator("#settings")).to_be_hidden()
    if reader.page.locator("#side").is_visible():
        reader.page.get_by_role("button", name="Conversations", exact=True).click()
    reader.ask("What is the weather in Paris?")
    assert box_of(reader.page.locator("#middle")) == {"x": 0, "y": 0, "width": width, "height": 740}
    for one in reader.page.locator("#middle :is(.card, .ask, header button)").all():
        box = box_of(one)
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    reader.page.context.close()


def test_a_phone_shows_compared_answers_below_each_other(browser: Browser, url: str) -> None:
    reader = Reader.open(browser, url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    reader.page.get_by_role("button", name="Settings", exact=True).click()
    reader.switch("Compare A and B")
    reader.page.keyboard.press("Escape")
    expect(reader.page.locator("#settings")).to_be_hidden()
    reader.ask(QUESTION)
    first, second = (box_of(one) for one in reader.page.locator(".pair .turn").all())
    assert first["x"] == second["x"]
    assert first["y"] + first["height"] <= second["y"]
    reader.page.context.close()


# A phone's window, and what a finger needs (WCAG 2.5.5).
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
FINGER = 44
# Links within a text are exempt; the label of a switch is its target.
TARGETS = 'button, select, summary, textarea, input:not([type="checkbox"], [type="file"]), .switch label[for]'
SMALL = """targets => targets.filter(one => one.checkVisibility({visibilityProperty: true})).map(one => {
  const box = one.getBoundingClientRect();
  return [one.outerHTML.slice(0, 120), box.width, box.height];
})"""


def small_targets(reader: Reader) -> list[tuple[str, float, float]]:
    """Return what is shown and smaller than a finger needs, with its size."""
    shown = reader.page.locator(TARGETS).evaluate_all(SMALL)
    assert len(shown) > 5
    # Half a pixel is rounding.
    return [(text, width, height) for text, width, height in shown if min(width, height) < FINGER - 0.5]


def test_a_finger_finds_44_pixels_on_a_phone(browser: Browser, url: str) -> None:
    reader = Reader.open(browser, url, **PHONE)
    assert small_targets(reader) == []
    settings = reader.page.get_by_role("button", name="Settings", exact=True)
    settings.click()
    reader.set("temperature", "0.5")
    reader.page.get_by_role("searchbox", name="Search options").fill("")
    for part in ("system", "structure", "tools"):
        reader.part(part)
    assert small_targets(reader) == []
    reader.page.get_by_role("button", name="Close the settings").click()
    reader.ask(QUESTION)
    reader.answers.last.locator(".timings summary").click()
    # Also on a phone.
    expect(reader.page.get_by_text("Context: ")).to_be_visible()
    assert small_targets(reader) == []
    reader.page.get_by_role("button", name="Conversations", exact=True).click()
    expect(reader.page.locator("#side .row-ways button").first).to_be_visible()
    assert small_targets(reader) == []
    reader.page.context.close()


def test_a_wide_table_scrolls_on_a_phone_and_breaks_no_word(browser: Browser, url: str) -> None:
    words = ["Internationalisation", "Telecommunications", "Misunderstandings", "Characteristics"]
    rows = [words, ["---"] * 4, words[::-1]]
    reader = Reader.open(browser, url, **PHONE)
    reader.page.get_by_role("button", name="Settings", exact=True).click()
    table_text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    reader.structure("regex", re.escape(table_text).replace("\\\n", "\\n").replace("\\ ", " "))
    reader.page.get_by_role("button", name="Close the settings").click()
    table = reader.ask("Say it").locator(f"{SAID} .table")
    expect(table.locator("td")).to_have_text(words[::-1])
    assert table.evaluate("element => element.scrollWidth > element.clientWidth")
    box = box_of(table)
    assert box["x"] + box["width"] <= 360
    # Rectangles of a cell's text: one for each line.
    lines = "one => (range => (range.selectNodeContents(one), range.getClientRects().length))(document.createRange())"
    assert [cell.evaluate(lines) for cell in table.locator("th, td").all()] == [1] * 8
    reader.page.context.close()
