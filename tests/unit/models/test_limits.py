# SPDX-License-Identifier: Apache-2.0
"""What a number that somebody asks for may be."""

from __future__ import annotations

import math

import pytest

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.limits import check_count, check_number


@pytest.mark.parametrize(("value", "least"), [(1, 1), (0, 0), (10**30, 7)])
def test_whole_numbers_that_are_large_enough_are_taken(value, least):
    """The least one is large enough."""
    assert check_count("size", value, least=least) is None


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, math.nan])
def test_anything_else_is_refused_with_what_it_may_be(value):
    """Also what Python would take for 1."""
    with pytest.raises(ConfigurationError) as caught:
        check_count("size", value)

    assert str(caught.value) == f"size must be a whole number of at least 1, not {value!r}"


@pytest.mark.parametrize("value", [1, 0.001, math.inf])
def test_numbers_above_0_are_taken(value):
    """For ever is above 0."""
    assert check_number("timeout", value) is None


@pytest.mark.parametrize("value", [0, -0.5, True, "1", None, math.nan])
def test_what_is_no_number_above_0_is_refused_with_its_unit(value):
    """What is not a number is not above 0, either."""
    with pytest.raises(ConfigurationError) as caught:
        check_number("rate", value, unit="a second")

    assert str(caught.value) == f"rate must be a number above 0 a second, not {value!r}"
