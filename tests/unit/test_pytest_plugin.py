# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin, run by pytest."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

BACKENDS = """
    import pytest

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(request):
        return request.param
"""


def test_sandbox_is_fresh_for_each_test(pytester: pytest.Pytester) -> None:
    """``sandbox`` is a lease of its own for each test, on asyncio and on trio, without a marker."""
    pytester.makeconftest(BACKENDS)
    pytester.makepyfile("""
        async def test_writes(sandbox):
            await sandbox.write_file("left", "x")
            assert (await sandbox.exec("cat left")).stdout == b"x"

        async def test_sees_nothing(sandbox):
            assert (await sandbox.exec("test ! -e left")).ok
    """)
    result = pytester.runpytest_inprocess("-v")

    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*test_writes?asyncio?*PASSED*", "*test_sees_nothing?trio?*PASSED*"])


def test_pool_grants_and_rolls_out(pytester: pytest.Pytester) -> None:
    """``sandbox_pool`` is an open pool: it grants as many sandboxes as ``--sandbox-size`` says, and runs batches."""
    pytester.makepyfile("""
        from agentsandbox.models.episode import Episode

        async def rollout(sandbox, episode):
            return float((await sandbox.exec(["true"])).ok)

        async def test_pool(sandbox_pool, sandbox_image):
            async with await sandbox_pool.acquire(sandbox_image) as a, await sandbox_pool.acquire(sandbox_image) as b:
                assert a.sandbox != b.sandbox
            batch = [Episode(id=str(i), image=sandbox_image) for i in range(3)]
            result = await sandbox_pool.rollout(batch, rollout=rollout)
            assert result.rewards == (1.0, 1.0, 1.0)
            assert sandbox_pool.parallelism == 3
    """)
    pytester.runpytest_inprocess("--sandbox-size=3").assert_outcomes(passed=2)  # anyio's default: asyncio and trio


def test_image_can_be_overridden(pytester: pytest.Pytester) -> None:
    """A module that overrides ``sandbox_image`` gets its sandboxes from another image; the option stays as it is."""
    pytester.makepyfile("""
        import pytest

        @pytest.fixture
        def sandbox_image(request):
            assert request.config.getoption("--sandbox-image") == "no-such-image"
            return "host"

        async def test_runs(sandbox):
            assert sandbox.image == "host"
            assert (await sandbox.exec(["true"])).ok
    """)
    pytester.runpytest_inprocess("--sandbox-image=no-such-image", "-k", "asyncio").assert_outcomes(passed=1)


def test_scope_option_shares_one_pool(pytester: pytest.Pytester) -> None:
    """``--sandbox-scope=module`` keeps one pool for a module; each test still has its own sandbox."""
    pytester.makepyfile("""
        import pytest

        POOLS, SANDBOXES = set(), set()

        @pytest.fixture(scope="module")
        def anyio_backend():
            return "asyncio"

        @pytest.mark.parametrize("number", range(3))
        async def test_pool(sandbox_pool, sandbox, number):
            POOLS.add(id(sandbox_pool))
            SANDBOXES.add((sandbox.id, sandbox.generation))
            assert (len(POOLS), len(SANDBOXES)) == (1, number + 1)
    """)
    pytester.runpytest_inprocess("--sandbox-scope=module").assert_outcomes(passed=3)


def test_unknown_backend_is_named(pytester: pytest.Pytester) -> None:
    """A backend that does not exist fails the fixture with its name; tests that use none are unaffected."""
    pytester.makepyfile("""
        async def test_needs_one(sandbox):
            pass

        def test_needs_none():
            pass
    """)
    result = pytester.runpytest_inprocess("--sandbox-backend=no-such-backend", "-k", "asyncio or none")

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ConfigurationError*no-such-backend*"])


def test_plugin_is_cheap_until_used(pytester: pytest.Pytester) -> None:
    """Loading the plugin imports records and errors, and nothing that does any work."""
    pytester.makepyfile("""
        import sys

        def test_modules():
            loaded = {name.split(".")[1] for name in sys.modules if name.startswith("agentsandbox.")}
            assert loaded == {"_kinds", "errors", "models", "pytest_plugin"}
            assert "kubernetes_asyncio" not in sys.modules
    """)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_options_are_in_the_help(pytester: pytest.Pytester) -> None:
    """``--help`` names the options."""
    result = pytester.runpytest_inprocess("--help")

    result.stdout.fnmatch_lines(["*--sandbox-backend=NAME*", "*--sandbox-image=IMAGE*", "*--sandbox-size=N*"])
