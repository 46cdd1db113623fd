# SPDX-License-Identifier: Apache-2.0
"""What templates and pools of somebody else are read as."""

from __future__ import annotations

import pytest

from agentsandbox.backends.agent_sandbox.given import Given, Offer, named, offer
from agentsandbox.backends.kubernetes.conditions import DEFAULT_CONTAINER, PodPhase, state_of
from agentsandbox.errors import ConfigurationError

RULE = {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}


def pod(*containers, annotations=None, **spec):
    """Make the Pod template of a SandboxTemplate."""
    return {"metadata": {"annotations": annotations or {}}, "spec": {"containers": list(containers), **spec}}


def test_pools_and_templates_are_known_by_the_word_that_episodes_use():
    """A pool's template is not known before it was looked at."""
    found = named({"swe": "their-pool"}, {"web": "their.template"})
    expected = {"swe": Given(image="swe", pool="their-pool"), "web": Given(image="web", template="their.template")}
    assert expected == found
    assert ["SandboxWarmPool 'their-pool'", "SandboxTemplate 'their.template'"] == [one.words for one in found.values()]
    assert {} == named(None, None)


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, "first"),
        ({"kubectl.kubernetes.io/default-container": "second"}, "second"),
        ({"kubectl.kubernetes.io/default-container": "no-such"}, "first"),
    ],
    ids=["the first", "the annotated one", "an annotation that is wrong"],
)
def test_the_container_is_the_one_that_kubectl_exec_takes(annotations, expected):
    """Unless one has the name that ours has."""
    two = ({"name": "first", "image": "a"}, {"name": "second", "image": "b"})
    assert expected == offer(pod(*two, annotations=annotations)).container
    assert "sandbox" == offer(pod(*two, {"name": "sandbox", "image": "c"}, annotations=annotations)).container


def test_what_a_template_gives_is_read_off():
    """Image, runtime class, how long a Pod may take to end, and whether it has the rule for restarts."""
    container = {"name": "c", "image": "swe:1", "restartPolicyRules": [RULE]}
    found = offer(pod(container, runtimeClassName="gvisor", terminationGracePeriodSeconds=2))
    assert Offer(container="c", image="swe:1", runtime="gvisor", grace=2, restarts=True) == found
    other = {**RULE, "exitCodes": {"operator": "In", "values": [1]}}
    assert not offer(pod({**container, "restartPolicyRules": [other]})).restarts


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"grace": 1}, ["it has neither a rule for restarts nor"]),
        ({"grace": 1, "restarts": True}, ["its rule for restarts is of no use without"]),
        ({}, ["it has neither", "a Pod may take 30 s to end"]),
    ],
    ids=["nothing", "the rule", "slow to end"],
)
def test_what_it_lacks_is_said_with_what_follows(more, expected):
    """A runner by exec, a claim for each episode, and Pods that end late."""
    first, *rest = Offer(container="c", image="i", **more).missing
    assert first.startswith("a runner is started by exec")
    assert len(expected) == len(rest)
    assert all(words in line for words, line in zip(expected, rest, strict=True))


def test_the_state_of_a_pod_is_that_of_the_container_that_is_the_sandbox():
    """What runs beside it says nothing about it."""
    two = pod({"name": "side", "image": "a"}, {"name": "work", "image": "b"}, annotations={DEFAULT_CONTAINER: "work"})
    running = {"state": {"running": {"startedAt": "2026-01-02T03:04:05Z"}}, "ready": True}
    side = {"name": "side", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}, "containerID": "c://1"}
    work = {"name": "work", **running, "containerID": "c://2", "restartCount": 3}
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [side, work],
    }
    found = state_of({**two, "status": status})
    assert (PodPhase.READY, "b") == (found.phase, found.image)
    assert ("c://2", 3) == (found.identity.instance, found.identity.restarts)


def test_a_template_without_a_container_is_refused():
    """There is nothing to run commands in."""
    with pytest.raises(ConfigurationError, match="it has no container"):
        offer({"spec": {}})
