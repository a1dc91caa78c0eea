"""Processes of the user's: what they read, change and wait for, and their mistakes."""

from collections import Counter
from functools import partial

import pytest
import simpy

from policies.core.request import Prompt, Segment
from sim import ConfigError, simulate

RUN = {"workload": "poisson", "workload__num_requests": 30, "hardware": "l40s"}


def run(*attach, **settings):
    return simulate(**(RUN | settings), attach=attach)


def test_a_process_that_only_looks_changes_nothing():
    """Neither does one without end, which goes on until the last request has ended."""
    seen = []

    def watch(env, fleet, gateway):
        while True:
            seen.append((env.now, gateway.num_in_progress, gateway.num_ended, fleet.serving[0].num_running))
            yield env.timeout(0.25)

    plain, watched = run(), run(watch)
    for name in ("requests", "iterations", "events"):
        assert getattr(plain, name).equals(getattr(watched, name))
    assert plain.summary == watched.summary
    assert watched.command is None
    last_s = plain.requests.finished_s.max()
    assert last_s - 0.25 <= seen[-1][0] <= last_s
    assert max(num_running for *_, num_running in seen) > 1
    for time_s, num_in_progress, num_ended, _ in seen:
        arrived = (plain.requests.arrival_s <= time_s).sum()
        ended = (plain.requests.finished_s <= time_s).sum()
        assert (num_in_progress, num_ended) == (arrived - ended, ended)


def test_it_sends_requests_and_waits_for_their_end():
    log = []

    def client(env, fleet, gateway):
        yield env.timeout(0.5)
        end = gateway.send(100, 20, tenant="mine")
        first = yield end | env.timeout(1e-3, "too early")
        log.append(list(first.values()))
        log.append((yield end))
        log.append(env.now)
        log.append((yield gateway.send(10**9, 1, tenant="mine")))
        request = gateway.in_progress[0]
        log.append((yield gateway.ended(request)))
        log.append((request.request_id, env.now))
        with pytest.raises(ValueError, match=f"request_id={request.request_id}: it is not in progress"):
            gateway.ended(request)

    found = run(client).requests.set_index("request_id")
    mine = found[found.tenant == "mine"]
    assert mine.index.tolist() == [30, 31]
    assert log[0] == ["too early"]
    assert log[1:4] == ["finished", mine.finished_s[30], "rejected"]
    assert log[4] == "finished"
    assert found.finished_s[log[5][0]] == log[5][1]
    assert (mine.arrival_s[30], mine.output_tokens[30]) == (0.5, 20)


@pytest.mark.parametrize("workload", ["conversation", "closed_loop", "agentic"])
def test_it_adds_requests_to_traffic_that_follows_the_ends_of_requests(workload):
    """Ids are unique, nothing is lost, and what follows the end of a request still does."""
    size = {"conversation": "num_conversations", "closed_loop": "num_requests", "agentic": "num_tasks"}
    settings = {"workload": workload, f"workload__{size[workload]}": 6}

    def client(env, fleet, gateway):
        for _ in range(5):
            yield gateway.send(64, 8, tenant="mine")

    alone = simulate(**settings).requests
    both = simulate(**settings, attach=[client]).requests
    assert both.request_id.is_unique
    assert (both.status == "finished").all()
    assert (both.tenant == "mine").sum() == 5
    theirs = both[both.tenant != "mine"]
    assert sorted(theirs.prompt_tokens) == sorted(alone.prompt_tokens)
    assert sorted(theirs.output_tokens) == sorted(alone.output_tokens)


def test_it_warms_the_cache_of_one_replica():
    prompt = Prompt(2048, (Segment(10**6, 2048),))

    def warm(env, fleet, gateway):
        yield gateway.send(prompt, 1, replica=fleet.serving[1])
        for replica in fleet.serving:
            yield gateway.send(prompt, 1, replica=replica)

    found = run(warm, replicas=2, caching="prefix").requests.set_index("request_id")
    assert found.replica[[30, 31, 32]].tolist() == [1, 0, 1]
    assert found.cached_tokens[30] == found.cached_tokens[31] == 0
    assert found.cached_tokens[32] > 2000


