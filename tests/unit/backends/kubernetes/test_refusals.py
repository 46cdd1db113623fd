# SPDX-License-Identifier: Apache-2.0
"""What the API server's refusals mean."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from agentsandbox.backends.kubernetes.refusals import error_of, retry_after
from agentsandbox.errors import (
    ApiUnavailable,
    Conflict,
    InvalidObject,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Throttled,
)

FACTS = json.loads((Path(__file__).parent / "facts" / "api.json").read_text())["cases"]


def status(code, reason, message):
    """A Status as servers send it."""
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message, "details": {}}


@pytest.mark.parametrize(
    ("case", "error", "reason"),
    [
        ("create_already_exists", Conflict, "AlreadyExists"),
        ("get_not_found", NotFound, "NotFound"),
        ("invalid_pod", InvalidObject, "Invalid"),
        ("patch_immutable_field", InvalidObject, "Invalid"),
        ("delete_wrong_uid", Conflict, "Conflict"),
        ("patch_wrong_resource_version", Conflict, "Conflict"),
    ],
)
def test_recorded_refusals_become_the_right_error(case, error, reason):
    """Each refusal that a real server was seen to give has its error, with the server's own words."""
    fact = FACTS[case]

    judged = error_of(fact["status"], json.dumps(fact["body"]).encode(), fact["headers"])

    assert (type(judged), judged.reason, judged.status) == (error, reason, fact["status"])
    assert str(judged) == fact["body"]["message"]


def test_every_recorded_refusal_is_judged():
    """The table above leaves no recorded refusal out."""
    assert sorted(FACTS) == [
        "create_already_exists",
        "delete_wrong_uid",
        "get_not_found",
        "invalid_pod",
        "patch_immutable_field",
        "patch_wrong_resource_version",
    ]


@pytest.mark.parametrize(
    ("code", "reason", "message", "error", "retryable"),
    [
        (401, "Unauthorized", "Unauthorized", PermissionDenied, False),
        (403, "Forbidden", 'pods is forbidden: User "u" cannot create resource "pods"', PermissionDenied, False),
        (403, "Forbidden", 'pods "a" is forbidden: exceeded quota: sandboxes, requested: pods=1', QuotaExceeded, True),
        (403, "Forbidden", 'admission webhook "policy.example" denied the request: no', PermissionDenied, False),
        (403, "Forbidden", 'pods "a" is forbidden: violates PodSecurity "restricted:latest"', PermissionDenied, False),
        (400, "BadRequest", "container nope is not valid for pod x1", InvalidObject, False),
        (410, "Expired", "too old resource version: 5 (900)", Conflict, True),
        (429, "TooManyRequests", "too many requests", Throttled, True),
        (500, "InternalError", "etcdserver: request timed out", ApiUnavailable, True),
        (503, "ServiceUnavailable", "apiserver not ready", ApiUnavailable, True),
        (504, "Timeout", "request did not complete", ApiUnavailable, True),
    ],
)
def test_p48_refusals_are_told_apart(code, reason, message, error, retryable):
    """A quota and a throttle pass; a missing permission, a wrong object and an admission's denial do not."""
    judged = error_of(code, status(code, reason, message), {})

    assert (type(judged), judged.retryable, str(judged)) == (error, retryable, message)


def test_server_error_leaves_a_write_ambiguous_and_a_read_not():
    """After a 5xx nobody knows whether the write happened; a read has nothing to be unsure of."""
    assert error_of(500, b"", {}, write=True).ambiguous is True
    assert error_of(500, b"", {}, write=False).ambiguous is False


def test_text_that_is_no_status_is_cut():
    """A proxy's HTML page gives at most 256 characters to a message, and an empty answer gives the status."""
    assert len(str(error_of(502, b"<html>" + b"x" * 9999, {}))) == 256
    assert str(error_of(502, b"", {})) == "HTTP status 502"
    assert str(error_of(500, b'container not found ("sandbox")\n', {})) == 'container not found ("sandbox")'


@pytest.mark.parametrize(
    ("headers", "details", "seconds"),
    [
        ({"Retry-After": "7"}, None, 7.0),
        ({"retry-after": "1.5"}, None, 1.5),
        ({"Retry-After": "Sun, 29 Nov 2026 12:00:30 GMT", "Date": "Sun, 29 Nov 2026 12:00:00 GMT"}, None, 30.0),
        ({"Retry-After": "Sun, 29 Nov 2026 11:00:00 GMT", "Date": "Sun, 29 Nov 2026 12:00:00 GMT"}, None, 0.0),
        ({"Retry-After": "Sun, 29 Nov 2026 12:00:30 GMT", "date": "garbage"}, None, None),
        ({"Retry-After": "soon"}, None, None),
        ({"Retry-After": "inf"}, None, None),
        ({"Retry-After": "-5"}, None, None),
        ({}, {"retryAfterSeconds": 3}, 3.0),
        ({}, {}, None),
    ],
)
def test_p40_retry_after_is_seconds_or_a_date(headers, details, seconds):
    """Both forms of the header count, a date by the server's own clock, and nonsense counts as nothing."""
    assert retry_after(headers, details) == seconds


def test_p40_retry_after_date_without_a_server_date_is_compared_with_our_clock():
    """Without a Date header there is only our own clock."""
    seconds = retry_after({"Retry-After": formatdate(time.time() + 100, usegmt=True)})

    assert 90 < seconds <= 101
