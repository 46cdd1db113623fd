# SPDX-License-Identifier: Apache-2.0
"""Images of the cluster: what is behind a name, how long a pull takes, and how pulls fail. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Image", "digest", "malformed", "pull_error"]

_RUNNABLE = ("/bin/sh",)


@attrs.frozen(kw_only=True)
class Image:
    """An image that Pods can name."""

    root: str = "host"
    """What the local backend makes of it: ``host``, or the path of a root file system, an OCI layout or an archive."""
    user: str | None = None
    """Who its containers run as when the Pod does not say; by default ``sandbox`` for ``host``, and root else."""
    workdir: str | None = None
    """Where they start when the Pod does not say."""
    env: Mapping[str, str] = attrs.field(factory=dict)
    """Its environment."""
    command: Sequence[str] = _RUNNABLE
    """What starts when the Pod names no command."""
    size: int = 50_000_000
    """Its size in bytes, for the nodes' lists of images."""
    pull: float = 0.0
    """Seconds that a pull takes."""
    present: bool = True
    """Whether all nodes have it from the beginning."""
    error: str = ""
    """Why pulls fail: ``not_found``, ``throttled``, ``unauthorized``, ``no_host``, or a message of your own."""


def digest(name: str) -> str:
    """Return the id that a node has for an image."""
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


def malformed(name: str) -> str | None:
    """Return a kubelet's words for a name that is none."""
    repository = name.partition("@")[0]
    head, slash, last = repository.rpartition("/")
    repository = head + slash + last.partition(":")[0]
    path = repository.partition("/")[2] if "." in repository.partition("/")[0] else repository
    if path and not re.fullmatch(r"[a-z0-9._/-]+", path):
        shown = path if "/" in path else f"library/{path}"
        reason = f"repository name ({shown}) must be lowercase" if path != path.lower() else "invalid reference format"
        reason = f"invalid reference format: {reason}" if path != path.lower() else reason
        return f'Failed to apply default image tag "{name}": couldn\'t parse image name "{name}": {reason}'
    return None


def pull_error(name: str, error: str) -> str:
    """Return a container runtime's words for a pull that fails."""
    host, _, rest = name.partition("/")
    repository, _, tag = rest.rpartition(":")
    repository, tag = (repository, tag) if repository else (rest, "latest")
    head = f'failed to pull and unpack image "{name}": failed to resolve reference "{name}": '
    if error == "no_host":
        url = f"https://{host}/v2/{repository}/manifests/{tag}"
        return head + f'failed to do request: Head "{url}": dial tcp: lookup {host} on 10.255.255.53:53: no such host'
    if error == "throttled":
        return (
            f'failed to pull and unpack image "{name}": failed to copy: httpReadSeeker: failed open: unexpected status '
            f"code https://{host}/v2/{repository}/manifests/{tag}: 429 Too Many Requests - Server message: "
            "toomanyrequests: You have reached your pull rate limit."
        )
    if error == "unauthorized":
        return (
            head
            + "pull access denied, repository does not exist or may require authorization: server message: "
            + ("insufficient_scope: authorization failed")
        )
    if error == "not_found":
        return head + f"{name}: not found"
    return error
