# SPDX-License-Identifier: Apache-2.0
"""
What a killed driver leaves behind, and how to tell it from anything else.

Nothing is deleted before everything that was found has been looked at: an object with the marks of the run that does
not look as we make them ends the whole undertaking, and so does one whose UID is not what the run's receipt says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.kubernetes import owned
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.manifests import DOMAIN, pods_path, selector
from agentsandbox.backends.kubernetes.options import check_run_id
from agentsandbox.backends.local.leftovers import started
from agentsandbox.errors import NotFound, PermissionDenied, SandboxError, UsageError

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import Json

__all__ = ["CLAIMED", "COLLECTIONS", "Claim", "Collection", "reap", "remove", "remove_leftovers"]

AT_ONCE = 16

IN_CLUSTER = "in-cluster"
"""What the API calls the context of a Pod's own service account."""


@attrs.frozen(kw_only=True)
class Collection:
    """One kind of objects that runs make."""

    kind: str
    """Its name."""
    root: str
    """Where its API is."""
    plural: str
    """Its name in paths."""
    prefixes: tuple[str, ...]
    """How the names of a run's begin."""
    propagation: str = "Background"
    """How what they own goes along."""

    def path(self, namespace: str) -> str:
        """Return the path of those of a namespace."""
        return f"{self.root}/namespaces/{namespace}/{self.plural}"


_EXTENSIONS = "/apis/extensions.agents.x-k8s.io/v1beta1"

COLLECTIONS = (
    # What makes Pods anew goes before Pods, and takes them along.
    Collection(kind="Job", root="/apis/batch/v1", plural="jobs", prefixes=("rollout-{}",), propagation="Foreground"),
    Collection(
        kind="SandboxClaim",
        root=_EXTENSIONS,
        plural="sandboxclaims",
        prefixes=("asb-{}-",),
        propagation="Foreground",
    ),
    Collection(
        kind="SandboxWarmPool",
        root=_EXTENSIONS,
        plural="sandboxwarmpools",
        prefixes=("asb-{}-",),
        propagation="Foreground",
    ),
    Collection(kind="SandboxTemplate", root=_EXTENSIONS, plural="sandboxtemplates", prefixes=("asb-{}-",)),
    Collection(kind="Pod", root="/api/v1", plural="pods", prefixes=("asb-{}-", "rollout-{}-")),
    Collection(kind="ConfigMap", root="/api/v1", plural="configmaps", prefixes=("episode-{}",)),
    Collection(kind="NetworkPolicy", root="/apis/networking.k8s.io/v1", plural="networkpolicies", prefixes=("asb-{}",)),
)
"""In the order in which they are removed: what makes others anew goes before them."""

CLAIMED = tuple(one for one in COLLECTIONS if one.root == _EXTENSIONS)
"""Those of the agent-sandbox controller."""


@attrs.frozen(kw_only=True)
class Claim:
    """What a run says is its own."""

    run_id: str
    """The run."""
    uids: Mapping[str, str] = attrs.field(factory=dict)
    """Name → UID, as far as they were noted."""
    namespace_uid: str = ""
    """UID of the namespace that it made, if it was noted."""
    nonce: str = ""
    """What it marked its namespace with, noted before there was one."""

    @classmethod
    def of(cls, receipt: Mapping[str, Any]) -> Claim:
        """Read it off a receipt."""
        uids = {str(entry["name"]): str(entry["uid"]) for entry in receipt.get("created", ()) if "uid" in entry}
        return cls(
            run_id=str(receipt["run_id"]),
            uids=uids,
            namespace_uid=str(receipt.get("namespace_uid") or ""),
            nonce=str(receipt.get("nonce") or ""),
        )


async def remove_leftovers(receipt: Mapping[str, Any]) -> list[str]:
    """
    Remove what the run of a receipt left behind.

    Raises:
        UsageError: If its driver still runs, or something is not provably the run's.

    """
    claim, driver = Claim.of(receipt), receipt.get("driver") or {}
    check_run_id(claim.run_id)
    if driver and not receipt.get("ended") and started(int(driver["pid"])) == driver["started"]:
        raise UsageError(f"run {claim.run_id} is still going on (process {driver['pid']}); stop it first")
    context = receipt.get("context")
    api = await KubernetesApi.connect(
        context=None if context == IN_CLUSTER else context, namespace=receipt["namespace"], max_connections=8
    )
    try:
        return await remove(api, str(receipt["namespace"]), claim)
    finally:
        await api.aclose()


async def reap(api: KubernetesApi, run_id: str) -> list[str]:
    """
    Remove everything of a run from the API's namespace, and the namespace that it made for itself.

    Args:
        api: The API server.
        run_id: 12 hexadecimal digits.

    Returns:
        One line for each thing that was removed.

    Raises:
        ConfigurationError: If the run id is not one; nothing has been asked then.
        UsageError: If something has the marks of the run and is not as we make it; nothing has been deleted then.

    """
    check_run_id(run_id)
    own = owned.own_namespace(run_id)
    removed: list[str] = []
    for namespace in dict.fromkeys((api.namespace, own)):
        try:
            removed += await remove(api, namespace, Claim(run_id=run_id))
        except PermissionDenied:
            if namespace == api.namespace:
                raise
    return removed


