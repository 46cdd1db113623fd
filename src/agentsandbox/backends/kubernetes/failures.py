# SPDX-License-Identifier: Apache-2.0
"""What keeps a Pod from being ready, told apart by the kubelet's reasons and words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

from agentsandbox.errors import ImagePullFailed, ProvisionError, Unschedulable

__all__ = ["START_REASONS", "Cause", "PodFailure", "pull_failure", "waiting_failure"]

START_REASONS = ("StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError")
"""The runtime could not start the first process, for instance because the image has no shell."""


class Cause(StrEnum):
    """What keeps a Pod from being ready."""

    IMAGE_NOT_FOUND = "image_not_found"
    IMAGE_FORBIDDEN = "image_forbidden"
    IMAGE_THROTTLED = "image_throttled"
    IMAGE_INVALID = "image_invalid"
    IMAGE_ABSENT = "image_absent"
    IMAGE_PLATFORM = "image_platform"
    IMAGE_UNAVAILABLE = "image_unavailable"
    UNSCHEDULABLE = "unschedulable"
    REJECTED = "rejected"
    CONFIG = "config"
    START = "start"
    CRASHING = "crashing"


@attrs.frozen(kw_only=True)
class PodFailure:
    """Why a Pod does not become ready."""

    cause: Cause
    """Which kind."""
    reason: str
    """The cluster's own word, such as ``ErrImagePull``."""
    message: str
    """The cluster's own sentence."""
    permanent: bool
    """Whether another Pod of the same image and options would fail alike."""
    over: bool = False
    """Whether this Pod cannot recover."""
    retry_in: float | None = None
    """Seconds of the back-off that it names."""

    @property
    def hint(self) -> str:
        """What to do about it, where that is known from the words alone; else empty."""
        return next((hint for pattern, hint in _HINTS if re.search(pattern, f"{self.reason} {self.message}")), "")

    def error(self) -> ProvisionError:
        """Return the exception to raise when one gives up on this Pod."""
        text = f"{self.reason}: {self.message}" if self.message else self.reason
        if self.hint:
            text += f"; {self.hint}"
        if self.cause.startswith("image_"):
            return ImagePullFailed(text, permanent=self.permanent)
        error = Unschedulable(text) if self.cause in (Cause.UNSCHEDULABLE, Cause.REJECTED) else ProvisionError(text)
        error.retryable = not self.permanent
        return error


_HINTS = (
    (
        "image will run as root",
        "its user is root: give the number of another one (user=1000), or allow root (run_as_root=True)",
    ),
    ("has non-numeric user", "give the number of its user (user=1000): a name may stand for root"),
    ("^ErrImageNeverPull", "pull_policy='IfNotPresent' lets nodes get it"),
)

# The order decides: a throttled answer may also say "denied", and a platform that is missing also "not found".
_TEXTS: tuple[tuple[str, Cause, bool], ...] = (
    ("toomanyrequests|too many requests|rate limit|pull qps exceeded", Cause.IMAGE_THROTTLED, False),
    ("no space left|disk pressure|quota exceeded", Cause.IMAGE_UNAVAILABLE, False),
    ("no such host|temporary failure|network is unreachable|no route to host", Cause.IMAGE_UNAVAILABLE, False),
    ("connection (refused|reset)|unexpected eof|timeout|time-out|timed out", Cause.IMAGE_UNAVAILABLE, False),
    ("deadline exceeded|service unavailable|bad gateway|internal server error", Cause.IMAGE_UNAVAILABLE, False),
    ("no match(ing manifest)? for (platform|[a-z]+/)|image operating system", Cause.IMAGE_PLATFORM, True),
    ("unauthorized|authorization failed|authentication required|insufficient_scope", Cause.IMAGE_FORBIDDEN, True),
    (r"\bdenied\b|no basic auth|forbidden", Cause.IMAGE_FORBIDDEN, True),
    ("not ?found|manifest unknown|name unknown|does not exist|no such image", Cause.IMAGE_NOT_FOUND, True),
    ("invalid reference|couldn't parse image|invalid image", Cause.IMAGE_INVALID, True),
)
_REASONS = {
    "InvalidImageName": (Cause.IMAGE_INVALID, True),
    "ErrImageNeverPull": (Cause.IMAGE_ABSENT, True),
    "SignatureValidationFailed": (Cause.IMAGE_FORBIDDEN, True),
    "ErrImagePull": None,
    "ImagePullBackOff": None,
    "ImageInspectError": None,
    "RegistryUnavailable": None,
}
"""What a container waits with when it has no image; ``None`` where only the message tells them apart."""


def pull_failure(reason: str, message: str) -> PodFailure:
    """
    Tell the failures to get an image apart.

    Args:
        reason: Of the waiting container, such as ``ErrImagePull`` or ``ImagePullBackOff``.
        message: Its message. A back-off repeats the failure that caused it; where it does not (servers before 1.31),
            the failure counts as passing, and the ``ErrImagePull`` before it has said more.

    """
    inner = re.sub(r'^Back-off pulling image "[^"]*"(?:: )?(?:ErrImagePull: )?', "", message)
    # Names and addresses may hold any word of the table; the sentence around them is what counts.
    text = re.sub(r'"[^"]*"|https?://\S+', "", inner)
    cause, permanent = _REASONS.get(reason) or next(
        ((cause, permanent) for pattern, cause, permanent in _TEXTS if re.search(pattern, text, re.IGNORECASE)),
        (Cause.IMAGE_UNAVAILABLE, False),
    )
    return PodFailure(cause=cause, reason=reason, message=inner or message, permanent=permanent)


def waiting_failure(container: Mapping[str, Any], reason: str, message: str) -> PodFailure | None:
    """
    Judge a waiting container.

    Args:
        container: Its status.
        reason: Why it waits.
        message: The same in a sentence.

    Returns:
        ``None`` if it waits for nothing but its turn.

    """
    if reason in _REASONS:
        return pull_failure(reason, message)
    if reason == "CreateContainerConfigError":
        # A Secret that has not reached the node yet is no mistake in the Pod.
        return _failure(Cause.CONFIG, reason, message, permanent="failed to sync" not in message)
    if reason in START_REASONS:
        passing = re.search("deadline exceeded|is reserved for|timed out|transport", message, re.IGNORECASE)
        return _failure(Cause.START, reason, message, permanent=passing is None)
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated") or {}
        back_off = re.match(r"back-off (?:(\d+)m)?(?:(\d+)s)?", message)
        seconds = 60.0 * int(back_off[1] or 0) + int(back_off[2] or 0) if back_off else None
        text = f"{message} (last exit code {last.get('exitCode')}, {last.get('reason')})" if last else message
        return attrs.evolve(_failure(Cause.CRASHING, reason, text, permanent=False), retry_in=seconds)
    return None


def _failure(cause: Cause, reason: str, message: str, *, permanent: bool) -> PodFailure:
    return PodFailure(cause=cause, reason=reason, message=message.strip(), permanent=permanent)
