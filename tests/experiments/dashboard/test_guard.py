"""The dashboard answers its own page alone, and executes nothing of what a browser sends."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("dash", reason="dash is not installed: pip install 'windtunnel[dashboard]'")

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.dashboard.app import make_app
from experiments.dashboard.controls import board_of
from experiments.dashboard.guard import CALLBACKS, MAX_BYTES, MAX_QUERY
from experiments.dashboard.simulation_service import SimulationService

SMALL = ("model=smollm2_135m", "hardware=l4", "workload=synthetic", "workload.num_requests=20")
HOME = "http://127.0.0.1:8050"
OUTPUTS = ["error.children", "results.className", "summary.children", "tables.children"]
OUTPUTS += ["latency.figure", "answered.data", "poll.disabled", "command.children"]


@pytest.fixture(scope="module")
def service():
    board = board_of(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), SMALL)
    with SimulationService(board, curves=False) as service:
        yield service


@pytest.fixture(scope="module")
def browser(service):
    """Returns a client that has opened the page and has its cookie."""
    client = make_app(service).server.test_client()
    assert client.get("/", base_url=HOME).status_code == 200
    return client


def question(state, problems=(), client="page"):
    """Returns the body that the page posts when its state changes."""
    names = [name.split(".") for name in OUTPUTS]
    return {
        "output": f"..{'...'.join(OUTPUTS)}..",
        "outputs": [{"id": name, "property": kind} for name, kind in names],
        "inputs": [
            {"id": "state", "property": "data", "value": state},
            {"id": "problems", "property": "data", "value": problems},
        ],
        "state": [{"id": "client", "property": "data", "value": client}],
        "changedPropIds": ["state.data"],
    }


def ask(browser, body, **more):
    return browser.post(CALLBACKS, base_url=more.pop("base_url", HOME), json=body, **more)


def error_of(response):
    return response.get_json()["response"]["error"]["children"]


def test_the_page_gets_its_answer(browser, service):
    response = ask(browser, question(service.board.defaults), headers={"Origin": HOME})
    assert response.status_code == 200
    assert error_of(response) == ""


@pytest.mark.parametrize("key", ["seed", "model", "replicas", "workload.arrivals.rate_per_s"])
@pytest.mark.parametrize("wrap", [lambda node: node, lambda node: [node], lambda node: {"a": node}])
def test_a_class_in_the_state_is_not_called(browser, service, tmp_path, key, wrap):
    made = tmp_path / "made"
    node = {"_target_": "os.system", "command": f"touch {made}"}
    response = ask(browser, question({**service.board.defaults, key: wrap(node)}))
    assert response.status_code == 200
    assert f"{key}: must be text or a number, not a " in error_of(response)
    assert not made.exists()


def test_text_that_composes_to_a_class_is_no_value_of_a_control(browser, service):
    for text in ("{_target_:os.system,command:true}", "${oc.env:HOME}", "1,2", "null"):
        for key in service.board.defaults:
            response = ask(browser, question({**service.board.defaults, key: text}))
            assert response.status_code == 200
            optional = key.startswith("slo.t") and text == "null"
            assert bool(error_of(response)) is not optional


@pytest.mark.parametrize("host", ["evil.example:8050", "127.0.0.1.evil.example", "[::1", "10.0.0.7:8050", ""])
def test_other_host_names_are_refused(service, host):
    client = make_app(service).server.test_client()
    for path in ("/", "/_dash-layout", CALLBACKS):
        response = client.open(path, method="POST" if path == CALLBACKS else "GET", headers={"Host": host})
        assert response.status_code in (400, 403)
        assert b"script" not in response.data


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:8051", "localhost"])
def test_a_forwarded_port_is_served(service, host):
    client = make_app(service).server.test_client()
    base = f"http://{host}"
    assert client.get("/", base_url=base).status_code == 200
    body = question(service.board.defaults)
    assert ask(client, body, base_url=base, headers={"Origin": base}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1:8050"]
)
def test_pages_of_other_origins_are_refused(browser, service, origin):
    response = ask(browser, question(service.board.defaults), headers={"Origin": origin})
    assert response.status_code == 403
    assert b"only the dashboard's own page" in response.data


def test_a_program_without_the_session_is_refused(service, browser):
    client = make_app(service).server.test_client()
    body = question(service.board.defaults)
    assert ask(client, body).status_code == 403
    client.set_cookie("windtunnel-8050", "guessed", domain="127.0.0.1")
    assert ask(client, body).status_code == 403
    cookie = browser.get_cookie("windtunnel-8050", domain="127.0.0.1")
    assert cookie.http_only
    assert cookie.same_site == "Strict"


def test_size_and_number_of_keys_are_limited(browser, service):
    begun = time.process_time()
    response = ask(browser, question({f"key{i}": i for i in range(20_000)}))
    assert response.status_code == 413
    assert len(json.dumps(question({f"k{i}": i for i in range(4000)}))) < MAX_BYTES
    response = ask(browser, question({f"k{i}": i for i in range(4000)}))
    assert response.status_code == 200
    assert "replicas: must be a whole number" in error_of(response)
    assert browser.get(f"/?{'x' * MAX_QUERY}=1", base_url=HOME).status_code == 403
    state, problems = service.board.state_of("?" + "&".join(f"k{i}=1" for i in range(20_000)))
    assert state == service.board.defaults
    assert problems == ["The address has more than 64 settings, so it is ignored and defaults are used."]
    assert time.process_time() - begun < 10


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(state=ANYTHING, problems=ANYTHING, client=ANYTHING)
def test_whatever_is_sent_is_answered_in_words(browser, state, problems, client):
    response = ask(browser, question(state, problems, client))
    assert response.status_code == 200
    assert isinstance(error_of(response), str)


@settings(deadline=None)
@given(body=ANYTHING)
def test_a_body_that_no_page_sends_is_refused_without_a_failure(browser, body):
    response = ask(browser, body)
    assert response.status_code in (400, 403, 413, 415)


def test_the_page_cannot_be_framed(browser):
    headers = browser.get("/", base_url=HOME).headers
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
