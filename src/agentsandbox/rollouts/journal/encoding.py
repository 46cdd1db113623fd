# SPDX-License-Identifier: Apache-2.0
"""
Values and records as JSON, and back to equal ones. Pure.

JSON has no tuples, bytes, infinities or keys that are numbers: those travel as ``{"~": kind, "v": value}``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import attrs

from agentsandbox.errors import Blame, ConfigurationError, Failure, FailureKind, Phase
from agentsandbox.models.episode import Attempt, Episode, EpisodeRecord, Status
from agentsandbox.models.sandbox import Identity
from agentsandbox.models.timing import StartKind, Timings, TTFCSample

__all__ = ["decode", "digest", "dump", "encode", "load_attempt", "load_record", "store_attempt", "store_record"]

_TAG = "~"
_LONG = 4096
"""Bits above which an integer travels in hexadecimal: Python refuses to print very long ones in decimal."""


def encode(value: object, unknown: Callable[[object], Any] | None = None) -> Any:
    """
    Reduce *value* to what JSON knows, so that :func:`decode` gives an equal value.

    Args:
        value: Anything.
        unknown: What to put for a value of a type that is not known; its ``repr()`` when nothing is said, which is what
            is read back then.

    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() <= _LONG else {_TAG: "int", "v": hex(number)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "v": repr(float(value))}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and key != _TAG for key in value)
        if plain:
            return {str.__str__(key): encode(inner, unknown) for key, inner in value.items()}
        return {_TAG: "dict", "v": [[encode(key, unknown), encode(inner, unknown)] for key, inner in value.items()]}
    if isinstance(value, list):
        return [encode(inner, unknown) for inner in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "v": [encode(inner, unknown) for inner in value]}
    if isinstance(value, (set, frozenset)):
        kind = "set" if isinstance(value, set) else "frozenset"
        return {_TAG: kind, "v": sorted((encode(inner, unknown) for inner in value), key=dump)}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, PurePath):
        return {_TAG: "path", "v": str(value)}
    return _strange(value) if unknown is None else unknown(value)


def _strange(value: Any) -> Any:
    # What a rollout function keeps beside a reward may be anything, and must never cost the reward.
    try:
        item = value.item()
    except Exception:  # noqa: BLE001 - it is no scalar of an array library
        item = None
    if type(item) in (bool, int, float, str):
        return encode(item)
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a stranger's __repr__
        text = f"<{type(value).__name__}>"
    return {_TAG: "repr", "v": text}


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16),
    "float": float,
    "dict": lambda v: {decode(key): decode(inner) for key, inner in v},
    "tuple": lambda v: tuple(decode(inner) for inner in v),
    "set": lambda v: {decode(inner) for inner in v},
    "frozenset": lambda v: frozenset(decode(inner) for inner in v),
    "bytes": base64.b64decode,
    "path": Path,
    "repr": str,
}


def decode(value: Any) -> Any:
    """Turn what :func:`encode` gave into a value that equals the first one."""
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if isinstance(value, dict):
        kind = value.get(_TAG)
        return {key: decode(inner) for key, inner in value.items()} if kind is None else _DECODERS[kind](value["v"])
    return value


def dump(value: Any) -> str:
    """Write what :func:`encode` gave, the same text for the same value; nothing but ASCII, so lone surrogates live."""
    return json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":"))


def digest(episode: Episode) -> str:
    """
    Name the content of an episode: equal for equal episodes, also in another process.

    Raises:
        ConfigurationError: If something in its inputs cannot be recognised again.

    """

    def by_content(value: object) -> Any:
        try:
            content = pickle.dumps(value, protocol=4)
        except Exception as error:
            raise ConfigurationError(
                f"the inputs of episode {episode.id!r} hold a {type(value).__name__}, which a journal cannot recognise "
                f"after a restart: {error}; use values that JSON or pickle knows"
            ) from error
        return {_TAG: "pickle", "v": hashlib.sha256(content).hexdigest()}

    fields = [episode.id, episode.image, episode.group, episode.inputs, episode.artifacts, episode.timeout]
    return hashlib.sha256(dump([encode(field, by_content) for field in fields]).encode()).hexdigest()


def store_attempt(attempt: Attempt) -> dict[str, Any]:
    """Put an attempt into a dictionary for JSON."""
    ttfc = attempt.ttfc
    return {
        "number": attempt.number,
        "sandbox": attempt.sandbox,
        "node": attempt.node,
        "identity": attrs.asdict(attempt.identity) if attempt.identity else None,
        "reward": encode(attempt.reward),
        "failure": _store_failure(attempt.failure),
        "ttfc": None if ttfc is None else {**attrs.asdict(ttfc), "stages": encode(ttfc.stages)},
        "timings": attrs.asdict(attempt.timings),
        "commands": [_safely(entry) for entry in attempt.commands],
        # Only where there are any: journals without them are what earlier versions wrote.
        **({} if attempt.restored is None else {"restored": attempt.restored}),
        **({"checkpoints": list(attempt.checkpoints)} if attempt.checkpoints else {}),
    }


def load_attempt(data: Mapping[str, Any]) -> Attempt:
    """Take an attempt from what :func:`store_attempt` gave."""
    identity, ttfc = data["identity"], data["ttfc"]
    return Attempt(
        number=data["number"],
        sandbox=data["sandbox"],
        node=data["node"],
        identity=None if identity is None else Identity(**identity),
        reward=decode(data["reward"]),
        failure=_load_failure(data["failure"]),
        ttfc=None
        if ttfc is None
        else TTFCSample(**{**ttfc, "start": StartKind(ttfc["start"]), "stages": decode(ttfc["stages"])}),
        timings=Timings(**data["timings"]),
        commands=tuple(decode(entry) for entry in data["commands"]),
        restored=data.get("restored"),
        checkpoints=tuple(data.get("checkpoints") or ()),
    )


def store_record(record: EpisodeRecord) -> dict[str, Any]:
    """Put a record into a dictionary for JSON, all but its episode and its attempts: those are stored already."""
    return {
        "status": record.status.value,
        "reward": encode(record.reward),
        "failure": _store_failure(record.failure),
        "attempts": record.attempts,
        "patch": record.patch,
        "info": _safely(record.info),
        "artifacts": {name: str(path) for name, path in record.artifacts.items()},
    }


def load_record(data: Mapping[str, Any], episode: Episode, history: tuple[Attempt, ...]) -> EpisodeRecord:
    """Take a record from what :func:`store_record` gave."""
    return EpisodeRecord(
        episode=episode,
        status=Status(data["status"]),
        reward=decode(data["reward"]),
        failure=_load_failure(data["failure"]),
        attempts=data["attempts"],
        history=history,
        patch=data["patch"],
        info=decode(data["info"]),
        artifacts={name: Path(path) for name, path in data["artifacts"].items()},
    )


def _safely(value: Mapping[str, Any]) -> Any:
    try:
        return encode(value)
    except RecursionError:
        return {_TAG: "dict", "v": [["unreadable", "nested too deeply to be kept"]]}


def _store_failure(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {field.name: getattr(failure, field.name) for field in attrs.fields(Failure) if field.name != "cause"}


def _load_failure(data: Mapping[str, Any] | None) -> Failure | None:
    if data is None:
        return None
    return Failure(
        **{
            **data,
            "kind": FailureKind(data["kind"]),
            "phase": Phase(data["phase"]),
            "blame": Blame(data["blame"]),
        }
    )
