# SPDX-License-Identifier: Apache-2.0
"""What it takes for a Pod to make jails."""

from __future__ import annotations

import pytest

from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes.jailing import CAPABILITIES, STORAGE, JailOptions, jail_options
from agentsandbox.backends.kubernetes.manifests import FirstProcess, pod
from agentsandbox.backends.kubernetes.options import PodOptions
from agentsandbox.errors import ConfigurationError
from agentsandbox.models.sandbox import SandboxSpec


def made(first_process=FirstProcess.RUNNER, **options):
    """Return the spec and the container of a Pod."""
    options = PodOptions(run_as_root=True, **options)
    names = {"run_id": "0" * 12, "owner": "me", "nonce": "n", "first_process": first_process}
    spec = pod("asb-1", "image", options=options, **names)["spec"]
    return spec, spec["containers"][0]


def test_nothing_is_added_unless_it_is_asked_for():
    """A Pod without jails drops every capability and gains none."""
    spec, container = made()

    assert {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}} == container["securityContext"]
    assert not {"hostUsers", "volumes"} & set(spec)


def test_a_pod_with_jails_gets_what_they_need_and_nothing_else():
    """The capabilities for namespaces, mounts and ids; its seccomp profile stays."""
    spec, container = made(jail=True)

    assert {
        "allowPrivilegeEscalation": True,
        "capabilities": {"drop": ["ALL"], "add": sorted(CAPABILITIES)},
    } == container["securityContext"]
    assert "SYS_ADMIN" in CAPABILITIES
    assert not {"SYS_PTRACE", "SYS_MODULE", "NET_ADMIN", "SYS_RAWIO", "DAC_READ_SEARCH"} & set(CAPABILITIES)
    assert {"type": "RuntimeDefault"} == spec["securityContext"]["seccompProfile"]
    assert not spec.get("hostPID")


def test_a_container_that_runs_no_runner_of_ours_gets_nothing():
    """An image's own entry point makes no jails."""
    _, container = made(FirstProcess.IMAGE, jail=True)

    assert {"drop": ["ALL"]} == container["securityContext"]["capabilities"]


def test_what_else_can_be_asked_for():
    """A user namespace, no AppArmor profile, a volume on disk; capabilities of the user's own stay."""
    jail = {"user_namespace": True, "apparmor": False, "storage": "disk"}
    spec, container = made(jail=jail, capabilities=("NET_RAW",))
    security = container["securityContext"]

    assert spec["hostUsers"] is False
    assert "Unmasked" == security["procMount"]
    assert {"type": "Unconfined"} == security["appArmorProfile"]
    assert "NET_RAW" in security["capabilities"]["add"]
    assert [{"name": "agentsandbox-jails", "emptyDir": {}}] == spec["volumes"]
    assert [{"name": "agentsandbox-jails", "mountPath": STORAGE}] == container["volumeMounts"]


def test_pods_that_differ_in_their_jails_are_of_different_pools():
    """Whoever looks for a Pod to use finds none with other walls."""
    hashes = set()
    for jail in (None, True, {"network": True}):
        options = PodOptions(run_as_root=True, jail=jail)
        manifest = pod("asb-1", "image", options=options, run_id="0" * 12, owner="me", nonce="n")
        hashes.add(manifest["metadata"]["labels"]["agentsandbox.dev/pool"])

    assert 3 == len(hashes)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (False, None),
        (True, JailOptions()),
        ({"network": True}, JailOptions(network=True)),
        (JailOptions(storage="disk"), JailOptions(storage="disk")),
    ],
)
def test_how_jails_are_asked_for(value, expected):
    """By yes or no, by a mapping, or by the record itself."""
    assert expected == jail_options(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("yes", "jail is True or a mapping"),
        ({"walls": 4}, "jail has no option walls"),
        ({"storage": "tape"}, 'storage of jails is "memory" or "disk"'),
        ({"network": "pod"}, "network of jails is True or False"),
        ({"user_namespace": 1}, "user_namespace of jails is True or False"),
        ({"disk_limit": 1}, "disk_limit of jails is a whole number of at least"),
        ({"memory": 0}, "memory of jails is a whole number of at least"),
        ({"max_processes": True}, "max_processes of jails is a whole number"),
        ({"inodes": None}, "inodes of jails is a whole number"),
    ],
)
def test_what_is_refused_at_once(value, words):
    """Before a cluster hears of it, with the name of the option."""
    with pytest.raises(ConfigurationError, match=words):
        jail_options(value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": 0}, "slots is a whole number from 1 to 256"),
        ({"slots": 257, "jail": True}, "slots is a whole number from 1 to 256"),
        ({"slots": True}, "slots is a whole number"),
        ({"slots": 8, "run_as_root": True}, "slots=8 needs jails, which give the Pod SYS_ADMIN: say jail=True"),
        ({"jail": True}, "first process is root: run_as_root=True"),
        ({"jail": True, "run_as_root": True, "user": 1000}, "first process is root"),
        (
            {"jail": True, "run_as_root": True, "volume_mounts": ({"name": "v", "mountPath": "/data"},)},
            "would share /data: mount it with readOnly",
        ),
    ],
)
def test_what_no_pod_could_do(options, words):
    """Combinations that cannot work, or would let slots see each other, say what to change."""
    with pytest.raises(ConfigurationError, match=words):
        PodOptions(**options)


def test_volumes_that_nobody_writes_to_are_fine():
    """They are shown to every jail."""
    mounts = ({"name": "v", "mountPath": "/data", "readOnly": True},)

    assert 8 == PodOptions(jail=True, slots=8, run_as_root=True, volume_mounts=mounts).slots


def test_what_each_slot_may_use():
    """Its share of the Pod's memory, unless something else is said; no limit without one of the Pod."""
    options = JailOptions(max_processes=64)

    assert {"cpu": 1024, "pids": 64, "memory": 100} == options.groups(slots=8, memory=800)
    assert options.groups(slots=8, memory=None)["memory"] is None
    assert 2**30 == JailOptions(memory=2**30).groups(slots=8, memory=800)["memory"]
    assert {"disk_limit", "inodes", "max_processes", "open_files", "address_space"} == set(options.limits())


def test_jails_are_made_as_fast_as_they_can_be():
    """They ask nothing of the API server; Pods have a rate of their own."""
    assert KubernetesBackend().default_create_rate == 20.0
    jailed = KubernetesBackend(jail=True, slots=4, run_as_root=True)
    assert jailed.default_create_rate is None
    assert 4 * KubernetesBackend().default_creates_in_flight == jailed.default_creates_in_flight


def test_a_dry_run_sees_the_pod_as_it_will_be():
    """The doctor and the validation ask about the Pod with its capabilities."""
    manifest = KubernetesBackend(jail=True, slots=4, run_as_root=True).manifest(SandboxSpec(image="image"))

    assert "SYS_ADMIN" in manifest["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
