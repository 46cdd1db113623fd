# SPDX-License-Identifier: Apache-2.0
"""Getting an image onto the node that will need it, before it is needed."""

from __future__ import annotations

from agentsandbox.hydration.planner import plan as plan
from agentsandbox.hydration.records import Advice as Advice
from agentsandbox.hydration.records import ImageUse as ImageUse
from agentsandbox.hydration.records import NodeFacts as NodeFacts
from agentsandbox.hydration.records import NodePlan as NodePlan
from agentsandbox.hydration.records import Plan as Plan
from agentsandbox.hydration.records import Step as Step
from agentsandbox.hydration.records import Unplaced as Unplaced
from agentsandbox.hydration.records import Wave as Wave

__all__ = ["Advice", "ImageUse", "NodeFacts", "NodePlan", "Plan", "Step", "Unplaced", "Wave", "plan"]
