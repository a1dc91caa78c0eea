"""Trace readers: every format from small files and from the real ones, windows and scaling, every bad row."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from policies.core.request import Segment
from sim.workload.formats import AzureCsv, BailianJsonl, BurstGptCsv, MooncakeJsonl, PlainCsv, VidurCsv
from sim.workload.modified import faster
from sim.workload.traces import Trace

REAL_TRACES = Path(__file__).resolve().parents[3] / ".." / "shared" / "data" / "traces"

PLAIN = "arrival_s,prompt_tokens,output_tokens\n0.5,10,1\n2.5,20,2\n4.5,30,3\n6.5,40,4\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOONCAKE_ROW = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}


def write(folder, text, name="trace.csv"):
    path = folder / name
    path.write_bytes(text.encode())
    return path


def rows_of(workload, max_model_len=10_000):
    """Returns (arrival_s, prompt tokens, output tokens) of each request."""
    source = workload.source(seed=0, max_model_len=max_model_len)
    return [
        (a.request.arrival_s, a.request.prompt.num_tokens, a.num_output_tokens) for a in source.arrivals()
    ]


def mooncake(folder, **changes):
    row = {key: value for key, value in (MOONCAKE_ROW | changes).items() if value is not None}
    return MooncakeJsonl(
        path=write(folder, json.dumps(MOONCAKE_ROW) + "\n" + json.dumps(row) + "\n", "t.jsonl")
    )


def test_reads_plain_csv(tmp_path):
    assert rows_of(PlainCsv(path=write(tmp_path, PLAIN), start_s=0)) == [
        (0.5, 10, 1),
        (2.5, 20, 2),
        (4.5, 30, 3),
        (6.5, 40, 4),
    ]


def test_reads_azure_dates_with_all_seven_digits(tmp_path):
    text = AZURE + (
        "2023-11-16 23:59:59.9799601,374,44\r\n"
        "2023-11-16 23:59:59.9799602,396,109\r\n"
        "2023-11-17 00:00:00.9799601,879,55"
    )
    assert rows_of(AzureCsv(path=write(tmp_path, text))) == [(0.0, 374, 44), (1e-7, 396, 109), (1.0, 879, 55)]


def test_reads_azure_2024_dates_with_a_zone_and_fewer_digits(tmp_path):
    text = AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:02:00+00:00,2399,6\n"
    assert rows_of(AzureCsv(path=write(tmp_path, text))) == [(0.0, 2162, 5), (119.99007, 2399, 6)]


def test_burstgpt_failures_are_skipped_and_counted_within_the_window(tmp_path):
    rows = "5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,0,0,0,API log\n45,GPT-4,1087,0,1087,API log\n"
    path = write(tmp_path, BURSTGPT + rows + "118,ChatGPT,417,276,693,Conversation log\n")
    assert rows_of(BurstGptCsv(path=path)) == [(0.0, 472, 18), (113.0, 417, 276)]
    notes = BurstGptCsv(path=path, start_s=40.0).source(seed=0, max_model_len=9999).notes
    assert notes.skipped == {"failed: no output tokens": 1}


def test_reads_vidur_csv_with_its_further_columns(tmp_path):
    text = "arrived_at,num_prefill_tokens,num_decode_tokens,num_total_tokens\n0.25,100,20,120\n"
    assert rows_of(VidurCsv(path=write(tmp_path, text), start_s=0)) == [(0.25, 100, 20)]


def test_reads_bailian_in_seconds_with_16_tokens_per_hash(tmp_path):
    row = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 13}
    later = row | {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.0, "type": "text", "turn": 2}
    rows = (row | {"hash_ids": [7, 8]}, later | {"hash_ids": [7, 8, 9]})
    path = write(tmp_path, "".join(json.dumps(one) + "\n" for one in rows), "t.jsonl")
    one, other = BailianJsonl(path=path, start_s=0).source(seed=0, max_model_len=999).arrivals()
    assert (one.at_s, other.at_s) == (61.5, 62.0)
    assert one.request.prompt.segments == (Segment(7, 16), Segment(8, 16))
    assert other.request.prompt.segments == (Segment(7, 16), Segment(8, 16), Segment(9, 8))
    path.write_text(json.dumps(row | {"hash_ids": [7], "timestamp": -1}))
    with pytest.raises(ValueError, match=r"t.jsonl:1:40: timestamp: expected a finite number of seconds"):
        rows_of(BailianJsonl(path=path))


def test_reads_mooncake_hashes_as_segments(tmp_path):
    source = mooncake(tmp_path, timestamp=1500, input_length=1024, hash_ids=[7, 4]).source(
        seed=0, max_model_len=10_000
    )
    first, second = (arrival.request for arrival in source.arrivals())
    assert first.prompt.segments == (Segment(7, 512), Segment(8, 512), Segment(9, 76))
    assert second.prompt.segments == (Segment(7, 512), Segment(4, 512))
    assert second.arrival_s == 1.5


def test_a_clipped_prompt_keeps_the_content_of_its_first_tokens(tmp_path):
    source = mooncake(tmp_path).source(seed=0, max_model_len=605)
    prompt = next(source.arrivals()).request.prompt
    assert prompt.num_tokens == 600
    assert prompt.segments == (Segment(7, 512), Segment(8, 88))
    assert source.notes.num_clipped == 2


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("trace.csv.gz", gzip.compress),
        ("trace.csv.zst", zstandard.ZstdCompressor().compress),
        ("trace.csv", lambda data: b"\xef\xbb\xbf" + data),  # a byte order mark, as spreadsheets write it
    ],
)
def test_reads_compressed_files_and_byte_order_marks(tmp_path, name, compress):
    (tmp_path / name).write_bytes(compress(PLAIN.encode()))
    assert len(rows_of(PlainCsv(path=tmp_path / name))) == 4


def test_reads_zstd_files_of_several_frames(tmp_path):
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "t.zst").write_bytes(compress(PLAIN[:50].encode()) + compress(PLAIN[50:].encode()))
    assert len(rows_of(PlainCsv(path=tmp_path / "t.zst"))) == 4


@pytest.mark.parametrize(
    ("name", "compress"), [("t.gz", gzip.compress), ("t.zst", zstandard.ZstdCompressor().compress)]
)
def test_rejects_compressed_files_that_end_early(tmp_path, name, compress):
    rows = "".join(f"{i},{i % 97 + 1},{i * i % 89 + 1}\n" for i in range(50_000))
    data = compress(("arrival_s,prompt_tokens,output_tokens\n" + rows).encode())
    (tmp_path / name).write_bytes(data[: len(data) - 9])
    with pytest.raises(ValueError, match=rf"{name}:\d+:1: expected more compressed data"):
        rows_of(PlainCsv(path=tmp_path / name))


@pytest.mark.parametrize(
    ("name", "message"),
    [("t.gz", "t.gz: is not gzip data, "), ("t.zst", "t.zst:1:1: expected more compressed data, found")],
)
def test_rejects_files_that_are_not_what_their_ending_says(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        rows_of(PlainCsv(path=write(tmp_path, PLAIN, name)))


def test_rejects_text_that_is_not_utf8(tmp_path):
    (tmp_path / "t.csv").write_bytes(PLAIN.encode() + b"7.5,\xff,1\n")
    with pytest.raises(ValueError, match=r"t.csv:\d+:1: expected UTF-8 text"):
        rows_of(PlainCsv(path=tmp_path / "t.csv"))


def test_window_is_in_the_traces_time_and_starts_the_run_at_zero(tmp_path):
    path = write(tmp_path, PLAIN)
    assert rows_of(PlainCsv(path=path, start_s=2.0, duration_s=4.5)) == [(0.5, 20, 2), (2.5, 30, 3)]
    assert rows_of(PlainCsv(path=path, start_s=2.0, max_requests=1)) == [(0.5, 20, 2)]


def test_each_seed_replays_a_window_of_its_own(tmp_path):
    trace = PlainCsv(path=write(tmp_path, PLAIN), start_s=0.5, duration_s=2.0, window_by_seed=True)
    windows = [list(trace.source(seed=seed, max_model_len=99).arrivals()) for seed in (0, 1, 2)]
    prompts = [[(a.request.arrival_s, a.request.prompt.num_tokens) for a in window] for window in windows]
    assert prompts == [[(0.0, 10)], [(0.0, 20)], [(0.0, 30)]]
    with pytest.raises(ValueError, match=r"no request of .* between 8.5 s and 10.5 s"):
        trace.source(seed=4, max_model_len=99)
    with pytest.raises(ValueError, match="window_by_seed=true, duration_s=null: duration_s must be set"):
        PlainCsv(path=trace.path, window_by_seed=True)


def test_load_compresses_the_window(tmp_path):
    trace = PlainCsv(path=write(tmp_path, PLAIN), start_s=2.0)
    quick = faster(trace.source(seed=0, max_model_len=99), 2.0)
    assert [
        (a.request.arrival_s, a.request.prompt.num_tokens, a.num_output_tokens) for a in quick.arrivals()
    ] == [
        (0.25, 20, 2),
        (1.25, 30, 3),
        (2.25, 40, 4),
    ]


def test_what_lies_behind_the_window_is_not_read(tmp_path):
    path = write(tmp_path, PLAIN + "broken")
    assert len(rows_of(PlainCsv(path=path, max_requests=3))) == 3


def test_rejects_a_window_without_requests(tmp_path):
    path = write(tmp_path, PLAIN)
    with pytest.raises(ValueError, match=r"start_s=7: no request of .* between 7 s and 8 s; .* at 6.5 s"):
        rows_of(PlainCsv(path=path, start_s=7.0, duration_s=1.0))


def test_rows_out_of_order_are_refused_with_their_line_or_sorted(tmp_path):
    path = write(tmp_path, PLAIN + "3.5,50,5\n")
    with pytest.raises(ValueError, match=r"trace.csv:6:1: expected an arrival at or after .*6.5.*found 3.5"):
        rows_of(PlainCsv(path=path))
    assert [row[1] for row in rows_of(PlainCsv(path=path, sort=True))] == [10, 20, 50, 30, 40]


def test_sorted_azure_rows_count_from_the_earliest(tmp_path):
    text = AZURE + "2023-11-16 10:00:01.0,11,1\n2023-11-16 09:59:59.0,22,2\n"
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"trace.csv:3:1: expected an arrival at or after"):
        rows_of(AzureCsv(path=path))
    assert rows_of(AzureCsv(path=path, sort=True)) == [(0.0, 22, 2), (2.0, 11, 1)]


@pytest.mark.parametrize(
    ("workload", "text", "message"),
    [
        (PlainCsv, "", r":1:1: expected a header with arrival_s,prompt_tokens,output_tokens, found an empty"),
        (
            PlainCsv,
            "arrival_s,prompt,output_tokens\n",
            r":1:1: no column prompt_tokens; .* found arrival_s,prompt,",
        ),
        (VidurCsv, "num_prefill_tokens,num_decode_tokens\n", r":1:1: no column arrived_at"),
        (BurstGptCsv, "Timestamp,Request tokens\n", r":1:1: no column Response tokens"),
        (PlainCsv, PLAIN[:38], r"trace.csv:2:1: expected at least one request, found none"),
        (PlainCsv, PLAIN + "7.5,5", r":6:6: expected 3 fields .* found 2"),
        (PlainCsv, PLAIN + "7.5,5,6,7\n", r":6:9: expected 3 fields .* found 4"),
        (PlainCsv, PLAIN + "7.5,5x,6\n", r":6:5: prompt_tokens: expected a whole .* from 1 to .* found '5x'"),
        (PlainCsv, PLAIN + "7.5,50,\n", r":6:8: output_tokens: expected a whole number .* found ''"),
        (PlainCsv, PLAIN + "7.5,0,6\n", r":6:5: prompt_tokens: expected .* found '0'"),
        (
            PlainCsv,
            PLAIN + "7.5,99999999999999999999,6\n",
            r":6:5: prompt_tokens: expected .* to 1,000,000,000, found '99999999999999999999'",
        ),
        (PlainCsv, PLAIN + "7.5,5,1000000001\n", r":6:7: output_tokens: expected .* found '1000000001'"),
        (PlainCsv, PLAIN + "7.5,5,-6\n", r":6:7: output_tokens: expected .* found '-6'"),
        (
            PlainCsv,
            PLAIN + "\n\nsoon,5,6\n",
            r":8:1: arrival_s: expected a number of seconds >= 0, at most 1e\+09 after .* found 'soon'",
        ),
        (PlainCsv, PLAIN + "nan,5,6\n", r":6:1: arrival_s: expected .* found 'nan'"),
        (PlainCsv, PLAIN + "-1,5,6\n", r":6:1: arrival_s: expected .* found '-1'"),
        (AzureCsv, AZURE + "16.11.2023 18:15,1,1\n", r":2:1: TIMESTAMP: expected a time such as 2023-"),
        (
            AzureCsv,
            AZURE + "2023-11-16 18:15:61.0,1,1\n",
            r":2:1: TIMESTAMP: .* found '2023-11-16 18:15:61.0'",
        ),
        (AzureCsv, AZURE + "2023-11-16 18:15:01.0,1,0\n", r":2:25: GeneratedTokens: expected .* found '0'"),
        (
            BurstGptCsv,
            BURSTGPT + "5,GPT-4,7,-1,6,x\n",
            r":2:11: Response tokens: expected .* from 0 to .* found '-1'",
        ),
        (BurstGptCsv, BURSTGPT + "5,GPT-4,0,1,6,x\n", r":2:9: Request tokens: .* from 1 to .* found '0'"),
    ],
)
def test_rejects_bad_csv_with_file_line_and_column(tmp_path, workload, text, message):
    with pytest.raises(ValueError, match=message):
        rows_of(workload(path=write(tmp_path, text)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_length": None}, r"t.jsonl:2:1: no key input_length; expected timestamp, input_length"),
        ({"output_length": None}, r"t.jsonl:2:1: no key output_length"),
        (
            {"timestamp": -1},
            r"t.jsonl:2:2: timestamp: expected a finite number of ms >= 0, at most .* found -1",
        ),
        ({"timestamp": "0"}, r"t.jsonl:2:2: timestamp: expected a finite number of ms"),
        ({"timestamp": 10**400}, r"t.jsonl:2:2: timestamp: expected a finite number of ms"),
        (
            {"input_length": 99999999999999999999},
            r"t.jsonl:2:18: input_length: .* to 1,000,000,000, found 99999999999999999999",
        ),
        ({"output_length": 1_000_000_001}, r"output_length: expected .* to 1,000,000,000, found 1000000001"),
        ({"input_length": 0}, r"t.jsonl:2:18: input_length: expected a whole number .* found 0"),
        ({"output_length": 1.5}, r"output_length: expected a whole number .* found 1.5"),
        ({"output_length": True}, r"output_length: expected a whole number .* found True"),
        ({"hash_ids": [1, "a"]}, r"hash_ids: expected a list of whole numbers"),
        (
            {"hash_ids": [1, 2, 3, 4]},
            r"hash_ids: expected at most 3 ids for 1100 tokens, 512 each, found 4 ids",
        ),
    ],
)
def test_rejects_bad_mooncake_rows_with_file_line_and_column(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        rows_of(mooncake(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t.jsonl:1:1: expected JSON lines with timestamp, .* found an empty file"),
        (json.dumps(MOONCAKE_ROW)[:40], r"t.jsonl:1:\d+: expected one JSON object per line"),
        (f'{{"timestamp": {"9" * 5000}}}', r"t.jsonl:1:1: expected one JSON object per line: .* digits"),
        ("[1, 2]\n", r"t.jsonl:1:1: expected a JSON object, found \[1, 2\]"),
    ],
)
def test_rejects_files_that_are_no_json_lines(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        rows_of(MooncakeJsonl(path=write(tmp_path, text, "t.jsonl")))


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    write(tmp_path, PLAIN, "azure_2023.csv")
    with pytest.raises(
        ValueError, match=r"path=.*azure_2032.csv: no such file; did you mean azure_2023.csv\?"
    ):
        PlainCsv(path=tmp_path / "azure_2032.csv")
    with pytest.raises(ValueError, match=r"path=.*x.csv: no such folder .*nowhere"):
        PlainCsv(path=tmp_path / "nowhere" / "x.csv")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_s": -1}, "start_s=-1: must be finite and >= 0 s"),
        ({"duration_s": 0}, "duration_s=0: must be finite and > 0 s"),
        ({"max_requests": 0}, "max_requests=0: must be finite and > 0"),
        ({"patience_s": -5}, "patience_s=-5: must be finite and > 0 s"),
    ],
)
def test_rejects_settings_that_select_nothing(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        PlainCsv(path=write(tmp_path, PLAIN), **settings)


def test_a_format_of_a_user_declares_its_table_and_columns(tmp_path):
    class Unread(Trace):
        pass

    file = tmp_path / "trace.txt"
    file.write_text("1,2,3\n")
    with pytest.raises(ValueError, match=r"^Unread: a format of traces must declare columns and table, as"):
        Unread(path=file)


def test_rejects_mooncake_blocks_without_tokens(tmp_path):
    with pytest.raises(ValueError, match="tokens_per_hash=0: must be finite and > 0"):
        MooncakeJsonl(path=write(tmp_path, "", "t.jsonl"), tokens_per_hash=0)


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="the real traces are not on this machine")
@pytest.mark.parametrize(
    ("workload", "name", "num_requests", "last_s"),
    [
        (AzureCsv, "azure_2023_conv.csv.gz", 19_366, 3501.721937),
        (AzureCsv, "azure_2023_code.csv.gz", 8_819, 3435.948056),
        (MooncakeJsonl, "mooncake_conversation.jsonl.gz", 12_031, 3536.999),
        (MooncakeJsonl, "mooncake_synthetic.jsonl.gz", 3_993, 1022.025),
    ],
)
def test_reads_the_real_traces_whole(workload, name, num_requests, last_s):
    rows = rows_of(workload(path=REAL_TRACES / name), max_model_len=1_000_000)
    assert (len(rows), rows[0][0], rows[-1][0]) == (num_requests, 0.0, last_s)
