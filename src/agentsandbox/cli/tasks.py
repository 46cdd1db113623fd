# SPDX-License-Identifier: Apache-2.0
"""Tasks from a file and rollout functions by name, refused with the line or the name when they cannot work."""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.episode import Episode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["load_rollout", "load_tasks"]

KEYS = frozenset({"id", "image", "group", "inputs", "artifacts", "timeout"})


def load_tasks(path: Path, *, image: str) -> list[Episode]:
    """
    Read episodes from a file with one JSON object a line.

    Args:
        path: The file. Keys of a line: ``id`` (required), ``image``, ``group``, ``inputs``, ``artifacts``, ``timeout``.
        image: What a line without an image gets.

    Raises:
        ConfigurationError: Naming the line that cannot work.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the tasks file {path}: {error}") from error
    found: list[Episode] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            episode = _episode(json.loads(line), image)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from error
        if episode.id in lines:
            raise ConfigurationError(
                f"{path}, line {number}: id {episode.id!r} is already used in line {lines[episode.id]}"
            )
        lines[episode.id] = number
        found.append(episode)
    if not found:
        raise ConfigurationError(f"{path} contains no task; write one JSON object a line")
    return found


def _episode(value: Any, image: str) -> Episode:
    if not isinstance(value, dict):
        raise ConfigurationError(f"a task is a JSON object, not {value!r:.80}")
    fields: Mapping[str, Any] = value
    if unknown := sorted(set(fields) - KEYS):
        raise ConfigurationError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(KEYS))}")
    if "id" not in fields:
        raise ConfigurationError("key 'id' is missing")
    for key, kind in (("inputs", dict), ("artifacts", list)):
        if key in fields and not isinstance(fields[key], kind):
            raise ConfigurationError(f"{key!r} must be a JSON {'object' if kind is dict else 'array'}")
    if isinstance(fields.get("group"), (dict, list)):
        raise ConfigurationError("'group' must be a string or a number")
    return Episode(**{"image": image, **fields})


def load_rollout(name: str) -> Callable[..., Any]:
    """
    Import a rollout function by ``module:function``; the working directory is searched as well.

    Raises:
        ConfigurationError: If it cannot be imported.

    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigurationError(f"--rollout takes module:function, not {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f"cannot import {module_name!r} for --rollout {name}: {error}") from error
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise ConfigurationError(
                f"module {module_name!r} has no {attribute!r}, named by --rollout {name}"
            ) from None
    if not callable(target):
        raise ConfigurationError(f"--rollout {name} names {target!r}, which is not a function")
    return target  # type: ignore[no-any-return]
