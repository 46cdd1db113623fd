# SPDX-License-Identifier: Apache-2.0
"""The parts of the double that compute and do nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from agentsandbox.testing.cluster import images, patching, podspec, scheduler, starting
from agentsandbox.testing.cluster.backoff import BackOff
from agentsandbox.testing.cluster.clock import Clock, Timing
from agentsandbox.testing.cluster.matching import matcher
from agentsandbox.testing.cluster.recording import Recorder
from agentsandbox.testing.cluster.replies import Refusal
from agentsandbox.testing.cluster.store import Store


@pytest.mark.parametrize(
    ("labels", "fields", "expected"),
    [
        ("", "", True),
        ("a=1", "", True),
        ("a==1,b=2", "", True),
        ("a=2", "", False),
        ("a!=2", "", True),
        ("c!=2", "", True),
        ("a", "", True),
        ("!a", "", False),
        ("!c", "", True),
        ("a in (1, 3)", "", True),
        ("a notin (1,3),b=2", "", False),
        ("c notin (1)", "", True),
        ("", "metadata.name=x", True),
        ("", "metadata.name!=x", False),
        ("", "status.phase=Running,spec.nodeName=n1", True),
        ("", "status.phase==Pending", False),
        ("", "spec.nodeName=", False),
    ],
)
def test_selectors(labels: str, fields: str, expected: bool) -> None:
    """An object is selected when every term of both selectors holds."""
    found = {
        "metadata": {"name": "x", "labels": {"a": "1", "b": "2"}},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running"},
    }

    assert matcher(labels, fields)(found) is expected


@pytest.mark.parametrize(("labels", "fields"), [("a b", ""), ("", "spec.secret=1"), ("", "nonsense")])
def test_selectors_that_are_none(labels: str, fields: str) -> None:
    """A selector that the server does not understand is a bad request."""
    with pytest.raises(Refusal) as caught:
        matcher(labels, fields)

    assert caught.value.code == 400


def test_patches() -> None:
    """A merge patch replaces lists and removes by null; a strategic one merges lists by their key."""
    before = {
        "metadata": {"labels": {"a": "1", "b": "2"}},
        "spec": {"containers": [{"name": "s", "image": "i", "env": []}]},
    }
    patch = {"metadata": {"labels": {"a": None}}, "spec": {"containers": [{"name": "s", "image": "j"}]}}

    merged = patching.apply(before, patch, patching.MERGE_PATCH)
    strategic = patching.apply(before, patch, patching.STRATEGIC_PATCH)

    assert merged == {"metadata": {"labels": {"b": "2"}}, "spec": {"containers": [{"name": "s", "image": "j"}]}}
    assert strategic["spec"] == {"containers": [{"name": "s", "image": "j", "env": []}]}
    assert before["metadata"]["labels"] == {"a": "1", "b": "2"}
    gone = patching.apply(
        before, {"spec": {"containers": [{"name": "s", "$patch": "delete"}]}}, patching.STRATEGIC_PATCH
    )
    assert gone["spec"] == {"containers": []}


def test_json_patches() -> None:
    """A JSON patch tests, adds, replaces and removes; a test that fails refuses all of it."""
    before = {"metadata": {"labels": {"a/b": "1"}}, "l": [1, 2]}
    steps = [
        {"op": "test", "path": "/metadata/labels/a~1b", "value": "1"},
        {"op": "replace", "path": "/metadata/labels/a~1b", "value": "2"},
        {"op": "add", "path": "/l/-", "value": 3},
        {"op": "remove", "path": "/l/0"},
    ]

    assert patching.apply(before, steps, patching.JSON_PATCH) == {"metadata": {"labels": {"a/b": "2"}}, "l": [2, 3]}
    assert before["l"] == [1, 2]
    for bad in ({"op": "test", "path": "/l/0", "value": 9}, {"op": "replace", "path": "/x", "value": 1}):
        with pytest.raises(Refusal) as caught:
            patching.apply(before, [bad], patching.JSON_PATCH)
        assert caught.value.code == 422


def test_patch_of_unknown_type() -> None:
    """Another content type is refused with 415."""
    with pytest.raises(Refusal) as caught:
        patching.apply({}, {}, "application/json")

    assert caught.value.code == 415


@pytest.mark.parametrize(
    ("text", "expected"), [("10m", 0.01), ("2", 2), ("16Mi", 16 * 2**20), ("1e3", 1000), ("1.5Gi", 1.5 * 2**30), (3, 3)]
)
def test_quantities(text: str, expected: float) -> None:
    """Quantities are numbers with decimal and binary suffixes."""
    assert podspec.quantity(text) == expected


def pod(**spec):
    containers = [{"name": "s", "image": "i", "resources": {"requests": {"cpu": "1"}}}]
    return podspec.complete({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": containers, **spec}})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"containers": []}, "spec.containers"),
        ({"restartPolicy": "Sometimes"}, "spec.restartPolicy"),
        ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds"),
        ({"containers": [{"name": "s"}]}, "spec.containers[0].image"),
        (
            {"containers": [{"name": "s", "image": "i", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
            "spec.containers[0].volumeMounts[0].name",
        ),
        (
            {"containers": [{"name": "s", "image": "i", "restartPolicyRules": [{"action": "Restart"}]}]},
            "spec.containers[0].restartPolicy",
        ),
        (
            {
                "containers": [
                    {"name": "s", "image": "i", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}},
                ]
            },
            "spec.containers[0].resources.requests",
        ),
    ],
)
def test_invalid_pods(change: dict, field: str) -> None:
    """A Pod that no server takes is refused with 422, naming the field."""
    with pytest.raises(Refusal) as caught:
        podspec.validate(pod(**change), version=(1, 36))

    assert caught.value.code == 422
    assert [cause["field"] for cause in caught.value.status["details"]["causes"]] == [field]


def test_restart_all_containers_needs_a_new_server() -> None:
    """A server before 1.36 does not know the rule, and says so."""
    rules = [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]
    found = pod(containers=[{"name": "s", "image": "i", "restartPolicy": "Never", "restartPolicyRules": rules}])

    podspec.validate(found, version=(1, 36))
    with pytest.raises(Refusal, match="RestartAllContainers"):
        podspec.validate(found, version=(1, 35))


def test_what_may_change_in_a_pod() -> None:
    """Image, deadline and tolerations may change; a deadline may only shrink."""
    before = pod(activeDeadlineSeconds=100)
    podspec.check_update(before, {**before, "spec": {**before["spec"], "activeDeadlineSeconds": 50}})
    for change in ({"activeDeadlineSeconds": 200}, {"restartPolicy": "Never"}, {"activeDeadlineSeconds": None}):
        with pytest.raises(Refusal) as caught:
            podspec.check_update(before, {**before, "spec": {**before["spec"], **change}})
        assert caught.value.code == 422


def node(name, **more):
    return scheduler.NodeSpec(name=name, cpu="2", pods=2, **more).object("now", ())


def test_scheduler_spreads_and_respects_room() -> None:
    """A Pod goes where fewest are, and nowhere if no node has room; the words name every obstacle."""
    nodes = [node("n1"), node("n2")]
    used = {"n1": Counter(pods=1, cpu=1)}

    assert scheduler.place(pod(), nodes, used) == ("n2", "")
    used["n2"] = Counter(pods=2, cpu=1)
    assert scheduler.place(pod(), nodes, used) == ("n1", "")
    used["n1"] = Counter(pods=1, cpu=2)
    chosen, words = scheduler.place(pod(), nodes, used)
    assert chosen is None
    assert words.startswith("0/2 nodes are available: 1 Insufficient cpu, 1 Too many pods.")


def test_scheduler_respects_taints_and_selectors() -> None:
    """A taint keeps Pods away that do not tolerate it, a selector and a cordon do, too."""
    tainted = node("n1", taints=({"key": "gpu", "value": "yes", "effect": "NoSchedule"},), labels={"zone": "a"})
    tolerated = pod(tolerations=[{"key": "gpu", "operator": "Exists"}])

    assert "untolerated taint(s) {gpu: yes}" in scheduler.place(pod(), [tainted], {})[1]
    assert scheduler.place(tolerated, [tainted], {}) == ("n1", "")
    assert "node affinity/selector" in scheduler.place(pod(nodeSelector={"zone": "b"}), [node("n2")], {})[1]
    cordoned = node("n3")
    cordoned["spec"]["unschedulable"] = True
    assert "node(s) were unschedulable" in scheduler.place(pod(), [cordoned], {})[1]


def affinity(*terms):
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def here(*names, operator="In", key="metadata.name"):
    return {"matchFields": [{"key": key, "operator": operator, "values": list(names)}]}


@pytest.mark.parametrize(
    ("terms", "chosen"),
    [
        ([here("n2")], "n2"),
        ([here("n2"), here("n1")], "n1"),
        ([{**here("n2"), "matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}], None),
        ([here("n1", operator="NotIn")], "n2"),
        ([{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}], "n2"),
        ([{"matchExpressions": [{"key": "fast", "operator": "Exists"}]}], "n2"),
        ([{"matchExpressions": [{"key": "fast", "operator": "DoesNotExist"}]}], "n1"),
        ([{"matchExpressions": [{"key": "disks", "operator": "Gt", "values": ["2"]}]}], "n2"),
        ([{"matchExpressions": [{"key": "disks", "operator": "Lt", "values": ["2"]}]}], "n1"),
        ([{"matchExpressions": [{"key": "zone", "operator": "Lt", "values": ["2"]}]}], None),
        ([{}], None),
    ],
)
def test_scheduler_respects_the_affinity_to_nodes(terms: list, chosen: str | None) -> None:
    """One of the terms has to hold, and each as a whole; a term that asks for nothing holds nowhere."""
    nodes = [node("n1", labels={"zone": "a", "disks": "1"}), node("n2", labels={"zone": "b", "fast": "", "disks": "3"})]

    assert chosen == scheduler.place(pod(affinity=affinity(*terms)), nodes, {})[0]


def test_words_about_a_pod_that_names_its_node() -> None:
    """The other nodes are not even looked at; the one that is named has its own words."""
    nodes = [node("n1"), node("n2")]
    pinned = pod(affinity=affinity(here("n1")))
    other = "1 node(s) didn't satisfy plugin(s) [NodeAffinity]"

    full = scheduler.place(pinned, nodes, {"n1": Counter(pods=2)})[1]
    assert full.startswith(f"0/2 nodes are available: 1 Too many pods, {other}. ")
    unknown = scheduler.place(pod(affinity=affinity(here("n9"))), nodes[:1], {})[1]
    assert unknown.startswith(f"0/1 nodes are available: {other}. no new claims to deallocate, ")
    unlike = scheduler.place(pod(affinity=affinity(here("n1", operator="NotIn"))), nodes[:1], {})[1]
    assert "1 node(s) didn't match Pod's node affinity/selector" in unlike


def test_nodes_are_named_by_one_field_and_one_value() -> None:
    """Whatever else a term for fields says is refused, in the words of the server."""
    with pytest.raises(Refusal) as caught:
        podspec.validate(
            pod(affinity=affinity(here("a", "b"), here(key="metadata.uid", operator="Exists"))), version=(1, 36)
        )

    causes = caught.value.status["details"]["causes"]
    assert [
        ("[0].matchFields[0].values", "Required value"),
        ("[1].matchFields[0].operator", 'Invalid value: "Exists"'),
        ("[1].matchFields[0].key", 'Invalid value: "metadata.uid"'),
    ] == [
        (cause["field"].partition("Terms")[2], cause["message"].partition(": ")[0] + _quoted(cause)) for cause in causes
    ]
    podspec.validate(pod(affinity=affinity(here("a"))), version=(1, 36))


def _quoted(cause):
    found = cause["message"].split(": ")
    return f": {found[1]}" if found[1].startswith('"') else ""


def test_events_are_counted_combined_and_dropped() -> None:
    """The same again is a count, ten that differ in their words are one, and after 25 a kubelet says no more."""
    clock = Clock()
    store = Store()
    recorder = Recorder(store, clock, keeps=True)
    about = {"kind": "Pod", "metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"nodeName": "n1"}}

    def tell(message, component="kubelet"):
        recorder.tell(about, "Normal", "Pulling", message, component=component)

    def told():
        return [(one.object["message"], one.object["count"]) for one in store.all(store.resource("events"), "n")]

    tell("same")
    tell("same")
    assert [("same", 2)] == told()
    for number in range(10):
        tell(f"other {number}")
    assert ("(combined from similar events): other 9", 2) == told()[-1]
    assert 10 == len(told())
    for _ in range(20):
        tell("same")
    assert 7 == recorder.dropped
    clock.offset = 301.0
    tell("same")
    assert 7 == recorder.dropped
    tell("placed", component="default-scheduler")
    assert "<Recorder [11 Events, 7 dropped]>" == repr(recorder)


def test_back_off_of_crashes() -> None:
    """The first restart is free; then the wait doubles up to its ceiling, counted from the end of the container."""
    waits, now = [], 0.0
    back_off = BackOff(Timing(back_off_max=30))
    back_off.started("i", now)
    for _ in range(5):
        now += 1
        back_off.exited(now)
        now += 0.5
        left = back_off.left("i", now)
        waits.append(left)
        now += left
        back_off.started("i", now)

    assert waits == [0.0, 9.5, 19.5, 29.5, 29.5]


def test_back_off_is_forgotten() -> None:
    """A container that ran long begins anew, and after a restart of all containers nothing is left."""
    back_off = BackOff(Timing())
    back_off.started("i", 0)
    for at in (1, 2):
        back_off.exited(at)
        back_off.started("i", at)
    assert back_off.nominal("i") == 20
    back_off.exited(1000)
    back_off.started("i", 1100)
    assert back_off.nominal("i") == 10
    back_off.exited(1101)
    back_off.forget()
    back_off.started("i", 1101)
    assert back_off.nominal("i") == 10


def test_rules_of_restart() -> None:
    """A rule says what an exit code means; without one that fits there is none."""
    rules = [
        {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}},
        {"action": "Restart", "exitCodes": {"operator": "NotIn", "values": [0]}},
    ]

    assert [starting.rule({"restartPolicyRules": rules}, code) for code in (42, 0, 1)] == [
        "RestartAllContainers",
        "",
        "Restart",
    ]
    assert starting.rule({}, 42) == ""


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("host", False),
        ("docker.io/library/busybox:1.36", False),
        ("registry.local:5000/a/b@sha256:00", False),
        ("UPPER", True),
        ("docker.io/team/Upper:1", True),
    ],
)
def test_image_names(name: str, bad: bool) -> None:
    """Repository names are in lower case."""
    assert (images.malformed(name) is not None) is bad


def test_words_of_pulls_that_fail() -> None:
    """Each kind of failure has a container runtime's words, and others have their own."""
    name = "registry.local/team/image:1"

    assert "429 Too Many Requests" in images.pull_error(name, "throttled")
    assert images.pull_error(name, "not_found").endswith(f"{name}: not found")
    assert "pull access denied" in images.pull_error(name, "unauthorized")
    assert "no such host" in images.pull_error(name, "no_host")
    assert images.pull_error(name, "disk is full") == "disk is full"
