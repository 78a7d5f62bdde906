"""Keys are built by rule and refuse what could lead elsewhere."""

import pytest

from dcr_s3.format.keys import ack_key, attempt_name, is_plain_file_name, manifest_key, manifest_version, segment_key


def test_keys_sort_by_version() -> None:
    assert [manifest_key(v) for v in (9, 10, 100)] == sorted(manifest_key(v) for v in (100, 9, 10))


def test_manifest_versions_are_read_back_and_other_keys_are_not() -> None:
    assert manifest_version(manifest_key(123)) == 123
    assert manifest_version("manifests/1.json") is None
    assert manifest_version("manifests/000000000001.json.tmp") is None


def test_segment_key() -> None:
    attempt = attempt_name(3, "0123456789ab", 0)
    assert segment_key(5, attempt, 2, 7) == "segments/000000000005/000003-0123456789ab-0000/00002-000007.dcr"


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "-a", "a b", "ä", "x" * 129, "a\n"])
def test_receiver_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="receiver name"):
        ack_key(name)


@pytest.mark.parametrize("session", ["short", "0123456789aB", "0123456789a/"])
def test_attempt_sessions_are_twelve_hex_digits(session: str) -> None:
    with pytest.raises(ValueError, match="attempt"):
        attempt_name(1, session, 0)


def test_plain_file_names() -> None:
    assert is_plain_file_name("model-00001-of-00002.safetensors")
    assert not is_plain_file_name("a\n")
