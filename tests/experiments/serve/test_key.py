"""The key of a server is asked for, and is in no file and no answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import urllib.error
import urllib.request

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from experiments.app import cli
from tests.worlds.serving import complete, get, serving

KEY = "s3cret-of-a-test"


def test_a_server_with_a_key_asks_for_it():
    async def ask() -> None:
        async with serving(api_key=KEY) as client:
            right = {"headers": {"Authorization": f"Bearer {KEY}"}}
            assert (await complete(client))[0] == 401
            assert (await complete(client, headers={"Authorization": "Bearer \x85\udcff"}))[0] == 401
            assert (await complete(client, **right))[0] == 200
            assert (await get(client, "/health"))[0] == 200

    asyncio.run(ask())


def test_the_key_is_in_no_file_of_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WINDTUNNEL_API_KEY", "")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = threading.Thread(target=use_and_stop, args=(f"http://127.0.0.1:{port}",))
    client.start()
    code = cli.main(["serve", "--api-key", KEY, f"port={port}", "output.report=false", "time_scale=100"])
    client.join()
    assert code == 0
    assert os.environ["WINDTUNNEL_API_KEY"] == KEY
    assert KEY not in capsys.readouterr().out
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert "config.yaml" in {file.name for file in files}
    assert all(KEY.encode() not in file.read_bytes() for file in files)


def use_and_stop(url: str) -> None:
    """Sends one request to a server as soon as it listens, then ends it with SIGTERM."""
    body = json.dumps({"prompt": "hello"}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    for _ in range(1000):
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                assert response.status == 200
                break
        except urllib.error.URLError:
            threading.Event().wait(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
