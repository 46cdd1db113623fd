# SPDX-License-Identifier: Apache-2.0
"""The first words on a stream: who asks, who answers, and how far each of them has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.errors import SandboxLost
from agentsandbox.protocol.frames import HELLO, REFUSED, VERSION, WELCOME, Frame, FrameError, dump, load

if TYPE_CHECKING:
    from agentsandbox.protocol.connection import Connection
    from agentsandbox.transport import ByteStream

__all__ = ["Welcome", "greet"]


@attrs.frozen(kw_only=True)
class Welcome:
    """What a runner answers."""

    facts: dict[str, Any]
    """What it says about itself."""
    received: Any
    """How many numbered frames it says that it has; unchecked."""
    rest: list[Frame]
    """What came along with the answer."""


async def greet(stream: ByteStream, connection: Connection, nonce: str) -> Welcome:
    """
    Say who asks, and wait for the answer.

    Raises:
        SandboxLost: If the runner refuses.
        FrameError: If what answers is no runner of this version.

    """
    connection.send(HELLO, 0, dump({"version": VERSION, "nonce": nonce, "received": connection.received}))
    await stream.send(connection.data_to_send())
    frames: list[Frame] = []
    while not frames:
        frames = connection.receive_data(await stream.receive())
    first, *rest = frames
    answer = load(first.payload) if first.type in (WELCOME, REFUSED) else {}
    if first.type == REFUSED:
        raise SandboxLost("refused", str(answer.get("reason")))
    if first.type != WELCOME or answer.get("version") != VERSION:
        raise FrameError(f"no welcome of version {VERSION} from the runner")
    facts = answer.get("facts")
    if not isinstance(facts, dict):
        raise FrameError("the runner gives no facts")
    return Welcome(facts=facts, received=answer.get("received"), rest=rest)
