"""The page, and make show's, in Chromium as a reader uses them: make page_test."""

import json
import os
import pathlib
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

PAGE, SHOW, WRONG = (
    pathlib.Path(f"build/{f}.html").absolute() for f in os.environ["FILES"].split()
)
OUTPUT = pathlib.Path("build/page/output").read_text()
needs_lab = pytest.mark.skipif(not SHOW.exists(), reason="there is no lab/: no explorer")
both = pytest.mark.parametrize("file", [PAGE, pytest.param(SHOW, marks=needs_lab)])


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as p:
        yield p.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])


@pytest.fixture
def visit(chromium):
    """visit(file) opens it. In the end there were no errors, and no requests but for the file"""
    asked, errors = set(), []

    def visit(file, width=1280, **how):
        how = dict(how, viewport=dict(width=width, height=900), reduced_motion="reduce")
        page = chromium.new_page(**how)
        page.set_default_timeout(5000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.on("request", lambda request: asked.add(request.url))
        page.goto(file.as_uri())
        return page

    yield visit
    assert errors == [] and len(asked) == 1


def test_names_lead_to_definitions(visit):
    page = visit(PAGE)
    for place, word in ("#Tensor", "size"), ("#allreduce_ring", "chunk"), ("#relu", "relu_kernel"):
        page.click(f".code:has({place}) a[href='#{word}'] >> nth=0")
        assert page.text_content("b:target") == word
    page.click(".used a[href='#train_batch'] >> nth=0")
    page.click("text=Contents")
    page.click("nav >> text=Data synchronization")
    assert page.evaluate("location.hash") == "#section-3" and not page.is_visible("nav")


def test_outputs_stand_where_they_are_printed(visit):
    shown = visit(PAGE).locator("samp").all_text_contents()
    assert "\n".join(shown) in OUTPUT and " [[3. 3.]] @gpu(0)\n [[3. 3.]] @gpu(1)" in shown


@both
@pytest.mark.parametrize("width, scheme", [(400, "light"), (1280, "dark")])
def test_it_fits_and_axe_finds_nothing(visit, file, width, scheme):
    page = visit(file, width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Of the sections two: all, whose rows are alike, would take axe a minute
    rest = "main > [id^=section]:not(#section-6, #section-7)"
    page.evaluate(f"document.querySelectorAll('{rest}').forEach(section => section.remove())")
    found = Axe().run(page).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found] == []


@both
def test_the_text_is_there_without_javascript(visit, file):
    text = visit(file, java_script_enabled=False).inner_text("main")
    assert ("allreduce_ring" if file == PAGE else "make exercise") in text


# ----- The explorer -----------------------------------------------------------------------------


def choose(page, name, k):
    page.select_option("#algorithm", name)
    page.select_option("#devices", str(k))
    page.focus("#stage")


def numbers(page):
    return [int(page.text_content(f"#{name}")) for name in ("sent", "messages", "steps", "busiest")]


def runs(page):
    return json.loads(page.text_content("#show-data"))["runs"]


@needs_lab
@both
def test_a_ring_of_four_by_keyboard(visit, file):
    page = visit(file)
    choose(page, "ring", 4)
    for step in range(7):
        assert page.text_content("#where") == f"step {step} of 6"
        assert numbers(page) == [4 * step, 24, 6, runs(page)["ring"]["4"]["busiest"]]
        page.keyboard.press("ArrowRight")
    assert "Every device holds the sum" in page.text_content("#told")
    page.keyboard.press("ArrowLeft")
    assert page.text_content("#where") == "step 5 of 6"


@needs_lab
def test_all_algorithms_on_all_numbers_of_devices(visit):
    page = visit(SHOW)
    for name, k, run in (
        (name, k, run) for name, of in runs(page).items() for k, run in of.items()
    ):
        choose(page, name, k)
        page.keyboard.press("End")
        assert numbers(page) == [run[n] for n in ("messages", "messages", "steps", "busiest")]
        wrong = page.text_content("#told .wrong")
        assert (wrong == "") == run["right"] == (name != "rebind"), (name, k, wrong)
        assert name != "rebind" or "gpu(1) ends with its own numbers in all" in wrong


@needs_lab
def test_what_is_added_twice_shows(visit):
    page = visit(WRONG)
    choose(page, "yours", 4)
    page.keyboard.press("End")
    assert not runs(page)["yours"]["4"]["right"]
    assert "gpu(0) + gpu(1) + gpu(2) + 2 times gpu(3)" in page.text_content("#told .wrong")
    assert page.locator("#stage text", has_text=re.compile("^2x$")).count() >= 4
