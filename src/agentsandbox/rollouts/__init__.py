# SPDX-License-Identifier: Apache-2.0
"""Batches of episodes: who runs when, what is tried again, and one record for each."""

from __future__ import annotations

from agentsandbox.rollouts.accounting import Ledger as Ledger
from agentsandbox.rollouts.gather import gather_rollouts as gather_rollouts
from agentsandbox.rollouts.source import LeaseSource as LeaseSource
from agentsandbox.rollouts.source import RolloutFunction as RolloutFunction
from agentsandbox.rollouts.source import RolloutLease as RolloutLease

__all__ = ["LeaseSource", "Ledger", "RolloutFunction", "RolloutLease", "gather_rollouts"]
