"""windtunnel dashboard: its state is an address and a command line, its callbacks are functions."""

import json
import shlex
import socket
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from experiments.dashboard.command import HOST, check_port
from experiments.dashboard.controls import board_of
from experiments.dashboard.figures import (
    caveats,
    curve_figure,
    latency_figure,
    limit_sentence,
    roofline_figure,
)
from experiments.dashboard.simulation_service import (
    Curve,
    RatePoint,
    SimulationService,
    Superseded,
    rate_point,
)
from sim.settings.errors import ConfigError

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "hardware=l4", "workload=synthetic", "workload.num_requests=60")
RATE = "workload.arrivals.rate_per_s"


@pytest.fixture(scope="module")
def board():
    return board_of(SOURCE, SMALL)


@pytest.fixture
def service(board):
    with SimulationService(board, curves=False) as service:
        yield service


@pytest.fixture(scope="module")
def answer(board):
    with SimulationService(board, curves=False) as service:
        return service.answer("page", {**board.defaults, RATE: 20, "seed": 3})


def states():
    return st.fixed_dictionaries(
        {
            "model": st.sampled_from(["smollm2_135m", "llama3_1_8b"]),
            "hardware": st.sampled_from(["l4", "h100_sxm"]),
            "engine": st.sampled_from(["vllm", "sglang"]),
            "replicas": st.integers(1, 9),
            "tensor_parallel_size": st.integers(1, 8),
            RATE: st.floats(0.01, 100) | st.integers(1, 100),
            "workload.lengths.prompt_tokens.mean": st.floats(1, 5000),
            "workload.lengths.output_tokens.mean": st.integers(1, 500),
            "slo.ttft_ms": st.none() | st.floats(1, 5000),
            "slo.tpot_ms": st.none() | st.integers(1, 500),
            "slo.attainment_target": st.floats(0.01, 1),
            "seed": st.integers(0, 99),
        }
    )


@given(states())
def test_an_address_brings_its_state_back(board, state):
    again, problems = board.state_of(board.query(state))
    assert problems == []
    assert again == state
    assert board.state_of("") == (board.defaults, [])
    assert board.query(board.defaults) == ""


def test_a_page_of_changes_is_what_its_command_line_composes(board, service):
    state = {
        **board.defaults,
        "hardware": "h100_sxm",
        "engine": "sglang",
        RATE: 2.5,
        "replicas": 2,
        "slo.tpot_ms": None,
        "seed": 7,
    }
    words = shlex.split(board.command_line(state))
    assert words[:2] == ["windtunnel", "simulate"]
    typed = composed(SOURCE, words[2:])
    assert board.config(state) == OmegaConf.to_container(typed)
    assert words[-5:] == ["engine=sglang", "replicas=2", f"{RATE}=2.5", "slo.tpot_ms=null", "seed=7"]


def test_the_command_line_gives_the_same_figures(board, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state, _ = board.state_of(answer.query)
    words = shlex.split(board.command_line(state))[2:]
    assert main(["simulate", *words, "output.report=false", "output.tables=false", "hydra.run.dir=out"]) == 0
    written = json.loads((tmp_path / "out/summary.json").read_text())
    assert written == json.loads(json.dumps(answer.result.summary))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?model=smolm2_135m", "model=smolm2_135m: no such choice; nearest: smollm2_135m"),
        ("?replicas=two", "replicas=two: must be a whole number"),
        ("?hardware=nope", "hardware=nope: no such choice; all: windtunnel list hardware"),
        ("?replicas=1.5", "replicas=1.5: must be a whole number from 1 to 64"),
        ("?replicas=0", "replicas=0: must be a whole number from 1 to 64"),
        ("?replicas=65", "replicas=65: must be a whole number from 1 to 64"),
        ("?replicas=1000000", "replicas=1000000: must be a whole number from 1 to 64"),
        ("?replicas=", "replicas: must be a whole number from 1 to 64, such as 1"),
        ("?seed=-1", "seed=-1: must be a whole number from 0 to 4,294,967,295"),
        ("?slo.ttft_ms=0", "slo.ttft_ms=0: must be a number >= 0.001"),
        ("?slo.attainment_target=2", "slo.attainment_target=2: must be a number from 0.01 to 1"),
        (f"?{RATE}=", f"{RATE}: must be a number from 0.001 to 10,000, such as 4"),
        (f"?{RATE}=1e400", f"{RATE}=1e400: must be a number from 0.001 to 10,000"),
        (f"?{RATE}=nan", f"{RATE}=nan: must be a number"),
        ("?replica=2", "replica: is not a control of this page; nearest: replicas"),
    ],
)
def test_what_is_wrong_in_an_address_is_reported_and_the_default_stays(board, query, message):
    state, problems = board.state_of(query)
    assert len(problems) == 1
    assert problems[0].startswith(message)
    assert state == board.defaults


