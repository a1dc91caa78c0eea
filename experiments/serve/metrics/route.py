"""The route /metrics."""

from __future__ import annotations

import asyncio

from aiohttp import web

from experiments.serve.metrics.exposition import CONTENT_TYPE, ServingMetrics


def add_metrics_route(app: web.Application, metrics: ServingMetrics) -> None:
    """Adds /metrics to an application."""

    async def show(request: web.Request) -> web.StreamResponse:
        parts = []
        for part in metrics.parts():
            parts.append(part)
            await asyncio.sleep(0)
        return web.Response(body=b"".join(parts), headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/metrics", show)
