"""Pages in headless Chromium, on a wide screen and on a phone: nothing overlaps or leaves the screen."""

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.app.cli import main
from experiments.dashboard.browser import missing, opened, served, visited

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")]
WIDE, PHONE = 1440, 390
SMALL = ("model=smollm2_135m", "hardware=l4")
TRAFFIC = ("workload=poisson", "workload.num_requests=100")

CHECKS = Path(__file__).with_name("page_layout.js").read_text(encoding="utf-8")
"""Function of the browser that returns what is wrong with the layout of a page, as sentences."""


def simulate(folder: Path) -> Path:
    assert main(["simulate", *SMALL, *TRAFFIC, f"hydra.run.dir={folder}"]) == 0
    return folder / "report.html"


def validate(folder: Path) -> Path:
    simulate(folder / "measured")
    against = f"against={folder / 'measured'}"
    assert main(["validate", *SMALL, against, f"hydra.run.dir={folder / 'page'}"]) == 0
    return folder / "page" / "report.html"


def sweep(folder: Path) -> Path:
    axes = ("batching=chunked,prefill_first", "engine.max_num_seqs=4,16,64", "seed=0,1")
    assert main(["sweep", *SMALL, *TRAFFIC, *axes, f"hydra.run.dir={folder}"]) == 0
    return folder / "sweep.html"


def compare(folder: Path) -> Path:
    assert main(["compare", "experiment=static_vs_continuous", f"hydra.run.dir={folder}"]) == 0
    return folder / "compare.html"


def whatif(folder: Path) -> Path:
    assert main(["whatif", *SMALL, *TRAFFIC, "slo=chat", f"hydra.run.dir={folder}"]) == 0
    return folder / "whatif.html"


def goodput(folder: Path) -> Path:
    arms = "goodput.arms=['engine=vllm','batching=static']"
    assert main(["goodput", *SMALL, *TRAFFIC, "slo=chat", arms, f"hydra.run.dir={folder}"]) == 0
    return folder / "goodput.html"


def capacity(folder: Path) -> Path:
    assert main(["capacity", *TRAFFIC, f"hydra.run.dir={folder}"]) == 0
    return folder / "capacity.html"


def roofline(folder: Path) -> Path:
    folder.mkdir(parents=True)
    assert main(["roofline", f"out={folder / 'roofline.html'}"]) == 0
    return folder / "roofline.html"


PAGES = (simulate, validate, sweep, compare, whatif, goodput, capacity, roofline)


@pytest.fixture(scope="module", params=PAGES, ids=lambda page: page.__name__)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path_factory.mktemp(make.__name__) / "run")


def drawn(page) -> None:
    page.page.wait_for_function(
        "() => [...document.querySelectorAll('.plotly-graph-div')].every(plot => plot._fullLayout)"
    )
    page.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.sampled(slow=8)
@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_nothing_overlaps_or_leaves_the_screen(file, width):
    with visited(file.as_uri(), width=width, height=900) as page:
        drawn(page)
        assert page.page.evaluate(CHECKS, width) == []
        errors = [error for error in page.errors if "GL Driver" not in error]  # of a browser without a GPU
        assert (errors, page.foreign) == ([], [])


def test_the_verdict_is_above_the_plots(file):
    verdict = "document.querySelector('.verdict, h2')"
    with visited(file.as_uri(), width=PHONE, height=900) as page:
        text = page.page.evaluate(f"() => {verdict}.innerText")
        if file.stem not in ("sweep", "roofline"):  # they give no verdict
            assert text.startswith(("SLO", "Verdict", "Answer", "No SLO"))
        plot = "document.querySelector('.plotly-graph-div')"
        assert page.page.evaluate(f"() => {verdict}.compareDocumentPosition({plot}) & 4")


def test_a_turned_phone_redraws_its_plots(tmp_path):
    with visited(simulate(tmp_path / "run").as_uri(), width=PHONE, height=900) as page:
        drawn(page)
        for width in (WIDE, PHONE):
            page.page.set_viewport_size({"width": width, "height": 900})
            page.page.wait_for_function(f"() => !({CHECKS})({width}).length", timeout=20_000)


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("dash", reason="dash is not installed: pip install 'windtunnel[dashboard]'")
    with served((*SMALL, *TRAFFIC)) as address:
        yield address


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_the_dashboard_shows_its_verdict_before_the_controls(address, width):
    with opened(address, width=width, height=900) as page:
        page.answered("windtunnel simulate")
        page.drawn_whole()
        assert page.page.evaluate(CHECKS, width) == []
        order = "() => document.querySelector('#verdict').compareDocumentPosition(document.forms[0]) & 4"
        assert page.page.evaluate(order)
        tops = (
            "() => ['#verdict', 'form'].map(one => document.querySelector(one).getBoundingClientRect().top)"
        )
        verdict, controls = page.page.evaluate(tops)
        if width == PHONE:
            assert verdict < controls
            assert verdict < 200  # on the first screen
        assert (page.errors, page.foreign) == ([], [])
