"""The quickstart's last table: what the policy could before its training, and what it can after it."""

from calibadv_jax.contrib.commands.quickstart import comparison_table


def means(f1, valid, searches):
    return {"f1": f1, "format": valid, "searches": searches}


def test_before_stands_before_after():
    before = {"0": {"all": means(0.1, 0.2, 1.0), "two_hop": means(0.3, 0.4, 1.5)}}
    after = {"0": {"all": means(0.5, 0.6, 2.0), "two_hop": means(0.7, 0.8, 2.5)}}
    head, _, *rows = comparison_table(before, after).splitlines()
    assert head.split("  ")[0] == "temperature" and "F1 before  F1 after  format  searches" in head
    assert [row.split() for row in rows] == [
        ["0", "all", "0.100", "0.500", "0.600", "2.000"],
        ["0", "two_hop", "0.300", "0.700", "0.800", "2.500"],
    ]
