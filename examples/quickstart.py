# SPDX-License-Identifier: Apache-2.0
"""Four episodes, four fresh sandboxes, four rewards."""

import asyncio

from agentsandbox import Episode, SandboxPool


async def solve(sandbox, episode):  # one attempt in one fresh sandbox; returns the reward
    await sandbox.write_file("answer.py", episode.inputs["source"])  # your policy acts here
    result = await sandbox.exec(["python3", "answer.py"], timeout=20)
    return float(result.stdout == b"42\n")


async def main():
    sources = ["print(6 * 7)", "print(6 + 7)", "print('4' + '2')", "raise SystemExit(1)"]
    batch = [Episode(id=f"ep-{i}", image="host", inputs={"source": s}) for i, s in enumerate(sources)]
    async with SandboxPool("local", images={"host": 4}, rollout=solve) as pool:
        print((await pool.rollout(batch)).rewards)


if __name__ == "__main__":
    asyncio.run(main())  # (1.0, 0.0, 1.0, 0.0)
