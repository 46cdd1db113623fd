# SPDX-License-Identifier: Apache-2.0
"""Refusals in the words of a real API server."""

from __future__ import annotations

from typing import Any

__all__ = [
    "Json",
    "Refusal",
    "already_exists",
    "bad_request",
    "expired",
    "forbidden",
    "immutable",
    "internal",
    "invalid",
    "modified",
    "not_found",
    "precondition_failed",
]

Json = dict[str, Any]


class Refusal(Exception):
    """An answer that is no success: a Status with its HTTP code."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Json | None = None,
        *,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.headers = headers or {}
        self.status: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            **({"details": details} if details is not None else {}),
            "code": code,
        }


def not_found(plural: str, name: str, *, group: str = "") -> Refusal:
    """Say that there is no such object."""
    what = f"{plural}.{group}" if group else plural
    details = {"name": name, **({"group": group} if group else {}), "kind": plural}
    return Refusal(404, "NotFound", f'{what} "{name}" not found', details)


def already_exists(plural: str, name: str, *, group: str = "") -> Refusal:
    """Say that the name is taken."""
    what = f"{plural}.{group}" if group else plural
    details = {"name": name, **({"group": group} if group else {}), "kind": plural}
    return Refusal(409, "AlreadyExists", f'{what} "{name}" already exists', details)


def modified(plural: str, name: str) -> Refusal:
    """Say that the resource version is not the present one."""
    message = (
        f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    return Refusal(409, "Conflict", message, {"name": name, "kind": plural})


def precondition_failed(kind: str, name: str, what: str, given: str, found: str) -> Refusal:
    """Say that a delete or a patch was meant for another object."""
    message = (
        f'Operation cannot be fulfilled on {kind} "{name}": the {what} in the precondition ({given}) does not match '
        f"the {what} in record ({found}). The object might have been deleted and then recreated"
    )
    return Refusal(409, "Conflict", message, {"name": name, "kind": kind})


def invalid(kind: str, name: str, causes: list[tuple[str, str, str]]) -> Refusal:
    """
    Refuse an object.

    Args:
        kind: Its kind.
        name: Its name.
        causes: Of each, the reason, such as ``FieldValueInvalid``, the field, and the message.

    """
    texts = [f"{field}: {message}" for _, field, message in causes]
    text = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    details = {
        "name": name,
        "kind": kind,
        "causes": [{"reason": reason, "message": message, "field": field} for reason, field, message in causes],
    }
    return Refusal(422, "Invalid", f'{kind} "{name}" is invalid: {text}', details)


_UPDATES = (
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
    "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)\n"
)


def immutable(name: str, difference: str) -> Refusal:
    """Refuse to change a Pod where it cannot be changed."""
    return invalid("Pod", name, [("FieldValueForbidden", "spec", _UPDATES + difference)])


def forbidden(
    plural: str, name: str, words: str, *, group: str = "", reason: str = "Forbidden", code: int = 403
) -> Refusal:
    """Say what does not allow it: a role, a quota, an admission."""
    what = f"{plural}.{group}" if group else plural
    subject = f'{what} "{name}"' if name else what
    details = {**({"name": name} if name else {}), **({"group": group} if group else {}), "kind": plural}
    return Refusal(code, reason, f"{subject} is forbidden: {words}", details)


def bad_request(message: str) -> Refusal:
    """Say that the request makes no sense."""
    return Refusal(400, "BadRequest", message)


def internal(message: str) -> Refusal:
    """Say what broke in the server."""
    causes = {"causes": [{"message": message}]}
    return Refusal(500, "InternalError", f"Internal error occurred: {message}", causes)


def expired(asked: int, oldest: int) -> Refusal:
    """Say that what was asked for is forgotten."""
    return Refusal(410, "Expired", f"too old resource version: {asked} ({oldest})")
