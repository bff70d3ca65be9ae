"""The page and the explorer of make show in Chromium, as a reader uses them: make page_test."""

import json
import os
import pathlib
import re
import subprocess

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

PAGE, SHOW = (pathlib.Path(f"build/{name}.html").absolute() for name in ("page/index", "show"))
REST = "main > [id^=section]:not(#section-6, #section-7)"
needs_show = pytest.mark.skipif(not SHOW.exists(), reason="there is no explorer, build/show.html")
FILES = [PAGE, pytest.param(SHOW, marks=needs_show)]


@pytest.fixture(scope="session")
def chromium():
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """visit(file) opens it. In the end there were no errors, and no requests but for the file"""
    pages = []

    def visit(file, fragment="", width=1280, **how):
        page = chromium.new_page(viewport={"width": width, "height": 900}, **how)
        page.set_default_timeout(5000)
        page.errors, page.asked, page.file = [], [], file.as_uri()
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda m: m.type == "error" and page.errors.append(m.text))
        page.on("request", lambda request: page.asked.append(request.url.split("#")[0]))
        page.goto(page.file + fragment)
        pages.append(page)
        return page

    yield visit
    for page in pages:
        assert page.errors == [] and page.asked == [page.file]
        page.close()


def test_names_lead_to_definitions(visit):
    page = visit(PAGE)
    for place, word in ("#Tensor", "size"), ("#allreduce_ring", "chunk"), ("#relu", "relu_kernel"):
        page.locator(f".code:has({place}) a[href='#{word}']").first.click()
        assert page.locator("b:target").text_content() == word
    page.click(".used a[href='#train_batch']:visible")
    assert page.evaluate("location.hash") == "#train_batch"
    page.click("summary >> text=Contents")
    page.click("nav >> text=Data synchronization")
    assert page.evaluate("location.hash") == "#section-3" and not page.is_visible("nav")


def test_outputs_stand_below_what_prints_them(visit):
    page = visit(PAGE)
    shown = "\n".join(page.locator("samp").all_text_contents())
    output = pathlib.Path("build/page/output").read_text()
    assert shown == output[output.index("b1 weight") : output.index("first minibatch")].rstrip()
    assert page.locator("samp", has_text="[[3. 3.]] @gpu(1)").count() == 1


@pytest.mark.parametrize("width, scheme", [(400, "light"), (1280, "dark")])
@pytest.mark.parametrize("file", FILES)
def test_it_fits_and_axe_finds_nothing(visit, file, width, scheme):
    page = visit(file, width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Of the page's sections three: axe takes a minute for all, whose rows are alike
    page.evaluate(f"document.querySelectorAll('{REST}').forEach(s => s.remove())")
    found = Axe().run(page).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in found] == []


@pytest.mark.parametrize("file, word", [(PAGE, "allreduce_ring"), (FILES[1].values[0], "race")])
def test_the_text_is_there_without_javascript(visit, file, word):
    if file.exists():
        assert word in visit(file, java_script_enabled=False).inner_text("body")


# ----- The explorer -----------------------------------------------------------------------------


def number(page, name):
    return int(re.sub(r"\D", "", page.text_content(f"#{name}")))


def choose(page, name, k):
    page.select_option("#algorithm", name)
    page.select_option("#devices", str(k))
    page.focus("#stage")


def counts(page, *names):
    return [number(page, name) for name in names]


def data(page):
    return json.loads(page.text_content("#show-data"))


@needs_show
def test_a_ring_of_four_by_keyboard(visit):
    page = visit(SHOW)
    run = data(page)["runs"]["ring"]["4"]
    choose(page, "ring", 4)
    page.keyboard.press("Home")
    assert number(page, "sent") == 0
    for step in range(1, 7):
        page.keyboard.press("ArrowRight")
        assert page.input_value("#step") == str(step) and number(page, "sent") == 4 * step
    assert counts(page, "messages", "steps") == [24, 6] == [run["messages"], run["steps"]]
    assert number(page, "busiest") == run["busiest"]
    page.keyboard.press("ArrowLeft")
    assert page.input_value("#step") == "5"


@needs_show
def test_every_algorithm_on_every_number_of_devices(visit):
    page = visit(SHOW)
    for name, runs in data(page)["runs"].items():
        for k, run in runs.items():
            choose(page, name, k)
            page.keyboard.press("End")
            got = counts(page, "sent", "messages", "steps", "busiest")
            assert got == [run[n] for n in ("messages", "messages", "steps", "busiest")], (name, k)
            assert run["right"] == (name != "rebind"), (name, k)
            assert ("WRONG" in page.text_content("#told")) == (not run["right"]), (name, k)
