"""Traces as people bring them: late starts, decimals, further columns, sets of texts, sessions, spans."""

import json

import pandas as pd
import pytest

from sim.workload.arrivals import Poisson
from sim.workload.formats import (
    AzureCsv,
    BailianJsonl,
    BlisTraceV2,
    BurstGptCsv,
    ChutesParquet,
    MooncakeJsonl,
    PlainCsv,
    TraceLabJsonl,
    VidurCsv,
)
from sim.workload.otel_traces import OtelTrace
from sim.workload.token_ids import TokenIdsJsonl
from sim.workload.untimed_traces import MooncakeSessions, ShareGptJson

RATE = Poisson(rate_per_s=1.0)


def write(folder, text, name="t.csv"):
    path = folder / name
    path.write_text(text)
    return path


def lines(folder, *rows, name="t.jsonl"):
    return write(folder, "".join(json.dumps(row) + "\n" for row in rows), name)


def read(trace):
    """Returns (time, prompt, output) of the requests, and the remarks."""
    source = trace.source(seed=0, max_model_len=10**6)
    found = [(one.at_s, one.request.prompt.num_tokens, one.num_output_tokens) for one in source.arrivals()]
    return found, " ".join(source.notes.remarks)


def late_traces(folder):
    """Yields traces of 2 requests, 0.5 s apart, that begin at 86,400 s, one per format."""
    yield PlainCsv, write(folder, "arrival_s,prompt_tokens,output_tokens\n86400,9,5\n86400.5,9,5\n", "p.csv")
    vidur = "arrived_at,num_prefill_tokens,num_decode_tokens\n86400,9,5\n86400.5,9,5\n"
    yield VidurCsv, write(folder, vidur, "v.csv")
    burst = "Timestamp,Request tokens,Response tokens\n86400,9,5\n86400.5,9,5\n"
    yield BurstGptCsv, write(folder, burst, "b.csv")
    blis = "arrival_time_us,input_tokens,output_tokens\n86400000000,9,5\n86400500000,9,5\n"
    yield BlisTraceV2, write(folder, blis, "blis.csv")
    row = {"input_length": 9, "output_length": 5, "hash_ids": [1]}
    moon = [row | {"timestamp": time} for time in (86400000, 86400500)]
    yield MooncakeJsonl, lines(folder, *moon, name="m.jsonl")
    yield (
        BailianJsonl,
        lines(folder, *(one | {"timestamp": one["timestamp"] / 1e3} for one in moon), name="q.jsonl"),
    )
    ids = {"prompt_token_ids": [3] * 9, "output_token_ids": [4] * 5}
    yield (
        TokenIdsJsonl,
        lines(folder, ids | {"arrival_s": 86400}, ids | {"arrival_s": 86400.5}, name="i.jsonl"),
    )
    pd.DataFrame({"started_at": [86400.0, 86400.5], "it": [9, 9], "ot": [5, 5]}).to_parquet(
        folder / "c.parquet"
    )
    yield ChutesParquet, folder / "c.parquet"


@pytest.mark.parametrize("which", range(8))
def test_a_trace_that_starts_late_begins_with_its_first_arrival_and_says_so(tmp_path, which):
    kind, path = list(late_traces(tmp_path))[which]
    requests, remarks = read(kind(path=path))
    assert requests == [(0.0, 9, 5), (0.5, 9, 5)]
    assert "arrives at 86,400 s" in remarks
    assert "workload.start_s=0" in remarks
    requests, remarks = read(kind(path=path, start_s=0))
    assert requests == [(86400.0, 9, 5), (86400.5, 9, 5)]
    assert "arrives at" not in remarks


