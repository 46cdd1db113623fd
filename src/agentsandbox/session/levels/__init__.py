# SPDX-License-Identifier: Apache-2.0
"""
Sessions without our runner: through a POSIX shell, and through one connection a command.

Both have the interface of :class:`agentsandbox.session.Session`, as far as it goes without a runner, and need of a
transport nothing but :class:`agentsandbox.transport.exec.Connect`.
"""

from __future__ import annotations

from agentsandbox.session.levels.direct import DirectSession
from agentsandbox.session.levels.probing import Probed, probe
from agentsandbox.session.levels.shell import ShellSession

__all__ = ["DirectSession", "Probed", "ShellSession", "probe"]
