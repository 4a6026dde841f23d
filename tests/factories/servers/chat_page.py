"""The chat page in a browser: `penstock serve` with the demo model, headless Chromium, and what a reader does."""

from __future__ import annotations

import contextlib
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from factories.servers.stack import START_TIMEOUT, Process, free_port, start
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

# Debian's, Fedora's and Google's names.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Width of a window, in pixels, in which the settings have room beside the conversation.
_WIDE = 1200
# One core of a busy machine; an answer takes a tenth of a second on a free one.
PATIENCE_MILLISECONDS = 30_000


def find_chromium() -> str | None:
    """Path of the system's Chromium; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def served_page(*flags: str) -> Iterator[str]:
    """Run the whole tree over the demo model; gives the page's address."""
    port = free_port()
    engine = ("--kv-memory", "64MiB", "--threads", "1", "--dtype", "float32")
    process = start(None, "--http-port", str(port), *engine, *flags)
    try:
        process.wait_ready()
        _await_health(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/"
    finally:
        if process.popen.poll() is None:
            process.terminate()
        process.log.unlink(missing_ok=True)


def _await_health(url: str, process: Process) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.popen.poll() is None:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(url, timeout=5):
            return
    raise RuntimeError(f"no gateway at {url}:\n{process.output()}")


@contextlib.contextmanager
def running_chromium(path: str) -> Iterator[Browser]:
    """Run headless Chromium."""
    expect.set_options(timeout=PATIENCE_MILLISECONDS)
    with sync_playwright() as playwright:
        # Containers run as root, where Chromium has no sandbox; it shows pages of this machine only.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Reader:
    """A reader with a browser window of its own, without anything kept from before."""

    page: Page
    # What the browser complained about, but answers that are errors, which the page shows itself.
    complaints: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, browser: Browser, url: str, **window: Any) -> Reader:
        """Open the page and wait until it knows models and options."""
        reader = cls(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **window}).new_page())
        reader.page.set_default_timeout(PATIENCE_MILLISECONDS)
        reader.page.on("console", reader._hear)
        reader.page.on("pageerror", lambda error: reader.complaints.append(str(error)))
        reader.page.goto(url)
        reader.await_model()
        reader.show_all_settings()
        return reader

    def show_all_settings(self) -> None:
        """Open the settings, show all of them, and close them where they would lie over the conversation."""
        toggle = self.page.get_by_role("button", name="Settings", exact=True)
        toggle.click()
        self.page.get_by_role("button", name="All", exact=True).click()
        if (self.page.viewport_size or {"width": 0})["width"] < _WIDE:
            close = self.page.get_by_role("button", name="Close the settings")
            (close if close.is_visible() else toggle).click()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def await_model(self) -> None:
        """Wait until the page knows the server's models."""
        expect(self.page.locator("#model option")).not_to_have_count(0)

    def send(self, text: str) -> None:
        """Type a question and send it by Enter."""
        self.page.locator("#ask").fill(text)
        self.page.locator("#ask").press("Enter")

    def await_end(self) -> None:
        """Wait until nothing is answering."""
        expect(self.page.locator(".turn.running")).to_have_count(0)
        expect(self.page.get_by_role("button", name="Send", exact=True)).to_be_visible()

    def ask(self, text: str) -> Locator:
        """Send a question; returns the last answer once it is whole."""
        before = self.page.locator(".turn.assistant").count()
        self.send(text)
        expect(self.page.locator(".turn.assistant")).not_to_have_count(before)
        self.await_end()
        return self.answers.last

    @property
    def answers(self) -> Locator:
        """The answers of the branch that is shown."""
        return self.page.locator(".turn.assistant")

    def switch(self, name: str) -> None:
        """Turn a switch of the settings."""
        self.page.get_by_role("switch", name=name).click()

    def set(self, option: str, value: str) -> None:
        """Type an option's value, found by the search."""
        self.page.get_by_role("searchbox", name="Search options").fill(option)
        control = self.option(option)
        if control.evaluate("element => element.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)

    def option(self, name: str) -> Locator:
        """The control of an option."""
        return self.page.locator(f'[data-option="{name}"] :is(input, select, textarea)')

    def part(self, name: str) -> Locator:
        """A part of the settings, unfolded: system, answer, options, structure or tools."""
        part = self.page.locator(f'[data-part="{name}"]')
        if not part.evaluate("element => element.open"):
            part.locator("summary").first.click()
        return part

    def structure(self, kind: str, text: str = "") -> None:
        """Choose a structured output."""
        part = self.part("structure")
        part.locator("select").select_option(kind)
        if text:
            part.locator("textarea").fill(text)
