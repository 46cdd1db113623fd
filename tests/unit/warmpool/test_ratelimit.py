# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsandbox.errors import ConfigurationError
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter, TokenBucket


class Fixed(Random):
    """Jitter of a known size."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


def test_a_burst_and_then_the_rate():
    """It starts full, which is an advance; when that time is over, tokens come one by one."""
    bucket = TokenBucket(2.0, 3, now=10.0)

    assert [True, True, True, False] == [bucket.take(10.0) for _ in range(4)]
    assert 11.5 == bucket.next_at(10.0)
    assert not bucket.take(11.4)
    assert bucket.take(11.5)
    assert not bucket.take(11.5)
    assert 12.0 == bucket.next_at(11.5)


def test_no_second_after_a_quiet_time_sees_more_than_the_rate():
    """With one second's worth as burst, a crowd that comes at once is served at the rate from its first moment on."""
    bucket, taken, now = TokenBucket(100.0, 100), [], 50.0
    while len(taken) < 1000:
        if bucket.take(now):
            taken.append(now)
        else:
            now = bucket.next_at(now)

    assert all(later - first > 0.989 for first, later in zip(taken, taken[100:], strict=False))


def test_saved_tokens_are_capped_by_the_burst():
    """A long silence allows no more than one burst."""
    bucket = TokenBucket(100.0, 2)

    assert [True, True, False] == [bucket.take(1e6) for _ in range(3)]


def test_a_clock_that_steps_back_gives_nothing():
    """Time in the past neither fills nor empties the bucket."""
    bucket = TokenBucket(1.0, 1, now=5.0)
    assert bucket.take(5.0)

    assert not bucket.take(1.0)
    assert bucket.take(6.0)


def test_a_new_rate_counts_from_now():
    """What was saved at the old rate stays, and what is left of an advance is paid back at the new one."""
    bucket = TokenBucket(1.0, 10)
    for _ in range(10):
        bucket.take(0.0)
    bucket.set_rate(10.0, 11.0)

    assert [True, True, False] == [bucket.take(11.0) for _ in range(3)]
    assert bucket.take(11.1)
    assert "<TokenBucket [10/s, 0.000 of 10]>" == repr(bucket)

    bucket = TokenBucket(1.0, 10)
    for _ in range(10):
        bucket.take(0.0)
    bucket.set_rate(10.0, 2.0)

    assert 2.8 == pytest.approx(bucket.next_at(2.0))


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1.0, 1), (math.nan, 1), (1.0, 0.5), (1.0, math.nan)])
def test_senseless_limits_are_refused(rate, burst):
    """A rate of 0 would wait for ever, a burst below 1 would never give a token."""
    with pytest.raises(ConfigurationError, match="must be"):
        TokenBucket(rate, burst)


@given(
    rate=st.floats(0.01, 1e4),
    burst=st.floats(1, 100),
    start=st.floats(0, 1e7),
    gaps=st.lists(st.floats(0, 10), max_size=50),
)
def test_never_more_than_burst_plus_rate_times_time(rate, burst, start, gaps):
    """In any window the takes are bounded; and waiting until ``next_at()`` always suffices."""
    bucket, now, taken = TokenBucket(rate, burst, now=start), start, 0
    for gap in gaps:
        now += gap
        while bucket.take(now):
            taken += 1
            if taken > 10_000:
                return
        now = bucket.next_at(now)
        assert bucket.take(now)
        taken += 1

    assert taken <= burst + rate * (now - start) + 1e-3 * (1 + taken)


