"""Requests to a server that are tried again: a server that restarts does not end a run of hours."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential_jitter,
)

logger = logging.getLogger(__name__)

ATTEMPTS = 7  # with the waits between them about half a minute
LONGEST_WAIT = 10.0
RETRY_BYTES = 64 << 20
BUSY = (502, 503, 504)
# Nothing was sent yet, so any request may be made again.
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)
# The server may have done it. Reading is harmless, and points are written under ids of their own.
BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)

# The same by gRPC: reading, and writing or deleting points.
HARMLESS = {
    "qdrant.Points": (
        "Upsert Delete CreateFieldIndex Get Scroll Count Query QueryBatch QueryGroups Search SearchBatch"
    ).split(),
    "qdrant.Collections": "Get List ListAliases ListCollectionAliases CollectionExists".split(),
}


class _BusyError(Exception):
    """An answer that says to come back later."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response


class RetryingTransport(httpx.BaseTransport):
    """An HTTP transport that waits and tries again, once `patient`.

    A connection that cannot be opened is tried again for any request; one that breaks, or an answer of
    502 to 504, only for requests that do no harm twice: reading, and writing or deleting points.
    """

    def __init__(self, inner: httpx.BaseTransport | None = None, first_wait: float = 0.5) -> None:
        self.inner = inner or httpx.HTTPTransport()
        self.patient = False
        self.first_wait = first_wait

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One request, with the answer of the last attempt."""
        if not self.patient:
            return self.inner.handle_request(request)
        harmless = request.method == "GET" or "/points" in request.url.path
        again = Retrying(
            retry=retry_if_exception(
                lambda error: isinstance(error, UNSENT + (BROKEN + (_BusyError,) if harmless else ()))
            ),
            wait=wait_exponential_jitter(initial=self.first_wait, max=LONGEST_WAIT),
            stop=stop_after_attempt(ATTEMPTS),
            before_sleep=_note,
            reraise=True,
        )
        try:
            return again(self._send, request, harmless)
        except _BusyError as error:
            return error.response

    def _send(self, request: httpx.Request, harmless: bool) -> httpx.Response:
        response = self.inner.handle_request(request)
        if harmless and response.status_code in BUSY:
            response.read()
            raise _BusyError(response)
        return response

    def close(self) -> None:
        """Close the connections."""
        self.inner.close()


def grpc_options(first_wait: float = 2.0) -> dict[str, Any]:
    """Options of a gRPC channel that waits and tries again; gRPC does both by itself.

    A call waits for a connection until its time is up, as nothing was sent yet. One that breaks
    (UNAVAILABLE) is made again, with growing pauses, when it does no harm twice. The health check, which
    is the first call, does neither: a wrong address fails at once.
    """
    harmless = [
        {"service": service, "method": method} for service in HARMLESS for method in HARMLESS[service]
    ]
    again = {
        "maxAttempts": 5,  # gRPC allows no more
        "initialBackoff": f"{first_wait:g}s",
        "maxBackoff": f"{LONGEST_WAIT:g}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = {
        "methodConfig": [
            {"name": harmless, "waitForReady": True, "retryPolicy": again},
            {"name": [{"service": service} for service in HARMLESS], "waitForReady": True},
        ]
    }
    return {
        "grpc.service_config": json.dumps(config),
        "grpc.enable_retries": 1,
        # What is to be sent again is kept meanwhile; by default no more than 256 KiB, less than a batch.
        "grpc.per_rpc_retry_buffer_size": RETRY_BYTES,
        "grpc.max_reconnect_backoff_ms": 2000,
    }


def _note(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    wait = state.next_action.sleep if state.next_action else 0
    said = f"status {error.response.status_code}" if isinstance(error, _BusyError) else error
    logger.warning("Qdrant does not answer (%s); trying again in %.1f s", said, wait)
