# SPDX-License-Identifier: Apache-2.0
"""``python -m agentsandbox.cli`` is ``agentsandbox``."""

from agentsandbox.cli import main

main()
