"""Take the README's picture from the built site: a chapter's playground, in the browser that the tests use.

usage: screenshot.py TARGET
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PAGE = Path(__file__).resolve().parents[1] / "_build" / "html" / "book" / "ch05_delta_rule.html"


def main(target):
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        page.goto(f"{PAGE.as_uri()}#play")
        page.wait_for_load_state("networkidle")
        for _ in range(3):
            page.get_by_role("button", name="Forward").click()
        page.evaluate("document.getElementById('play').scrollIntoView()")
        page.wait_for_timeout(1000)  # the theme scrolls its sidebar
        page.screenshot(path=target)


if __name__ == "__main__":
    main(*sys.argv[1:])
