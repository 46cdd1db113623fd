# SPDX-License-Identifier: Apache-2.0
"""The directory that a run writes: its receipt before anything is created, a log an episode, and the results."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentsandbox.models.events import Event

__all__ = ["OutputDirectory", "read_receipt", "write_json", "writing"]

RECEIPT = "receipt.json"
RESULTS = "results.json"
RECEIPT_VERSION = 1
NOTED_AT_ONCE = 256
"""Objects up to which the receipt is written for each; beyond, once a second."""

LOGGED = {
    "lease.granted": "ready",
    "command.ended": "command",
    "attempt.ended": "attempt",
    "episode.ended": "reward",
}
"""Events of an episode that go into its log, and what they are called there."""


class OutputDirectory:
    """
    What a run leaves on disk. It is an event sink: give it to the pool.

    Args:
        path: The directory. It must not exist, so that no earlier record is overwritten.
        receipt: What the run is about to create, and for whom.
        resume: Whether to go on in a directory that exists.

    Raises:
        ConfigurationError: If the directory exists and is not to be resumed, or cannot be made.

    """

    def __init__(self, path: Path, receipt: Mapping[str, Any], *, resume: bool = False) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=resume)
        except FileExistsError:
            raise ConfigurationError(f"{path} exists; results are never overwritten, choose another --output") from None
        except OSError as error:
            raise ConfigurationError(f"cannot make the output directory {path}: {error}") from error
        self.path = path
        self._receipt: dict[str, Any] = {"version": RECEIPT_VERSION, **receipt, "created": [], "ended": False}
        self._write_receipt()

    def __call__(self, event: Event) -> None:
        """Take an event: note what was created, and log what belongs to an episode."""
        if event.name == "host.created":
            self._receipt["created"].append(dict(event.data))
            self._write_receipt()
        if event.episode is not None and (name := LOGGED.get(event.name)) is not None:
            line: dict[str, Any] = {"event": name, "at": time.time(), "episode_id": event.episode}
            line.update(attempt=event.attempt, sandbox=event.sandbox, **event.data)
            with self.log_path(event.episode).open("a", encoding="utf-8") as log:
                log.write(json.dumps({key: value for key, value in line.items() if value is not None}) + "\n")

    def log_path(self, episode: str) -> Path:
        """Return where the log of *episode* goes."""
        return self.path / f"rollout-{re.sub(r'[^A-Za-z0-9._-]', '_', episode)[:150]}.log"

    def note(self, **facts: Any) -> None:
        """Note something in the receipt."""
        self._receipt.update(facts)
        self._write_receipt()

    def created(self, kind: str, object_: Mapping[str, Any]) -> None:
        """Note in the receipt that there is an object on a cluster."""
        meta = object_["metadata"]
        self._receipt["created"].append({"kind": kind, "name": meta["name"], "uid": meta["uid"]})
        # Thousands of Pods must not mean thousands of long files; what is not noted is known by its labels.
        if len(self._receipt["created"]) <= NOTED_AT_ONCE or time.monotonic() - self._written > 1.0:
            self._write_receipt()

    def end(self) -> None:
        """Note in the receipt that the run has ended by itself."""
        self.note(ended=True)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write ``results.json``: whole or not at all."""
        self.write(RESULTS, results)

    def write(self, name: str, value: Any) -> None:
        """Write a file of JSON: whole or not at all."""
        write_json(self.path / name, value)

    def write_text(self, name: str, text: str) -> None:
        """Write a file of text."""
        with writing(self.path / name) as path:
            path.write_text(text, encoding="utf-8")

    def _write_receipt(self) -> None:
        self.write(RECEIPT, self._receipt)
        self._written = time.monotonic()


def read_receipt(path: Path) -> dict[str, Any]:
    """
    Read the receipt of a run.

    Raises:
        ConfigurationError: If there is none, or it is not one of ours.

    """
    try:
        receipt = json.loads((path / RECEIPT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{path} has no {RECEIPT}: not the output of a run") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path / RECEIPT}: {error}") from error
    if not isinstance(receipt, dict) or receipt.get("version") != RECEIPT_VERSION or "run_id" not in receipt:
        raise ConfigurationError(f"{path / RECEIPT} is not a receipt of this version")
    return receipt


def write_json(path: Path, value: Any) -> None:
    """
    Write a file of JSON: whole or not at all.

    Raises:
        ConfigurationError: If it cannot be written.

    """
    with writing(path):
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """
    Write a file that the user has named, or one in a directory that he has named.

    Raises:
        ConfigurationError: Instead of any ``OSError``: a full disk, a missing directory, no permission.

    """
    try:
        yield path
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path}: {error.strerror or error}; make room there, or choose another --output"
        ) from error
