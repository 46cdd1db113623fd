# SPDX-License-Identifier: Apache-2.0
"""How a command ends that somebody stops."""

from __future__ import annotations

import signal
import threading

import anyio
import pytest

from agentsandbox.cli.running import running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_cleans_up(number):
    """Whatever it does is cancelled, and may end in good order; afterwards the signal means what it meant before."""
    before, done = signal.getsignal(signal.SIGTERM), []

    async def act():
        try:
            signal.raise_signal(number)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0)
                done.append("removed")

    with pytest.raises(KeyboardInterrupt):
        running(act)
    assert ["removed"] == done
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_command_in_another_thread_leaves_signals_alone():
    """They are the main thread's."""
    found = []

    async def act():
        return signal.getsignal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: found.append(running(act)))
    thread.start()
    thread.join()
    assert [before] == found
