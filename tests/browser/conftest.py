"""A real browser, Debian's chromium, without a network; and pages that it opens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from quantkit.reporting import write_report
from tests.reporting.planted_pair import write_run

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, PHONE = (1280, 800), (390, 844)


@dataclass
class Opened:
    """A page, and all that it complained of or asked for."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.fail("the report is tested in a browser: `apt-get install chromium` gets one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """`open_page(path, size=WIDE, dark=False, script=True)` -> what a person would see."""
    contexts = []

    def opening(
        path: Path,
        *,
        size: tuple[int, int] = WIDE,
        dark: bool = False,
        script: bool = True,
        touch: bool = False,
    ) -> Opened:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            java_script_enabled=script,
            has_touch=touch,
            reduced_motion="reduce",
            offline=True,
        )
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("dialog", lambda dialog: opened.complaints.append(dialog.message))
        opened.page.goto(path.as_uri())
        return opened

    yield opening
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def pair_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result files of a planted pair."""
    return write_run(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def pair_page(pair_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its report."""
    return write_report([pair_run], tmp_path_factory.mktemp("page"))[0]
