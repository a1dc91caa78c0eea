"""Names and paths of clients are data: none is opened or executed, and none breaks what others read."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from aiohttp import FormData
from prometheus_client.parser import text_string_to_metric_families

from experiments.serve.http import fields as http_fields
from tests.experiments.serve.test_fuzz import CONTROLS, GETS, JSON_ROUTES
from tests.worlds.serving import complete, get, post, served, streamed

CANARY = "/canary_of_a_path"
HOSTILE = [
    'a"} 1\nvllm:num_requests_running{engine="9"} 77\n',
    "back\\slash\\n",
    "<script>alert(1)</script>",
    "a\r\nSet-Cookie: x=1",
    "\u2028\u202e\x1b[31m",
    "{{ 7 * 7 }}",
]
_watched: list[tuple[str, str]] = []
_is_watching = False


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _is_watching and event in WATCHED and CANARY in repr(arguments):
        _watched.append((event, repr(arguments)[:200]))


WATCHED = {
    *(
        "open",
        "os.listdir",
        "os.scandir",
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.chmod",
        "shutil.copyfile",
    ),
    *("exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "glob.glob"),
    *("socket.connect", "socket.getaddrinfo", "pickle.find_class", "ctypes.dlopen", "tempfile.mkstemp"),
}
"""Events of Python's audit hooks by which a path or a code of a request would be used."""


def with_canary(value):
    """Returns a body whose texts are the path, but for the choices without which a body is refused."""
    if isinstance(value, dict):
        return {name: each if name in ("role", "type") else with_canary(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_canary(each) for each in value]
    return CANARY if isinstance(value, str) else value


def test_no_route_opens_or_executes_what_a_request_names():
    sys.addaudithook(_watch)

    async def test(client):
        global _is_watching
        _is_watching = True
        with pytest.raises(OSError, match=CANARY):
            Path(CANARY).read_text()
        assert _watched, "the hook sees files"
        _watched.clear()
        for path, fields in JSON_ROUTES.items():
            body = {**fields, "chat_template": CANARY, "guided_json": CANARY, "file": CANARY}
            for one in (
                with_canary(body),
                {**with_canary(body), "model": None, "endpoint": "/v1/completions"},
            ):
                await client.post(path, json=one, headers={"X-Request-Id": CANARY, "X-Fault": CANARY})
        body = {"lora_name": "sql", "lora_path": CANARY}
        assert (await post(client, "/v1/load_lora_adapter", body))[0] == 200
        for path in (*GETS, *CONTROLS):
            await client.get(f"{path}?path={CANARY}&after={CANARY}&tags={CANARY}")
            await client.get(f"{path.rstrip('/')}/..%2f..{CANARY}")
            await client.get(f"{path.rstrip('/')}{CANARY}")
            await client.post(f"{path}?level={CANARY}")
        form = FormData()
        form.add_field("file", b'{"custom_id": "a"}', filename=CANARY)
        form.add_field("purpose", "batch")
        async with client.post("/v1/files", data=form) as response:
            uploaded = await response.json()
        assert uploaded["filename"].endswith(CANARY.strip("/"))
        for path in (f"/v1/files/{uploaded['id']}/content", f"/v1/files/{CANARY}", f"/v1/batches/{CANARY}"):
            await client.get(path)
        _is_watching = False
        assert (await complete(client))[0] == 200

    served(test, "adapters=fixed_slots", "serve.faults=true")
    assert _watched == []


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_of_an_adapter_breaks_neither_metrics_nor_models(name):
    async def test(client):
        assert (await post(client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "x"}))[0] == 200
        models = (await get(client, "/v1/models"))[1]["data"]
        assert [model["id"] for model in models][1:] == [name]
        stream = streamed(client, model=name, max_tokens=5000, ignore_eos=True)
        assert (await anext(stream))["model"] == name
        text = (await get(client, "/metrics"))[1]
        families = {family.name: family for family in text_string_to_metric_families(text)}
        adapters = [
            each.labels["running_lora_adapters"] for each in families["vllm:lora_requests_info"].samples
        ]
        assert adapters == [name]
        assert len(families["vllm:num_requests_running"].samples) == 1
        await stream.aclose()

    served(test, "adapters=fixed_slots", "time_scale=1")


def test_an_unknown_field_is_ignored_with_a_warning_once(caplog, monkeypatch):
    monkeypatch.setattr(http_fields, "_known_to_be_ignored", set())

    async def test(client):
        for _ in range(3):
            assert (await complete(client, banana=1, cherry=2))[0] == 200

    served(test)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [sum(repr(name) in each for each in warnings) for name in ("banana", "cherry")] == [1, 1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_log_line_stays_one_line(name, caplog):
    caplog.set_level("DEBUG")

    async def test(client):
        await complete(client, **{name: 1}, user=name, request_id=name, model=None)
        await complete(client, model=name)
        await get(client, f"/{json.dumps(name)}")

    served(test)
    assert not any(re.search(r"[\r\n\x1b\u2028\u202e]", record.getMessage()) for record in caplog.records)
