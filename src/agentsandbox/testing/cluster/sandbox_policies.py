# SPDX-License-Identifier: Apache-2.0
"""The network policies that the agent-sandbox controller makes for templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster
    from agentsandbox.testing.cluster.replies import Json
    from agentsandbox.testing.cluster.store import Stored

__all__ = ["keep_policy"]

PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
"""Networks that Pods do not reach when a template says nothing."""


def keep_policy(cluster: FakeCluster, template: Stored, digest: str) -> None:
    """
    Have the policy that a template asks for, or the default one; none where the template is ``Unmanaged``.

    Args:
        cluster: The cluster.
        template: The SandboxTemplate.
        digest: The hash of its name, which its Pods bear.

    """
    kind = cluster.store.resource("networkpolicies")
    name = f"{template.name}-network-policy"
    known = cluster.store.find(kind, template.namespace, name)
    if template.object["spec"].get("networkPolicyManagement") == "Unmanaged":
        if known is not None and _owned(known, template):
            cluster.delete(known, None)
        return
    given = template.object["spec"].get("networkPolicy")
    rules = _default() if given is None else {way: given.get(way) or [] for way in ("ingress", "egress")}
    spec: Json = {
        "podSelector": {"matchLabels": {"agents.x-k8s.io/sandbox-template-ref-hash": digest}},
        "policyTypes": ["Ingress", "Egress"],
        **rules,
    }
    if known is not None:
        if _owned(known, template) and known.object["spec"] != spec:
            cluster.store.replace(known, {**known.object, "spec": spec}, generation=True)
        return
    owner = {"kind": "SandboxTemplate", "name": template.name, "uid": template.uid, "controller": True}
    owner |= {"apiVersion": template.resource.api_version, "blockOwnerDeletion": True}
    meta = {"name": name, "namespace": template.namespace, "ownerReferences": [owner]}
    cluster.create("networkpolicies", {"metadata": meta, "spec": spec})


def _owned(policy: Stored, template: Stored) -> bool:
    return any(one["uid"] == template.uid for one in policy.object["metadata"].get("ownerReferences") or ())


def _default() -> Json:
    """Nothing in but from the router, and out to public addresses only."""
    router = {"podSelector": {"matchLabels": {"app": "sandbox-router"}}}
    public = [{"ipBlock": {"cidr": "0.0.0.0/0", "except": list(PRIVATE)}}]
    return {"ingress": [{"from": [router]}], "egress": [{"to": public}]}
