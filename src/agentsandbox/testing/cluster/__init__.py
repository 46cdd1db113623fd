# SPDX-License-Identifier: Apache-2.0
"""
A Kubernetes cluster inside the test process: a real API server on loopback, and Pods of real processes.

kmock, a mock server of the same field, was looked at for the plain part and not taken: it has no resource versions,
selectors, pages, dry runs or preconditions, and those are what clients get wrong.
"""

from __future__ import annotations

from agentsandbox.testing.cluster.access import Access, Rule
from agentsandbox.testing.cluster.clock import Timing
from agentsandbox.testing.cluster.cluster import FakeCluster
from agentsandbox.testing.cluster.containers import Unconfined
from agentsandbox.testing.cluster.faults import ExecFault, Faults, RequestFault, RequestRecord, WatchFault
from agentsandbox.testing.cluster.images import Image
from agentsandbox.testing.cluster.scheduler import NodeSpec
from agentsandbox.testing.cluster.store import Resource

__all__ = [
    "Access",
    "ExecFault",
    "FakeCluster",
    "Faults",
    "Image",
    "NodeSpec",
    "RequestFault",
    "RequestRecord",
    "Resource",
    "Rule",
    "Timing",
    "Unconfined",
    "WatchFault",
]
