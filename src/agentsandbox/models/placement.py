# SPDX-License-Identifier: Apache-2.0
"""Which node an image belongs on."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["Placement"]


@attrs.frozen(kw_only=True)
class Placement:
    """
    Where sandboxes of an image are made: where the image is, or will be.

    A sandbox on another node is not made into one of it, and no more are made for a node than it has room for.
    """

    nodes: Mapping[str, str]
    """Image → node. An image that is not named may be anywhere."""
    room: Mapping[str, int]
    """Node → how many sandboxes it has room for."""
