"""Drives another project's router: workers that hold each request until they are told to end it.

The router is the program of its package. Behind it are small HTTP servers that say which of them got a
request; in front of it one client. So the loads that the router sees are known at every decision: a request
is sent when the previous one has reached a worker, and an end counts once the router lists it.
"""

import asyncio
import contextlib
import logging
import socket
from functools import partial
from itertools import count

import aiohttp
from aiohttp import web

TIMEOUT_S = 60.0

logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # SGLang's router asks in HTTP/2 first


class Workers:
    """HTTP servers that look like engines; each completion waits until `end`."""

    def __init__(self, num_workers):
        self.urls = []
        self.alive = [True] * num_workers
        self._runners = []
        self._arrived = {}  # request id: future of the worker's index
        self._ended = {}  # request id: event

    async def __aenter__(self):
        for index in range(len(self.alive)):
            app = web.Application()
            told, held = partial(self._told, index), partial(self._held, index)
            app.add_routes(
                [
                    web.get("/{path:.*}", told),
                    web.post("/v1/completions", held),
                    web.post("/v1/completions/render", self._rendered),
                ]
            )
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            listener = socket.create_server(("127.0.0.1", 0))
            await web.SockSite(runner, listener).start()
            self._runners.append(runner)
            self.urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        return self

    async def __aexit__(self, *_):
        for ended in self._ended.values():
            ended.set()
        for runner in self._runners:
            await runner.cleanup()

    def expect(self, request_id):
        """Returns a future of the index of the worker that will get the request."""
        self._ended[request_id] = asyncio.Event()
        self._arrived[request_id] = asyncio.get_running_loop().create_future()
        return self._arrived[request_id]

    def end(self, request_id):
        """Lets the worker answer the request."""
        self._ended.pop(request_id).set()

    async def _told(self, index, request):
        status = 200 if self.alive[index] else 503
        return web.json_response({"model_path": "m", "model_id": "m", "data": [{"id": "m"}]}, status=status)

    async def _rendered(self, request):
        """Tells the tokens of a prompt, one a character: vLLM's router matches tokens, and asks for them."""
        prompt = (await request.json())["prompt"]
        return web.json_response([{"token_ids": [ord(character) for character in prompt]}])

    async def _held(self, index, request):
        request_id = (await request.json())["seed"]
        ended = self._ended[request_id]
        if not self._arrived[request_id].done():
            self._arrived[request_id].set_result(index)
        await ended.wait()
        return web.json_response({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]})


class Router:
    """A running router in front of workers.

    outstanding: the requests that have not ended, by worker. counts_loads: whether the router counts them, as
    it does for policies that compare loads. order: the workers in the order in which the router holds them.
    """

    def __init__(self, url, workers, session, process, log):
        self.workers = workers
        self.outstanding = [0] * len(workers.urls)
        self.counts_loads = True
        self.order = []
        self._url, self._session, self._process, self._log = url, session, process, log
        self._ids = count()
        self._clients = {}  # request id: worker, task of the client

    async def send(self, prompt, headers=None):
        """Sends a prompt; returns the request's id and the worker that got it."""
        request_id = next(self._ids)
        arrived = self.workers.expect(request_id)
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "seed": request_id}
        client = asyncio.create_task(self._complete(body, headers))
        await asyncio.wait({arrived, client}, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        assert arrived.done(), f"{client}\n{self._log.read_text()[-4000:]}"
        worker = arrived.result()
        self._clients[request_id] = worker, client
        self.outstanding[worker] += 1
        return request_id, worker

    async def end(self, request_id):
        """Ends a request; returns when the router no longer counts it."""
        worker, client = self._clients.pop(request_id)
        self.workers.end(request_id)
        await client
        self.outstanding[worker] -= 1
        if self.counts_loads:
            await self.until(lambda listed: listed[worker]["load"] == self.outstanding[worker])

    async def end_all(self):
        """Ends all requests."""
        for request_id in [*self._clients]:
            await self.end(request_id)

    async def until(self, is_so):
        """Waits until the router's list of its workers, in our order, is as asked."""
        deadline_s = asyncio.get_running_loop().time() + TIMEOUT_S
        while not is_so(await self.listed()):
            assert asyncio.get_running_loop().time() < deadline_s, await self.listed()
            await asyncio.sleep(0.001)

    async def listed(self):
        """Returns what the router lists of each worker; None for one that it does not have."""
        async with self._session.get(f"{self._url}/workers") as reply:
            found = {each["url"]: each for each in (await reply.json())["workers"]}
        self.order = [self.workers.urls.index(url) for url in found]
        return [found.get(url) for url in self.workers.urls]

    async def _complete(self, body, headers):
        async with self._session.post(
            f"{self._url}/v1/completions", json=body, headers=headers or {}
        ) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()


@contextlib.asynccontextmanager
async def running(program, words, num_workers, log):
    """Runs a router in front of so many workers until the end of the block."""
    async with Workers(num_workers) as workers:
        ports = [free_port(), free_port()]
        command = [program, *words, "--host", "127.0.0.1", "--port", str(ports[0])]
        command += ["--prometheus-port", str(ports[1])]
        command += ["--worker-urls", *workers.urls]
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        with log.open("w") as file:
            process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
        try:
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                router = Router(f"http://127.0.0.1:{ports[0]}", workers, session, process, log)
                await until_it_serves(router, process, log)
                yield router
                await router.end_all()
                assert sum(router.outstanding) == 0
        finally:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def until_it_serves(router, process, log):
    """Waits until the router lists all workers as healthy."""
    for _ in range(600):
        assert process.returncode is None, log.read_text()[-4000:]
        try:
            if all(each is not None and each["is_healthy"] for each in await router.listed()):
                return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError(log.read_text()[-4000:])


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