async def remove(api: KubernetesApi, namespace: str, claim: Claim) -> list[str]:
    """
    Remove what a run has in a namespace, and the namespace if it is the run's own.

    Returns:
        One line for each thing that was removed.

    Raises:
        UsageError: If something is not provably the run's; nothing has been deleted then.

    """
    check_run_id(claim.run_id)
    home: Json | None = None
    if namespace == owned.own_namespace(claim.run_id):
        try:
            home = await api.request("GET", owned.namespace_path(namespace))
        except NotFound:
            return []
        _verify_namespace(home, claim)
    found: list[tuple[Collection, list[Json]]] = []
    for kind in COLLECTIONS:
        objects = await _listed(api, kind, namespace, claim)
        for object_ in objects:
            _verify(object_, kind.kind, tuple(prefix.format(claim.run_id) for prefix in kind.prefixes), claim)
        found.append((kind, objects))
    removed: list[str] = []
    for kind, objects in found:
        removed += await _delete_all(api, kind.kind, kind.path(namespace), objects, propagation=kind.propagation)
    if home is not None:
        removed += await _delete_namespace(api, home)
    return removed


async def _listed(api: KubernetesApi, kind: Collection, namespace: str, claim: Claim) -> list[Json]:
    """List a run's objects of a kind; who may not even look at it, or has no such kind, has made nothing there."""
    try:
        found = await owned.list_all(api, kind.path(namespace), selector=selector(claim.run_id))
        # Pods of a Sandbox go with the claim that it belongs to, and may be named after somebody else's pool.
        return [object_ for object_ in found if kind.kind != "Pod" or not _of_sandbox(object_)]
    except PermissionDenied:
        if kind.kind == "Pod":
            raise
    except NotFound:
        pass
    return []


def _of_sandbox(pod: Json) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(one.get("controller") and one.get("kind") == "Sandbox" for one in owners)


def _verify_namespace(home: Json, claim: Claim) -> None:
    meta = home["metadata"]
    labels = owned.labels_of(home)
    if any(labels.get(key) != value for key, value in owned.marks(claim.run_id).items()):
        raise UsageError(f"namespace {meta['name']} does not have the labels of run {claim.run_id}: nothing is deleted")
    if claim.namespace_uid and meta["uid"] != claim.namespace_uid:
        raise UsageError(
            f"namespace {meta['name']} has UID {meta['uid']}, and run {claim.run_id} made {claim.namespace_uid}: "
            "nothing is deleted"
        )
    nonce = (meta.get("annotations") or {}).get(f"{DOMAIN}/nonce")
    if claim.nonce and nonce != claim.nonce:
        raise UsageError(f"namespace {meta['name']} was not made by run {claim.run_id}: nothing is deleted")


def _verify(object_: Json, kind: str, prefixes: tuple[str, ...], claim: Claim) -> None:
    meta = object_["metadata"]
    name, labels = str(meta["name"]), owned.labels_of(object_)
    what = f"{kind} {meta.get('namespace')}/{name}"
    marked = all(labels.get(key) == value for key, value in owned.marks(claim.run_id).items())
    if not marked or not name.startswith(prefixes):
        raise UsageError(f"{what} is not as run {claim.run_id} makes them: nothing is deleted")
    if claim.uids.get(name, meta["uid"]) != meta["uid"]:
        raise UsageError(
            f"{what} has UID {meta['uid']}, and run {claim.run_id} made {claim.uids[name]}: nothing is deleted"
        )


async def _delete_all(
    api: KubernetesApi, kind: str, path: str, objects: Sequence[Json], *, propagation: str = "Background"
) -> list[str]:
    removed: list[str] = []
    errors: list[SandboxError] = []
    slots = anyio.Semaphore(AT_ONCE)

    async def one(object_: Json) -> None:
        meta = object_["metadata"]
        try:
            async with slots:
                there = await owned.delete(api, f"{path}/{meta['name']}", meta["uid"], propagation=propagation)
                if there:
                    await owned.gone(api, f"{path}/{meta['name']}", meta["uid"])
        except SandboxError as error:
            errors.append(error)  # one that resists must not keep the others
        else:
            if there:
                removed.append(f"deleted {kind} {meta['namespace']}/{meta['name']}")

    async with anyio.create_task_group() as group:
        for object_ in objects:
            group.start_soon(one, object_)
    if errors:
        raise errors[0]
    return sorted(removed)


async def _delete_namespace(api: KubernetesApi, home: Json) -> list[str]:
    name, uid = home["metadata"]["name"], home["metadata"]["uid"]
    others = await owned.list_all(api, pods_path(name))
    if others:
        return [f"left namespace {name}: {len(others)} Pods in it are not of this run"]
    path = owned.namespace_path(name)
    await owned.delete(api, path, uid)
    await owned.gone(api, path, uid)
    return [f"deleted namespace {name}"]
