# SPDX-License-Identifier: Apache-2.0
"""Who may do what in the double."""

from __future__ import annotations

import pytest

from agentsandbox.errors import InvalidObject, PermissionDenied, QuotaExceeded
from agentsandbox.testing.cluster import Rule

pytestmark = pytest.mark.anyio
BODY = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "sandbox", "image": "host"}]}}


async def test_tokens(started) -> None:
    """A token that is not known is refused with 401, and one that was exchanged is not accepted any more."""
    async with started() as client:
        client.cluster.access.tokens = {"t0"}
        await client.make()
        assert client.cluster.requests[-1].authorization == "Bearer t0"
        client.cluster.access.tokens = {"t1"}
        with pytest.raises(PermissionDenied) as caught:
            await client.get("a")
        assert caught.value.status == 401


async def test_roles(started) -> None:
    """What a role does not allow is refused in the server's words, and a review says the same."""
    async with started() as client:
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
        client.cluster.access.use_role({"rules": rules})
        assert (await client.api.request("GET", client.pods))["items"] == []
        with pytest.raises(PermissionDenied) as caught:
            await client.api.request("POST", client.pods, body=BODY)

        words = (
            'pods is forbidden: User "system:serviceaccount:rl:trainer" cannot create resource "pods" in API group ""'
        )
        assert str(caught.value).startswith(words)
        assert [await reviewed(client, verb, "pods") for verb in ("list", "create")] == [True, False]
        assert Rule(("*",), ("*",), ("*",)).allows("create", "batch", "jobs")


async def reviewed(client, verb, resource):
    """Ask a SelfSubjectAccessReview."""
    name, _, sub = resource.partition("/")
    attributes = {"verb": verb, "resource": name, "subresource": sub, "namespace": "rl", "group": ""}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    found = await client.api.request("POST", path, body={"spec": {"resourceAttributes": attributes}})
    return found["status"]["allowed"]


@pytest.mark.parametrize(("version", "needs_both"), [((1, 34), False), ((1, 36), True)])
async def test_p13_exec_needs_two_verbs_on_new_servers(started, version: tuple[int, int], needs_both: bool) -> None:
    """A websocket is a GET; from 1.35 on the server asks for ``create`` on ``pods/exec`` as well."""
    async with started(version=version) as client:
        await client.make()
        client.cluster.access.deny("create", "pods/exec")
        if needs_both:
            with pytest.raises(PermissionDenied, match='cannot create resource "pods/exec"'):
                await client.run(["true"])
        else:
            assert (await client.run(["true"]))[0] == 0
        client.cluster.access.denied.clear()
        client.cluster.access.deny("get", "pods/exec")
        with pytest.raises(PermissionDenied, match='cannot get resource "pods/exec"'):
            await client.run(["true"])
        assert [await reviewed(client, verb, "pods/exec") for verb in ("get", "create")] == [False, True]


async def test_quotas(started) -> None:
    """A quota that would be exceeded refuses the Pod in the server's words, and room that comes back is room."""
    async with started() as client:
        client.cluster.create(
            "resourcequotas",
            {"metadata": {"name": "q", "namespace": "rl"}, "spec": {"hard": {"pods": "1", "requests.cpu": "1"}}},
        )
        await client.make("a", container={"resources": {"requests": {"cpu": "1"}}})
        with pytest.raises(QuotaExceeded) as caught:
            await client.make("b", container={"resources": {"requests": {"cpu": "500m"}}})
        words = "exceeded quota: q, requested: pods=1,requests.cpu=0.5, used: pods=1,requests.cpu=1, limited: "
        words += "pods=1,requests.cpu=1"
        assert words in str(caught.value)
        client.cluster.delete_behind("a")
        await client.make("b", container={"resources": {"requests": {"cpu": "500m"}}})


async def test_webhooks_see_real_and_dry_creates(started) -> None:
    """An admission webhook refuses in its own words, also in a dry run."""
    async with started() as client:
        client.cluster.access.webhooks["policy.example.com"] = lambda operation, pod: (
            "no registry of ours" if operation == "CREATE" and pod["kind"] == "Pod" else None
        )
        for params in ({}, {"dryRun": "All"}):
            with pytest.raises(PermissionDenied) as caught:
                await client.api.request("POST", client.pods, params=params, body=BODY)
            assert str(caught.value) == 'admission webhook "policy.example.com" denied the request: no registry of ours'


async def test_pod_security(started) -> None:
    """A restricted namespace takes only Pods that give everything up, and names what others did not."""
    async with started() as client:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        await client.api.request(
            "PATCH",
            "/api/v1/namespaces/rl",
            body={"metadata": {"labels": labels}},
            content_type="application/merge-patch+json",
        )
        with pytest.raises(PermissionDenied) as caught:
            await client.make()
        for words in (
            "allowPrivilegeEscalation != false",
            "unrestricted capabilities",
            "runAsNonRoot",
            "seccompProfile",
        ):
            assert words in str(caught.value)
        inner = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        outer = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        await client.make(container={"securityContext": inner}, securityContext=outer)


async def test_runtime_classes(started) -> None:
    """A runtime class must exist, and its overhead is added."""
    async with started() as client:
        with pytest.raises(PermissionDenied, match='RuntimeClass "gvisor" not found'):
            await client.make(runtimeClassName="gvisor")
        client.cluster.create(
            "runtimeclasses",
            {"metadata": {"name": "gvisor"}, "handler": "runsc", "overhead": {"podFixed": {"cpu": "1"}}},
        )
        made = await client.make(runtimeClassName="gvisor")
        assert made["spec"]["overhead"] == {"cpu": "1"}


async def test_old_servers_drop_or_refuse_the_rule(started) -> None:
    """A dry run tells whether the server has the rule ``RestartAllContainers``: kept, refused, or dropped."""
    rules = [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]
    container = {"name": "sandbox", "image": "host", "restartPolicy": "Never", "restartPolicyRules": rules}
    body = {"metadata": {"name": "a"}, "spec": {"containers": [container]}}
    answers = []
    for version in ((1, 36), (1, 35), (1, 30)):
        async with started(version=version) as client:
            try:
                found = await client.api.request("POST", client.pods, params={"dryRun": "All"}, body=body)
                answers.append(found["spec"]["containers"][0].get("restartPolicyRules"))
            except InvalidObject as error:
                answers.append(error.status)

    assert answers == [rules, 422, None]
