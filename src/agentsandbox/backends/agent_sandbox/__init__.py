# SPDX-License-Identifier: Apache-2.0
"""Sandboxes from the agent-sandbox controller of Kubernetes SIG Apps: templates, warm pools, claims."""

from __future__ import annotations

from agentsandbox.backends.agent_sandbox.backend import AgentSandboxBackend

__all__ = ["AgentSandboxBackend"]
