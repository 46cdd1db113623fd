# SPDX-License-Identifier: Apache-2.0
"""What a trainer says that it will need: rollouts that are announced and have no sandbox yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

__all__ = ["Announcement", "Outlook"]


class Announcement:
    """
    Rollouts that are to come, image by image.

    Args:
        counts: Image → how many, in the order in which they will be needed.

    """

    __slots__ = ("_total", "left")

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.left: dict[str, int] = {image: count for image, count in counts.items() if count > 0}
        """Image → how many of them have no sandbox yet."""
        self._total = sum(self.left.values())

    def __repr__(self) -> str:
        return f"<Announcement [{sum(self.left.values())} of {self._total} rollouts to come]>"


class Outlook:
    """
    All announcements, oldest first. Every lease that is granted fulfils a part of the oldest one of its image.

    Nothing here costs more with more images or announcements, but for what an announcement is about.
    """

    def __init__(self) -> None:
        self._ahead: dict[str, int] = {}
        self._by_image: dict[str, deque[Announcement]] = {}
        self.total = 0
        """How many rollouts are to come."""

    def ahead(self, image: str) -> int:
        """How many rollouts of an image are to come."""
        return self._ahead.get(image, 0)

    def add(self, announcement: Announcement) -> None:
        """Count on what is announced."""
        for image, count in announcement.left.items():
            self._by_image.setdefault(image, deque()).append(announcement)
            self._change(image, count)

    def begin(self, announcement: Announcement) -> None:
        """Count on what begins now: in the place of what was announced of it before, as far as that goes."""
        for image, count in announcement.left.items():
            for _ in range(min(count, self.ahead(image))):
                self.fulfil(image)
            self._by_image.setdefault(image, deque()).appendleft(announcement)
            self._change(image, count)

    def fulfil(self, image: str) -> bool:
        """Take one rollout of an image off the oldest announcement of it; whether there was any."""
        queue = self._by_image.get(image)
        while queue:
            left = queue[0].left
            if image not in left:  # fulfilled, or withdrawn
                queue.popleft()
                continue
            left[image] -= 1
            if not left[image]:
                del left[image]
            self._change(image, -1)
            return True
        return False

    def withdraw(self, announcement: Announcement) -> list[str]:
        """Count on the rest of an announcement no longer; the images that it was about. Idempotent."""
        images = list(announcement.left)
        for image, count in announcement.left.items():
            self._change(image, -count)
        announcement.left.clear()
        return images

    def _change(self, image: str, by: int) -> None:
        self.total += by
        ahead = self._ahead.get(image, 0) + by
        if ahead:
            self._ahead[image] = ahead
        else:
            # What is left in the queues are announcements that were withdrawn.
            self._ahead.pop(image, None)
            self._by_image.pop(image, None)

    def __repr__(self) -> str:
        return f"<Outlook [{self.total} rollouts of {len(self._ahead)} images]>"
