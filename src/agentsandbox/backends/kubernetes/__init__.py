# SPDX-License-Identifier: Apache-2.0
"""Pods as sandboxes. Nothing here imports a Kubernetes client before a cluster is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.backend import KubernetesBackend as KubernetesBackend

__all__ = ["KubernetesBackend"]


def __getattr__(name: str) -> Any:
    if name == "KubernetesBackend":
        from agentsandbox.backends.kubernetes.backend import KubernetesBackend

        return KubernetesBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
