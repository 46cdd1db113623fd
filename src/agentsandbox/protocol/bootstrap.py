# SPDX-License-Identifier: Apache-2.0
"""
The runner as one piece of text, for sandboxes where nothing of ours is installed.

:func:`program` packs the modules of the runner into a Python program that needs only an interpreter of 3.7 or later,
also one started with ``-I -S -B``. The modules come back under their real names, below packages that are empty.
"""

from __future__ import annotations

import base64
import functools
import importlib.resources
import json
import marshal
import zlib
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "ATTACHED_ENTRY",
    "RELAY",
    "STDIO_ENTRY",
    "WAITING",
    "WAITING_GREETING",
    "handover",
    "program",
    "runner_modules",
    "source",
    "stub",
]

STDIO_ENTRY = "agentsandbox.protocol.runner.loop:main"
"""Serves over standard input and output."""

ATTACHED_ENTRY = "agentsandbox.protocol.runner.attached:main"
"""Serves streams that are handed over; what :data:`WAITING` is to become."""

WAITING_GREETING = b"stub "
"""
How a line begins that a stream which was handed over is told first while the program has not arrived yet. The rest of
the line says for which bytecode its interpreter is made, in hexadecimal digits.
"""

_RUNNER = "agentsandbox.protocol.runner"

_MODULES = (
    "around",
    "attached",
    "attaching",
    "capture",
    "commands",
    "family",
    "files",
    "hashing",
    "kernel",
    "killing",
    "loop",
    "mounts",
    "pipes",
    "place",
    "poller",
    "ports",
    "pristine",
    "processes",
    "removing",
    "requests",
    "restore",
    "scan",
    "sealing",
    "signals",
    "spawn",
    "starting",
    "storing",
    "stream",
    "surroundings",
    "timers",
    "users",
)
"""Modules of the runner package that run in every sandbox; the others are for the machine of the driver."""

WAITING = """\
import sys,os,array,hashlib,signal,socket
try:
 import base64,ctypes,errno,fcntl,heapq,hmac,importlib.machinery,json
 import resource,select,shutil,stat,struct,tarfile,typing,zlib
except ImportError:pass
m=getattr(sys.modules.get("_frozen_importlib_external"),"MAGIC_NUMBER",b"")
signal.signal(15,lambda*a:os._exit(0))
signal.signal(17,1)
def late(*a):raise TimeoutError
signal.signal(14,late)
s=socket.socket(socket.AF_UNIX)
s.bind("\\0"+sys.argv[1])
s.listen(64)
def take(n):
 b=b""
 while len(b)<n:
  c=os.read(0,n-len(b))
  if not c:raise EOFError
  b+=c
 return b
while 1:
 c=s.accept()[0]
 try:
  signal.alarm(30)
  f=array.array("i")
  f.frombytes(c.recvmsg(1,64)[1][0][2])
  for i in 0,1:os.dup2(f[i],i);os.close(f[i])
  os.write(1,("stub "+m.hex()+"\\n").encode())
  h=take(40)
  if hashlib.sha256(h[:32]).hexdigest()==sys.argv[2]:
   p=take(int(h[32:],16))
   break
 except Exception:pass
 finally:signal.alarm(0)
 c.close()
 n=os.open(os.devnull,2)
 for i in 0,1:os.dup2(n,i)
 os.close(n)
sys.argv[1:]=[str(s.detach()),str(c.detach())]
exec(compile(p,"<runner>","exec"),{"__name__":"__main__"})
"""
"""
First process of a container: waits for its program on the first stream that shows the nonce, and becomes it.

Arguments: the name of an abstract socket, which only this container's network namespace can see, and the SHA-256 of the
nonce, because everybody may read command lines.
"""

RELAY = """\
import os,struct,sys,time,_socket as k
try:
 import ctypes
 ctypes.CDLL(None).prctl(4,0,0,0,0)
except Exception:pass
for i in range(2000):
 s=k.socket(1,1)
 try:s.connect("\\0"+sys.argv[1]);break
 except OSError:s.close();time.sleep(.005)
else:sys.exit("nobody listens")
s.sendmsg([b"+"],[(k.SOL_SOCKET,k.SCM_RIGHTS,struct.pack("2i",0,1))])
n=os.open(os.devnull,2)
for i in 0,1:os.dup2(n,i)
s.recv(1)
"""
"""
Hands its standard input and output over to :data:`WAITING`, or to the runner that it became, and stays until they are
closed. It keeps neither, so that nobody can reach them through it, and lets nobody trace it, because a reset does not
end it. Argument: the name of the abstract socket.
"""

