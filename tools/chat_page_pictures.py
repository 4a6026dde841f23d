"""Take the pictures of docs/guide/chat-page.md: the chat page before the demo model, light, dark and on a phone.

python tools/chat_page_pictures.py [--out FOLDER]     (needs Chromium, and playwright of the extra dev)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from factories.servers.chat_page import Reader, find_chromium, running_chromium, served_page  # noqa: E402
from playwright.sync_api import Browser, expect  # noqa: E402

OUT = ROOT / "docs" / "guide" / "images"
# Pages load quickly, and the repository stays small.
MOST_BYTES = 150_000


def _light(browser: Browser, url: str) -> Reader:
    """A conversation with Markdown, and an answer's stages as a bar."""
    reader = Reader.open(browser, url, viewport={"width": 1200, "height": 740}, color_scheme="light")
    reader.part("system").get_by_role("textbox").fill("Answer in one or two sentences.")
    reader.option("temperature").fill("0")
    # The first answer of a process is slower than others.
    reader.ask("Hello")
    reader.page.get_by_role("button", name="New conversation").click()
    reader.ask("What happens to a request?")
    reader.page.locator("#ask").focus()
    reader.page.locator("#settings").evaluate("element => { element.scrollTop = 0; }")
    return reader


def _dark(browser: Browser, url: str) -> Reader:
    """Two sets of options side by side, with the probabilities of a token."""
    reader = Reader.open(browser, url, viewport={"width": 1240, "height": 760}, color_scheme="dark")
    reader.page.get_by_role("button", name="Conversations", exact=True).click()
    reader.switch("Compare A and B")
    reader.switch("Token probabilities")
    reader.option("temperature").fill("0")
    reader.page.get_by_role("button", name="Set B").click()
    reader.option("temperature").fill("1.6")
    reader.option("seed").fill("3")
    reader.ask("What can you do?")
    # One that the model was not sure of.
    reader.page.locator(".pair .turn").last.locator(".token:is(.p1, .p2, .p3, .p4)").first.hover()
    return reader


def _phone(browser: Browser, url: str) -> Reader:
    """A tool call with its result, and an answer's stages as a table."""
    reader = Reader.open(browser, url, viewport={"width": 390, "height": 760}, has_touch=True, is_mobile=True)
    reader.page.get_by_role("button", name="Settings", exact=True).click()
    reader.part("tools").get_by_role("button", name="Put in an example").click()
    reader.option("temperature").fill("0")
    reader.page.keyboard.press("Escape")
    answer = reader.ask("What is the weather in Paris?")
    answer.get_by_role("textbox", name="Result of get_weather").fill('{"temperature": 21, "sky": "clear"}')
    answer.get_by_role("button", name="Send the result").click()
    expect(reader.answers).to_have_count(2)
    reader.await_end()
    reader.answers.last.locator(".timings summary").click()
    expect(reader.answers.last.locator("table")).to_be_in_viewport(ratio=1)
    return reader


def main() -> None:
    """Take the pictures. Exits with a message where Chromium is missing or a picture is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    path = find_chromium()
    if path is None:
        raise SystemExit("no Chromium on the path")
    out.mkdir(parents=True, exist_ok=True)
    with served_page() as url, running_chromium(path) as browser:
        for name, scene in (("light", _light), ("dark", _dark), ("phone", _phone)):
            reader = scene(browser, url)
            target = out / f"chat-page-{name}.png"
            reader.page.screenshot(path=target, animations="disabled", caret="hide")
            print(f"{target}: {target.stat().st_size} bytes")
            if reader.complaints:
                raise SystemExit(f"the browser complained: {reader.complaints}")
            if target.stat().st_size > MOST_BYTES:
                raise SystemExit(f"{target} is larger than {MOST_BYTES} bytes")
            reader.page.context.close()


if __name__ == "__main__":
    main()
