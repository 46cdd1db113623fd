# SPDX-License-Identifier: Apache-2.0
"""What a refusal, a server error or a broken connection means: answers of the API server as this library's errors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    Conflict,
    InfrastructureError,
    InvalidObject,
    NotFound,
    PermissionDenied,
    ProtocolError,
    QuotaExceeded,
    Throttled,
)

__all__ = ["connection_errors", "error_of", "handshake_error", "retry_after", "status_of", "unavailable"]

_TEXT_LIMIT = 256


def retry_after(headers: Mapping[str, str], details: Mapping[str, Any] | None = None) -> float | None:
    """
    Return how long the server asks to wait, in seconds.

    Args:
        headers: Of the answer. ``Retry-After`` is a number of seconds or a date; a date is compared with the server's
            own ``Date``, so that the two clocks may differ.
        details: Of the answer's Status, whose ``retryAfterSeconds`` counts if there is no header.

    """
    lower = {name.lower(): value for name, value in headers.items()}
    text = lower.get("retry-after", "").strip()
    if not text:
        seconds = (details or {}).get("retryAfterSeconds")
        return float(seconds) if isinstance(seconds, int | float) and seconds > 0 else None
    if text.replace(".", "", 1).isdigit():
        return float(text)
    try:
        until = parsedate_to_datetime(text).timestamp()
        now = parsedate_to_datetime(lower["date"]).timestamp() if "date" in lower else time.time()
    except ValueError:
        return None
    return max(0.0, until - now)


def error_of(
    status: int, body: bytes | str | Mapping[str, Any], headers: Mapping[str, str], *, write: bool = False
) -> InfrastructureError:
    """
    Turn a refusal of the API server into the error to raise.

    Args:
        status: The HTTP status, or the code of an ``ERROR`` event.
        body: What it said: a Status, or text.
        headers: Of the answer.
        write: Whether the call would have changed something, so that a server error leaves the outcome unknown.

    """
    said = status_of(body)
    message = str(said.get("message") or "") or f"HTTP status {status}"
    reason = str(said.get("reason") or "")
    details = said.get("details")
    wait = retry_after(headers, details if isinstance(details, Mapping) else None)
    if status == 403 and "exceeded quota" in message:
        return QuotaExceeded(message)
    if status in (401, 403):
        return PermissionDenied(message, status=status, reason=reason)
    if status == 404:
        return NotFound(message, status=status, reason=reason)
    if status in (409, 410):
        return Conflict(message, status=status, reason=reason or ("Expired" if status == 410 else "Conflict"))
    if status == 429:
        return Throttled(message, retry_after=wait, status=status, reason=reason)
    if 400 <= status < 500 and status != 408:
        return InvalidObject(message, status=status, reason=reason)
    return ApiUnavailable(message, retry_after=wait, ambiguous=write, status=status, reason=reason)


def handshake_error(
    status: int, body: bytes | str, headers: Mapping[str, str], *, protocols: Sequence[str]
) -> InfrastructureError:
    """
    Turn the refusal of a websocket handshake into the error to raise: nothing was started.

    Args:
        status: The HTTP status.
        body: What the server said.
        headers: Of the answer.
        protocols: What was offered.

    """
    if status < 300:
        return ProtocolError(f"websocket handshake: HTTP status {status}")
    if status == 403 and not body.strip():
        # Seen when no protocol is shared; whoever lacks a permission is told so in words.
        return InvalidObject(f"the server speaks none of {', '.join(protocols)}", status=403)
    return error_of(status, body, headers)


def status_of(body: bytes | str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the Status in an answer; text that is none becomes the ``message`` of one, cut to 256 characters."""
    if isinstance(body, Mapping):
        return body
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if isinstance(said, dict) and said.get("message"):
        return said
    return {"message": " ".join(text.split())[:_TEXT_LIMIT]}


def connection_errors() -> tuple[type[Exception], ...]:
    """Return what a request or a read of an answer raises when the connection is to blame."""
    import aiohttp

    return (aiohttp.ClientError, TimeoutError, OSError)


def unavailable(error: Exception, *, write: bool) -> InfrastructureError | ConfigurationError:
    """
    Judge what went wrong below HTTP. The text is ours, because aiohttp's may quote the whole URL.

    Args:
        error: One of :func:`connection_errors`.
        write: Whether the call would have changed something, so that its outcome is unknown once it was sent.

    """
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return ConfigurationError(
            f"the certificate of {error.host}:{error.port} is not trusted: {error.certificate_error}"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        # Nothing was sent, so nothing can have happened.
        return ApiUnavailable(f"cannot connect to {error.host}:{error.port}: {error.strerror or error.os_error}")
    if isinstance(error, aiohttp.ServerTimeoutError) and "onnection timeout" in str(error):
        return ApiUnavailable("no connection in time")
    if isinstance(error, TimeoutError):
        return ApiUnavailable("no answer in time", ambiguous=write)
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return ApiUnavailable(f"the proxy refuses: HTTP status {error.status}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return ApiUnavailable("the server closed the connection without an answer", ambiguous=write)
    text = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return ApiUnavailable(f"the connection broke ({type(error).__name__}{text})", ambiguous=write)
