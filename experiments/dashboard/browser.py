"""Drives the page in headless Chromium, to time its round trips and to take screenshots.

    python -m experiments.dashboard.browser                                    # times ten changes
    python -m experiments.dashboard.browser shots=experiments/dashboard/screenshots

Needs playwright (pip install playwright), and chromium or google-chrome on the PATH; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.dashboard.command import HOST, build_board
from experiments.dashboard.simulation_service import LOADS, SimulationService
from sim.settings.errors import ConfigError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_MS = 120_000
"""Long enough that a check never fails because a shared machine is slow."""
PHONE_PX = 430
"""Width of the widest phone."""
RATE = "#control-workload-arrivals-rate_per_s"
RATES = (5, 6, 7, 9, 10, 12, 14, 16, 18, 20)


@dataclass
class Opened:
    """Open page, with its errors and its requests to other servers."""

    page: Any
    errors: list[str] = field(default_factory=list)
    """Errors and warnings of its console and scripts."""
    foreign: list[str] = field(default_factory=list)
    """Addresses on other servers that it requested."""

    def answered(self, words: str) -> None:
        """Waits until the page shows the results whose command line contains these words, and the figure."""
        self.page.wait_for_function(
            "words => document.querySelector('#command').innerText.includes(words)"
            " && document.querySelector('#results').className === ''",
            arg=words,
        )
        self.page.wait_for_selector("#latency .main-svg")
        self.page.evaluate("() => new Promise(requestAnimationFrame)")

    def drawn_whole(self) -> None:
        """Waits until the curve has all its points and the roofline is drawn."""
        self.page.wait_for_function(
            "count => { const drawn = id => document.querySelector(`#${id} .js-plotly-plot`)?.data ?? [];"
            " return drawn('roofline').length && drawn('curve')[0]?.x.length === count }",
            arg=1 + len(LOADS),
        )

    def set(self, selector: str, value: object) -> None:
        """Types a number into a control."""
        self.page.fill(selector, str(value))
        self.page.press(selector, "Enter")


def missing() -> str:
    """Returns the reason why no browser can be used; empty if one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    return "" if _browser() else f"no browser is on the PATH; install one of {', '.join(BROWSERS)}"


@contextmanager
def served(overrides: Sequence[str]) -> Iterator[str]:
    """Serves the dashboard on a free port, in a thread; yields its address."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no log line per request
    serving = importlib.import_module("werkzeug.serving")
    with SimulationService(build_board(None, overrides)) as service:
        service.warm()
        app = importlib.import_module("experiments.dashboard.app").make_app(service)
        server = serving.make_server(HOST, 0, app.server, threaded=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@contextmanager
def opened(address: str, *, width: int = 1280, height: int = 800, scale: float = 1.0) -> Iterator[Opened]:
    """Opens the page and yields it with its first results. Raises ConfigError if there is no browser."""
    with visited(address, width=width, height=height, scale=scale) as found:
        found.page.wait_for_selector("#verdict")
        yield found


@contextmanager
def visited(address: str, *, width: int = 1280, height: int = 800, scale: float = 1.0) -> Iterator[Opened]:
    """Opens any page; up to `PHONE_PX` wide, as on a phone. Raises ConfigError if there is no browser."""
    if reason := missing():
        raise ConfigError(reason)
    sync_playwright = importlib.import_module("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_browser(), args=list(FLAGS))
        screen = {"width": width, "height": height}
        page = browser.new_page(viewport=screen, device_scale_factor=scale, is_mobile=width <= PHONE_PX)
        page.set_default_timeout(TIMEOUT_MS)
        found, own = Opened(page), address.partition("?")[0]
        page.on("console", lambda m: found.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("request", lambda r: found.foreign.append(r.url) if _is_foreign(r.url, own) else None)
        page.goto(address)
        try:
            yield found
        finally:
            browser.close()


def main(arguments: Sequence[str]) -> None:
    """Times ten changes of the rate, or takes the screenshots of docs/studies.md with shots=FOLDER."""
    with served([]) as address:
        if arguments and arguments[0].startswith("shots="):
            take_shots(address, Path(arguments[0].partition("=")[2]))
            return
        with opened(address) as page:
            page.answered("windtunnel")
            print("requests/s  round trip, s   CPU time of the server, s")
            seconds, busy_s = [], []
            for rate in RATES:
                began, cpu_began_s = time.perf_counter(), time.process_time()
                page.set(RATE, rate)
                page.answered(f"rate_per_s={rate}")
                seconds.append(time.perf_counter() - began)
                busy_s.append(time.process_time() - cpu_began_s)
                print(f"{rate:10} {seconds[-1]:14.2f} {busy_s[-1]:20.2f}")
                page.page.wait_for_timeout(500)
            print(f"median     {statistics.median(seconds):14.2f} {statistics.median(busy_s):20.2f}")
            print(f"slowest    {max(seconds):14.2f} {max(busy_s):20.2f}")


def take_shots(address: str, folder: Path) -> None:
    """Takes the screenshots of docs/studies.md: results on a wide screen and on a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    query = "?hardware=l40s&workload.arrivals.rate_per_s=5"
    for name, width, height in (("dashboard.png", 1280, 1380), ("dashboard_narrow.png", 420, 1100)):
        with opened(address + query, width=width, height=height, scale=0.7) as page:
            page.answered("rate_per_s=5")
            page.drawn_whole()
            page.page.wait_for_timeout(1000)
            page.page.screenshot(path=str(folder / name))
            print(folder / name)


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _is_foreign(url: str, address: str) -> bool:
    return not url.startswith((address, "data:", "blob:"))


if __name__ == "__main__":
    main(sys.argv[1:])
