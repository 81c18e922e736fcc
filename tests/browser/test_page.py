"""The report as people use it: read, pointed at, sorted, on a phone, in the dark, by keyboard."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from quantkit.reporting import write_report
from quantkit.reporting.text import number
from quantkit.results import Stats, Sweep, read_json, write_json
from tests.browser.conftest import PHONE, Open

MARK = '[role="graphics-symbol"][aria-label]'
HOSTILE = (
    '"><img src=x onerror=alert(1)></title></style><svg onload=alert(2)><script>alert(3)</script>'
)
REAL = Path(__file__).parents[2] / "reports" / "pair"


def names(page: Page, selector: str) -> list[str]:
    """The words of all elements."""
    return [str(text) for text in page.locator(selector).all_text_contents()]


def colour(page: Page, selector: str, what: str) -> tuple[float, float, float]:
    """A computed colour, 0 to 1."""
    text = page.eval_on_selector(selector, f"e => getComputedStyle(e).{what}")
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", text)[:3])
    return red, green, blue


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("which", ["planted", "shipped"])
def test_it_opens_without_a_network_and_without_a_complaint(
    which: str, pair_page: Path, open_page: Open, tmp_path: Path
) -> None:
    path = pair_page if which == "planted" else write_report([REAL], tmp_path)[0]
    opened = open_page(path)
    assert opened.requests == [path.as_uri()]
    assert opened.complaints == []
    assert path.stat().st_size < 6_000_000


def test_every_figure_has_marks_that_can_be_seen(pair_page: Path, open_page: Open) -> None:
    page = open_page(pair_page).page
    page.add_style_tag(content="main > section { content-visibility: visible !important; }")
    figures = page.locator("figure").all()
    assert len(figures) > 15
    for figure in figures:
        boxes = figure.locator(MARK).evaluate_all(
            "marks => marks.map(m => m.getBoundingClientRect()).map(r => [r.width, r.height])"
        )
        assert boxes, figure.get_attribute("id")
        assert any(max(box) > 1 for box in boxes)
        assert figure.get_attribute("aria-label")


def test_pointing_at_a_mark_tells_the_value_of_the_file(
    pair_run: Path, pair_page: Path, open_page: Open
) -> None:
    stats = read_json(next(pair_run.rglob("baseline/stats.json")), Stats)
    groups = [
        g for g in stats.points["attention_logit"] if g.head is not None and g.token_class == "all"
    ]
    worst = max(groups, key=lambda g: g.abs_top["1"])
    page = open_page(pair_page).page
    figure = page.locator("figure[id*='largest-attention-logit'][id$='baseline']")
    words = f"layer {worst.layer}, head {worst.head}: {number(worst.abs_top['1'])}"
    mark = figure.locator(f'{MARK}[aria-label*="{words}"]')
    tip = page.locator("#tip")
    assert not tip.is_visible()
    mark.scroll_into_view_if_needed()
    mark.hover()
    assert tip.is_visible() and words in (tip.text_content() or "")
    box, view = tip.bounding_box(), page.viewport_size
    assert box is not None and view is not None
    assert box["x"] >= 0 and box["x"] + box["width"] <= view["width"]
    page.locator("h1").hover()
    assert not tip.is_visible()


def test_arrow_keys_move_through_the_marks_and_say_them(pair_page: Path, open_page: Open) -> None:
    page = open_page(pair_page).page
    svg = page.locator("#first-sweep-perplexity svg[role=group]").first
    labels = svg.locator(MARK).evaluate_all("ms => ms.map(m => m.getAttribute('aria-label'))")
    svg.focus()
    said = page.locator("#spoken")
    for key, index in (
        ("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", -1), ("Home", 0),
        ("End", -1), ("ArrowDown", 0),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert said.text_content() == labels[index], key
        assert page.locator("#tip").text_content() == labels[index]
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_a_tap_tells_it_too(pair_page: Path, open_page: Open) -> None:
    page = open_page(pair_page, size=PHONE, touch=True).page
    mark = page.locator(f"figure[id*='largest-attention-logit'] {MARK}").first
    mark.scroll_into_view_if_needed()
    mark.tap()
    assert page.locator("#tip").text_content() == mark.get_attribute("aria-label")


PLANTED = (
    ("1,688.2", "0.122x", "12 %", "2.4 MB", "16.08, 21", "81.45 =", "2 h 05 min", "950 %", "b10"),
    ("38.8", "1.63x", "9.5 %", "1.1 GB", "9.5, 10", "80.71", "12 s", "x12.3", "b9"),
    ("n/a", "n/a", "n/a", "n/a", "n/a", "n/a", "n/a", "n/a", ""),
    ("-7", "0.9x", "100 %", "900 kB", "-1.5, 2", "104.6", "2 h", "-inf", "a"),
    ("6.5e-05", "10x", "0 %", "12 B", "100, 200", "n/a", "3 min 20 s", "inf", "c"),
)  # fmt: skip
VALUES: tuple[tuple[float | None, ...], ...] = (
    (1688.2, 38.8, None, -7, 6.5e-05), (0.122, 1.63, None, 0.9, 10), (12, 9.5, None, 100, 0),
    (2.4e6, 1.1e9, None, 900e3, 12), (16.08, 9.5, None, -1.5, 100),
    (81.45, 80.71, None, 104.6, None), (7500, 12, None, 7200, 200),
    (950, 1130, None, -math.inf, math.inf),
)  # fmt: skip
NUMBERS = len(VALUES)


def with_table(page: Page) -> Any:
    """The page's own sorting, on a table of ours."""
    page.evaluate(
        """([rows, numbers]) => {
            const holder = document.createElement("div");
            const table = document.createElement("table");
            const cells = (tag, texts) => "<tr>" + texts.map((t, i) =>
                `<${tag}${i < numbers ? ' class="number"' : ""}>${t}</${tag}>`).join("") + "</tr>";
            table.innerHTML = "<thead>" + cells("th", [..."abcdefghi"]) + "</thead>" +
                "<tbody>" + rows.map(r => cells("td", r)).join("") + "</tbody>";
            table.id = "planted";
            holder.append(table);
            document.querySelector("main").prepend(holder);
            sortable(table);
        }""",
        [[list(row) for row in PLANTED], NUMBERS],
    )
    return page.locator("#planted")