def test_without_a_rate_only_pauses_count():
    """No limit of our own: everything goes until the other side refuses."""
    limiter = AdaptiveLimiter(random=Fixed(0.0))
    assert all(limiter.take(0.0) for _ in range(10_000))
    assert math.inf == limiter.rate
    assert "<AdaptiveLimiter [no limit, 0 refusals in a row]>" == repr(limiter)

    limiter.refused(0.0, 3.0)
    assert not limiter.take(2.9)
    assert 3.0 == limiter.next_at(0.0)
    assert limiter.take(3.0)
    assert 5.0 == limiter.next_at(5.0)

    limiter.succeeded(4.0)
    assert math.inf == limiter.rate


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.999])
def test_p40_retry_after_is_a_minimum_with_jitter_on_top(jitter):
    """Never earlier than asked, and not in step with others."""
    limiter = AdaptiveLimiter(rate=10.0, random=Fixed(jitter))
    limiter.refused(0.0, 7.0)

    assert 7.0 + jitter == limiter.next_at(0.0)
    assert not limiter.take(6.999)


def test_p40_two_drivers_come_back_at_different_times():
    """Jitter comes from each driver's own source."""
    times = set()
    for seed in range(10):
        limiter = AdaptiveLimiter(rate=10.0, random=Random(seed))
        limiter.refused(0.0, 1.0)
        times.add(limiter.next_at(0.0))

    assert 10 == len(times)
    assert all(1.0 <= at <= 2.0 for at in times)


def test_pauses_without_a_time_double_up_to_a_maximum():
    """Refusals in a row: 1, 2, 4 and then 5 seconds, each from a half to one and a half of it."""
    limiter = AdaptiveLimiter(backoff=1.0, backoff_max=5.0, random=Fixed(0.5))
    now, pauses = 0.0, []
    for _ in range(5):
        limiter.refused(now)
        pauses.append(limiter.next_at(now) - now)
        now = limiter.next_at(now)

    assert [1.0, 2.0, 4.0, 5.0, 5.0] == pauses


def test_refusals_halve_the_rate_and_successes_raise_it_step_by_step():
    """AIMD: 8 → 4 → 2, then +1 a success up to the ceiling, which is not exceeded."""
    limiter = AdaptiveLimiter(rate=8.0, increase=1.0, random=Fixed(0.0))
    limiter.refused(0.0, 1.0)
    limiter.refused(1.0, 1.0)
    assert 2.0 == limiter.rate

    rates = []
    for _ in range(8):
        limiter.succeeded(2.0)
        rates.append(limiter.rate)
    assert [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 8.0, 8.0] == rates


def test_refusals_of_calls_under_way_count_as_one():
    """A throttle that hits 50 calls at once halves the rate once, and the longest request to wait holds."""
    limiter = AdaptiveLimiter(rate=64.0, random=Fixed(0.0))
    for retry_after in (1.0, 5.0, 2.0):
        limiter.refused(0.0, retry_after)

    assert 32.0 == limiter.rate
    assert 5.0 == limiter.next_at(0.0)
    assert "<AdaptiveLimiter [32/s of 64/s, 1 refusals in a row]>" == repr(limiter)


def test_the_rate_never_falls_below_its_floor():
    """However often it is refused, it still tries."""
    limiter = AdaptiveLimiter(rate=1.0, floor=0.25, backoff_max=1.0, random=Fixed(0.0))
    now = 0.0
    for _ in range(10):
        limiter.refused(now)
        now = limiter.next_at(now)

    assert 0.25 == limiter.rate


def test_a_success_in_a_pause_does_not_end_it():
    """A call that was under way and went through is no permission to go on."""
    limiter = AdaptiveLimiter(rate=10.0, random=Fixed(0.0))
    limiter.refused(0.0, 5.0)
    limiter.succeeded(1.0)
    limiter.refused(1.0)

    assert not limiter.take(4.9)
    assert limiter.take(5.0)


def test_the_burst_can_be_set():
    """Nothing said means one second's worth, at least one."""
    limiter = AdaptiveLimiter(rate=0.5)
    assert [True, False] == [limiter.take(0.0), limiter.take(0.0)]
    limiter = AdaptiveLimiter(rate=5.0, burst=2)
    assert [True, True, False] == [limiter.take(0.0) for _ in range(3)]