@pytest.mark.parametrize("most", [64, 64.0, "64"])
def test_the_most_that_a_control_names_is_taken(board, most):
    control = next(control for control in board.controls if control.key == "replicas")
    assert control.parse(most) == 64


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("replicas=65", "^replicas=65: must be a whole number from 1 to 64$"),
        ("replicas=null", "^replicas=null: must be a whole number from 1 to 64$"),
        ("seed=2.5", "^seed=2.5: must be a whole number from 0 to "),
        ("load=true", "^load=true: must be a number from 0.001 to 1,000$"),
        ("slo.ttft_ms=.inf", "^slo.ttft_ms=.inf: must be a number >= 0.001$"),
    ],
)
def test_what_the_page_would_not_take_is_not_its_default_either(override, message):
    workload = ["workload=azure_conv_like"] if override.startswith("load") else []
    with pytest.raises(ConfigError, match=message):
        board_of(SOURCE, [*SMALL[:2], *workload, override])


def test_controls_offer_every_choice_of_the_groups_that_needs_no_file(board):
    options = {c.key: [option.name for option in c.options] for c in board.controls if c.kind == "choice"}
    assert {"h100_sxm", "l4", "mi300x"} <= set(options["hardware"])
    assert "hf" not in options["model"]
    assert {"vllm", "sglang", "tensorrt_llm"} <= set(options["engine"])


def test_a_long_workload_is_cut_and_one_without_a_rate_is_scaled():
    board = board_of(SOURCE, ["model=smollm2_135m", "hardware=l4", "workload=azure_conv_like"])
    assert board.base[-1] == "workload.num_requests=2000"
    assert {"load", "prompt_scale", "output_scale"} <= set(board.defaults)
    assert board_of(SOURCE, ["slo=none"]).base == ("workload=synthetic", "slo=none")


def test_a_newer_question_ends_an_older_run(board, service, monkeypatch):
    """The first run waits in its first report until the second question has been asked."""
    begun, asked = threading.Event(), threading.Event()
    run = service._simulated

    def slow(query, state, check):
        def wait(simulated_s, num_ended):
            begun.set()
            asked.wait(30)
            check(simulated_s, num_ended)

        return run(query, state, wait if state["seed"] == 1 else check)

    monkeypatch.setattr(service, "_simulated", slow)
    outcome = []

    def first():
        try:
            outcome.append(service.answer("page", {**board.defaults, "seed": 1}))
        except Superseded as error:
            outcome.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(30)
    second = service.answer("page", {**board.defaults, "seed": 2})
    asked.set()
    thread.join()
    assert isinstance(outcome[0], Superseded)
    assert service.curve("page").answer is second
    other = service.answer("another page", {**board.defaults, "seed": 2})
    assert other is second  # remembered
    assert service.curve("page").answer is second


def test_a_point_of_the_curve_is_the_run_at_that_rate(board, answer, service):
    state, _ = board.state_of(answer.query)
    config = board.config(state)
    assert rate_point(config, 1.0) == answer.point
    twice = rate_point(config, 2.0)
    assert twice.load == 2.0
    assert twice.usd_per_million_output_tokens < answer.point.usd_per_million_output_tokens


def test_figures_show_the_answer(answer):
    points = {load: RatePoint(load, share, 1.0) for load, share in ((2.0, 0.1), (0.5, 1.0), (1.0, 0.95))}
    figure = curve_figure(Curve(answer=answer, points=points))
    assert list(figure.data[0].x) == pytest.approx([load * answer.rate_per_s for load in (0.5, 1, 2)])
    assert list(figure.data[0].y) == pytest.approx([100, 95, 10])
    assert [trace.name for trace in latency_figure(answer).data[::2]] == ["TTFT", "TPOT", "ITL", "E2E"]
    assert {"decode, by batch size", "prefill, by batch size"} <= {
        t.name for t in roofline_figure(answer).data
    }
    assert limit_sentence(answer).startswith("Shares of the requests' time: ")
    assert not any("Overloaded" in text for text in caveats(answer))


def test_overload_comes_before_all_other_caveats():
    board = board_of(SOURCE, [*SMALL, "workload.num_requests=400", "engine.max_num_seqs=2"])
    with SimulationService(board, curves=False) as service:
        found = service.answer("page", {**board.defaults, RATE: 10})
    assert caveats(found)[0].startswith("Overloaded: since ")


