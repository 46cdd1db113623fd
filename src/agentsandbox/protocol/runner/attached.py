# SPDX-License-Identifier: Apache-2.0
"""
The runner as the first process of a container: streams come to it from outside, one exec each.

Every exec runs a relay that connects to an abstract socket, hands over its standard input and output, and stays only as
long as they are used. The program itself arrived that way, on the first stream: see ``WAITING`` and ``RELAY`` in
:mod:`agentsandbox.protocol.bootstrap`.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from typing import Any, Callable, Mapping, Optional

from . import place
from .loop import serve
from .stream import Stream


def main(config: Mapping[str, Any]) -> None:
    """
    Serve by configuration.

    Whoever received this program left the first stream on standard input and output, and in ``sys.argv`` the numbers of
    its listening socket and of the connection to that stream's relay.

    Args:
        config: ``nonce``; ``env`` on top of the container's; ``workdir``, relative to the container's; ``user``;
            ``jails``: whether it is to make jails, and nothing else.

    """
    jails: Optional[Callable[[Mapping[str, Any], int], int]] = None
    if config.get("jails"):
        from .jailer import run

        jails = run
        gc.collect()
        gc.freeze()  # what is loaded now stays shared with every jail
    listener, relay = (int(word) for word in sys.argv[1:3])
    stream = Stream(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3), relay)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    sys.exit(
        serve(
            stream,
            nonce=config["nonce"],
            base_env=place.environment(config.get("env") or {}),
            workdir=os.path.join(os.getcwd(), config.get("workdir") or ""),
            user=config.get("user"),
            accept=listener,
            handed=True,
            facts={"place": place.clean()},
            jails=jails,
        )
    )
