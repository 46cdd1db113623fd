# SPDX-License-Identifier: Apache-2.0
"""A cluster that exists in a model only, for virtual time: what a plan would do, before anybody pays for nodes."""

from __future__ import annotations

from agentsandbox.backends.simulated.backend import SimulatedBackend as SimulatedBackend
from agentsandbox.backends.simulated.model import ClusterModel as ClusterModel
from agentsandbox.backends.simulated.model import Faults as Faults
from agentsandbox.backends.simulated.model import StartModel as StartModel

__all__ = ["ClusterModel", "Faults", "SimulatedBackend", "StartModel"]