class TestCallbacks:
    """The callbacks as Dash calls them, without a server."""

    dash = pytest.importorskip("dash", reason="dash is not installed: pip install 'windtunnel[dashboard]'")

    @pytest.fixture
    def callbacks(self, service):
        from experiments.dashboard.app import Callbacks  # noqa: PLC0415 (needs dash)

        return Callbacks(service)

    def test_a_page_begins_with_its_address(self, callbacks, board):
        given = list(board.defaults.values())
        state, problems, query, *fields = callbacks.synchronise(None, "?seed=5&replicas=x", given)
        assert (state["seed"], state["replicas"]) == (5, 1)
        assert problems == ["replicas=x: must be a whole number from 1 to 64"]
        assert query is self.dash.no_update
        assert [field for field in fields if field is not self.dash.no_update] == [5]

    def test_a_control_changes_the_address(self, callbacks, board):
        given = list({**board.defaults, "seed": 6}.values())
        state, problems, query, *_ = callbacks.synchronise("control-seed", "", given)
        assert (state["seed"], problems, query) == (6, [], "?seed=6")
        given = list({**board.defaults, "seed": None}.values())
        state, problems, *_ = callbacks.synchronise("control-seed", "", given)
        assert state is self.dash.no_update
        assert problems == ["seed: must be a whole number from 0 to 4,294,967,295, such as 0"]

    @pytest.mark.parametrize(
        ("model", "value", "button", "next_value"),
        [
            ("smollm2_135m", 1, "more", 3),  # 9 heads: a size of 2 is no choice
            ("smollm2_135m", 3, "less", 1),
            ("smollm2_135m", 1, "less", 1),
            ("llama3_1_8b", 2, "more", 4),
            ("llama3_1_8b", 4, "less", 2),
        ],
    )
    def test_buttons_step_to_sizes_that_the_model_allows(
        self, callbacks, board, model, value, button, next_value
    ):
        given = {**board.defaults, "model": model, "hardware": "h100_sxm", "tensor_parallel_size": value}
        found = callbacks.step(f"control-tensor_parallel_size-{button}", list(given.values()))
        changed = [new for new in found if new is not self.dash.no_update]
        assert changed == [next_value]

    @pytest.mark.parametrize(
        ("key", "value", "button", "next_value"),
        [
            ("replicas", 64, "more", 64),
            ("slo.attainment_target", 0.9, "more", 0.91),
            ("slo.ttft_ms", None, "more", 500),
            (RATE, 4, "less", 3),
        ],
    )
    def test_buttons_stay_within_the_limits(self, callbacks, board, key, value, button, next_value):
        name = f"control-{key.replace('.', '-')}-{button}"
        found = callbacks.step(name, list({**board.defaults, key: value}.values()))
        assert [new for new in found if new is not self.dash.no_update] == [next_value]

    def test_an_answer_fills_the_page_and_an_error_keeps_it_stale(self, callbacks, board):
        message, style, shown, _, figure, _, off, command = callbacks.answer("page", board.defaults, [])
        assert (message, style, off) == ("", "", False)
        assert shown[0].children.startswith("SLO chat")
        assert [len(trace.x) for trace in figure.data[1::2]] == [2] * 4  # p50 and p99 of each latency
        assert command.startswith("windtunnel simulate model=smollm2_135m hardware=l4")
        large = {**board.defaults, "model": "llama3_1_405b"}
        message, style, shown, _, figure, _, off, command = callbacks.answer("page", large, [])
        assert "llama-3.1-405b" in message
        assert style == "stale"
        assert shown is self.dash.no_update
        assert figure is self.dash.no_update
        assert command.endswith("model=llama3_1_405b")

    def test_details_and_curve_are_of_the_last_answer(self, callbacks, board):
        callbacks.answer("page", board.defaults, [])
        figure, message = callbacks.details("page")
        assert figure.data
        assert message
        curve, note, shown, off = callbacks.grow("page", None)
        assert list(curve.data[0].x) == pytest.approx([callbacks.service.curve("page").answer.rate_per_s])
        assert (note, off) == ("", False)
        nothing = self.dash.no_update
        assert callbacks.grow("page", shown) == (nothing, nothing, nothing, True)
        callbacks.answer("page", board.defaults, [])  # the same again is another question
        assert callbacks.grow("page", shown)[2] != shown

    def test_an_unknown_page_is_left_as_it_is(self, callbacks):
        for call in (callbacks.details, lambda client: callbacks.grow(client, None)):
            with pytest.raises(self.dash.exceptions.PreventUpdate):
                call("unheard of")


def test_a_taken_port_is_reported_with_the_next_free_one():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"^--port={port}: another program uses this port; use a free one, such as --port \d+",
        ):
            check_port(port)
    check_port(port)
    with pytest.raises(ConfigError, match=r"^--port=70000: must be a whole number from 1 to 65535"):
        check_port(70000)


def test_bad_settings_and_a_missing_dash_end_the_command_with_a_message(monkeypatch, capsys):
    assert main(["dashboard", "hardware=h10"]) == 2
    assert "hardware=h10: no such choice" in capsys.readouterr().err
    assert main(["dashboard", "batching=chunked", "batching=orca"]) == 2
    assert "batching=orca: batching is chosen twice; leave out batching=chunked" in capsys.readouterr().err
    assert main(["dashboard", "model=llama3_1_405b"]) == 2
    assert "llama-3.1-405b" in capsys.readouterr().err
    nothing = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr("experiments.dashboard.command.importlib.util", nothing)
    with pytest.raises(ConfigError, match=r"^dash is not installed: pip install 'windtunnel\[dashboard\]'"):
        from_command()


def from_command():
    from experiments.dashboard.command import main as dashboard  # noqa: PLC0415 (after the patch)

    dashboard([])
