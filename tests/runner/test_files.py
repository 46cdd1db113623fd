# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Driver, Result

ORDINARY = 65534
"""A user without privileges; root runs what is about permissions as this one."""


def read(driver: Driver, path: str, **more: Any) -> Result:
    """Read a file."""
    limit = more.pop("limit", None)
    return driver.run(builtin="read", args={"path": path, "limit": limit}, **more)


def write(driver: Driver, path: str, data: bytes, **more: Any) -> Result:
    """Write a file."""
    args = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    args.update({key: more.pop(key) for key in ("size", "sha256", "mode", "parents") if key in more})
    return driver.run(data, builtin="write", args=args, **more)


def problem(result: Result) -> tuple[int, int, str]:
    """Return exit code, error number and path of a report."""
    error = result.exit["report"]["error"]
    assert error["message"].startswith(error["path"] + ": ")
    return result.exit["code"], error["errno"], error["path"]


def archive(*members: tuple[str, Any]) -> bytes:
    """Return a tar archive: bytes are files, ``None`` directories, strings links, a TarInfo is itself."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.mtime = 1_000_000_000
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            elif isinstance(content, bytes):
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def special(kind: bytes, linkname: str = "") -> tarfile.TarInfo:
    """Return a member of another kind."""
    info = tarfile.TarInfo("special")
    info.type, info.linkname = kind, linkname
    return info


@pytest.mark.parametrize("size", [0, 1, 65536, 3 * 1024 * 1024 + 7])
def test_a_file_arrives_as_it_was_sent(driver: Driver, size: int) -> None:
    """What was written is read back byte for byte; parents are made; nothing else stays behind."""
    data = os.urandom(size)
    directory = driver.workdir / "made" / f"for-{size}"

    written = write(driver, f"made/for-{size}/file", data)
    result = read(driver, str(directory / "file"))

    assert written.exit["code"] == 0
    assert written.exit["report"] == {"size": size, "sha256": hashlib.sha256(data).hexdigest()}
    assert (result.stdout, result.exit["report"]) == (data, {"size": size})
    assert os.listdir(directory) == ["file"]
    assert stat.S_IMODE((directory / "file").stat().st_mode) == 0o644


def test_p09_a_short_or_changed_upload_changes_nothing(driver: Driver) -> None:
    """If size or hash differ, the old content stays, and no temporary file."""
    path = driver.workdir / "p09" / "a.bin"
    assert write(driver, "p09/a.bin", b"old").exit["code"] == 0

    for wrong in ({"size": 3584}, {"sha256": "0" * 64}, {"size": 0}):
        result = write(driver, "p09/a.bin", b"new content", **wrong)

        assert problem(result) == (1, errno.EIO, str(path))
        assert path.read_bytes() == b"old"
        assert os.listdir(path.parent) == ["a.bin"]
    assert problem(write(driver, "p09/none", b"x", size=2)) == (1, errno.EIO, str(path.parent / "none"))
    assert not (path.parent / "none").exists()


def test_writing_keeps_mode_owner_and_link(driver: Driver) -> None:
    """A replaced file keeps its mode and owner, a link still points to it, and an explicit mode wins."""
    path, link = driver.workdir / "kept", driver.workdir / "kept-link"
    path.write_text("old")
    path.chmod(0o751)
    if os.getuid() == 0:
        os.chown(path, ORDINARY, ORDINARY)
    link.symlink_to("kept")
    before = path.stat()

    assert write(driver, "kept-link", b"new").exit["code"] == 0
    after = path.stat()
    assert link.is_symlink()
    assert (path.read_bytes(), after.st_uid, after.st_gid) == (b"new", before.st_uid, before.st_gid)
    assert stat.S_IMODE(after.st_mode) == 0o751
    assert write(driver, "kept", b"newer", mode=0o600).exit["code"] == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_names_of_any_bytes(driver: Driver) -> None:
    """Names need not be UTF-8, and errors give them back unharmed."""
    name = b"caf\xe9-\xff\n.txt"
    text = name.decode("utf-8", "surrogateescape")

    assert write(driver, text, b"data").exit["code"] == 0
    assert read(driver, text).stdout == b"data"
    assert (driver.workdir / os.fsdecode(name)).read_bytes() == b"data"
    missing = f"{driver.workdir}/{text}.missing"
    assert problem(read(driver, text + ".missing")) == (1, errno.ENOENT, missing)
    assert write(driver, "l" * 255, b"longest").exit["code"] == 0


def test_reading_stops_at_the_limit(driver: Driver) -> None:
    """A file above the limit sends nothing and tells its size, kernel files included."""
    (driver.workdir / "thousand").write_bytes(bytes(1000))

    assert read(driver, "thousand", limit=1000).stdout == bytes(1000)
    over = read(driver, "thousand", limit=999)
    assert (problem(over)[:2], over.stdout, over.exit["report"]["size"]) == ((1, errno.EFBIG), b"", 1000)
    assert read(driver, "/proc/self/status", limit=100_000).stdout.startswith(b"Name:")
    assert problem(read(driver, "/proc/self/status", limit=10))[1] == errno.EFBIG


def test_every_error_of_a_file_has_its_number_and_path(driver: Driver) -> None:
    """Missing files, directories, files as directories and FIFOs are told apart; nothing hangs."""
    work = driver.workdir
    (work / "file").write_text("x")
    (work / "directory").mkdir(exist_ok=True)
    os.mkfifo(work / "fifo")

    for request, number, path in (
        (read(driver, "missing"), errno.ENOENT, "missing"),
        (read(driver, "directory"), errno.EISDIR, "directory"),
        (read(driver, "file/below"), errno.ENOTDIR, "file/below"),
        (read(driver, "fifo"), errno.EINVAL, "fifo"),
        (read(driver, "n" * 300), errno.ENAMETOOLONG, "n" * 300),
        (write(driver, "directory", b"x"), errno.EISDIR, "directory"),
        (write(driver, "fifo", b"x"), errno.EINVAL, "fifo"),
        (write(driver, "none/file", b"x", parents=False), errno.ENOENT, "none/file"),
        (driver.run(builtin="pack", args={"path": "missing"}), errno.ENOENT, "missing"),
        (driver.run(builtin="pack", args={"path": "file"}), errno.ENOTDIR, "file"),
    ):
        assert problem(request) == (1, number, f"{work}/{path}")
    assert problem(write(driver, "file/below", b"x"))[1] in (errno.ENOTDIR, errno.EEXIST)
    assert problem(write(driver, "/proc/none", b"x"))[1] in (errno.ENOENT, errno.EACCES, errno.EPERM)
    assert (work / "file").read_text() == "x"


def test_permissions_are_those_of_the_user(driver: Driver) -> None:
    """Files are touched as the user who asks: what that user may not read or write is refused."""
    secret, home = driver.workdir / "secret", driver.workdir / "home"
    secret.write_text("secret")
    secret.chmod(0o400)
    home.mkdir()
    if os.getuid() == 0:
        os.chown(home, ORDINARY, ORDINARY)
        who: dict[str, Any] = {"user": ORDINARY}
        assert problem(read(driver, "secret", **who)) == (1, errno.EACCES, str(secret))
    else:
        who = {}
        assert read(driver, "secret").stdout == b"secret"
    assert problem(write(driver, "secret", b"x", **who)) == (1, errno.EACCES, str(secret))
    assert problem(write(driver, "/etc/none", b"x", **who)) == (1, errno.EACCES, "/etc/none")
    assert write(driver, "home/file", b"x", **who).exit["code"] == 0
    assert (home / "file").stat().st_uid == (ORDINARY if os.getuid() == 0 else os.getuid())
    assert secret.read_text() == "secret"


def test_directories_travel_there_and_back(driver: Driver) -> None:
    """A tree that was unpacked is packed again with the same names, bytes, modes and links, without FIFOs."""
    odd = b"\xff-name".decode("utf-8", "surrogateescape")
    long = "/".join(["deep" * 20] * 4)
    members = [
        ("a", None),
        ("a/empty", b""),
        ("a/file", b"x" * 700),
        ("a/link", "file"),
        ("a/up", "../b"),
        ("b", None),
        (f"b/{odd}", b"odd"),
        (f"{long}/file", b"deep"),
    ]
    sent = driver.run(archive(*members), builtin="unpack", args={"path": "tree"})
    os.mkfifo(driver.workdir / "tree" / "a" / "fifo")
    (driver.workdir / "tree" / "a" / "file").chmod(0o750)

    packed = driver.run(builtin="pack", args={"path": "tree"})

    assert (sent.exit["code"], sent.exit["report"]["entries"]) == (0, len(members))
    assert packed.exit["code"] == 0
    with tarfile.open(fileobj=io.BytesIO(packed.stdout), errors="surrogateescape") as tar:
        got = {info.name: info for info in tar}
        assert {name for name, _ in members} <= set(got)
        assert set(got) - {name for name, _ in members} == {long.rsplit("/", depth)[0] for depth in range(4)}
        assert (got["a/link"].linkname, got["a/up"].linkname) == ("file", "../b")
        assert (got["a/file"].mode, got["a"].mode, got["a/file"].mtime) == (0o750, 0o755, 1_000_000_000)
        for name, content in members:
            if isinstance(content, bytes):
                assert tar.extractfile(name).read() == content  # type: ignore[union-attr]


def test_unpacking_replaces_what_is_in_the_way(driver: Driver, tmp_path: Path) -> None:
    """Files replace files and links; links are never followed, so what they point to stays untouched."""
    target = driver.workdir / "replaced"
    target.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("untouched")
    (target / "file").symlink_to(outside / "file")
    (target / "directory").symlink_to(outside)

    members = [("file", b"new"), ("directory", None), ("directory/file", b"inside")]
    result = driver.run(archive(*members), builtin="unpack", args={"path": "replaced"})

    assert result.exit["code"] == 0
    assert (outside / "file").read_text() == "untouched"
    assert (target / "file").read_text() == "new"
    assert not (target / "file").is_symlink()
    assert (target / "directory" / "file").read_text() == "inside"


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("/etc/x", b"x")], "absolute name"),
        ([("../x", b"x")], "leads out"),
        ([("a/../../x", b"x")], "leads out"),
        ([("link", "/etc/passwd")], "leads to '/etc/passwd'"),
        ([("link", "..")], "leads to '..'"),
        ([("a/link", "../../x")], "leads to '../../x'"),
        ([("a/link", "b/../../../x")], "leads to"),
        ([("special", special(tarfile.FIFOTYPE))], "neither"),
        ([("special", special(tarfile.CHRTYPE))], "neither"),
        ([("special", special(tarfile.LNKTYPE, "/etc/passwd"))], "neither"),
        ([(".", b"x")], "no name for a file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_archives_are_refused(driver: Driver, members: Any, reason: str) -> None:
    """Names and links that lead out, devices, FIFOs and hard links end the unpacking with an error."""
    result = driver.run(archive(*members), builtin="unpack", args={"path": "hostile"})

    code, number, _ = problem(result)
    assert (code, number) == (1, errno.EBADMSG)
    assert reason in result.exit["report"]["error"]["message"]
    assert not (driver.workdir / "x").exists()
    assert not (driver.workdir / "hostile" / "special").exists()


def test_a_planted_link_is_not_followed(driver: Driver, tmp_path: Path) -> None:
    """A directory of the archive that was replaced by a link is an error, and nothing is written behind it."""
    (driver.workdir / "planted").mkdir()
    (driver.workdir / "planted" / "sub").symlink_to(tmp_path)

    result = driver.run(archive(("sub/file", b"x")), builtin="unpack", args={"path": "planted"})

    code, number, path = problem(result)
    assert (code, path) == (1, f"{driver.workdir}/planted/sub")
    assert number in (errno.ELOOP, errno.ENOTDIR)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("cut", [0, 1, 300, 512, 1024, 1100, 1536])
def test_an_archive_that_ends_early_is_an_error(driver: Driver, cut: int) -> None:
    """However the stream was cut, also between two members, it is not taken for a whole archive."""
    whole = archive(("one", b"1" * 100), ("two", b"2" * 100))

    result = driver.run(whole[:cut], builtin="unpack", args={"path": f"early-{cut}"})

    assert problem(result)[:2] == (1, errno.EBADMSG)
    assert driver.run(whole, builtin="unpack", args={"path": f"early-{cut}"}).exit["code"] == 0


def test_a_broken_header_is_an_error(driver: Driver) -> None:
    """Rubbish between two members is not taken for the end of the archive."""
    whole = archive(("one", b"1" * 100), ("two", b"2" * 100))

    result = driver.run(whole[:1024] + b"\x01" * 512 + whole[1536:], builtin="unpack", args={"path": "rubbish"})

    assert problem(result)[:2] == (1, errno.EBADMSG)


def test_builtins_can_be_killed(driver: Driver) -> None:
    """A write whose input never ends is ended like any command, and leaves no half file."""
    number = driver.start(builtin="write", args={"path": "endless/file"}, stdin=True, timeout=0.3)

    exit_ = driver.finish(number).exit
    assert (exit_["limit"], exit_["code"], exit_["report"]) == ("total", 143, None)
    assert os.listdir(driver.workdir / "endless") == []


def test_a_file_that_cannot_be_read_fails_the_download(driver: Driver) -> None:
    """A download is whole or an error that names the file, never silently short."""
    tree = driver.workdir / "unreadable"
    tree.mkdir()
    (tree / "ok").write_text("x")
    (tree / "secret").write_text("x")
    (tree / "secret").chmod(0)
    who = {"user": ORDINARY} if os.getuid() == 0 else {}

    result = driver.run(builtin="pack", args={"path": "unreadable"}, **who)

    assert problem(result) == (1, errno.EACCES, str(tree / "secret"))
