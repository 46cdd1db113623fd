# SPDX-License-Identifier: Apache-2.0
"""Objects of a run beside its Pods: made under a name that only we know, and deleted by UID."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.manifests import DOMAIN, delete_options
from agentsandbox.backends.kubernetes.options import check_name, check_run_id
from agentsandbox.backends.kubernetes.watch import backoff
from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    Conflict,
    InfrastructureError,
    NotFound,
    PermissionDenied,
    Throttled,
)

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import Json, KubernetesApi

__all__ = [
    "check_namespace",
    "config_maps_path",
    "create",
    "delete",
    "gone",
    "jobs_path",
    "labels_of",
    "list_all",
    "marks",
    "namespace_manifest",
    "namespace_path",
    "own_namespace",
    "usable",
]

TRIES = 6
"""Of a call that may be repeated, while the API server does not answer."""

SETTLE = 120.0
"""Seconds until something that was deleted must be gone."""

_USABLE = 30.0
_PAGE = 200


def own_namespace(run_id: str) -> str:
    """Return the name of the namespace that a run makes for itself."""
    check_run_id(run_id)
    return f"asb-rl-{run_id}"


def namespace_path(name: str | None = None) -> str:
    """Return the path of all namespaces, or of one."""
    if name is not None:
        check_name(name, "namespace")
    return "/api/v1/namespaces" + (f"/{name}" if name else "")


def jobs_path(namespace: str, name: str | None = None) -> str:
    """Return the path of a namespace's Jobs, or of one."""
    check_name(namespace, "namespace")
    return f"/apis/batch/v1/namespaces/{namespace}/jobs" + (f"/{name}" if name else "")


def config_maps_path(namespace: str, name: str | None = None) -> str:
    """Return the path of a namespace's ConfigMaps, or of one."""
    return namespace_path(namespace) + "/configmaps" + (f"/{name}" if name else "")


def marks(run_id: str) -> dict[str, str]:
    """Return the labels by which everything of a run is known."""
    check_run_id(run_id)
    return {f"{DOMAIN}/managed-by": "agentsandbox", f"{DOMAIN}/run-id": run_id}


def labels_of(object_: Mapping[str, Any]) -> Mapping[str, str]:
    """Return an object's labels."""
    return object_["metadata"].get("labels") or {}


def namespace_manifest(run_id: str, nonce: str) -> Json:
    """Return the namespace of a run, to create."""
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": own_namespace(run_id),
            "labels": marks(run_id),
            "annotations": {f"{DOMAIN}/nonce": nonce},
        },
    }


async def check_namespace(api: KubernetesApi, run_id: str) -> None:
    """
    Make sure that we may make a namespace for a run.

    Raises:
        ConfigurationError: If we may not.

    """
    try:
        await api.request("POST", namespace_path(), params={"dryRun": "All"}, body=namespace_manifest(run_id, ""))
    except PermissionDenied as error:
        raise ConfigurationError(f"{error}; name a namespace that is there already with --namespace") from error


async def create(api: KubernetesApi, path: str, body: Json) -> Json:
    """
    Create an object; if the answer is lost, find out whether it was made.

    Args:
        api: The API server.
        path: Of the collection.
        body: The object, with a nonce of its own among its annotations.

    Returns:
        What the server made of it.

    Raises:
        Conflict: If there is another object of that name.
        ControlPlaneError: If the server refuses or does not answer.

    """
    meta, nonce = body["metadata"], f"{DOMAIN}/nonce"
    for waiting in _again():
        try:
            return await api.request("POST", path, body=body)
        except Conflict as error:
            found = await api.request("GET", f"{path}/{meta['name']}")
            if (found["metadata"].get("annotations") or {}).get(nonce) == meta["annotations"][nonce]:
                return found
            raise error from None
        except (ApiUnavailable, Throttled) as error:
            await _pause(error, waiting)
    raise AssertionError("the last try returns or raises")


async def usable(api: KubernetesApi, namespace: str, pod: Json) -> None:
    """
    Make sure that a namespace takes Pods. A fresh one does when somebody has given it a service account.

    Args:
        api: The API server.
        namespace: Which namespace.
        pod: A Pod as it will be made; this only asks whether it could be.

    Raises:
        ControlPlaneError: If the Pod is refused for another reason.

    """
    path = f"{namespace_path(namespace)}/pods"
    with anyio.move_on_after(_USABLE):
        while True:
            try:
                await api.request("POST", path, params={"dryRun": "All"}, body=pod)
            except PermissionDenied as error:
                if "looking up service account" not in str(error):
                    raise
            else:
                return
            await anyio.sleep(0.1)
    raise InfrastructureError(f"namespace {namespace} has got no service account within {_USABLE:g} s")


async def delete(api: KubernetesApi, path: str, uid: str, *, propagation: str = "Background") -> bool:
    """
    Order the end of this very object; that another one has its name by now is as good.

    Returns:
        Whether it was still there.

    Raises:
        ControlPlaneError: If the server refuses or does not answer.

    """
    for waiting in _again():
        try:
            await api.request("DELETE", path, body={**delete_options(uid), "propagationPolicy": propagation})
        except NotFound:
            return False
        except Conflict:
            found = await api.request("GET", path)
            if found["metadata"]["uid"] == uid:
                if found["metadata"].get("deletionTimestamp"):
                    return True  # a namespace that is on its way refuses another order
                raise
            return False
        except (ApiUnavailable, Throttled) as error:
            await _pause(error, waiting)
        else:
            return True
    raise AssertionError("the last try returns or raises")


async def gone(api: KubernetesApi, path: str, uid: str) -> None:
    """
    Wait until this very object is gone, for as long as :data:`SETTLE`.

    Raises:
        InfrastructureError: If it is still there when the time is up.

    """
    wait = 0.05
    with anyio.move_on_after(SETTLE):
        while True:
            try:
                found = await api.request("GET", path)
            except NotFound:
                return
            except (ApiUnavailable, Throttled):
                pass
            else:
                if found["metadata"]["uid"] != uid:
                    return
            await anyio.sleep(wait)
            wait = min(2 * wait, 1.0)
    raise InfrastructureError(f"{path} is still terminating after {SETTLE:g} s; look at its finalizers")


async def list_all(api: KubernetesApi, path: str, *, selector: str | None = None) -> list[Json]:
    """Return all objects of a collection, page by page."""
    items: list[Json] = []
    params: dict[str, Any] = {"labelSelector": selector, "limit": _PAGE}
    while True:
        page = await api.request("GET", path, params=params)
        items += page.get("items") or ()
        following = (page.get("metadata") or {}).get("continue")
        if not following:
            return items
        params["continue"] = following


def _again() -> Iterator[int | None]:
    """Count the failures so far; ``None`` is the last try."""
    yield from range(1, TRIES)
    yield None


async def _pause(error: ApiUnavailable | Throttled, failures: int | None) -> None:
    if failures is None:
        raise error
    await anyio.sleep(backoff(failures, random.random(), at_least=error.retry_after))  # noqa: S311 - jitter