def test_it_crashes_repairs_starts_and_drains_replicas():
    states = []

    def operator(env, fleet, gateway):
        first, second = fleet.serving
        yield env.timeout(1)
        fleet.crash(first)
        with pytest.raises(ValueError, match="crash: replica 0 is down; it must serve"):
            fleet.crash(first)
        with pytest.raises(ValueError, match="drain: replica 1 is the last that serves"):
            fleet.drain(second)
        third = fleet.start()
        states.append([first.state, second.state, third.state])
        yield env.timeout(0.5)
        fleet.repair(first)
        with pytest.raises(ValueError, match="repair: replica 0 is serving, and no process crashed it"):
            fleet.repair(first)
        fleet.drain(third)  # which interrupts its cold start
        fleet.drain(second)
        yield env.timeout(60)
        states.append([first.state, second.state, third.state])
        states.append([replica.index for replica in fleet.replicas])

    result = run(operator, replicas=2, workload__arrivals__rate_per_s=0.4)
    assert states == [["down", "serving", "starting"], ["serving", "gone", "gone"], [0]]
    [failure] = result.run.records.failures
    assert (failure.at_s, failure.replica, failure.kind.name, failure.duration_s) == (1.0, 0, "crash", 0.5)
    assert (result.requests.status == "finished").all()


def test_it_changes_a_limit_and_slows_down_a_replica():
    """From then on, plans have the new limit, also where nothing else happens at that time."""

    def limit(env, fleet, gateway):
        [replica] = fleet.serving
        assert replica.max_num_batched_tokens == 1024
        yield env.timeout(3)
        replica.max_num_batched_tokens = 64
        with pytest.raises(ValueError, match="max_num_batched_tokens=0"):
            replica.max_num_batched_tokens = 0

    def slow(env, fleet, gateway):
        yield env.timeout(3)
        fleet.serving[0].slow_down(3)

    def tokens(rows):
        return rows.prefill_tokens + rows.decode_seqs

    settings = {"engine__max_num_batched_tokens": 1024, "workload__lengths__prompt_tokens__value": 2000}
    plain, limited, slowed = run(**settings), run(limit, **settings), run(slow, **settings)
    early, late = (limited.iterations[limited.iterations.start_s > 3.2], plain.iterations)
    assert tokens(early).max() == 64
    assert tokens(late).max() == 1024
    assert slowed.requests.finished_s.max() > 1.5 * plain.requests.finished_s.max() - 3


def test_all_of_simpy_works_beside_the_run():
    log = []

    def process(env, fleet, gateway):
        desk, mail = simpy.Resource(env), simpy.Store(env)
        child = env.process(sleeper(env, desk, mail))
        yield env.timeout(1)
        child.interrupt("wake up")
        log.append((yield mail.get()))
        assert (yield child) == "done"
        log.append(env.now)

    def sleeper(env, desk, mail):
        with desk.request() as turn:
            yield turn
            try:
                yield env.timeout(100)
            except simpy.Interrupt as interrupt:
                yield mail.put(interrupt.cause)
        yield env.all_of([env.timeout(1), env.timeout(2)])
        return "done"

    run(process)
    assert log == ["wake up", 3.0]


def no_generator(env, fleet, gateway):
    return None


def of_two(env, fleet):
    yield env.timeout(1)


def yields_a_number(env, fleet, gateway):
    yield env.timeout(1)
    yield 3


def yields_of_another_world(env, fleet, gateway):
    yield simpy.Environment().timeout(1)


def raises(env, fleet, gateway):
    yield env.timeout(2)
    fleet.servng  # noqa: B018


class Callable:
    def __call__(self, env, fleet, gateway):
        yield env.timeout(1)


def waits_for_no_time(env, fleet, gateway):
    yield env.timeout(float("nan"))


def begins_one_that_fails(env, fleet, gateway):
    def fails():
        yield env.timeout(0.5)
        raise KeyError("lost")

    env.process(fails())
    yield env.timeout(10)


