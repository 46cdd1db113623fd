# SPDX-License-Identifier: Apache-2.0
"""What is sent to the API server, checked before it is sent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsandbox.backends.kubernetes.manifests import (
    COMMAND_LIMIT,
    FirstProcess,
    PodOptions,
    delete_options,
    exec_params,
    exec_path,
    image_patch,
    label_value,
    lifetime,
    network_policy,
    pod,
    pod_name,
    pods_path,
    selector,
    template_hash,
)
from agentsandbox.backends.kubernetes.options import check_labels
from agentsandbox.errors import ConfigurationError, UsageError

RUN = "0123456789ab"


def made(**options):
    """A Pod with the defaults of everything that is not given."""
    call = {"options": PodOptions(), "run_id": RUN, "owner": "me@lab", "nonce": "n0", "program": "print(1)", **options}
    return pod("asb-0123456789ab-0-abcdef", "img:1", **call)


def container(**options):
    """The only container of such a Pod."""
    (only,) = made(**options)["spec"]["containers"]
    return only


def test_p38_p46_pod_has_no_token_an_end_and_its_owner():
    """No service-account token, no service links, a server-side end, and labels that say whose it is."""
    manifest = made()

    spec = manifest["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["activeDeadlineSeconds"] == 24 * 3600
    assert spec["terminationGracePeriodSeconds"] == 1
    assert spec["restartPolicy"] == "Never"
    assert manifest["metadata"]["labels"] == {
        "agentsandbox.dev/managed-by": "agentsandbox",
        "agentsandbox.dev/run-id": RUN,
        "agentsandbox.dev/owner": "me-lab",
        "agentsandbox.dev/pool": template_hash(PodOptions(), "print(1)"),
    }
    assert manifest["metadata"]["annotations"] == {
        "agentsandbox.dev/image": "img:1",
        "agentsandbox.dev/spec-hash": template_hash(PodOptions(), "print(1)"),
        "agentsandbox.dev/nonce": "n0",
    }


def test_pod_is_restricted():
    """Capabilities, privilege escalation, root and unconfined system calls are out unless they are asked for."""
    manifest = made()

    assert manifest["spec"]["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True}
    assert container()["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    loosened = PodOptions(run_as_root=True, user=0, group=0, capabilities=["SYS_ADMIN"])
    assert made(options=loosened)["spec"]["securityContext"] == {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsUser": 0,
        "runAsGroup": 0,
    }
    assert container(options=loosened)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}


def test_container_can_be_made_anew_in_place():
    """Where the server knows the rule, exit code 42 restarts the container; where it does not, there is no rule."""
    assert container()["restartPolicy"] == "Never"
    assert container()["restartPolicyRules"] == [
        {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}
    ]
    without = container(restart_rule=False)
    assert "restartPolicy" not in without
    assert "restartPolicyRules" not in without


def test_overlay_reaches_the_pod():
    """Everything that users may choose stands where the Pod API wants it."""
    options = PodOptions(
        requests={"cpu": "1"},
        limits={"cpu": "2", "memory": "1Gi"},
        lifetime=60,
        runtime_class="gvisor",
        node_selector={"pool": "rl"},
        tolerations=[{"key": "rl", "operator": "Exists"}],
        affinity={"nodeAffinity": {}},
        priority_class="low",
        image_pull_secrets=["registry"],
        pull_policy="Never",
        volumes=[{"name": "v", "emptyDir": {}}],
        volume_mounts=[{"name": "v", "mountPath": "/v"}],
        env={"B": "2", "A": "1"},
        workdir="/testbed",
        labels={"team": "x"},
        annotations={"note": "any text at all"},
    )
    manifest = made(options=options)

    spec = manifest["spec"]
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["nodeSelector"] == {"pool": "rl"}
    assert spec["tolerations"] == [{"key": "rl", "operator": "Exists"}]
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["priorityClassName"] == "low"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["volumes"] == [{"name": "v", "emptyDir": {}}]
    assert spec["activeDeadlineSeconds"] == 60
    (only,) = spec["containers"]
    assert only["resources"] == {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}
    assert only["volumeMounts"] == [{"name": "v", "mountPath": "/v"}]
    assert only["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert (only["workingDir"], only["imagePullPolicy"]) == ("/testbed", "Never")
    assert manifest["metadata"]["labels"]["team"] == "x"
    assert manifest["metadata"]["annotations"]["note"] == "any text at all"
    assert json.loads(json.dumps(manifest)) == manifest


def test_image_without_a_shell_keeps_its_entry_point():
    """No command is set, so the image's own one runs."""
    assert "command" not in container(first_process=FirstProcess.IMAGE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"requests": {"cpu": "half"}}, "'half' is not a quantity"),
        ({"requests": {"cpu": "0"}}, "cpu: 0 is not more than 0"),
        ({"requests": {"memory": "1Gi"}, "limits": {"memory": "1000M"}}, "memory: 1Gi is more than the limit 1000M"),
        ({"requests": {"cpu": "1500m"}, "limits": {"cpu": "1"}}, "cpu: 1500m is more than the limit 1"),
        ({"lifetime": 0}, "lifetime: 0"),
        ({"lifetime": 2**31}, "lifetime: 2147483648"),
        ({"user": 0}, "run_as_root=True"),
        ({"workdir": "src"}, "'src' is not absolute"),
        ({"env": {"1A": "x"}}, "'1A' is not the name of a variable"),
        ({"runtime_class": "gVisor"}, "'gVisor'"),
        ({"image_pull_secrets": ["My_Secret"]}, "'My_Secret'"),
        ({"image_pull_secrets": "registry"}, "should be a list"),
        ({"labels": {"team": "a b"}}, "label team: 'a b'"),
        ({"labels": {"team": "x" * 64}}, "at most 63"),
        ({"labels": {"-team": "x"}}, "label '-team'"),
        ({"labels": {"UPPER.example/a": "x"}}, "is not a domain"),
        ({"labels": {"agentsandbox.dev/run-id": "x"}}, "is ours"),
        ({"annotations": {"a b": "x"}}, "label 'a b'"),
        ({"node_selector": {"pool": "-"}}, "label pool: '-'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_created(options, words):
    """The error names the value."""
    with pytest.raises(ConfigurationError, match=words):
        PodOptions(**options)


@pytest.mark.parametrize("policy", ["never", "", None])
def test_pull_policy_is_one_of_three(policy):
    """The API server would refuse any other."""
    with pytest.raises(ValueError):
        PodOptions(pull_policy=policy)


@pytest.mark.parametrize(
    ("name", "image", "run_id", "error"),
    [
        ("UPPER", "img", RUN, "Pod name 'UPPER'"),
        ("a" * 64, "img", RUN, "at most 63"),
        ("a-", "img", RUN, "Pod name 'a-'"),
        ("a", "", RUN, "is not the name of an image"),
        ("a", "img 1", RUN, "is not the name of an image"),
        ("a", "img\n", RUN, "is not the name of an image"),
        ("a", "img", "", "run id ''"),
        ("a", "img", "run-1", "run id 'run-1'"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_created(name, image, run_id, error):
    """Names of Pods, images and runs are checked here, not by a server with a Pod half made."""
    with pytest.raises(ConfigurationError, match=error):
        pod(name, image, options=PodOptions(), run_id=run_id, owner="o", nonce="n")


def test_program_that_the_kernel_would_not_take_is_refused():
    """One argument holds less than 128 KiB."""
    assert container(program="x" * (128 * 1024 - 1))["command"][3] == "x" * (128 * 1024 - 1)
    with pytest.raises(UsageError, match="131072 bytes"):
        made(program="x" * (128 * 1024))


def test_p47_lifetime_covers_every_stage():
    """The stages and a margin, or less margin where less is allowed; a limit below the stages is a contradiction."""
    assert lifetime([300, 1200, 120]) == 1920
    assert lifetime([300, 1200, 120], max_lifetime=1700) == 1700
    assert lifetime([0.5], margin=0) == 1
    with pytest.raises(ConfigurationError, match="max_lifetime is 900 s, and the stages may take 1620 s"):
        lifetime([300, 1200, 120], max_lifetime=900)


def test_pod_names_are_unique_and_short():
    """Run, number in base 36 and random digits; no two alike, and always a valid name."""
    assert pod_name(RUN, 0).startswith("asb-0123456789ab-0-")
    assert pod_name(RUN, 35).startswith("asb-0123456789ab-z-")
    assert pod_name(RUN, 36**3).startswith("asb-0123456789ab-1000-")
    assert len({pod_name(RUN, 1) for _ in range(100)}) == 100
    assert len(pod_name(RUN, 10**9)) <= 63
    with pytest.raises(ConfigurationError):
        pod_name("RUN", 1)


@given(st.text(max_size=100))
def test_label_value_takes_any_text(text):
    """Whatever a user is called, the label is one that a server takes."""
    check_labels({"owner": label_value(text)})


def test_p46_selector_is_of_one_run():
    """There is no selector of all runs."""
    assert selector(RUN) == "agentsandbox.dev/run-id=0123456789ab,agentsandbox.dev/managed-by=agentsandbox"
    for wrong in ("", "x", "0123456789ab,a=b"):
        with pytest.raises(ConfigurationError):
            selector(wrong)


def test_template_hash_tells_what_can_serve_another_image():
    """Equal options and program: one hash, whatever the image; any difference: another."""
    assert template_hash(PodOptions()) == template_hash(PodOptions())
    different = {
        template_hash(PodOptions()),
        template_hash(PodOptions(), "print(2)"),
        template_hash(PodOptions(run_as_root=True)),
        template_hash(PodOptions(limits={"cpu": "1"})),
        template_hash(PodOptions(), first_process=FirstProcess.IMAGE),
    }
    assert len(different) == 5


def test_p41_deletes_and_patches_carry_the_uid():
    """They hit the object that was meant, or nothing."""
    assert delete_options("u1") == {"preconditions": {"uid": "u1"}, "propagationPolicy": "Background"}
    assert delete_options("u1", grace=0)["gracePeriodSeconds"] == 0
    with pytest.raises(UsageError):
        delete_options("")
    assert image_patch("u1", "img:2") == {
        "metadata": {"uid": "u1", "annotations": {"agentsandbox.dev/image": "img:2"}},
        "spec": {"containers": [{"name": "sandbox", "image": "img:2"}]},
    }


def test_paths_take_names_only():
    """A name can never become another path."""
    assert pods_path("rl") == "/api/v1/namespaces/rl/pods"
    assert exec_path("rl", "a-1") == "/api/v1/namespaces/rl/pods/a-1/exec"
    for wrong in ("../x", "a/b", "", "A"):
        with pytest.raises(ConfigurationError):
            pods_path("rl", wrong)
        with pytest.raises(ConfigurationError):
            pods_path(wrong)


def test_p16_exec_has_no_terminal_and_names_its_container():
    """Plain pipes by default; with a terminal there is no separate stderr."""
    assert exec_params(["sh", "-c", "true"], stdin=True) == [
        ("command", "sh"),
        ("command", "-c"),
        ("command", "true"),
        ("container", "sandbox"),
        ("stdin", "true"),
        ("stdout", "true"),
        ("stderr", "true"),
        ("tty", "false"),
    ]
    assert ("stderr", "false") in exec_params(["sh"], tty=True)


@pytest.mark.parametrize("word", ["x", "ü", "\n"], ids=["plain", "unicode", "quoted"])
def test_p18_command_line_in_a_url_is_short(word):
    """The limit counts what is in the URL in the end, so quoted characters count more."""
    unit = len(urlencode({"command": word})) - len("command=")
    fits = (COMMAND_LIMIT - len("&command=")) // unit

    assert len(urlencode(exec_params([word * fits])[:1])) + 1 <= COMMAND_LIMIT
    with pytest.raises(UsageError, match="does not belong in a URL"):
        exec_params([word * (fits + 1)])


def test_network_policy_denies_by_default():
    """Nothing in, nothing out, for the Pods of this run alone."""
    policy = network_policy(RUN)

    assert policy["spec"] == {
        "podSelector": {"matchLabels": {"agentsandbox.dev/run-id": RUN}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [],
        "egress": [],
    }
    assert policy["metadata"]["labels"]["agentsandbox.dev/run-id"] == RUN


def test_network_policy_allows_what_is_named():
    """Names, networks, and networks with a port."""
    dns, network, port = network_policy(RUN, allow=["dns", "10.0.0.0/8", "fd00::/8:443"])["spec"]["egress"]

    assert dns["ports"] == [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    assert network == {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    assert port == {"to": [{"ipBlock": {"cidr": "fd00::/8"}}], "ports": [{"protocol": "TCP", "port": 443}]}
    for wrong in ("example.com", "10.0.0.1/8", "10.0.0.0/8:0", "10.0.0.0/8:x", "10.0.0.0"):
        with pytest.raises(ConfigurationError, match=wrong):
            network_policy(RUN, allow=[wrong])


PROGRAM = """
import os, sys
flags = sys.flags.isolated, sys.flags.no_site, sys.flags.dont_write_bytecode
print("program", sys.argv[1:], flags, os.getpid(), flush=True)
"""


def start(path, **options):
    """Start a container's command as it would be started, with that PATH."""
    command = container(program=PROGRAM, arguments=["a b", "c"])["command"]
    return subprocess.Popen(["/bin/sh", *command[1:]], stdout=subprocess.PIPE, text=True, env={"PATH": path}, **options)


def programs(tmp_path, *names):
    """A directory with links to those programs, to be a PATH."""
    for name, target in names:
        (tmp_path / name).symlink_to(target)
    return str(tmp_path)


def test_wrapper_becomes_the_program(tmp_path):
    """With a Python on the PATH the first process is the program itself, with its arguments."""
    process = start(programs(tmp_path, ("python3", sys.executable)))
    out, _ = process.communicate(timeout=20)

    assert out == f"program ['a b', 'c'] (1, 1, 1) {process.pid}\n"


def test_wrapper_passes_over_a_python_that_cannot_run_it(tmp_path):
    """An interpreter that is too old or broken is not the end of the search."""
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    process = start(programs(tmp_path, ("python", sys.executable)))
    out, _ = process.communicate(timeout=20)

    assert out.startswith("program ['a b', 'c']")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 42)])
def test_keeper_ends_at_once(tmp_path, number, code):
    """Without any Python a keeper stays, ends on TERM with 0 and asks for a new container on USR1 with 42."""
    script = container(program=PROGRAM)["command"][2].replace("sleep 3600", "echo up; sleep 3600")
    # Only the search is cut short: this machine has interpreters in the places that it looks at.
    script = script.replace('p=$(command -v "$p" 2>/dev/null) || continue', "continue")
    path = programs(tmp_path, ("sleep", "/bin/sleep"))
    process = subprocess.Popen(
        ["/bin/sh", "-c", script, PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": path},
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.wait(timeout=20) == code
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
