# SPDX-License-Identifier: Apache-2.0
"""Custom resources as they are sent, and what their conditions mean."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentsandbox.backends.agent_sandbox.objects import (
    CORE,
    EXTENSIONS,
    Launch,
    Verdict,
    assigned,
    claim,
    claim_state,
    controller_of,
    launch_of,
    left_to_live,
    mode_patch,
    object_name,
    path,
    pod_of,
    replicas_patch,
    served,
    template,
    warm_pool,
)
from agentsandbox.backends.kubernetes.manifests import DOMAIN, PodOptions, pod
from agentsandbox.errors import ConfigurationError, InvalidObject, ProvisionError

RUN = "0123456789ab"
FACTS = json.loads((Path(__file__).parents[3] / "contract/facts/agent_sandbox_crds.json").read_text())


def manifest(image="python:3.12", **options):
    """Make a Pod as the backend makes it."""
    return pod("a", image, options=PodOptions(**options), run_id=RUN, owner="ann", nonce="n" * 16)


def made(**options):
    """Make a template of it."""
    return template(manifest(**options), run_id=RUN, version="v1beta1", nonce="x" * 16)


def test_a_template_keeps_what_makes_a_pod_ours():
    """The run's labels and the restart rule are in the Pod template; marks of single Pods are not."""
    meta, spec = (made()["spec"]["podTemplate"][part] for part in ("metadata", "spec"))
    assert RUN == meta["labels"][f"{DOMAIN}/run-id"]
    assert {f"{DOMAIN}/image", f"{DOMAIN}/spec-hash"} == set(meta["annotations"])
    assert "RestartAllContainers" == spec["containers"][0]["restartPolicyRules"][0]["action"]
    assert spec["automountServiceAccountToken"] is False


def test_nothing_is_left_to_the_controllers_defaults():
    """DNS stays the cluster's and the network policy ours, or lookups would go to public resolvers."""
    spec = made()["spec"]
    assert "ClusterFirst" == spec["podTemplate"]["spec"]["dnsPolicy"]
    assert ("Unmanaged", "Disallowed") == (spec["networkPolicyManagement"], spec["envVarsInjectionPolicy"])


def test_the_name_of_a_template_is_its_run_and_its_whole_content():
    """Another limit, image or run is another template; the same content is the same one, whatever its nonce."""
    names = {
        made()["metadata"]["name"],
        made(limits={"cpu": "1", "memory": "1Gi"})["metadata"]["name"],
        template(manifest("other"), run_id=RUN, version="v1beta1", nonce="x" * 16)["metadata"]["name"],
    }
    assert 3 == len(names)
    again = template(manifest(), run_id=RUN, version="v1beta1", nonce="y" * 16)["metadata"]["name"]
    assert again in names
    assert object_name(RUN, made()["spec"]) == again
    assert object_name("f" * 12, made()["spec"]) not in names


def test_a_pool_is_named_like_its_template_and_keeps_nothing():
    """Every step up is ours to take."""
    pool = warm_pool(
        made()["metadata"]["name"], name=made()["metadata"]["name"], run_id=RUN, version="v1beta1", nonce="x" * 16
    )
    name = made()["metadata"]["name"]
    assert {"replicas": 0, "sandboxTemplateRef": {"name": name}} == pool["spec"]
    assert (name, "SandboxWarmPool") == (pool["metadata"]["name"], pool["kind"])


def test_a_claim_ends_by_itself_and_asks_for_nothing_that_starts_cold():
    """It has an end by the server's clock, and neither variables nor volumes."""
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    one = claim("c", "p", run_id=RUN, version="v1beta1", nonce="x", now=now, lifetime=3600)
    lifecycle = {"shutdownTime": "2026-01-02T04:04:05Z", "shutdownPolicy": "Delete"}
    assert {"warmPoolRef": {"name": "p"}, "lifecycle": lifecycle} == one["spec"]


@pytest.mark.parametrize(
    ("plural", "name", "expected"),
    [
        ("sandboxclaims", "c1", f"/apis/{EXTENSIONS}/v1beta1/namespaces/rl/sandboxclaims/c1"),
        ("sandboxes", None, f"/apis/{CORE}/v1beta1/namespaces/rl/sandboxes"),
    ],
)
def test_paths(plural, name, expected):
    """Each kind is under its own group."""
    assert expected == path("v1beta1", plural, "rl", name)


def test_a_name_that_is_none_gets_into_no_path():
    """It cannot point elsewhere."""
    with pytest.raises(ConfigurationError, match=r"'\.\./x'"):
        path("v1beta1", "sandboxes", "rl", "../x")


@pytest.mark.parametrize("versions", [["v1alpha1", "v1beta1"], ["v1beta1", "v1"]])
def test_a_version_that_is_known_is_chosen(versions):
    """Whatever the server prefers."""
    assert "v1beta1" == served(EXTENSIONS, {"versions": [{"version": one} for one in versions]})


def test_a_server_with_unknown_versions_only_is_refused_by_name():
    """The error says what there is, and what is spoken here."""
    with pytest.raises(ConfigurationError, match=r"as v2, and this library speaks v1beta1"):
        served(CORE, {"versions": [{"version": "v2"}]})


