# SPDX-License-Identifier: Apache-2.0
"""What is known of an attempt, and of the call of its rollout function, while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.models.episode import Attempt
from agentsandbox.models.timing import Timings, TTFCSample

if TYPE_CHECKING:
    from agentsandbox.errors import Failure
    from agentsandbox.rollouts.accounting import Ticket
    from agentsandbox.rollouts.source import RolloutLease

__all__ = ["Call", "Draft"]


@attrs.define(eq=False)
class Call:
    """One call of the rollout function, in a task of its own so that it can be left behind."""

    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    done: anyio.Event = attrs.field(factory=anyio.Event)
    returned: bool = False
    value: Any = None
    error: BaseException | None = None
    stopped: bool = False
    """Whether it was told to stop, so that what it returns does not count any more."""
    entered: bool = False
    """Whether the attempt is in the books."""
    left_behind: bool = False
    """Whether it was still running when its attempt ended."""


@attrs.define(eq=False)
class Draft:
    """What is known of an attempt so far."""

    ticket: Ticket
    submitted_at: float
    called_at: float
    granted_at: float | None = None
    ended_at: float | None = None
    released_at: float | None = None
    lease: RolloutLease | None = None
    lag: float = 0.0
    """How long after its call the sandbox that it got was asked for: not 0 if it is the second one of a hedge."""

    def attempt(self, now: float, *, reward: float | None = None, failure: Failure | None = None) -> Attempt:
        """Write down what has become of it."""
        lease, episode = self.lease, self.ticket.episode
        redact = getattr(lease, "redact", None)
        if failure is not None and redact is not None:
            failure = attrs.evolve(failure, message=redact(failure.message))
        ttfc = (
            _since_call(lease.ttfc, self.lag)
            if lease is not None
            else TTFCSample(
                seconds=now - self.called_at,
                censored=True,
                stages={"queue": now - self.called_at},
                episode=episode.id,
                image=episode.image,
            )
        )
        return Attempt(
            number=self.ticket.number,
            sandbox=lease.sandbox if lease is not None else None,
            node=lease.node if lease is not None else None,
            identity=lease.identity if lease is not None else None,
            reward=reward,
            failure=failure,
            ttfc=ttfc,
            timings=Timings(
                queued=self.called_at - self.submitted_at,
                acquire=_between(self.called_at, self.granted_at),
                first_command=None if ttfc.censored else ttfc.seconds,
                run=_between(self.granted_at, self.ended_at),
                release=_between(self.ended_at, self.released_at),
                total=now - self.submitted_at,
                ready_at=_between(self.submitted_at, self.granted_at),
            ),
            commands=tuple(lease.commands) if lease is not None else (),
            restored=getattr(lease, "restored", None),
            checkpoints=tuple(getattr(lease, "checkpoints", ())),
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _since_call(ttfc: TTFCSample, lag: float) -> TTFCSample:
    if not lag:
        return ttfc
    stages = {**ttfc.stages, "queue": ttfc.stages.get("queue", 0.0) + lag}
    return attrs.evolve(ttfc, seconds=ttfc.seconds + lag, stages=stages)
