"""Who belongs, who has proved a version, and how those that have not are named."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_s3.protocol.membership import Member, lacking, living, proved_by
from dcr_s3.protocol.position import Position

AT = Position(run_id="0" * 32, version=5, sha256="a" * 64, epoch=1, state="b" * 32)
NOW = 1000.0

MEMBERS = st.lists(
    st.builds(
        Member,
        name=st.sampled_from("abcdef"),
        version=st.integers(3, 7),
        state=st.sampled_from([AT.state, "c" * 32]),
        seen_at=st.floats(0, NOW),
        lease_s=st.integers(1, 2000),
    ),
    unique_by=lambda member: member.name,
)


def member(name: str, version: int, *, state: str = AT.state, seen_at: float = NOW, lease_s: int = 60) -> Member:
    return Member(name, version, state, seen_at, lease_s)


def test_a_lease_ends_exactly_when_its_time_is_over() -> None:
    one = member("one", 5, seen_at=100.0, lease_s=60)
    assert one.alive(159.9)
    assert not one.alive(160.0)


def test_a_newer_version_proves_an_older_one_and_other_bits_prove_nothing() -> None:
    assert member("one", 5).has_proved(AT)
    assert member("one", 6, state="c" * 32).has_proved(AT)
    assert not member("one", 5, state="c" * 32).has_proved(AT)
    assert not member("one", 4).has_proved(AT)


@settings(deadline=None)
@given(MEMBERS, st.sets(st.sampled_from("abcdefgh")))
def test_named_receivers_count_alive_or_not(members: list[Member], names: set[str]) -> None:
    missing = lacking(members, AT, sorted(names), NOW)
    proved = set(proved_by(members, AT))
    assert {phrase[0] for phrase in missing} == names - proved
    assert len(missing) == len(names - proved)


@settings(deadline=None)
@given(MEMBERS, st.integers(0, 8))
def test_a_count_looks_at_living_members_only(members: list[Member], count: int) -> None:
    alive = living(members, NOW)
    enough = sum(m.has_proved(AT) for m in alive) >= count
    assert (lacking(members, AT, count, NOW) == []) == enough


@settings(deadline=None)
@given(MEMBERS)
def test_by_default_every_living_member_must_have_proved_it(members: list[Member]) -> None:
    behind = [m.name for m in living(members, NOW) if not m.has_proved(AT)]
    assert [phrase[0] for phrase in lacking(members, AT, None, NOW)] == behind


def test_each_is_named_with_what_is_known() -> None:
    members = [member("late", 3), member("lost", 3, seen_at=NOW - 500), member("odd", 5, state="c" * 32)]
    assert lacking(members, AT, ["absent", "late", "lost", "odd"], NOW) == [
        "absent (never heard of, or left)",
        "late (at version 3)",
        "lost (at version 3, silent for 500 s, its lease is over)",
        "odd (claims version 5 with other bits)",
    ]
    assert lacking([member("one", 5)], AT, 3, NOW) == ["2 that nobody has heard of"]