def test_a_trace_that_starts_at_zero_has_no_note(tmp_path):
    _, remarks = read(PlainCsv(path=write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n0,9,5\n")))
    assert not remarks


def test_failures_before_the_first_request_do_not_begin_the_run(tmp_path):
    text = "Timestamp,Request tokens,Response tokens\n100,9,0\n500,9,5\n600,9,0\n700,9,5\n"
    source = BurstGptCsv(path=write(tmp_path, text)).source(seed=0, max_model_len=99)
    assert [one.at_s for one in source.arrivals()] == [0.0, 200.0]
    assert source.notes.skipped == {"failed: no output tokens": 2}


def test_a_window_of_a_late_trace_begins_with_its_first_arrival(tmp_path):
    text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{1000 + i},9,5\n" for i in range(10))
    trace = PlainCsv(path=write(tmp_path, text), duration_s=2.0, window_by_seed=True)
    for seed in range(3):
        at_s = [one.at_s for one in trace.source(seed=seed, max_model_len=99).arrivals()]
        assert at_s == [0.0, 1.0]


def test_dates_before_that_of_the_first_row_are_sorted(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:05.0,7,1\n2023-11-16 18:17:03.5,8,1\n"
    assert read(AzureCsv(path=write(tmp_path, text), sort=True))[0] == [(0.0, 8, 1), (1.5, 7, 1)]


@pytest.mark.parametrize(("text", "prompt"), [("5.0", 5), ("5.", 5), ("12.000", 12), ("5", 5)])
def test_whole_numbers_with_decimals_are_read(tmp_path, text, prompt):
    path = write(tmp_path, f"arrival_s,prompt_tokens,output_tokens\n0,{text},5\n")
    assert read(PlainCsv(path=path))[0] == [(0.0, prompt, 5)]


@pytest.mark.parametrize("text", ["5.5", "nan", "inf", "-5.0", "1e3", "", "a"])
def test_other_numbers_are_refused_with_their_place(tmp_path, text):
    path = write(tmp_path, f"arrival_s,prompt_tokens,output_tokens\n0,7,5\n1,{text},5\n")
    with pytest.raises(ValueError, match=rf"t.csv:3:3: prompt_tokens: expected a whole number .* '{text}'"):
        read(PlainCsv(path=path))


def test_whole_floats_of_json_and_parquet_are_read_and_fractions_refused(tmp_path):
    row = {"timestamp": 0, "input_length": 5.0, "output_length": 3, "hash_ids": [1]}
    assert read(MooncakeJsonl(path=lines(tmp_path, row)))[0] == [(0.0, 5, 3)]
    with pytest.raises(ValueError, match=r"input_length: expected a whole number of tokens .* found 5.5"):
        read(MooncakeJsonl(path=lines(tmp_path, row | {"input_length": 5.5})))
    table = pd.DataFrame({"started_at": [0, 1], "it": [5.0, 6.0], "ot": [3, 3]})
    table.to_parquet(tmp_path / "c.parquet")
    assert read(ChutesParquet(path=tmp_path / "c.parquet"))[0] == [(0.0, 5, 3), (1.0, 6, 3)]
    table.assign(it=[5.0, 6.5]).to_parquet(tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"d.parquet:2:it: expected a whole number .* found 6.5"):
        read(ChutesParquet(path=tmp_path / "d.parquet"))


def test_columns_that_matter_and_are_not_used_are_named(tmp_path):
    burst = "Timestamp,Session ID,Model,Request tokens,Response tokens\n0,7,GPT-4,9,5\n"
    _, remarks = read(BurstGptCsv(path=write(tmp_path, burst)))
    assert "Session ID (sessions), Model (models and adapters)" in remarks
    azure = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,3,8,1\n"
    assert "NumImages (images and sound)" in read(AzureCsv(path=write(tmp_path, azure)))[1]
    row = {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1], "priority": 2}
    remarks = read(MooncakeJsonl(path=lines(tmp_path, row | {"session_id": "a"})))[1]
    assert "priority (priorities), session_id (sessions)" in remarks
    table = pd.DataFrame({"started_at": [0], "it": [5], "ot": [3], "user_id": ["u"], "model": ["m"]})
    table.to_parquet(tmp_path / "c.parquet")
    remarks = read(ChutesParquet(path=tmp_path / "c.parquet"))[1]
    assert "model (models and adapters)" in remarks
    assert "user_id" not in remarks  # it is the tenant
    round_ = {
        "session_id": "s",
        "input_tokens_total": 9,
        "prefix_tokens": 0,
        "output_tokens": 5,
        "model": "m",
    }
    event = {"event_type": "text", "timestamp": "2026-01-31T12:00:00Z"}
    remarks = read(TraceLabJsonl(path=lines(tmp_path, round_ | {"timing_events": [event]})))[1]
    assert "model (models and adapters)." in remarks
    assert "sessions" not in remarks  # they are used


def test_mooncake_without_hashes_shares_nothing_and_says_so(tmp_path):
    row = {"input_length": 1024, "output_length": 8}
    path = lines(tmp_path, row | {"timestamp": 0}, row | {"timestamp": 5000, "hash_ids": [1, 2]})
    source = MooncakeJsonl(path=path).source(seed=0, max_model_len=10**5)
    one, other = source.arrivals()
    assert (one.request.prompt.segments, len(other.request.prompt.segments)) == ((), 2)
    assert [note for note in source.notes.remarks if "hash_ids" in note] == [
        "Requests without hash_ids share no contents, so no prefix cache finds their prompts."
    ]


@pytest.mark.parametrize(
    ("tokens", "ids", "size"), [(40, 3, 16), (60, 4, 16), (1000, 16, 64), (1000, 4, 256)]
)
def test_too_many_hashes_name_the_setting_and_the_size_that_fits(tmp_path, tokens, ids, size):
    row = {"timestamp": 0, "input_length": tokens, "output_length": 6, "hash_ids": list(range(ids))}
    path = lines(tmp_path, row)
    with pytest.raises(ValueError, match=f"found {ids} ids; set workload.tokens_per_hash={size}, which fits"):
        read(MooncakeJsonl(path=path))
    assert read(MooncakeJsonl(path=path, tokens_per_hash=size))[0] == [(0.0, tokens, 6)]


def test_mooncake_reads_texts_in_place_of_lengths(tmp_path):
    path = lines(tmp_path, {"timestamp": 0, "text_input": "x" * 41, "output_length": 8})
    requests, remarks = read(MooncakeJsonl(path=path))
    assert requests == [(0.0, 11, 8)]
    assert "4 characters per token" in remarks


def test_delays_are_read_by_the_format_with_sessions_only(tmp_path):
    row = {"session_id": "a", "input_length": 300, "output_length": 40}
    path = lines(tmp_path, row | {"timestamp": 0}, row | {"delay": 2})
    with pytest.raises(ValueError, match=r"delay: .*workload=mooncake_sessions reads them"):
        read(MooncakeJsonl(path=path))
    whole = row | {"hash_ids": [1], "timestamp": 0}
    with pytest.raises(ValueError, match=r"t.jsonl:2:.* delay: .*workload=mooncake_sessions reads them"):
        read(MooncakeJsonl(path=lines(tmp_path, whole, whole | {"delay": 2})))


def test_turns_of_a_session_follow_the_end_of_the_one_before(tmp_path):
    first = {"session_id": "a", "input_length": 300, "output_length": 40, "timestamp": 61000}
    later = {"session_id": "a", "input_length": 150, "output_length": 20, "delay": 2000}
    other = first | {"session_id": "b", "timestamp": 60000}
    source = MooncakeSessions(path=lines(tmp_path, first, later, other), arrivals=RATE).source(
        seed=0, max_model_len=9999
    )
    b, a = source.arrivals()
    assert [(one.at_s, one.request.prompt.num_tokens) for one in (b, a)] == [(0.0, 300), (1.0, 300)]
    (turn,) = source.follow_ups(a.request, 5.0, 40)
    assert (turn.at_s, turn.request.prompt.num_tokens, turn.num_output_tokens) == (7.0, 490, 20)
    assert turn.request.prompt.segments[0] == a.request.prompt.segments[0]
    assert source.follow_ups(b.request, 5.0, 40) == ()
    assert "begins at 60 s, which is 0 s" in " ".join(source.notes.remarks)


def test_whole_contexts_of_sessions_are_not_added_up(tmp_path):
    mode = {"session_id": "a", "context_mode": "message_array_with_responses", "output_length": 40}
    path = lines(tmp_path, mode | {"input_length": 300}, mode | {"input_length": 500})
    source = MooncakeSessions(path=path, arrivals=RATE).source(seed=0, max_model_len=9999)
    (first,) = source.arrivals()
    assert source.follow_ups(first.request, 5.0, 40)[0].request.prompt.num_tokens == 500
    path = lines(tmp_path, mode | {"input_length": 300}, mode | {"input_length": 340})
    with pytest.raises(ValueError, match=r"t.jsonl:2:.*input_length: expected more than the 340 tokens"):
        MooncakeSessions(path=path, arrivals=RATE).source(seed=0, max_model_len=9999)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"delay": -1}, "delay: expected a number of ms"),
        ({"delay": float("nan")}, "delay: expected a number of ms"),
        ({"input_length": 5.5}, "input_length: expected a whole number"),
        ({"timestamp": "now"}, "timestamp: expected a finite number of ms"),
        ({"context_mode": "other"}, "context_mode: expected message_array_with_responses"),
    ],
)
def test_wrong_turns_are_refused(tmp_path, row, message):
    sound = {"session_id": "a", "input_length": 3, "output_length": 4}
    with pytest.raises(ValueError, match=f"t.jsonl:2:.*{message}"):
        MooncakeSessions(path=lines(tmp_path, sound, sound | row), arrivals=RATE).source(
            seed=0, max_model_len=99
        )


