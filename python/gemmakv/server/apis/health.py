"""The routes for operators and their programs: health and metrics."""

from __future__ import annotations

from pydantic import BaseModel, Field
from starlette.responses import Response

from gemmakv.server.apis.call import CallDep, JsonResponse, loading
from gemmakv.server.apis.kept import history_of
from gemmakv.server.apis.routing import OPEN, router
from gemmakv.server.service.errors import RequestError

ROUTER = router(**OPEN)
METRICS = router()


class Health(BaseModel):
    status: str = "ok"
    warnings: list[str] = Field(
        [], description="What fails while requests are served."
    )


@ROUTER.get(
    "/health", response_model=Health, summary="Whether requests are served"
)
@ROUTER.get(
    "/health/ready",
    response_model=Health,
    summary="Whether requests are served",
)
async def health(call: CallDep) -> Response:
    service = call.running
    if service is None:
        raise loading()
    if service.admission.draining:
        raise RequestError(503, "the server stops", code="server_stopping")
    # A server that needs another start is not ready: `health` raises. What may
    # pass is only a warning: other servers have the same folder, and requests
    # without a session are answered.
    history = history_of(service)
    warnings: list[str] = []
    if history is not None:
        warnings = await service.threads.run_waiting(history.health)
    found = {"status": "ok", **({"warnings": warnings} if warnings else {})}
    return JsonResponse(found)


@ROUTER.get(
    "/health/live", response_model=Health, summary="Whether the process runs"
)
async def live() -> Response:
    return JsonResponse({"status": "ok"})


@METRICS.get("/metrics", summary="Metrics for Prometheus")
async def metrics(call: CallDep) -> Response:
    accept = call.headers.get("accept", "")
    text, kind = call.service.counts.metrics_text(accept)
    return Response(text, headers={"content-type": kind})
