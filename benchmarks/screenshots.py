"""Pictures of a report as people see it: `python benchmarks/screenshots.py RUN [--out DIR]`.

Draws the page of a run folder anew and opens it in chromium, without a network, 1280 and 390 pixels
wide, light and dark: `screen-1280-light.png` and so on hold what is seen before scrolling. With
`--whole` the pages stand in full beside them, as `whole-*.png`. Pillow, where it is there, cuts the
colours to 256, so that files stay small enough for a repository.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, sync_playwright

from quantkit.reporting.report import write_report

SIZES: Final = ((1280, 800), (390, 844))
"""Pixels of a small laptop and of a phone."""
SCHEMES: Final = ("light", "dark")
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
MOST_PIXELS: Final = 16_000
"""Height of a whole page at most: chromium draws no more at once."""


def main(run: Path, out: Path, *, whole: bool) -> list[Path]:
    """Writes the pictures into `out`; returns their paths."""
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        sys.exit("no browser was found: `apt-get install chromium` gets one.")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = write_report([run], Path(folder))[0]
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for width, height in SIZES:
            for scheme in SCHEMES:
                for kind, png in _pictures(browser, page, (width, height), scheme, whole).items():
                    path = out / f"{kind}-{width}-{scheme}.png"
                    path.write_bytes(_small(png))
                    written.append(path)
        browser.close()
    return written


def _pictures(
    browser: Browser, page: Path, size: tuple[int, int], scheme: str, whole: bool
) -> dict[str, bytes]:
    """Returns the PNG of the first screen, and of the whole page where asked for."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
        offline=True,
    )
    view = context.new_page()
    view.goto(page.as_uri())
    found = {"screen": view.screenshot()}
    if whole:
        # What is out of sight has no size yet, and chromium would draw it empty.
        view.add_style_tag(content="main > section { content-visibility: visible !important; }")
        tall = view.evaluate("document.documentElement.scrollHeight")
        view.set_viewport_size({"width": width, "height": min(tall, MOST_PIXELS)})
        found["whole"] = view.screenshot()
    context.close()
    return found


def _small(png: bytes) -> bytes:
    """Returns the picture in 256 colours; as it is without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        return png
    cut = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        few.save(cut, "PNG", optimize=True)
    return min(png, cut.getvalue(), key=len)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--out", type=Path, help="folder of the pictures")
    parser.add_argument("--whole", action="store_true", help="also the whole page, as one picture")
    given = parser.parse_args()
    for path in main(given.run, given.out or given.run, whole=given.whole):
        print(f"{path} {path.stat().st_size / 1e3:.0f} kB")
