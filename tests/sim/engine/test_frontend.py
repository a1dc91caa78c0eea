"""The queue of the front end, in ticks: a request takes 2, a prompt token 1, an answer's token 1/2."""

import pytest

from policies.core.request import Branching, Prompt, Request
from sim.engine.frontend import Frontend, FrontendQueue

LATENCY = 10.0
GAP = 4.0
WORK = {"request_s": 2.0, "prompt_token_s": 1.0}


@pytest.fixture
def make_queue():
    def make(num_servers=1, **work):
        return FrontendQueue(Frontend(**(work or WORK)), num_servers, LATENCY, lambda: GAP)

    return make


def ask(request_id=0, num_prompt_tokens=3, **given):
    return Request(request_id, 0.0, Prompt(num_prompt_tokens), **given)


def known(queue, *arrivals, output=1, prompt=3):
    """Returns when the scheduler knows requests that arrive at these times, less the latency."""
    return [queue.known_s(now, ask(i, prompt), output) - LATENCY for i, now in enumerate(arrivals)]


def test_one_process_works_on_one_request_after_the_other(make_queue):
    assert known(make_queue(), 0.0, 0.0, 1.0, 20.0) == [5.0, 10.0, 15.0, 25.0]


def test_more_processes_work_beside_each_other(make_queue):
    assert known(make_queue(2), 0.0, 0.0, 1.0, 4.0, 20.0) == [5.0, 5.0, 10.0, 10.0, 25.0]


def test_longer_prompts_take_longer(make_queue):
    assert known(make_queue(), 0.0, prompt=100) == [102.0]


def test_answers_under_way_use_idle_time_and_delay_no_request(make_queue):
    """An answer of 6 tokens ends 24 after its prompt and is 3 of work; the process is idle for 20 of them."""
    assert known(make_queue(output_token_s=0.5, **WORK), 0.0, 25.0, 30.0, output=6) == [5.0, 30.0, 35.0]


def test_answers_delay_requests_that_come_after_their_ends_while_no_time_is_idle(make_queue):
    """Answers end at 9 and 14; the third prompt begins at 10, after the first of them, of 0.5."""
    queue = make_queue(output_token_s=0.5, **WORK)
    assert known(queue, 0.0, 0.0, 0.0, 0.0, output=1) == [5.0, 10.0, 15.5, 21.0]


@pytest.mark.parametrize("num_servers", [1, 4])
def test_no_work_is_lost_in_a_burst(make_queue, num_servers):
    """400 requests are 400 x (2 + 3 + 8 x 0.5) of work; the last ones answer after all prompts are done."""
    queue = make_queue(num_servers, output_token_s=0.5, **WORK)
    departures = known(queue, *[0.0] * 400, output=8)
    assert departures == sorted(departures)
    assert departures[-1] == pytest.approx(400 * 9 / num_servers, rel=0.03)


def test_a_rate_below_capacity_waits_for_nothing_in_the_long_run(make_queue):
    """Every 10 ticks a request with 5 of work and an answer of 4; at 8 ticks the work exceeds the time."""
    queue = make_queue(output_token_s=0.5, **WORK)
    arrivals = [10.0 * i for i in range(2000)]
    assert known(queue, *arrivals, output=8)[-1] - arrivals[-1] < 2 * 5
    queue = make_queue(output_token_s=0.5, **WORK)
    arrivals = [8.0 * i for i in range(2000)]
    assert known(queue, *arrivals, output=8)[-1] - arrivals[-1] == pytest.approx(2000, rel=0.02)


@pytest.mark.parametrize(
    ("request_", "stop_after", "num_tokens"),
    [
        (ask(), 7, 7),
        (ask(), None, 0),
        (ask(max_tokens=9), None, 9),
        (ask(branching=Branching(3)), 7, 21),
        (ask(branching=Branching(2)), (4, 6), 10),
    ],
)
def test_all_branches_are_streamed(make_queue, request_, stop_after, num_tokens):
    """No time is idle, and the third request begins after the end of the first answer only."""
    queue = make_queue(request_s=1e6, output_token_s=1.0)
    for _ in range(2):
        queue.known_s(0.0, request_, stop_after)
    assert queue.known_s(0.0, request_, stop_after) - LATENCY == 3e6 + num_tokens


def test_a_crash_empties_the_queue(make_queue):
    queue = make_queue()
    known(queue, *[0.0] * 9)
    queue.reset()
    assert known(queue, 1.0) == [6.0]
    assert queue.taken_s == {0: 15.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"servers": 0}, "servers=0: must be >= 1 and <= 1000, or null"),
        ({"servers": 1001}, "servers=1001: must be"),
        ({"request_s": -1.0}, "request_s=-1.0: must be a finite number >= 0 s"),
        ({"prompt_token_s": float("nan")}, "prompt_token_s=nan: must be"),
        ({"output_token_s": float("inf")}, "output_token_s=inf: must be"),
        ({"range_s": (2.0, 1.0)}, r"range_s=\[2.0, 1.0\]: must be the least and the largest"),
        ({"range_s": (1.0,)}, r"range_s=\[1.0\]: must be two times"),
    ],
)
def test_settings_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Frontend(**given)
