"""The page in a real browser: no error, nothing fetched, every figure drawn, on a desk, on a phone and on paper."""

import shutil

import pytest
from report_samples import METHODS, make_run

from longrope2.report.page import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: apt install chromium")
DESK, PHONE = 1280, 390
PLOTS = ("factors", "convergence", "losses", "niah-by-length", "retention", "time")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "one")).as_uri()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, address, **options):
    page = browser.new_page(**options)
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [address]
    return page


@pytest.mark.parametrize(
    "options",
    [
        {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "has_touch": width == PHONE}
        for width in (DESK, PHONE)
        for scheme in ("light", "dark")
    ],
    ids=lambda options: f"{options['viewport']['width']}-{options['color_scheme']}",
)
def test_every_figure_is_drawn(browser, address, options):
    page = open_page(browser, address, **options)
    width = options["viewport"]["width"]
    for name in PLOTS:
        box = page.locator(f"#{name} svg").bounding_box()
        assert box["width"] > 250, name
        assert box["height"] > 100, name
    assert page.locator("#needles svg").count() == len(METHODS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the screen"
    # A column of sentences keeps its width; squeezed, its rows fill the screen of a phone.
    assert page.evaluate("Math.max(...[...document.querySelectorAll('tr')].map(row => row.offsetHeight))") < 250
    # Every mark lies inside its figure, where a pointer meets a mark.
    page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
    lost = page.evaluate(
        """() => [...document.querySelectorAll(".marks rect")].filter(mark => {
            const box = mark.getBoundingClientRect(), own = mark.ownerSVGElement.getBoundingClientRect();
            const met = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
            return box.left < own.left || box.right > own.right || box.top < own.top || box.bottom > own.bottom
                || !met.closest(".marks");
        }).length"""
    )
    assert lost == 0
    page.close()


def test_dark_and_light_differ_and_paper_is_light(browser, address):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    def letters(page):
        return page.evaluate("getComputedStyle(document.querySelector('#losses figure text')).fill")

    light = open_page(browser, address, color_scheme="light")
    dark = open_page(browser, address, color_scheme="dark")
    assert background(light) == "rgb(255, 255, 255)"
    assert background(dark) == "rgb(21, 24, 27)"
    assert (letters(light), letters(dark)) == ("rgb(104, 112, 120)", "rgb(154, 163, 171)")
    dark.emulate_media(media="print", color_scheme="dark")
    assert (background(dark), letters(dark)) == ("rgb(255, 255, 255)", "rgb(104, 112, 120)")


def test_a_touch_shows_the_value(browser, address):
    page = open_page(browser, address, viewport={"width": 390, "height": 800}, has_touch=True)
    assert not page.locator("#tip").is_visible()
    mark = page.locator("#losses .marks rect").first
    mark.scroll_into_view_if_needed()
    mark.tap()
    assert page.locator("#tip").inner_text() == "step 1, short rows: 3.5000"
    page.locator("h1").tap()
    assert not page.locator("#tip").is_visible()
