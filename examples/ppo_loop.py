# SPDX-License-Identifier: Apache-2.0
"""
Rewards of groups of rollouts become advantages, and advantages become a better policy.

The policy is a softmax over three programs, so that the loop shows everything but the model: several rollouts a prompt
(a group), rewards in input order, groups that are incomplete because infrastructure failed left out, and a
clipped PPO update. After a few steps it prefers the program that is right.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence

from agentsandbox import Episode, Lease, RolloutResult, SandboxPool

PROGRAMS = ("print(max(xs))", "print(xs[0])", "print(sum(xs))")
PROMPTS = {"peaks": [3, 9, 4], "valley": [7, 1, 8], "ramp": [2, 5, 6]}
GROUP_SIZE = 4
CLIP = 0.2
LEARNING_RATE = 1.0


async def rollout(sandbox: Lease, episode: Episode) -> float:
    """Run the program that the policy chose on the prompt's numbers, and compare with the right answer."""
    numbers = PROMPTS[episode.inputs["prompt"]]
    await sandbox.write_file("program.py", f"xs = {numbers}\n{PROGRAMS[episode.inputs['action']]}\n")
    result = await sandbox.exec(["python3", "program.py"], timeout=20, check=True, require_complete=True)
    return float(result.text.strip() == str(max(numbers)))


def probabilities(logits: Sequence[float]) -> list[float]:
    """Return the softmax of *logits*."""
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def advantages(result: RolloutResult) -> Mapping[str, float]:
    """
    Compare each reward with its group, as GRPO does.

    An episode without a reward has no advantage, and neither has a group that is incomplete: its mean would be biased
    towards the rollouts that happened to survive.
    """
    found: dict[str, float] = {}
    for record in result.records:
        group = result.groups[record.episode.group]
        if record.reward is None or not group.complete:
            continue
        rewards = [reward for reward in group.rewards if reward is not None]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        found[record.episode.id] = (record.reward - mean) / (deviation + 1e-6)
    return found


def update(logits: list[float], old: Sequence[float], result: RolloutResult) -> None:
    """Take two steps up the clipped objective."""
    scored = advantages(result)
    for _ in range(2):
        new = probabilities(logits)
        for record in result.records:
            if (advantage := scored.get(record.episode.id)) is None:
                continue
            action = record.episode.inputs["action"]
            ratio = new[action] / old[action]
            if (advantage > 0 and ratio > 1 + CLIP) or (advantage < 0 and ratio < 1 - CLIP):
                continue
            for k in range(len(logits)):
                gradient = ratio * advantage * ((k == action) - new[k])
                logits[k] += LEARNING_RATE * gradient / len(result.records)


async def train(pool: SandboxPool, *, steps: int, seed: int = 0) -> list[float]:
    """Train for a number of steps and return the mean reward of each."""
    rng = random.Random(seed)
    logits = [0.0] * len(PROGRAMS)
    means: list[float] = []
    for step in range(steps):
        policy = probabilities(logits)
        batch = [
            Episode(
                id=f"step-{step}-{prompt}-{number}",
                image="host",
                group=prompt,
                inputs={"prompt": prompt, "action": rng.choices(range(len(PROGRAMS)), policy)[0]},
            )
            for prompt in PROMPTS
            for number in range(GROUP_SIZE)
        ]
        result = await pool.rollout(batch)
        update(logits, policy, result)
        valid = [reward for reward in result.rewards if reward is not None]
        means.append(sum(valid) / len(valid) if valid else math.nan)
        print(f"step {step}: mean reward {means[-1]:.2f} over {len(valid)}, {len(result.retryable)} to try again")
    return means


async def main() -> None:
    """Train on this machine."""
    async with SandboxPool("local", images={"host": 4}, rollout=rollout, failure_threshold=0.5) as pool:
        await train(pool, steps=8)


if __name__ == "__main__":
    asyncio.run(main())
