# SPDX-License-Identifier: Apache-2.0
"""Sandboxes on this machine, confined by namespaces: no cluster, no daemon, nothing to install."""

from __future__ import annotations

from agentsandbox.backends.local.backend import LocalBackend, LocalSandbox, Unconfined

__all__ = ["LocalBackend", "LocalSandbox", "Unconfined"]
