"""The route /metrics."""

from __future__ import annotations

from aiohttp import web

from experiments.serve.metrics.exposition import CONTENT_TYPE, ServingMetrics


def add_metrics_route(app: web.Application, metrics: ServingMetrics) -> None:
    """Adds /metrics to an application."""

    async def show(request: web.Request) -> web.StreamResponse:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/metrics", show)
