"""Every operation on every case, beside every peer that is here."""

import pytest

from . import base


@pytest.mark.benchmark(timer=base.clock)
def test_operation(measure, point):
    measure(point)


@pytest.mark.benchmark(timer=base.clock)
def test_growth(measure, point):
    """Time over size."""
    measure(point)