BLIS = (
    "tenant_id,session_id,prefix_group,prefix_length,input_tokens,output_tokens,server_input_tokens,"
    "arrival_time_us,send_time_us,status,image_tokens\n"
)


def test_blis_has_microseconds_tenants_sessions_statuses_and_prefixes(tmp_path):
    text = (
        BLIS + "t0,s0,,0,512,64,520,0,1787000000040000,ok,0\n"
        "t1,s0,,0,700,64,0,400000,1787000000450000,ok,0\n"
        "t1,s1,doc,100,50,8,150,500000,1787000000550000,ok,0\n"
        "t1,s2,doc,100,60,8,160,600000,1787000000650000,ok,0\n"
        "t1,s2,,0,60,0,60,700000,1787000000750000,error,0\n"
    )
    source = BlisTraceV2(path=write(tmp_path, text)).source(seed=0, max_model_len=9999)
    found = list(source.arrivals())
    assert [(one.at_s, one.request.prompt.num_tokens) for one in found] == [
        (0.0, 520),
        (0.4, 700),
        (0.5, 150),
        (0.6, 160),
    ]
    assert [one.request.tenant for one in found] == ["t0", "t1", "t1", "t1"]
    assert [one.request.session_id for one in found] == [0, 0, 1, 2]
    assert found[2].request.prompt.segments[0] == found[3].request.prompt.segments[0]
    assert found[2].request.prompt.segments[0].num_tokens == 100
    assert source.notes.skipped == {"status: error": 1}
    assert "image_tokens (images and sound)" in " ".join(source.notes.remarks)


