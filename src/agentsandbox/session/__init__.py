# SPDX-License-Identifier: Apache-2.0
"""One attached runner: commands, files, and a link that survives its stream."""

from __future__ import annotations

from agentsandbox.session.process import Process
from agentsandbox.session.session import Session

__all__ = ["Process", "Session"]
