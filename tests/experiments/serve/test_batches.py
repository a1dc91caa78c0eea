"""/v1/files and /v1/batches: requests of files run as the batch class, and their outcomes are files again."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from experiments.serve.batches.batch import MAX_LINES, read_lines
from experiments.serve.batches.routes import window_of
from experiments.serve.batches.runner import CONCURRENCY
from experiments.serve.batches.store import FileStore
from experiments.serve.errors import ApiError
from experiments.serve.server import Stop
from tests.worlds.serving import complete, get, make_app, make_job, post, served, served_before_it_is_late

COMPLETIONS = "/v1/completions"


def line(custom_id, url=COMPLETIONS, method="POST", **body):
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True} | body
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


async def upload(client, text, purpose="batch"):
    form = aiohttp.FormData()
    form.add_field("purpose", purpose)
    form.add_field("file", text.encode(), filename="../../etc/passwd", content_type="application/jsonl")
    async with client.post("/v1/files", data=form) as response:
        return response.status, await response.json()


async def content(client, file_id):
    async with client.get(f"/v1/files/{file_id}/content") as response:
        return [json.loads(text) for text in (await response.text()).splitlines()]


async def create(client, text, **fields):
    status, file = await upload(client, text)
    assert status == 200
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"} | fields
    return await post(client, "/v1/batches", body)


async def ended(client, batch):
    while batch["status"] in ("validating", "in_progress", "finalizing", "cancelling"):
        await asyncio.sleep(0.02)
        batch = (await get(client, f"/v1/batches/{batch['id']}"))[1]
    return batch


def test_outcomes_are_in_the_order_of_the_input_and_errors_in_a_file_of_their_own():
    async def test(client):
        text = "\n".join(
            [line("a", seed=1), line("b", temperature=-1), line("c", seed=2, n=2), line("d", model="x")]
        )
        status, batch = await create(client, text, metadata={"job": "nightly"})
        assert (status, batch["metadata"]) == (200, {"job": "nightly"})
        batch = await ended(client, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
        good = await content(client, batch["output_file_id"])
        bad = await content(client, batch["error_file_id"])
        assert [row["custom_id"] for row in good] == ["a", "c"]
        assert [(row["custom_id"], row["response"]["status_code"]) for row in bad] == [("b", 400), ("d", 404)]
        alone = (await complete(client, "hello", max_tokens=5, ignore_eos=True, seed=1))[1]
        assert good[0]["response"]["body"]["choices"] == alone["choices"]
        assert len(good[1]["response"]["body"]["choices"]) == 2

    served(test)


def test_chats_run_in_batches():
    async def test(client):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        batch = (await create(client, json.dumps(row), endpoint="/v1/chat/completions"))[1]
        batch = await ended(client, batch)
        (found,) = await content(client, batch["output_file_id"])
        assert found["response"]["body"]["choices"][0]["message"]["role"] == "assistant"

    served(test)


async def until_completed(client, batch, number):
    while batch["request_counts"]["completed"] < number:
        await asyncio.sleep(0.01)
        batch = (await get(client, f"/v1/batches/{batch['id']}"))[1]


def test_cancelled_batch_keeps_what_it_has():
    async def test(client):
        text = "\n".join(line(str(i), max_tokens=100_000 if i else 5) for i in range(3))
        batch = (await create(client, text))[1]
        await until_completed(client, batch, 1)
        status, cancelled = await post(client, f"/v1/batches/{batch['id']}/cancel", None)
        assert (status, cancelled["status"]) == (200, "cancelling")
        batch = await ended(client, batch)
        assert batch["status"] == "cancelled"
        assert [row["custom_id"] for row in await content(client, batch["output_file_id"])] == ["0"]
        rows = await content(client, batch["error_file_id"])
        assert [row["error"]["code"] for row in rows] == ["batch_cancelled"] * 2
        assert (await post(client, f"/v1/batches/{batch['id']}/cancel", None))[0] == 409

    served(test)


def test_batch_expires_after_its_window():
    async def test(client):
        batch = (await create(client, line("a", max_tokens=100_000), completion_window="1s"))[1]
        batch = await ended(client, batch)
        assert batch["status"] == "expired"
        (row,) = await content(client, batch["error_file_id"])
        assert row["error"]["code"] == "batch_expired"

    served(test)


def test_files_are_listed_and_deleted_and_their_names_are_only_names():
    async def test(client):
        status, file = await upload(client, line("a"))
        assert (status, file["bytes"]) == (200, len(line("a")))
        assert [each["id"] for each in (await get(client, "/v1/files"))[1]["data"]] == [file["id"]]
        async with client.delete(f"/v1/files/{file['id']}") as response:
            assert (await response.json())["deleted"]
        assert (await get(client, f"/v1/files/{file['id']}"))[0] == 404
        assert (await get(client, "/v1/files/..%2f..%2fetc%2fpasswd/content"))[0] == 404

    served(test)


BAD = {
    "endpoint": ({"endpoint": "/v1/embeddings"}, 400),
    "window": ({"completion_window": "yesterday"}, 400),
    "file": ({"input_file_id": "file-none"}, 404),
    "metadata": ({"metadata": {"a": 5}}, 400),
}


@pytest.mark.parametrize(("fields", "status"), BAD.values(), ids=BAD)
def test_bad_batch_is_refused(fields, status):
    async def test(client):
        found, body = await create(client, line("a"), **fields)
        assert (found, body["error"]["code"]) == (status, status)
        assert (await upload(client, "x", purpose="fine-tune"))[0] == 400
        assert (await post(client, "/v1/files", {"file": "x"}))[0] == 400
        assert (await get(client, "/v1/batches?limit=0"))[0] == 400

    served(test)


LINES = {
    "json": ("{", "invalid_json_line"),
    "list": ("[]", "invalid_json_line"),
    "no id": (line(None), "invalid_custom_id"),
    "method": (line("a", method="GET"), "invalid_method"),
    "url": (line("a", url="/v1/chat/completions"), "mismatched_url"),
    "twice": (line("a") + "\n" + line("a"), "duplicate_custom_id"),
    "nothing": ("\n\n", "empty_file"),
    "deep": ("[" * 100_000, "invalid_json_line"),
}


@pytest.mark.parametrize(("text", "code"), LINES.values(), ids=LINES)
def test_wrong_line_is_named(text, code):
    _, errors = read_lines(text.encode(), COMPLETIONS)
    assert [each.code for each in errors] == [code]
    assert errors[0].line in (1, 2, None)


def test_batch_of_wrong_lines_fails_as_a_whole():
    async def test(client):
        batch = await ended(client, (await create(client, line("a") + "\n{"))[1])
        assert batch["status"] == "failed"
        assert [error["line"] for error in batch["errors"]["data"]] == [2]

    served(test)


def test_store_has_a_limit():
    store = FileStore(max_bytes=10)
    kept = store.add(b"12345", "a", "batch")
    with pytest.raises(ApiError, match="room for 10 bytes"):
        store.add(b"123456", "b", "batch")
    store.delete(kept.file_id)
    store.add(b"1234567890", "c", "batch")


def test_a_batch_waits_while_no_replica_serves():
    async def test(client):
        assert (await complete(client))[0] == 503
        batch = await ended(client, (await create(client, line("a")))[1])
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

    crash = ("failures=crash", "failures.events.0.at_s=0", "failures.events.0.duration_s=10")
    served_before_it_is_late(test, *crash)


def test_online_requests_go_before_a_batch():
    """With one sequence at a time, an online request overtakes a batch that has 25 s of work."""

    async def test(client):
        text = "\n".join(line(f"r{i}", max_tokens=400) for i in range(200))
        batch = (await create(client, text, completion_window="2h"))[1]
        await until_completed(client, batch, 1)
        assert (await complete(client))[0] == 200
        batch = (await get(client, f"/v1/batches/{batch['id']}"))[1]
        assert batch["request_counts"]["completed"] < 200
        assert (await post(client, f"/v1/batches/{batch['id']}/cancel", None))[0] == 200
        await ended(client, batch)

    served(test, "scheduling=online_batch", "engine.max_num_seqs=1")


FORMS = {
    "empty": (b"", "multipart/form-data; boundary=x"),
    "no boundary": (b"nonsense", "multipart/form-data"),
    "half a part": (
        b"--x\r\nContent-Disposition: form-data; name=file\r\n\r\nhalf",
        "multipart/form-data; boundary=x",
    ),
    "no header": (b"--x\r\n\r\n\xff", "multipart/form-data; boundary=x"),
    "no form": (b"file=a&purpose=batch", "application/x-www-form-urlencoded"),
}


@pytest.mark.parametrize(("data", "kind"), FORMS.values(), ids=FORMS)
def test_a_malformed_upload_is_an_error_of_the_client(data, kind):
    async def test(client):
        async with client.post("/v1/files", data=data, headers={"Content-Type": kind}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, 400)

    served(test)


@pytest.mark.parametrize(
    ("text", "seconds"), [("24h", 86400), ("90s", 90), ("30m", 1800), ("30d", 2_592_000)]
)
def test_windows_are_read_in_their_units(text, seconds):
    assert window_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "24", "0h", "-1h", "1.5h", "31d", "1e3s", "24h ", "999999999d", "\u0664h"]
)
def test_rejects_a_window_without_a_whole_number_and_unit(text):
    with pytest.raises(ApiError, match="completion_window"):
        window_of(text)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_any_file_is_read_or_has_mistakes(content):
    lines, errors = read_lines(content, COMPLETIONS)
    assert lines or errors


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, unique=True, max_size=20))
def test_right_files_are_read_in_order(ids):
    lines, errors = read_lines("\n".join(map(line, ids)).encode(), COMPLETIONS)
    assert not errors
    assert [each.custom_id for each in lines] == ids


def test_a_batch_has_a_limit_of_requests():
    text = "\n".join(line(str(i)) for i in range(MAX_LINES + 1))
    assert [each.code for each in read_lines(text.encode(), COMPLETIONS)[1]] == ["too_many_requests"]


def test_a_draining_server_begins_no_more_requests_of_a_batch():
    async def run():
        job, stop = make_job("engine.max_num_seqs=4"), Stop()
        fleet = job.fleet()
        fleet.driver.start()
        async with TestClient(TestServer(make_app(job, fleet, stop=stop))) as client:
            text = "\n".join(line(f"r{i}", max_tokens=100) for i in range(1000))
            await create(client, text)
            while fleet.num_in_progress < CONCURRENCY:
                await asyncio.sleep(0.001)
            stop.set()
            while fleet.num_in_progress:
                await asyncio.sleep(0.001)
        fleet.driver.stop()
        assert len(fleet.simulation.close().requests) < 500

    asyncio.run(run())
