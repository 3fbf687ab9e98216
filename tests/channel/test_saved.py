"""Saved state: taken out by name, its kinds under prefixes."""

from lightning_sparsecomm.channel.saved import Saved, add_prefix, pop_named, strip_prefix


def test_what_is_taken_out_is_no_longer_there() -> None:
    saved: Saved = {"ErrorFeedback": {"a": 1, "b": 2}}
    assert pop_named(saved, "ErrorFeedback", ["b", "c"]) == {"b": 2}
    assert pop_named(saved, "ErrorFeedback", ["b"]) == {}
    assert pop_named(saved, "MomentumCorrection", ["a"]) == {}
    assert saved == {"ErrorFeedback": {"a": 1}}


def test_prefixes_come_off_again() -> None:
    saved: Saved = {"ErrorFeedback": {"a": 1}, "GradientSync": {"b": 2}}
    prefixed = add_prefix("GradientSync", saved)
    assert prefixed == {"GradientSync.ErrorFeedback": {"a": 1}, "GradientSync.GradientSync": {"b": 2}}
    assert strip_prefix("GradientSync", prefixed) == saved
    assert strip_prefix("DeltaSync", prefixed) == {}
    # What is taken out of the one is taken out of the other, so that what is left can be named.
    pop_named(strip_prefix("GradientSync", prefixed), "ErrorFeedback", ["a"])
    assert prefixed["GradientSync.ErrorFeedback"] == {}
