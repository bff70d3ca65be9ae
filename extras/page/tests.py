"""The page, make show's, and that of a wrong allreduce in Chromium: make page_test."""

import os
import pathlib

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

FILES = [pathlib.Path(name).absolute() for name in os.environ["FILES"].split()]
of = lambda files: pytest.mark.parametrize("file", files)  # skipped, if there are none


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as p:
        yield p.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])


@pytest.fixture
def visit(chromium):
    """visit(file) opens it. In the end there were no errors, and no requests but for the file"""
    asked, errors = set(), []

    def visit(file, width=1280, **how):
        page = chromium.new_page(viewport=dict(width=width, height=900), **how)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.on("request", lambda request: asked.add(request.url))
        page.goto(file.as_uri())
        return page

    yield visit
    assert errors == [] and len(asked) == 1


def test_names_lead_to_definitions(visit):
    page = visit(FILES[0])
    for place, word in ("#flatten", "size"), ("#chunk", "rows"), ("#relu", "relu_kernel"):
        page.click(f".code:has({place}) a[href='#{word}'] >> nth=0")
        assert page.text_content("b:target") == word
    page.click(".used a[href='#train_batch'] >> nth=0")
    page.click("text=Contents")
    page.click("nav li:nth-child(3) > a >> nth=0")
    assert page.evaluate("location.hash") == "#section-3" and not page.is_visible("nav")


def test_outputs_stand_where_they_are_printed(visit):
    shown = visit(FILES[0]).locator("samp").all_text_contents()
    assert len(shown) == 7 and "\n".join(shown) in pathlib.Path("build/page/output").read_text()


@of(FILES[:2])
@pytest.mark.parametrize("width, scheme", [(400, "light"), (1280, "dark")])
def test_it_fits_and_axe_finds_nothing(visit, file, width, scheme):
    page = visit(file, width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Of the sections two: all, whose rows are alike, would take axe a minute
    rest = "main > [id^=section]:not(#section-6, #section-7)"
    page.evaluate(f"document.querySelectorAll('{rest}').forEach(section => section.remove())")
    found = Axe().run(page).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found] == []


@of(FILES[:2])
def test_the_text_is_there_without_javascript(visit, file):
    text = visit(file, java_script_enabled=False).inner_text("main")
    assert ("allreduce_bucket" if file == FILES[0] else "make exercise") in text


def choose(page, name, k):
    page.select_option("#algorithm", name)
    page.select_option("#devices", k)
    page.focus("#stage")
    rows = page.text_content("#show-data").split("\n")
    return next(row.split(" ")[3:7] for row in rows if row.startswith(f"run {name} {k} "))


def numbers(page):
    return [int(page.text_content(f"#{name}")) for name in ("sent", "messages", "rounds", "busiest")]


@of(FILES[:-1])
def test_a_ring_of_four_by_keyboard(visit, file):
    page = visit(file)
    busiest = choose(page, "ring", "4")[2]
    for passed in range(7):
        assert numbers(page) == [4 * passed, 24, 6, int(busiest)]
        page.keyboard.press("ArrowRight")
    assert "Every device holds the sum" in page.text_content("#told")


@of(FILES[1:2])
def test_all_algorithms_on_all_numbers_of_devices(visit, file):
    page = visit(file)
    for name in page.locator("#algorithm option").all_text_contents():
        for k in "2345678":
            messages, rounds, busiest, verdict = choose(page, name, k)
            page.keyboard.press("End")
            assert numbers(page) == [int(n) for n in (messages, messages, rounds, busiest)]
            wrong = page.text_content("#told .wrong")
            assert verdict == "right" and wrong == "", (name, k, wrong)


@of(FILES[2:])
def test_what_is_added_twice_shows(visit, file):
    page = visit(file)
    assert choose(page, "yours", "4")[3] == "wrong"
    page.keyboard.press("End")
    assert "gpu(0) + gpu(1) + gpu(2) + 2 times gpu(3)" in page.text_content("#told .wrong")
    assert "2x" in page.locator("#stage text").all_text_contents()