def test_wrong_values_of_blis_are_refused_with_their_column(tmp_path):
    path = write(tmp_path, BLIS + "t0,s0,doc,-3,512,64,520,0,1,ok,0\n")
    with pytest.raises(ValueError, match=r"t.csv:2:11: prefix_length: expected a whole number .* '-3'"):
        read(BlisTraceV2(path=path))


def exchange(*messages):
    senders = ("human", "gpt")
    listed = [{"from": senders[i % 2], "value": text} for i, text in enumerate(messages)]
    return {"id": "a", "conversations": listed}


@pytest.mark.parametrize("as_lines", [False, True])
def test_sharegpt_has_the_first_exchange_of_each_conversation(tmp_path, as_lines):
    chats = [exchange("x" * 34, "y" * 62, "again"), exchange("only"), exchange("é" * 8, "z")]
    path = lines(tmp_path, *chats) if as_lines else write(tmp_path, json.dumps(chats, indent=1), "s.json")
    source = ShareGptJson(path=path, arrivals=RATE).source(seed=0, max_model_len=9999)
    found = list(source.arrivals())
    assert [(one.request.prompt.num_tokens, one.num_output_tokens) for one in found] == [(9, 16), (2, 1)]
    assert source.notes.skipped == {"no answer, or an empty one": 1}
    assert "4 characters per token; workload.tokenizer=FILE" in source.notes.remarks[0]
    assert [
        one.at_s for one in ShareGptJson(path=path, arrivals=RATE).source(seed=0, max_model_len=9).arrivals()
    ]
    one = ShareGptJson(path=path, arrivals=RATE, max_requests=1).source(seed=0, max_model_len=9999)
    assert one.num_requests == 1


def test_the_first_requests_of_sharegpt_are_taken_wherever_they_end(tmp_path):
    path = write(tmp_path, json.dumps([exchange("hello", "hi")] * 5), "s.json")
    for most in (1, 2, 5):
        trace = ShareGptJson(path=path, arrivals=RATE, max_requests=most)
        assert trace.source(seed=0, max_model_len=99).num_requests == most


