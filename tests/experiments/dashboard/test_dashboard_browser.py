"""The dashboard in headless Chromium: it answers, its address restores it, it contacts no other host."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.dashboard.browser import RATE, missing, opened, served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")]
SMALL = ("model=smollm2_135m", "hardware=h100_sxm", "workload=synthetic", "workload.num_requests=100")


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("dash", reason="dash is not installed: pip install 'windtunnel[dashboard]'")
    with served(SMALL) as address:
        yield address


def figure(page):
    return page.page.evaluate("() => document.querySelector('#latency .js-plotly-plot').data[0].x.length")


def test_a_change_is_answered_and_its_address_brings_it_back(address):
    with opened(address) as page:
        page.answered("windtunnel simulate")
        before = page.page.inner_text("#tables table"), figure(page)
        page.set(RATE, 40)
        page.answered("rate_per_s=40")
        after = page.page.inner_text("#tables table"), figure(page)
        assert after != before
        page.drawn_whole()
        assert page.page.inner_text("#curve-note") == ""
        assert page.page.url.endswith("?workload.arrivals.rate_per_s=40")
        where = page.page.url
        page.page.go_back()
        page.page.wait_for_function(
            "() => !document.querySelector('#command').innerText.includes('rate_per_s')"
        )
        assert page.page.input_value(RATE) == "4"
        assert (page.errors, page.foreign) == ([], [])
    with opened(where) as again:
        again.answered("rate_per_s=40")
        assert again.page.input_value(RATE) == "40"
        assert again.page.inner_text("#tables table") == after[0]


def test_what_does_not_fit_is_reported_and_the_last_answer_stays_stale(address):
    with opened(address) as page:
        page.answered("windtunnel simulate")
        verdict = page.page.inner_text("#verdict")
        page.page.focus("#control-model")  # by the keyboard alone
        page.page.keyboard.press("Enter")
        page.page.wait_for_selector("input.dash-dropdown-search")
        page.page.fill("input.dash-dropdown-search", "llama3_1_405b")
        only = "() => document.querySelectorAll('.dash-dropdown-option').length === 1"
        page.page.wait_for_function(only)
        page.page.keyboard.press("ArrowDown")
        page.page.keyboard.press("Enter")
        page.page.wait_for_selector("#results.stale")
        assert "llama-3.1-405b" in page.page.inner_text("#error")
        assert page.page.inner_text("#verdict") == verdict
        assert "model=llama3_1_405b" in page.page.inner_text("#command")
        page.set("#control-seed", 4)
        page.page.wait_for_function("() => document.querySelector('#command').innerText.includes('seed=4')")
        assert (page.errors, page.foreign) == ([], [])


def test_while_a_run_is_under_way_the_last_answer_is_grey_and_says_so(address):
    """The test delays the server's answer."""
    grey = (
        "() => getComputedStyle(document.querySelector('#results')).opacity < 1"
        " && getComputedStyle(document.querySelector('#busy')).visibility === 'visible'"
    )
    held = []

    def hold(route):
        if "summary.children" in (route.request.post_data or ""):
            held.append(route)
        else:
            route.continue_()

    with opened(address) as page:
        page.answered("windtunnel simulate")
        page.drawn_whole()
        assert not page.page.evaluate(grey)
        page.page.route("**/_dash-update-component*", hold)  # it has a query
        page.set("#control-seed", 11)
        page.page.wait_for_function(grey)
        assert page.page.inner_text("#busy") == "simulating ..."
        while not held:
            page.page.wait_for_timeout(50)
        held[0].continue_()
        page.answered("seed=11")
        page.page.wait_for_function(f"() => !({grey})()")
        assert (page.errors, page.foreign) == ([], [])


def test_buttons_work_on_an_address_with_settings(address):
    size = "#control-tensor_parallel_size"
    with opened(f"{address}?model=llama3_2_1b&tensor_parallel_size=2") as page:
        page.page.set_viewport_size({"width": 1280, "height": 1200})
        for button, value in (("less", "1"), ("more", "2"), ("more", "4"), ("less", "2")):
            page.page.click(f"{size}-{button}")
            page.answered("model=llama3_2_1b" + f" tensor_parallel_size={value}" * (value != "1"))
            assert page.page.input_value(size) == value
        assert (page.errors, page.foreign) == ([], [])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?hardware=nope&replicas=2", "hardware=nope: no such choice"),
        ("?replicas=1000000", "replicas=1000000: must be a whole number from 1 to 64"),
    ],
)
def test_what_is_wrong_in_the_address_is_reported_above_the_answer(address, query, message):
    with opened(address + query) as page:
        page.answered("windtunnel simulate")
        assert page.page.inner_text("#error").startswith(message)
        page.set("#control-replicas", 0)
        page.page.wait_for_selector("#results.stale")
        assert page.page.inner_text("#error") == ("replicas: must be a whole number from 1 to 64, such as 1")


def test_a_narrow_screen_needs_no_scrolling_sideways(address):
    with opened(address, width=400) as page:
        page.answered("windtunnel simulate")
        assert page.page.evaluate("() => document.documentElement.scrollWidth") <= 400


def test_ctrl_c_ends_the_command_and_its_processes():
    pytest.importorskip("dash")
    command = [sys.executable, "-m", "experiments.app.cli", "dashboard", *SMALL, "--port", "8951"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("http://127.0.0.1:8951")
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (0, "")
