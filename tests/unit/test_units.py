"""Numbers as a person reads them."""

import pytest

from grpo_cli.units import format_bytes, format_count


@pytest.mark.parametrize(
    ("count", "shown"),
    [(1023, "1023 bytes"), (1536, "1.5 KiB"), (1010 * 2**10, "1,010 KiB"), (2**30, "1 GiB")],
)
def test_sizes_have_no_exponent(count, shown):
    assert format_bytes(count) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(999, "999"), (999_499, "999k"), (999_500, "1M"), (135e6, "135M")]
)
def test_counts_have_no_exponent(count, shown):
    assert format_count(count) == shown
