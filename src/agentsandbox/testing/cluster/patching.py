# SPDX-License-Identifier: Apache-2.0
"""The three kinds of patches. Pure."""

from __future__ import annotations

import copy
from typing import Any

from agentsandbox.testing.cluster.replies import Json, Refusal, bad_request

__all__ = ["JSON_PATCH", "MERGE_PATCH", "STRATEGIC_PATCH", "apply"]

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
    "conditions": "type",
    "ports": "containerPort",
}
"""Lists that a strategic merge patch merges element by element, and by which key."""


def apply(object_: Json, patch: Any, content_type: str) -> Json:
    """
    Return the object as the patch makes it; what was given stays as it was.

    Raises:
        Refusal: If the patch is of no known type or does not fit.

    """
    if content_type == JSON_PATCH:
        if not isinstance(patch, list):
            raise bad_request("a JSON patch is a list")
        return _operations(copy.deepcopy(object_), patch)
    if content_type not in (MERGE_PATCH, STRATEGIC_PATCH):
        raise Refusal(
            415,
            "UnsupportedMediaType",
            f"the body of the request was in an unknown format - accepted media types include: {JSON_PATCH}, "
            f"{MERGE_PATCH}, {STRATEGIC_PATCH}, application/apply-patch+yaml",
        )
    if not isinstance(patch, dict):
        raise bad_request("the patch is not an object")
    return _merge(object_, patch, strategic=content_type == STRATEGIC_PATCH)


def _merge(target: Any, patch: Json, *, strategic: bool) -> Json:
    result: Json = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merge(result.get(key), value, strategic=strategic)
        elif strategic and isinstance(value, list) and key in _MERGE_KEYS and isinstance(result.get(key), list):
            result[key] = _merge_list(result[key], value, _MERGE_KEYS[key])
        elif strategic and key == "finalizers" and isinstance(result.get(key), list):
            result[key] = [*result[key], *(one for one in value if one not in result[key])]
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merge_list(items: list[Any], patches: list[Any], key: str) -> list[Any]:
    result = list(items)
    for patch in patches:
        places = [place for place, item in enumerate(result) if item.get(key) == patch.get(key)]
        if patch.get("$patch") == "delete":
            result = [item for item in result if item.get(key) != patch.get(key)]
        elif places:
            result[places[0]] = _merge(result[places[0]], patch, strategic=True)
        else:
            result.append(copy.deepcopy(patch))
    return result


def _operations(object_: Any, operations: list[Json]) -> Json:
    for operation in operations:
        kind, path = operation.get("op"), str(operation.get("path"))
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
        node = object_
        try:
            for part in parents:
                node = node[int(part)] if isinstance(node, list) else node[part]
            key: Any = last
            if isinstance(node, list):
                key = len(node) if last == "-" else int(last)
            if kind == "test":
                if node[key] != operation.get("value"):
                    raise Refusal(422, "Invalid", f"testing value {path} failed: test failed")
            elif kind == "remove":
                del node[key]
            elif kind == "add" and isinstance(node, list):
                node.insert(key, operation["value"])
            elif kind in ("add", "replace"):
                if kind == "replace":
                    node[key]
                node[key] = operation["value"]
            else:
                raise bad_request(f"JSON patch operation {kind!r} is not supported here")
        except (KeyError, IndexError, ValueError, TypeError) as error:
            message = f"the server rejected our request due to an error in our request: {kind} {path}: {error!r}"
            raise Refusal(422, "Invalid", message) from error
    if not isinstance(object_, dict):
        raise bad_request("the patch makes something that is not an object")
    return object_