@pytest.mark.parametrize("column", range(NUMBERS + 1), ids="abcdefghi")
def test_a_click_on_a_head_sorts(column: int, pair_page: Path, open_page: Open) -> None:
    table = with_table(open_page(pair_page).page)
    head = table.locator("th").nth(column)
    first = [row[column] for row in PLANTED]
    if column < NUMBERS:
        known = [(v, t) for v, t in zip(VALUES[column], first, strict=True) if v is not None]
        up = [text for _, text in sorted(known)]
        missing = ["n/a"] * (len(first) - len(known))
    else:
        up, missing = ["a", "b9", "b10", "c"], [""]  # numbers in words count as such

    def shown() -> list[str]:
        return [str(t) for t in table.locator(f"td:nth-child({column + 1})").all_text_contents()]

    for expected, said in (
        ([*up, *missing], "ascending"), ([*up[::-1], *missing], "descending"), (first, None),
    ):  # fmt: skip
        head.locator("button").press("Enter")
        assert shown() == expected
        assert head.get_attribute("aria-sort") == said


def test_words_among_numbers_come_after_them_and_before_what_is_missing(
    pair_page: Path, open_page: Open
) -> None:
    page = open_page(pair_page).page
    texts = ["mse", "2", "n/a", "chance?", "10", "", "2"]
    shown = page.evaluate(
        """(texts) => {
            const table = document.createElement("table");
            table.innerHTML = '<thead><tr><th class="number">a</th></tr></thead><tbody>' +
                texts.map((t, i) => `<tr id="row${i}"><td>${t}</td></tr>`).join("") + "</tbody>";
            document.querySelector("main").prepend(table);
            sortable(table);
            const button = table.querySelector("th button");
            return [1, 2].map(() => {
                button.click();
                return [...table.tBodies[0].rows].map(row => row.id.slice(3)).join("");
            });
        }""",
        texts,
    )
    # The two 2's, and the two that are missing, keep their order: 1 before 6, 2 before 5.
    assert shown == ["1643025", "4160325"]