def test_sharegpt_counts_with_a_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path, json.dumps([exchange("a b a b a", "b b")]), "s.json")
    trace = ShareGptJson(path=path, arrivals=RATE, tokenizer=tmp_path)
    requests, remarks = read(trace)
    assert requests[0][1:] == (5, 2)
    assert "counted with" in remarks
    path = write(tmp_path, "{}", "broken.json")
    with pytest.raises(ValueError, match=r"tokenizer=.*is no tokenizer.json"):
        read(ShareGptJson(path=trace.path, arrivals=RATE, tokenizer=path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"id": "a"}]', "element 1: no key conversations"),
        ('[{"conversations": 5}]', "element 1: conversations: expected a list of messages"),
        ('[{"conversations": [{"from": "human"}]}]', r"element 1: conversations\[0\]: expected a message"),
        ('[{"conversations": []}, 7]', "element 2: expected a conversation .* found 7"),
        ('[{"conversations": []}', "expected more elements or ], found the end"),
        ('[{"conversations": [}]', "element 1: expected JSON"),
        ("[" + '{"a":' * 100_000, "element 1: nests values too deeply"),
        ("", "found none"),
        ("[]", "found none"),
    ],
)
def test_wrong_sets_of_texts_are_refused_with_their_element(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(ShareGptJson(path=write(tmp_path, text, "s.json"), arrivals=RATE))


def span(name, parent, start, end, tokens=(420, 90), **attributes):
    usage = {"gen_ai.usage.input_tokens": tokens[0], "gen_ai.usage.output_tokens": tokens[1]}
    return {
        "trace_id": "t1",
        "span_id": name,
        "parent_span_id": parent,
        "start_time": f"2026-02-25T10:00:{start:09.6f}",
        "end_time": f"2026-02-25T10:00:{end:09.6f}",
        "attributes": usage | attributes,
    }


def otlp(one):
    """Returns a span as OTLP JSON has it."""
    attributes = [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in one["attributes"].items()
    ]
    second = float(one["start_time"][-9:])
    nano = 1_772_013_600_000_000_000 + round(second * 1e9)
    return {
        "traceId": one["trace_id"],
        "spanId": one["span_id"],
        "parentSpanId": one["parent_span_id"] or "",
        "startTimeUnixNano": str(nano),
        "attributes": attributes,
    }


@pytest.mark.parametrize("form", ["spans", "lines", "otlp"])
def test_spans_of_calls_are_requests_and_traces_are_sessions(tmp_path, form):
    tool = span("t", "a", 2.6, 2.9) | {"attributes": {"gen_ai.operation.name": "execute_tool"}}
    agent = span("r", None, 0, 9, (980, 150), **{"gen_ai.operation.name": "invoke_agent"})
    one = span("a", "r", 0.5, 2.5)
    other = span("b", "a", 3.0, 5.0, (560, 60), **{"gen_ai.operation.name": "chat"})
    foreign = span("c", None, 4.0, 5.0, (7, 8)) | {"trace_id": "t2"}
    spans = [agent, tool, other, one, foreign]
    if form == "otlp":
        content = {"resourceSpans": [{"scopeSpans": [{"spans": [otlp(each) for each in spans]}]}]}
        path = write(tmp_path, json.dumps(content), "o.json")
    elif form == "spans":
        path = write(tmp_path, json.dumps({"trace_id": "t1", "spans": spans}), "o.json")
    else:
        path = lines(tmp_path, {"spans": spans[:4]}, {"spans": spans[4:]})
    source = OtelTrace(path=path).source(seed=0, max_model_len=9999)
    found = list(source.arrivals())
    assert [(each.at_s, each.request.prompt.num_tokens, each.num_output_tokens) for each in found] == [
        (0.0, 420, 90),
        (2.5, 560, 60),
        (3.5, 7, 8),
    ]
    sessions = [each.request.session_id for each in found]
    assert sessions[0] == sessions[1] != sessions[2]
    assert "2026-02-25 10:00:00 UTC" in " ".join(source.notes.remarks)


def test_models_of_spans_may_be_anything(tmp_path):
    spans = [span("a", None, 0, 1, **{"gen_ai.request.model": ["x"]}), span("b", None, 2, 3)]
    _, remarks = read(OtelTrace(path=write(tmp_path, json.dumps({"spans": spans}), "o.json")))
    assert "not used" not in remarks


def test_a_call_within_another_is_counted_once(tmp_path):
    outer, inner = span("a", None, 0, 5), span("b", "a", 0.1, 4.9)
    path = write(tmp_path, json.dumps({"spans": [outer, inner]}), "o.json")
    source = OtelTrace(path=path).source(seed=0, max_model_len=9999)
    assert source.num_requests == 1
    assert source.notes.skipped == {"contains the call of its child span": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_time": "never"}, "element 1: span 0: start time: expected ns since 1970"),
        ({"start_time": 10**30}, "element 1: span 0: start time: expected ns since 1970"),
        (
            {"attributes": {"gen_ai.usage.input_tokens": 5.5}},
            "span 0: gen_ai.usage.input_tokens: expected a whole",
        ),
        (
            {"attributes": {"gen_ai.usage.input_tokens": -5}},
            "span 0: gen_ai.usage.input_tokens: expected a whole",
        ),
        ({"attributes": 7}, "span 0: attributes: expected an object or a list"),
        ({"attributes": {}}, "expected spans of calls with gen_ai.usage.input_tokens, found none"),
    ],
)
def test_wrong_spans_are_refused(tmp_path, changes, message):
    path = write(tmp_path, json.dumps({"spans": [span("a", None, 0, 5) | changes]}), "o.json")
    with pytest.raises(ValueError, match=message):
        read(OtelTrace(path=path))