@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (
            [waits_for_no_time],
            r"attach: waits_for_no_time raised ValueError at 0 s: delay=nan: must be >= 0 s",
        ),
        ([begins_one_that_fails], r"attach: a process of env.process raised KeyError at 0.5 s: 'lost'"),
        ([no_generator], r"attach\[0\]=no_generator: must be a generator function, which has a `yield`"),
        ([Callable(), of_two], r"attach\[1\]=of_two: must take three arguments: env, fleet and gateway"),
        ([3], r"attach\[0\]=3: must be a generator function"),
        (raises, r"attach=raises: must be a list, such as \[my_process\]"),
        (
            [yields_a_number],
            "attach: yields_a_number yielded 3 at 1 s: must be an event of env, such as env.tim",
        ),
        (
            [yields_of_another_world],
            "attach: yields_of_another_world yielded .* at 0 s: must be an event of env",
        ),
        (
            [raises],
            r"attach: raises raised AttributeError at 2 s: .*servng.* \(line \d+ of .*test_attached.py\)",
        ),
    ],
)
def test_mistakes_are_told_in_one_sentence(attach, message):
    with pytest.raises(ConfigError, match=message):
        simulate(**RUN, attach=attach)


def test_what_takes_no_processes_says_so():
    with pytest.raises(
        ConfigError, match=r"sim.shards=2.* a process sees the whole fleet; set sim.shards=null"
    ):
        run(Callable(), replicas=2, sim__shards=2)


def test_partial_functions_are_taken():
    def late(seconds, env, fleet, gateway):
        yield env.timeout(seconds)

    run(partial(late, 2.0), Callable())


FEATURES = {
    "arrivals": {},
    "patience": {"workload__patience_s": 1.0, "workload__arrivals__rate_per_s": 40},
    "retries": {"retries": "exponential_backoff", "retries__timeout_s": 1,
                "workload__arrivals__rate_per_s": 40},
    "autoscaling": {"scaling": "concurrency", "scaling__interval_s": 1, "cold_start": "in_memory",
                    "workload__num_requests": 300, "scaling__target_concurrency": 2},
    "failures": {"failures": "crash", "replicas": 2, "failures__events": [
        {"_target_": "sim.cluster.failures.Scripted", "kind": "crash", "at_s": 1, "duration_s": 1}]},
    "sessions": {"workload": "conversation", "workload__num_conversations": 5},
    "agents": {"workload": "agentic", "workload__num_tasks": 5},
    "transfers": {"pools": "disaggregated", "roles": "balance", "hardware": "h100_sxm"},
    "early stops": {"sim__stop_overloaded": True, "sim__stop_missed": True},
    "migrations": {"replicas": 2, "migration": "llumnix"},
}  # fmt: skip
"""Settings of a run with a feature."""


def test_features_are_processes_and_events_of_simpy(monkeypatch):
    """Without SimPy's own classes there is no run."""
    made = Counter()
    begin = simpy.Environment.step

    def step(env):
        made["steps"] += 1
        begin(env)

    monkeypatch.setattr(simpy.Environment, "step", step)
    resume = simpy.Process._resume

    def counted(process, event):
        made[process.name] += 1
        resume(process, event)

    monkeypatch.setattr(simpy.Process, "_resume", counted)
    expected = {
        "sessions": ["_arrive_at"],
        "agents": ["_arrive_at"],
        "transfers": ["_hand_over", "_switch_in_turn"],
        "early stops": ["_check_in_turn"],
        "migrations": ["_decide_in_turn"],
        "patience": ["_give_up"],
        "retries": ["_time_out", "_retry"],
        "autoscaling": ["_decide_in_turn", "_start_cold"],
        "failures": ["_fail_in_turn", "_fail"],
    }
    for name, settings in FEATURES.items():
        made.clear()
        sized = "workload" in settings
        simulate(**({} if sized else RUN) | settings)
        assert made["steps"] > 50
        for process in ["_arrive_in_turn", *expected.get(name, [])]:
            assert made[process] > 1, (name, process)
