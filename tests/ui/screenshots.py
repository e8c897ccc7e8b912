"""Pictures of every tab, light and dark, wide and narrow: ``make screenshots``.

They are of the real server with the default model, under a little load of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ui.browsing import ARGUMENTS
from tests.ui.serving import free_port

PICTURES = Path("dashboard/pictures")  # the two that the README shows
README = {"wide-light-chat": "chat.png", "wide-dark-lessons": "inspector.png"}
SIZES = {"wide": (1280, 800), "narrow": (390, 844)}
QUESTION = "Explain in a few sentences why the sky is blue."
LOAD = ("Write a short story about a lighthouse.", "List ten animals.", "What is a prime number?")


def main(arguments: list[str] | None = None) -> int:
    """Take the pictures; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/screenshots"))
    parser.add_argument("--url", help="of a running server; without it, one is started")
    parser.add_argument("--readme", action="store_true", help=f"also renew those in {PICTURES}")
    args = parser.parse_args(arguments)
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed (make system-deps)", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    with server(args.url) as url:
        shoot(url, args.out, chromium)
    if args.readme:
        PICTURES.mkdir(exist_ok=True)
        for name, target in README.items():
            shutil.copy(args.out / f"{name}.png", PICTURES / target)
    print(f"pictures are in {args.out}")
    return 0


@contextmanager
def server(url: str | None, *options: str) -> Iterator[str]:
    """The server at ``url``, or one with ``options`` that lives as long as the block."""
    if url is not None:
        yield url.rstrip("/")
        return
    port = free_port()
    command = [sys.executable, "-m", "infer.cli", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 180
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep a few requests running, so that there is something to see."""
    done = threading.Event()

    def work(question: str) -> None:
        while not done.is_set():
            body = {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 24,
                "temperature": 0.8,
            }
            request = urllib.request.Request(
                f"{url}/v1/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=600) as answer:
                answer.read()

    threads = [threading.Thread(target=work, args=(text,)) for text in LOAD]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def shoot(url: str, out: Path, chromium: str) -> None:
    """Walk through the tabs in every size and theme."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        for size, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height})
                page.set_default_timeout(120_000)
                page.goto(f"{url}/ui/?__theme={theme}")
                page.wait_for_selector("#msg textarea")
                tag = f"{size}-{theme}"

                def picture(name: str, page: Any = page, tag: str = tag) -> None:
                    page.screenshot(path=out / f"{tag}-{name}.png", full_page=name != "chat")

                chat(page, picture)
                with load(url):
                    walk(page, picture)
                page.close()
        browser.close()


def chat(page: Any, picture: Callable[[str], None]) -> None:
    """A question and its answer, cut so early that the page offers to go on with it."""
    from playwright.sync_api import expect

    page.locator("#chat-max-tokens input").evaluate(  # folded away on a narrow screen
        "node => { node.value = '40'; node.dispatchEvent(new Event('input', {bubbles: true})) }"
    )
    page.locator("#msg textarea").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator("#bot .thought-group", has_text="tokens/s")).to_be_visible(timeout=300_000)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_role("button", name="Continue", exact=True)).to_be_visible()
    picture("chat")


def walk(page: Any, picture: Callable[[str], None]) -> None:
    """Fill every other tab and call ``picture`` with its name."""
    from playwright.sync_api import expect

    def tab(name: str) -> None:
        page.get_by_role("tab", name=name, exact=True).first.click()

    tab("Completion")
    page.get_by_label("Side by side").check()
    for side in ("A", "B"):
        page.get_by_role("button", name=f"Settings {side}").click()
        page.locator(f"#{side.lower()}-max-tokens input").fill("20")
        page.get_by_role("button", name=f"Settings {side}").click()
    page.get_by_role("button", name="Complete", exact=True).click()
    expect(page.locator("#tokens-b")).to_contain_text("finish:", timeout=300_000)
    expect(page.locator("#complete-stop")).to_be_disabled()  # both have ended
    page.locator("#tokens-a .token").nth(4).click()
    expect(page.locator("#tokens-b .prefix")).to_be_visible()
    expect(page.locator("#tokens-b")).to_contain_text("finish:", timeout=300_000)
    picture("completion")
    tab("Metrics")
    expect(page.locator("#metrics-board svg.chart")).to_have_count(9)
    page.wait_for_timeout(2500)
    picture("metrics")
    tab("Inspector")
    expect(page.locator("#inspector-board svg")).to_be_visible()
    page.wait_for_timeout(1500)
    picture("inspector")
    tab("Lessons")
    expect(page.locator("#lesson-board")).to_contain_text("After 0 steps", timeout=60_000)
    page.get_by_label("Lesson", exact=True).click()
    page.get_by_role("option", name="4 · A shared beginning").click()
    for i in (1, 2):
        page.get_by_role("button", name="Step ▶").click()
        expect(page.locator("#lesson-board")).to_contain_text(f"After {i} step")
    picture("lessons")
    tab("Model")
    expect(page.locator("#model-board .tile").first).to_be_visible()
    picture("model")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    raise SystemExit(main())