def test_long_tables_can_be_filtered(pair_page: Path, open_page: Open) -> None:
    page = open_page(pair_page).page
    field = page.locator("input.filter").first
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    rows = page.locator("input.filter + .scroll tbody").first.locator("tr")
    before = rows.count()
    assert before > 20
    word = str(rows.nth(3).locator("td").first.text_content())
    field.fill(word)
    left = [row for row in rows.all() if row.is_visible()]
    assert 0 < len(left) <= before
    assert all(word.lower() in str(row.text_content()).lower() for row in left)
    field.fill("no row has this")
    assert not [row for row in rows.all() if row.is_visible()]
    assert page.locator("#spoken").text_content() == f"0 of {before} rows"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_theme_is_the_systems_or_the_one_chosen(
    dark: bool, pair_page: Path, open_page: Open
) -> None:
    page = open_page(pair_page, dark=dark).page
    button = page.locator("#theme")

    def is_dark() -> bool:
        return sum(colour(page, "body", "backgroundColor")) < 1.5

    def readable() -> None:
        ground = colour(page, "body", "backgroundColor")
        assert contrast(colour(page, "body", "color"), ground) > 7
        assert contrast(colour(page, ".note", "color"), ground) > 4.5
        assert contrast(colour(page, "nav a", "color"), ground) > 4.5
        # marks and words of pictures follow the theme
        assert contrast(colour(page, ".panel svg text", "fill"), ground) > 4.5
        assert contrast(colour(page, f"#first-sweep-perplexity {MARK}", "fill"), ground) > 3

    assert is_dark() == dark and button.text_content() == "Theme: system"
    readable()
    for said, expected in (("light", False), ("dark", True), ("system", dark)):
        button.click()
        assert (button.text_content(), is_dark()) == (f"Theme: {said}", expected)
        readable()


def test_paper_is_light_whatever_was_chosen(pair_page: Path, open_page: Open) -> None:
    page = open_page(pair_page, dark=True).page
    for theme in ("system", "light", "dark"):
        assert page.locator("#theme").text_content() == f"Theme: {theme}"
        page.emulate_media(media="print", color_scheme="dark")
        assert contrast(colour(page, "body", "color"), (1, 1, 1)) > 7, theme
        assert contrast(colour(page, ".panel svg text", "fill"), (1, 1, 1)) > 4.5, theme
        page.emulate_media(media="screen", color_scheme="dark")
        page.locator("#theme").click()


def test_a_heading_has_a_link_to_itself_for_pointer_and_keyboard(
    pair_page: Path, open_page: Open
) -> None:
    page = open_page(pair_page).page
    head = page.locator("#provenance")
    link = head.locator("a")
    head.scroll_into_view_if_needed()

    def seen() -> bool:
        return bool(
            page.evaluate("a => getComputedStyle(a).opacity === '1'", link.element_handle())
        )

    assert not seen()
    head.hover()
    assert seen()
    page.mouse.move(0, 0)
    link.focus()
    assert seen() and page.evaluate("document.activeElement.hash") == "#provenance"
    page.keyboard.press("Enter")
    assert page.url.endswith("#provenance")


def test_the_theme_is_remembered(pair_page: Path, open_page: Open) -> None:
    opened = open_page(pair_page)
    opened.page.locator("#theme").click()
    opened.page.locator("#theme").click()
    opened.page.reload()
    assert opened.page.locator("#theme").text_content() == "Theme: dark"
    assert opened.complaints == []