def test_recorded_claims_are_read_as_they_were():
    """A claim is nothing while new, ready when the controller says so, and misses a pool that is not there."""
    seen = [claim_state(event["object"]) for event in FACTS["claim_watch"]]
    assert [Verdict.WAIT] * 3 + [Verdict.READY] * 2 == [state.verdict for state in seen]
    assert "swe-95qgk" == seen[-1].sandbox
    lost = claim_state(FACTS["claim_of_missing_pool"])
    assert (Verdict.MISSING, "WarmPoolNotFound") == (lost.verdict, lost.reason)
    with pytest.raises(ProvisionError, match='WarmPoolNotFound: SandboxWarmPool "nope" not found'):
        raise lost.error()


def test_recorded_sandbox_says_how_it_was_started_and_where_it_runs():
    """The launch type is a label, and the Pod's name an annotation or the Sandbox's own."""
    sandbox = FACTS["claimed_sandbox"]
    assert (Launch.WARM, "swe-95qgk") == (launch_of(sandbox), pod_of(sandbox))
    assert (Launch.COLD, "b") == (launch_of({"metadata": {"name": "b"}}), pod_of({"metadata": {"name": "b"}}))


def test_a_recorded_claim_says_which_sandbox_it_was_given_before_it_is_ready():
    """Its annotation comes first, its status with the answer; a claim of nothing has neither."""
    seen = [assigned(event["object"]) for event in FACTS["claim_watch"]]
    assert ["", "", "swe-95qgk", "swe-95qgk", "swe-95qgk"] == seen
    assert ["", ""] == [assigned(FACTS["claim_of_missing_pool"]), assigned({})]


def test_who_looks_after_an_object_is_its_controller():
    """Other owners do not count."""
    assert "a0b54ce2-5c70-4055-9709-44521910d9f5" == controller_of(FACTS["claimed_pod"])["uid"]
    assert {} == controller_of({"metadata": {"ownerReferences": [{"uid": "u"}]}}) == controller_of({"metadata": {}})


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("InvalidMetadata", Verdict.REFUSED),
        ("EnvVarsInjectionRejected", Verdict.REFUSED),
        ("VolumeClaimTemplatesError", Verdict.REFUSED),
        ("InvalidConfiguration", Verdict.REFUSED),
        ("TemplateNotFound", Verdict.MISSING),
        ("WarmPoolNotFound", Verdict.MISSING),
        ("PodFailed", Verdict.OVER),
        ("PodSucceeded", Verdict.OVER),
        ("SandboxExpired", Verdict.OVER),
        ("ClaimExpired", Verdict.OVER),
        ("SandboxMissing", Verdict.OVER),
        ("SandboxSuspended", Verdict.OVER),
        ("MultiplePods", Verdict.OVER),
        ("AdoptionConflict", Verdict.WAIT),
        ("SandboxCreatePending", Verdict.WAIT),
        ("SandboxNotReady", Verdict.WAIT),
        ("DependenciesNotReady", Verdict.WAIT),
        ("ReconcilerError", Verdict.WAIT),
        ("SomethingNew", Verdict.WAIT),
    ],
)
def test_every_reason_has_one_verdict(reason, verdict):
    """The caller's mistakes are final, ends are worth another claim, the rest is waited for."""
    condition = {"type": "Ready", "status": "False", "reason": reason, "message": "m"}
    state = claim_state({"metadata": {"name": "c", "generation": 1}, "status": {"conditions": [condition]}})
    assert verdict is state.verdict
    assert (InvalidObject if verdict is Verdict.REFUSED else ProvisionError) is type(state.error())


@pytest.mark.parametrize(("observed", "sandbox"), [(1, {"name": "s"}), (2, {})])
def test_ready_is_believed_only_of_this_generation_and_with_a_name(observed, sandbox):
    """Old news and nameless ones are waited out."""
    condition = {"type": "Ready", "status": "True", "reason": "DependenciesReady", "observedGeneration": observed}
    status = {"conditions": [condition], "sandbox": sandbox}
    assert Verdict.WAIT is claim_state({"metadata": {"name": "c", "generation": 2}, "status": status}).verdict


def test_patches_hit_this_very_object():
    """Both carry the UID."""
    assert {"metadata": {"uid": "u"}, "spec": {"replicas": 3}} == replicas_patch("u", 3)
    assert {"metadata": {"uid": "u"}, "spec": {"operatingMode": "Suspended"}} == mode_patch("u", "Suspended")


@pytest.mark.parametrize(
    ("spec", "status", "expected"),
    [
        ({"activeDeadlineSeconds": 100}, {"startTime": "2026-01-02T03:04:05Z"}, 70.0),
        ({"activeDeadlineSeconds": 100}, {}, math.inf),
        ({}, {"startTime": "2026-01-02T03:04:05Z"}, math.inf),
    ],
    ids=["limited", "not started", "without a limit"],
)
def test_a_pod_from_a_pool_has_lived_already(spec, status, expected):
    """Its time runs from its own start and not from the claim."""
    now = datetime(2026, 1, 2, 3, 4, 35, tzinfo=UTC).timestamp()
    assert expected == left_to_live({"spec": spec, "status": status}, now)
