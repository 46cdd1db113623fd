# SPDX-License-Identifier: Apache-2.0
"""What a batch has come to, on disk: a driver that is killed at any moment goes on where it was."""

from __future__ import annotations

from agentsandbox.rollouts.journal.batches import BatchJournal as BatchJournal
from agentsandbox.rollouts.journal.batches import Progress as Progress
from agentsandbox.rollouts.journal.book import Journal as Journal
from agentsandbox.rollouts.journal.reading import Orphan as Orphan
from agentsandbox.rollouts.journal.store import SCHEMA_VERSION as SCHEMA_VERSION

__all__ = ["SCHEMA_VERSION", "BatchJournal", "Journal", "Orphan", "Progress"]
