# SPDX-License-Identifier: Apache-2.0
"""Which Pods reach which, as a network plugin with or without a policy engine has it. For Pods without processes."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentsandbox.backends.kubernetes.network import CONNECT

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster
    from agentsandbox.testing.cluster.peers import Answer
    from agentsandbox.testing.cluster.replies import Json

__all__ = ["PLUGINS", "Network"]

PLUGINS = ("none", "plain", "enforcing")
"""No Pod reaches another; each reaches each; each reaches what policies let it."""

_FAILED = (1, b"TimeoutError: timed out")
_NOWHERE = (1, b"OSError: [Errno 101] Network is unreachable")


class Network:
    """
    Answers for connections between Pods.

    Args:
        cluster: Whose Pods and policies.

    """

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def __repr__(self) -> str:
        return f"<Network [{self._cluster.network_plugin}]>"

    def answering(self, pod: Json, answer: Answer) -> Answer:
        """Return what a Pod answers that tries to connect where it is told to, and *answer* to all else."""

        def reply(request: dict[str, Any]) -> tuple[int, bytes]:
            argv = request.get("argv") or []
            if CONNECT not in argv:
                return answer(request)
            address, port = argv[argv.index(CONNECT) + 1 :][:2]
            if self._cluster.network_plugin == "none":
                return _NOWHERE
            return (0, b"") if self.reaches(pod, address, int(port)) else _FAILED

        return reply

    def reaches(self, source: Json, address: str, port: int) -> bool:
        """Whether a Pod may connect to an address by TCP."""
        if self._cluster.network_plugin != "enforcing":
            return True
        target = self._at(address)
        out = [policy for policy in self._policies(source) if "Egress" in _types(policy)]
        if out and not any(
            self._allows(policy, "egress", "to", target, address, port, policy["metadata"]["namespace"])
            for policy in out
        ):
            return False
        if target is None:
            return True
        into = [policy for policy in self._policies(target) if "Ingress" in _types(policy)]
        own = (source.get("status") or {}).get("podIP") or "0.0.0.0"  # noqa: S104 - nobody's
        return not into or any(
            self._allows(policy, "ingress", "from", source, own, port, policy["metadata"]["namespace"])
            for policy in into
        )

    def _at(self, address: str) -> Json | None:
        for stored in self._cluster.store.all(self._cluster.kubelet.pods):
            if (stored.object.get("status") or {}).get("podIP") == address:
                return stored.object
        return None

    def _policies(self, pod: Json) -> Iterator[Json]:
        store = self._cluster.store
        for stored in store.all(store.resource("networkpolicies"), pod["metadata"]["namespace"]):
            if _selects(stored.object["spec"].get("podSelector") or {}, pod["metadata"].get("labels") or {}):
                yield stored.object

    def _allows(
        self, policy: Json, way: str, end: str, pod: Json | None, address: str, port: int, namespace: str
    ) -> bool:
        for rule in policy["spec"].get(way) or ():
            peers: Sequence[Json] = rule.get(end) or ()
            if not _any_port(rule.get("ports") or (), port):
                continue
            if not peers or any(self._is(peer, pod, address, namespace) for peer in peers):
                return True
        return False

    def _is(self, peer: Json, pod: Json | None, address: str, namespace: str) -> bool:
        if "ipBlock" in peer:
            ip, block = ipaddress.ip_address(address), peer["ipBlock"]
            excepted = any(ip in ipaddress.ip_network(one) for one in block.get("except") or ())
            return ip in ipaddress.ip_network(block["cidr"]) and not excepted
        if pod is None:
            return False
        if "namespaceSelector" in peer:
            store = self._cluster.store
            home = store.find(store.resource("namespaces"), "", pod["metadata"]["namespace"])
            labels = (home.object["metadata"].get("labels") or {}) if home is not None else {}
            if not _selects(peer["namespaceSelector"], labels):
                return False
        elif pod["metadata"]["namespace"] != namespace:
            return False
        return _selects(peer.get("podSelector") or {}, pod["metadata"].get("labels") or {})


def _types(policy: Json) -> Sequence[str]:
    given: Sequence[str] = policy["spec"].get("policyTypes") or ()
    return given or ("Ingress", *(("Egress",) if "egress" in policy["spec"] else ()))


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())


def _any_port(ports: Sequence[Json], port: int) -> bool:
    return not ports or any(one.get("protocol", "TCP") == "TCP" and one.get("port") in (None, port) for one in ports)
