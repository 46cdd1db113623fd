# SPDX-License-Identifier: Apache-2.0
"""Leases of warm sandboxes, for loops that own their schedule."""

from __future__ import annotations

from agentsandbox.client.announcing import Announced as Announced
from agentsandbox.client.checkpoints import CheckpointStore as CheckpointStore
from agentsandbox.client.lease import Lease as Lease
from agentsandbox.client.pool_client import SandboxClient as SandboxClient

__all__ = ["Announced", "CheckpointStore", "Lease", "SandboxClient"]