_TEMPLATE = """\
import base64, %s, sys, zlib
from importlib.machinery import ModuleSpec
class Carried:
    def __init__(self, sources):
        self.sources = sources
    def find_spec(self, name, path=None, target=None):
        if name in self.sources:
            return ModuleSpec(name, self, origin="carried", is_package=not self.sources[name])
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        source = self.sources[name]
        if isinstance(source, str):
            source = compile(source, "<%%s>" %% name, "exec", dont_inherit=True)
        exec(source, module.__dict__)
    def get_source(self, name):
        source = self.sources[name]
        return source if isinstance(source, str) else None
sys.meta_path.insert(0, Carried(%s.loads(zlib.decompress(base64.b64decode("%s")))))
"""

_CALL = """\
import importlib, json
getattr(importlib.import_module("%s"), "%s")(json.loads(%r))
"""


def runner_modules() -> tuple[str, ...]:
    """Return the names of the modules that every runner needs, in order."""
    return (
        "agentsandbox.protocol.archives",
        "agentsandbox.protocol.connection",
        "agentsandbox.protocol.frames",
        "agentsandbox.protocol.tree",
        *(f"{_RUNNER}.{name}" for name in _MODULES),
    )


def source(modules: Iterable[str] = ()) -> bytes:
    """
    Return a program that makes modules importable, and does nothing else.

    Args:
        modules: Names beside those of :func:`runner_modules`.

    Returns:
        The text of the program: the same bytes for the same modules.

    """
    return _source(tuple(modules))


def program(
    *,
    entry: str = STDIO_ENTRY,
    config: Mapping[str, Any] | None = None,
    modules: Iterable[str] = (),
    bytecode: str = "",
) -> bytes:
    """
    Return a program that makes modules importable and calls one of their functions.

    Args:
        entry: What to call, as ``module:function``.
        config: Its only argument; whatever JSON can carry.
        modules: Names beside those of :func:`runner_modules`.
        bytecode: For which bytecode the interpreter is made, in hexadecimal digits, if that is known. If it is ours,
            it need not compile anything, which takes longer than all else that it does before it answers.

    Returns:
        The text of the program, in ASCII.

    """
    module, _, function = entry.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ValueError(f"an entry is 'module:function', not {entry!r}")
    text = json.dumps(dict(config or {}), sort_keys=True, separators=(",", ":"))
    compiled = bytecode == MAGIC_NUMBER.hex()
    return _source(tuple(modules), compiled=compiled) + (_CALL % (module, function, text)).encode("ascii")


def stub(size: int) -> str:
    """
    Return a program, short enough for any command line, that reads another from standard input and runs it.

    It reads not a byte further, so that what follows on standard input is left to that program.

    Args:
        size: The length of that program, in bytes.

    """
    return (
        "import os\n"
        f"b,n=[],{size}\n"
        "while n:\n"
        " c=os.read(0,min(n,65536))\n"
        " if not c:raise SystemExit('the program ends early')\n"
        " b.append(c);n-=len(c)\n"
        "exec(compile(b''.join(b),'<runner>','exec'),{'__name__':'__main__'})"
    )


def handover(nonce: str, text: bytes) -> bytes:
    """Return what :data:`WAITING` expects on its first stream: the nonce, 32 digits of it, and a program."""
    if len(nonce) != 32:
        raise ValueError("a nonce has 32 hexadecimal digits")
    return b"%s%08x%s" % (nonce.encode("ascii"), len(text), text)


@functools.cache
def _source(modules: tuple[str, ...], *, compiled: bool = False) -> bytes:
    names = (*runner_modules(), *modules)
    sources: dict[str, Any] = {name: _compiled(name) if compiled else _read(name) for name in names}
    for name in names:
        parts = name.split(".")[:-1]
        while parts:
            sources[".".join(parts)] = ""
            parts.pop()
    if compiled:
        data = marshal.dumps(dict(sorted(sources.items())))
    else:
        data = json.dumps(sources, sort_keys=True, separators=(",", ":")).encode("ascii")
    loader = "marshal" if compiled else "json"
    return (_TEMPLATE % (loader, loader, base64.b64encode(zlib.compress(data)).decode("ascii"))).encode("ascii")


def _compiled(module: str) -> CodeType:
    """Return the code of a module, from the interpreter's cache if it is there, without our paths."""
    package, _, name = module.rpartition(".")
    file = importlib.resources.files(package).joinpath(f"{name}.py")
    code = SourceFileLoader(module, str(file)).get_code(module) if isinstance(file, Path) else None
    return _renamed(code or compile(_read(module), module, "exec", dont_inherit=True), f"<{module}>")


def _renamed(code: CodeType, name: str) -> CodeType:
    inner = (_renamed(const, name) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(inner))


def _read(module: str) -> str:
    package, _, name = module.rpartition(".")
    return importlib.resources.files(package).joinpath(f"{name}.py").read_text("utf-8")
