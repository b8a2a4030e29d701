"""Running means of durations."""

from __future__ import annotations

from digen.sched.profile import Profile


def test_nothing_is_known_at_first() -> None:
    assert Profile().mean("generator", "generate") is None


def test_the_first_sample_counts_until_there_is_a_second() -> None:
    profile = Profile()
    profile.add("gen0", "generator", "generate", 30.0)  # a cold start
    assert profile.mean("generator", "generate") == 30
    profile.add("gen0", "generator", "generate", 10.0)
    assert profile.mean("generator", "generate") == 10
    profile.add("gen0", "generator", "generate", 14.0)
    assert profile.mean("generator", "generate") == 12


def test_roles_and_kinds_are_kept_apart() -> None:
    profile = Profile()
    for value in (1.0, 2.0):
        profile.add("gen0", "generator", "generate", value)
        profile.add("gen0", "generator", "score", 10 * value)
        profile.add("trainer", "trainer", "generate", 100 * value)
    assert profile.mean("generator", "generate") == 2
    assert profile.mean("generator", "score") == 20
    assert profile.mean("trainer", "generate") == 200
    assert profile.mean("trainer", "score") is None
