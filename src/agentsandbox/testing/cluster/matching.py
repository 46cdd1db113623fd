# SPDX-License-Identifier: Apache-2.0
"""Label and field selectors of lists and watches. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from agentsandbox.testing.cluster.replies import Json, bad_request

__all__ = ["Match", "matcher"]

Match = Callable[[Json], bool]

_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s*\(([^)]*)\)\s*$")
_FIELDS = ("metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.restartPolicy", "status.phase")
_EVENT_FIELDS = ("involvedObject.", "reason", "type")


def matcher(labels: str, fields: str) -> Match:
    """
    Return what says whether an object is selected.

    Raises:
        Refusal: If a selector is none that is understood here.

    """
    tests = [_label(term) for term in _split(labels)] + [_field(term) for term in _split(fields)]
    if not tests:
        return lambda _object: True
    return lambda object_: all(test(object_) for test in tests)


def _split(text: str) -> list[str]:
    """Split at commas that are not in brackets."""
    terms, depth, current = [], 0, ""
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            terms.append(current)
            current = ""
        else:
            current += character
    return [term.strip() for term in (*terms, current) if term.strip()]


def _labels(object_: Json) -> Mapping[str, str]:
    return object_["metadata"].get("labels") or {}


def _label(term: str) -> Match:
    if found := _SET.match(term):
        key, values = found[1], {value.strip() for value in found[3].split(",")}
        if found[2] == "in":
            return lambda o: _labels(o).get(key) in values
        return lambda o: _labels(o).get(key) not in values
    if "!=" in term:
        key, _, value = term.partition("!=")
        return lambda o: _labels(o).get(key.strip()) != value.strip()
    if "=" in term:
        key, _, value = term.replace("==", "=").partition("=")
        return lambda o: _labels(o).get(key.strip()) == value.strip()
    if term.startswith("!"):
        return lambda o: term[1:].strip() not in _labels(o)
    if re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_./]*", term):
        return lambda o: term in _labels(o)
    raise bad_request(f"unable to parse requirement: found {term!r}")


def _field(term: str) -> Match:
    negative = "!=" in term
    path, found, value = term.replace("==", "=").partition("!=" if negative else "=")
    if not found:
        raise bad_request(f"invalid selector: {term!r}; can't understand {term!r}")
    if path not in _FIELDS and not path.startswith(_EVENT_FIELDS):
        raise bad_request(f'field label not supported: "{path}"')
    keys = path.split(".")

    def test(object_: Json) -> bool:
        node: object = object_
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        return (str(node or "") == value) != negative

    return test