@pytest.mark.parametrize("size", [PHONE, (768, 1024), (1280, 800), (1920, 1080)], ids=str)
def test_nothing_is_wider_than_the_screen(
    size: tuple[int, int], pair_page: Path, open_page: Open
) -> None:
    page = open_page(pair_page, size=size).page
    page.add_style_tag(content="main > section { content-visibility: visible !important; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    # The link of a heading starts no line of its own.
    shifted = page.evaluate(
        """[...document.querySelectorAll("h2, h3, h4")].filter(h => {
            const words = h.querySelector("span").getClientRects();
            const link = h.querySelector("a").getBoundingClientRect();
            return link.top >= words[words.length - 1].bottom;
        }).map(h => h.id)"""
    )
    assert shifted == []
    is_open = page.locator("nav details").get_attribute("open") is not None
    assert is_open == (size[0] >= 1152)


def test_the_first_screen_holds_the_answer(pair_page: Path, open_page: Open) -> None:
    page = open_page(pair_page).page
    tops = {
        name: page.locator(name).bounding_box()
        for name in (".verdict", "#first-table", "#first-sweep-perplexity", "#first-export")
    }
    for name, box in tops.items():
        assert box is not None and 0 <= box["y"] < 800, name
    assert len(names(page, ".verdict p")) == 3


def test_links_headings_and_names_are_sound(pair_page: Path, open_page: Open) -> None:
    page = open_page(pair_page).page
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)
    targets = page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    assert targets and all(target[0] == "#" and target[1:] in ids for target in targets)
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    unnamed = page.evaluate(
        """[...document.querySelectorAll('svg:not([aria-hidden]), figure, table, [role=region]')]
           .filter(e => !e.getAttribute('aria-label') &&
                        !document.getElementById(e.getAttribute('aria-labelledby')))
           .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    named = page.get_by_role("table", name="Largest magnitudes (Table 5 layout)", exact=True)
    assert named.first.is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Enter")
    page.locator("nav a", has_text="Provenance").click()
    page.wait_for_function("document.querySelector('nav a[aria-current]').hash === '#provenance'")


def test_links_of_the_contents_land_on_their_sections(pair_page: Path, open_page: Open) -> None:
    hashes = open_page(pair_page).page.eval_on_selector_all("nav a", "all => all.map(a => a.hash)")
    for target in hashes[-4:]:  # those with the most above them, which must have its height
        page = open_page(pair_page).page
        page.locator(f"nav a[href='{target}']").click()
        page.wait_for_function(
            """target => {
                const top = document.querySelector(target).getBoundingClientRect().top;
                const end = document.documentElement.scrollHeight - innerHeight - scrollY;
                return Math.abs(top - 16) < 2 || (top > 0 && end < 1);
            }""",
            arg=target,
        )


def test_without_a_script_it_still_reads(pair_page: Path, open_page: Open) -> None:
    page = open_page(pair_page, script=False).page
    assert page.locator(".verdict p").count() == 3
    assert page.locator("#first-sweep-perplexity svg").first.is_visible()
    assert page.locator("table").first.is_visible()
    assert not page.locator("#theme").is_visible()


@pytest.mark.parametrize("policy", ["as written", "taken out"])
def test_hostile_names_do_nothing(
    policy: str, pair_run: Path, open_page: Open, tmp_path: Path
) -> None:
    for path in pair_run.rglob("stats.json"):
        stats = read_json(path, Stats)
        points = {
            HOSTILE if name == "mlp_input" else name: [
                dataclasses.replace(
                    group,
                    top=[dataclasses.replace(entry, token=HOSTILE) for entry in group.top],
                )
                for group in groups
            ]
            for name, groups in stats.points.items()
        }
        model = dataclasses.replace(stats.model, name=f"{HOSTILE}{path.parent.name}")
        write_json(
            tmp_path / path.parent.name / "stats.json",
            dataclasses.replace(stats, points=points, model=model, warnings=[HOSTILE]),
        )
    sweep = read_json(pair_run / "sweep.json", Sweep)
    cells = [dataclasses.replace(c, model=f"{HOSTILE}{c.model}") for c in sweep.cells]
    write_json(
        tmp_path / "sweep.json",
        dataclasses.replace(sweep, cells=cells, deltas=[], headline=HOSTILE, notes=[HOSTILE]),
    )
    path = write_report([tmp_path], tmp_path / "out")[0]
    if policy == "taken out":  # escaping alone must hold
        text = path.read_text("utf-8")
        bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        assert bare != text
        path.write_text(bare, "utf-8")
    opened = open_page(path)
    page = opened.page
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert HOSTILE in (page.locator(".models").text_content() or "")
    page.locator(MARK).first.hover()
    assert page.locator("#tip img").count() == 0
    assert opened.complaints == [] and opened.requests == [path.as_uri()]


def test_the_policy_stops_what_escaping_would_miss(
    pair_page: Path, open_page: Open, tmp_path: Path
) -> None:
    text = pair_page.read_text("utf-8")
    planted = tmp_path / "planted.html"
    planted.write_text(text.replace("<h1>", "<script>document.title = 'run'</script><h1>"), "utf-8")
    opened = open_page(planted)
    assert opened.page.title() != "run"
    assert any("Content Security Policy" in said for said in opened.complaints)
