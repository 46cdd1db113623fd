# SPDX-License-Identifier: Apache-2.0
"""The rules about files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from agentsandbox.errors import OutputLimitExceeded
from agentsandbox.testing.subject import Need, NotApplicable, Source, need, raises

MIB = 1024 * 1024


async def check_files_round_trip(source: Source, image: str) -> None:
    """What is written is read back byte for byte, under any name; parents are created; relative is below workdir."""
    contents = {
        "plain.txt": b"great #content\r\nincluding newlines",
        "not utf-8": b"\xc3\x28\x00\xff",
        "empty": b"",
        "a b/é✨/deep file": b"x",
        "/tmp/conformance/absolute": b"y",  # noqa: S108
    }
    async with await source.acquire(image) as lease:
        need(lease, Need.FILES)
        for path, data in contents.items():
            await lease.write_file(path, data)
        for path, data in contents.items():
            assert await lease.read_file(path) == data, path
        await lease.write_file("plain.txt", "täxt\n")
        assert await lease.read_file("plain.txt") == "täxt\n".encode()
        assert (await lease.exec("cat 'a b/é✨/deep file' /tmp/conformance/absolute")).stdout == b"xy"
        assert (await lease.exec("touch zero", check=True)).ok
        assert await lease.read_file("zero") == b""


async def check_p09_large_files_arrive_whole(source: Source, image: str) -> None:
    """Files of 3,584 bytes and of 50 MiB arrive whole in both directions."""
    async with await source.acquire(image) as lease:
        need(lease, Need.FILES)
        for size in (3584, 50 * MIB):
            data = os.urandom(size)
            await lease.write_file("large.bin", data)
            assert (await lease.exec(["sha256sum", "large.bin"])).text.split()[0] == hashlib.sha256(data).hexdigest()
            assert await lease.read_file("large.bin") == data


async def check_files_are_replaced_whole(source: Source, image: str) -> None:
    """A write replaces a file at once, keeps its mode, leaves no temporary file and can set a mode."""
    async with await source.acquire(image) as lease:
        need(lease, Need.FILES)
        await lease.exec("mkdir d; echo old > d/f; chmod 754 d/f; ln d/f d/hard", check=True)
        await lease.write_file("d/f", "new\n")
        await lease.write_file("d/run", "#!/bin/sh\necho ran\n", mode=0o755)

        result = await lease.exec("cat d/f d/hard; stat -c %a d/f d/run; ls -A d; d/run", check=True)
        assert result.stdout == b"new\nold\n754\n755\nf\nhard\nrun\nran\n"


async def check_file_errors_are_pythons(source: Source, image: str) -> None:
    """Files that cannot be read or written raise Python's own errors, with the path in the message."""
    async with await source.acquire(image) as lease:
        need(lease, Need.FILES)
        await lease.exec("mkdir -p some/directory; echo x > some/file", check=True)
        with raises(FileNotFoundError, "no/such/file"):
            await lease.read_file("no/such/file")
        with raises(IsADirectoryError, "some/directory"):
            await lease.read_file("some/directory")
        with raises(IsADirectoryError, "some/directory"):
            await lease.write_file("some/directory", b"x")
        with raises(NotADirectoryError, "some/file/below"):
            await lease.write_file("some/file/below", b"x")
        assert (await lease.exec("ls -A some")).stdout == b"directory\nfile\n"


async def check_file_permissions(source: Source, image: str) -> None:
    """Files are read and written with the rights of the sandbox's user."""
    async with await source.acquire(image) as lease:
        need(lease, Need.FILES)
        if (await lease.exec("id -u")).stdout == b"0\n":
            raise NotApplicable("commands run as root, whom permissions do not hold")
        await lease.exec("echo secret > f; chmod 000 f; echo fixed > g; chmod 444 g", check=True)
        with raises(PermissionError, "f"):
            await lease.read_file("f")
        with raises(PermissionError, "g"):
            await lease.write_file("g", b"x")
        if not (await lease.exec("test -w /etc")).ok:
            with raises(PermissionError, "/etc/conformance"):
                await lease.write_file("/etc/conformance", b"x")
        assert (await lease.exec("cat g")).stdout == b"fixed\n"


async def check_read_limit(source: Source, image: str) -> None:
    """A file larger than ``limit`` is refused before it is sent; one of exactly the limit is not."""
    async with await source.acquire(image) as lease:
        need(lease, Need.FILES)
        await lease.write_file("f", b"a" * 2048)
        with raises(OutputLimitExceeded, "1024"):
            await lease.read_file("f", limit=1024)
        assert await lease.read_file("f", limit=2048) == b"a" * 2048


async def check_directories_round_trip(source: Source, image: str) -> None:
    """A directory goes up and comes down with its empty directories, modes, links and names; pipes are left out."""
    with tempfile.TemporaryDirectory() as scratch:
        there, back = Path(scratch, "there"), Path(scratch, "back")
        (there / "empty").mkdir(parents=True)
        (there / "a b" / "é✨").mkdir(parents=True)
        (there / "a b" / "é✨" / "data").write_bytes(bytes(range(256)))
        (there / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (there / "run.sh").chmod(0o755)
        (there / "link").symlink_to("run.sh")
        big = os.urandom(2 * MIB)
        (there / "big").write_bytes(big)

        async with await source.acquire(image) as lease:
            need(lease, Need.FILES)
            await lease.upload_dir(there, "into/this")
            assert (await lease.exec("cd into/this; ./link; mkfifo pipe; echo more > empty/more")).stdout == b"ran\n"
            await lease.download_dir("into/this", back)
            with raises(FileNotFoundError, "no/such/directory"):
                await lease.download_dir("no/such/directory", Path(scratch, "nothing"))

        found = sorted(str(path.relative_to(back)) for path in back.rglob("*"))
        assert found == ["a b", "a b/é✨", "a b/é✨/data", "big", "empty", "empty/more", "link", "run.sh"]
        assert (back / "a b" / "é✨" / "data").read_bytes() == bytes(range(256))
        assert (back / "big").read_bytes() == big
        assert os.readlink(back / "link") == "run.sh"  # noqa: PTH115
        assert (back / "run.sh").stat().st_mode & 0o777 == 0o755
