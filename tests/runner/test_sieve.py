# SPDX-License-Identifier: Apache-2.0
"""The filter of system calls: what it lets through, by an interpreter of its own, and that the kernel takes it."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys

import pytest

from agentsandbox.protocol.runner import sieve

ALLOWED, REFUSED, UNKNOWN = "allowed", "refused", "no such call"
ANSWERS = {
    sieve.ALLOW: ALLOWED,
    sieve.FAIL | errno.EPERM: REFUSED,
    sieve.FAIL | errno.ENOSYS: UNKNOWN,
}


def verdict(program, architecture, number, argument=0):
    """Interpret the filter as the kernel does."""
    data = struct.pack("=IIQQ", number, architecture, 0, argument)
    steps = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        operation, then, otherwise, operand = steps[at]
        at += 1
        if operation == sieve.LOAD:
            (value,) = struct.unpack_from("=I", data, operand)
        elif operation == sieve.AND:
            value &= operand
        elif operation == sieve.JUMP:
            at += operand
        elif operation == sieve.RETURN:
            return ANSWERS[operand]
        else:
            holds = value == operand if operation == sieve.EQUAL else value >= operand
            at += then if holds else otherwise


PAIRS = [(pair, architecture) for pair in sieve.MACHINES.values() for architecture in pair]


@pytest.mark.parametrize(("pair", "architecture"), PAIRS, ids=[hex(architecture) for _, architecture in PAIRS])
def test_what_makes_mounts_and_namespaces_is_refused(pair, architecture):
    """On every architecture that a machine runs, and nothing else is."""
    program = sieve.program(pair)
    clone, others = sieve.CALLS[architecture]
    refused = {number for number in range(600) if verdict(program, architecture, number) == REFUSED}

    assert {*others, *sieve.NEW_EVERYWHERE} == refused
    assert ALLOWED == verdict(program, architecture, clone, 0x01200011)
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert REFUSED == verdict(program, architecture, clone, flag | 17)
    assert UNKNOWN == verdict(program, architecture, sieve.CLONE3)


def test_there_is_no_way_around():
    """Neither by another architecture, nor by other numbers for the same calls."""
    program = sieve.program(sieve.MACHINES["x86_64"])

    assert REFUSED == verdict(program, sieve.AARCH64, 1)
    assert REFUSED == verdict(program, sieve.X86_64, sieve.X32 | 39)
    assert ALLOWED == verdict(program, sieve.I386, 1)


def test_the_kernel_takes_it():
    """Afterwards a call that needs no permission otherwise is refused, and processes and threads begin as ever."""
    if os.uname().machine not in sieve.MACHINES:
        pytest.skip("a machine that the filter does not know")
    code = """
import ctypes, json, os, subprocess, sys, threading
from agentsandbox.protocol.runner import jail, sieve
jail.prctl(jail.PR_SET_NO_NEW_PRIVS, 1)
applied = sieve.apply()
try:
    jail.unshare(0, "no")
except jail.JailError as error:
    refused = error.errno
threads = []
thread = threading.Thread(target=lambda: threads.append(1)); thread.start(); thread.join()
said = subprocess.run(["echo", "fine"], stdout=subprocess.PIPE, preexec_fn=os.setsid).stdout.decode()
print(json.dumps([applied, refused, threads, said]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert b"" == done.stderr
    assert [True, errno.EPERM, [1], "fine\n"] == json.loads(done.stdout)


def test_a_machine_that_is_not_known_has_none(monkeypatch):
    """It is told, and not guessed."""
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.1", "#1", "sparc64")))

    assert not sieve.apply()
