# SPDX-License-Identifier: Apache-2.0
"""Streams to the runner in a Pod: one exec each, whose relay hands its standard input and output over."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.jailing import MODULES
from agentsandbox.backends.kubernetes.manifests import CONTAINER, exec_params, exec_path
from agentsandbox.errors import ControlPlaneError, ProvisionError
from agentsandbox.protocol.bootstrap import (
    ATTACHED_ENTRY,
    RELAY,
    WAITING,
    WAITING_GREETING,
    handover,
    program,
    stub,
)
from agentsandbox.protocol.runner.attaching import GREETING
from agentsandbox.transport.websocket import MAX_MESSAGE, PROTOCOLS, ExecSocket, ExecStream

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.models.sandbox import SandboxSpec

__all__ = ["Attacher", "NoPython", "NoRunner", "first_process"]

SOCKET = "agentsandbox"
"""Name of the abstract socket. It is visible in the Pod's network namespace only, and who connects needs the nonce."""

OPENINGS = 64
"""Streams opened at once: when an API server goes away, thousands want another one at the same time."""

GREETED_WITHIN = 30.0
"""Seconds from the handshake to the first word of the runner, which may have to wait for its turn on a busy node."""

_LONGEST_GREETING = 64

# The same places where the Pod's first process looks. $0 is the program, "$@" its arguments. Standard error must stay
# open: the server ends the whole websocket when the last descriptor of it is closed.
_FIND = """\
exec 3>&2
for p in python3 python /testbed/.venv/bin/python /opt/miniconda3/envs/testbed/bin/python /opt/miniconda3/bin/python \
/opt/conda/bin/python /opt/venv/bin/python /root/.venv/bin/python /usr/local/bin/python3 /usr/bin/python3 \
"$HOME"/.pyenv/versions/*/bin/python /root/.pyenv/versions/*/bin/python /opt/pyenv/versions/*/bin/python
do p=$(command -v "$p")||continue
case $("$p" -V) in "Python 3."[7-9]*|"Python 3."[1-9][0-9]*) exec "$p" -ISBc "$0" "$@" 2>&3;; esac
done 2>/dev/null
echo "no Python" >&2
exit 127"""


_STARTER = f"""\
import os,sys,_socket as k
s=k.socket(1,1)
try:s.connect("\\0"+sys.argv[1])
except OSError:
 if not os.fork():
  try:
   os.setsid()
   n=os.open(os.devnull,2)
   for i in 0,1,2:os.dup2(n,i)
   os.closerange(3,256)
   exec(compile({WAITING!r},"<waiting>","exec"),{{"__name__":"__main__"}})
  finally:os._exit(1)
s.close()
exec(compile({RELAY!r},"<relay>","exec"),{{"__name__":"__main__"}})
"""
"""
Starts what would be the first process of a Pod of ours beside what the container runs, unless it is there already, and
becomes the relay to it. Too long for a command line, so it travels in the stream. Arguments: those of ``WAITING``.
"""


class NoPython(ProvisionError):
    """The image has no Python that a runner could use."""

    retryable = False


class NoRunner(ControlPlaneError):
    """The exec worked, and nobody in the container answered."""


def first_process(nonce: str) -> tuple[str, tuple[str, ...]]:
    """
    Return the program of a container and its arguments.

    Args:
        nonce: What a driver will have to show; its hash is all that the Pod's spec gets.

    """
    return WAITING, (SOCKET, hashlib.sha256(nonce.encode()).hexdigest())


