# SPDX-License-Identifier: Apache-2.0
"""What can be counted and measured: quantiles, TTFC summaries and a sink that counts events."""

from __future__ import annotations

from agentsandbox.metrics.quantiles import quantile as quantile
from agentsandbox.metrics.recorder import EventCounter as EventCounter
from agentsandbox.metrics.recorder import summarise_ttfc as summarise_ttfc

__all__ = ["EventCounter", "quantile", "summarise_ttfc"]
