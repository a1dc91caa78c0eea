"""The page at /: it is whole in itself, and shows figures and a chat in headless Chromium."""

import re
import shutil
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def test_page_is_one_file_and_runs_its_own_script_only(served):
    async def test(client):
        async with client.client.get("/") as response:
            assert response.status == 200
            return await response.text(), response.headers["Content-Security-Policy"]

    text, policy = served(test, api_key="needed elsewhere")
    script = re.search("<script>(.*?)</script>", text, re.DOTALL)[1]
    assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|\bon[a-z]+=|style=", text)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    command = [
        sys.executable,
        "-m",
        "experiments.app.cli",
        "serve",
        "port=0",
        "replicas=2",
        "output.report=false",
    ]
    process = subprocess.Popen([*command, f"hydra.run.dir={folder}/run"], stdout=subprocess.PIPE, text=True)
    yield process.stdout.readline().split()[0]
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_chat_and_figures_in_a_browser(address):
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page()
        errors, foreign = [], []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on(
            "request",
            lambda request: None if request.url.startswith(address) else foreign.append(request.url),
        )
        page.goto(address)
        page.wait_for_function("() => document.querySelectorAll('#replicas tr').length === 2")
        assert "llama-3.1-8b" in page.inner_text("#model")
        page.fill("#limit", "30")
        page.fill("#message", "<b>hello</b> there")
        page.click("#send")
        page.wait_for_function("() => document.querySelector('#log').innerText.includes('all after')")
        log = page.inner_text("#log")
        assert "you: <b>hello</b> there" in log
        assert re.search(r"model: ( \w+)+", log)
        page.wait_for_function("() => document.querySelector('#tiles').innerText.includes(' ms')")
        assert (errors, foreign) == ([], [])
        browser.close()