class Attacher:
    """
    Opens streams to runners.

    Args:
        api: The API server.
        jails: Whether runners are to make jails.

    """

    def __init__(self, api: KubernetesApi, *, jails: bool = False) -> None:
        self._api = api
        self._jails = jails
        self._openings = anyio.Semaphore(OPENINGS)
        self._interpreters: dict[str, str] = {}
        self.opened = 0
        """Streams that were opened so far."""

    def __repr__(self) -> str:
        return f"<Attacher [{self.opened} streams opened, {len(self._interpreters)} images known]>"

    def learn(self, image: str, executable: Any) -> None:
        """Remember where an image has its interpreter, so that nobody has to look for it again."""
        if isinstance(executable, str) and executable.startswith("/") and len(executable) < 512:
            self._interpreters[image] = executable

    async def open(
        self,
        pod: str,
        image: str,
        *,
        nonce: str,
        spec: SandboxSpec,
        container: str = CONTAINER,
        starts: bool = False,
    ) -> ExecStream:
        """
        Open a stream to the runner of a Pod, which is sent its program first if it has none yet.

        Args:
            pod: Its name.
            image: Its image.
            nonce: What the runner wants to see.
            spec: What its commands are to find.
            container: Which of its containers.
            starts: Whether nothing of ours runs there, so that a runner is started if there is none yet.

        Raises:
            NoPython: If the image has none.
            NoRunner: If nobody answered.
            ControlPlaneError: If the API server refuses.
            ProtocolError: If what answers is no runner.

        """
        _, (socket, digest) = first_process(nonce)
        words, first = [RELAY, socket], b""
        if starts:
            first = _STARTER.encode("ascii")
            # A socket of its own: Pods may share the network of their node.
            words = [stub(len(first)), f"{socket}-{digest[:16]}", digest]
        async with self._openings:
            executable = self._interpreters.get(image)
            if executable is not None:
                try:
                    return await self._open(pod, container, [executable, "-ISBc", *words], first, nonce, spec)
                except NoPython:
                    del self._interpreters[image]  # the same name means another image by now
            return await self._open(pod, container, ["sh", "-c", _FIND, *words], first, nonce, spec)

    async def _open(
        self, pod: str, container: str, command: list[str], first: bytes, nonce: str, spec: SandboxSpec
    ) -> ExecStream:
        socket = await self._api.websocket(
            exec_path(self._api.namespace, pod),
            params=exec_params(command, container=container, stdin=True),
            protocols=PROTOCOLS,
            heartbeat=None,  # the session's own
            max_size=MAX_MESSAGE,
        )
        stream = ExecStream(ExecSocket(socket))
        try:
            with anyio.fail_after(GREETED_WITHIN):
                if first:
                    await stream.send([first])
                said = await _greeting(stream)
                if said.startswith(WAITING_GREETING):
                    config = {**_config(nonce, spec), "jails": self._jails}
                    text = program(
                        entry=ATTACHED_ENTRY,
                        config=config,
                        modules=MODULES if self._jails else (),
                        bytecode=said[len(WAITING_GREETING) :].decode("ascii", "replace").strip(),
                    )
                    await stream.send([handover(nonce, text)])
        except BaseException as error:
            with anyio.move_on_after(5, shield=True):
                await stream.aclose()
            if isinstance(error, (TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError)):
                raise _silence(stream, error) from error
            raise
        self.opened += 1
        return stream


async def _greeting(stream: ExecStream) -> bytes:
    said = b""
    while said != GREETING and not (said.startswith(WAITING_GREETING) and said.endswith(b"\n")):
        said += await stream.receive()
        begin = said[: len(WAITING_GREETING)]
        if len(said) > _LONGEST_GREETING or not (GREETING.startswith(said) or WAITING_GREETING.startswith(begin)):
            raise NoRunner(f"what answers is no runner: {said[:_LONGEST_GREETING]!r}")
    return said


def _silence(stream: ExecStream, error: BaseException) -> ControlPlaneError | NoPython:
    status = stream.status
    words = " ".join(stream.stderr.decode("utf-8", "replace").split())[-300:]
    if isinstance(error, TimeoutError):
        return NoRunner(f"no runner answered within {GREETED_WITHIN:g} s" + (f": {words}" if words else ""))
    if status is None:
        return NoRunner("the stream ended before a runner answered")
    if status.exit_code == 127 or "executable file not found" in status.message or "no such file" in status.message:
        return NoPython(f"no Python 3.7 or later in the image: {words or status.message}")
    return NoRunner(f"the relay ended: {words or status.message or status.exit_code}")


def _config(nonce: str, spec: SandboxSpec) -> dict[str, Any]:
    return {"nonce": nonce, "env": dict(spec.env), "workdir": spec.workdir, "user": spec.user}
