"""Trust: where signatures are required, nothing unsigned, altered, moved or signed by a stranger is believed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_s3 import Receiver, Sender, verify_directory
from dcr_s3.errors import BadInput, BadSignature, CorruptObject
from dcr_s3.folding import Folder
from dcr_s3.format.ack import Ack
from dcr_s3.format.keys import (
    MANIFEST_PREFIX,
    RELEASE_KEY,
    RUN_KEY,
    fold_key,
    is_signed,
    manifest_key,
    owner_key,
    snapshot_marker_key,
)
from dcr_s3.format.signature import (
    Ed25519Signer,
    SharedSecret,
    Signer,
    Verifier,
    read_key,
    read_signer,
    signed,
    split_signature,
)
from dcr_s3.mirroring import open_mirror
from dcr_s3.reading import load_run
from dcr_s3.store import open_store
from dcr_s3.testing.checkpoints import make_state, save
from dcr_s3.workers import InlineExecutor

Trial = Any
HERE = InlineExecutor()

SIGNERS: dict[str, Signer] = {
    "secret": SharedSecret(b"s" * 32),
    "ed25519": Ed25519Signer(bytes(range(32))),
}
FOLD = fold_key(0, 5)
STRANGER = Ed25519Signer(bytes(32))


@pytest.fixture(params=SIGNERS)
def signer(request: pytest.FixtureRequest) -> Signer:
    return SIGNERS[request.param]


def everything(trial: Trial, signer: Signer) -> Verifier:
    """A run with a fence, deltas, a fold, a snapshot and a release, all by ``signer``."""
    verifier = Verifier([signer.verifier()])
    with trial.sender(signer=signer) as sender:
        for _ in range(4):
            trial.publish(sender)
        trial.receiver("one", verifier=verifier).pull()
        sender.release(sender.position.version, ["one"])
        sender.snapshot()
    store = open_store(trial.store, signer=signer)
    run, start = load_run(store)
    mirror = open_mirror(store, run, start, trial.root / "folder", base=trial.root / "base", executor=HERE)
    assert Folder(store, run, start, mirror, coders=HERE, movers=HERE).fold().first.version == 0
    mirror.close()
    return verifier


def test_a_signed_run_is_signed_throughout_and_everyone_with_the_key_converges(trial: Trial, signer: Signer) -> None:
    verifier = everything(trial, signer)
    covered = [k for k in trial.listed() if is_signed(k)]
    assert {RUN_KEY, RELEASE_KEY, manifest_key(1), FOLD, snapshot_marker_key(5)} <= set(covered)
    for key in covered:
        verifier.check(trial.bucket.objects[key].body, where=key)
        json.loads(trial.bucket.objects[key].body)
    trial.receiver("new", base=None, verifier=verifier).pull()
    trial.assert_holds(5, "new")
    trial.receiver("far", verifier=verifier).pull()
    trial.assert_holds(5, "far")
    trial.receiver("follower", verifier=verifier).follow(until_version=5, poll_interval_s=0.01)
    trial.assert_holds(5, "follower")
    assert verify_directory(trial.store, trial.root / "new", verifier=verifier, workers=0).version == 5


def test_a_reader_without_the_key_reads_a_signed_run(trial: Trial, signer: Signer) -> None:
    everything(trial, signer)
    trial.receiver("plain").pull()
    trial.assert_holds(5, "plain")


def test_an_unsigned_run_is_refused_where_signatures_are_required(trial: Trial, signer: Signer) -> None:
    trial.run(1)
    with pytest.raises(BadSignature, match=r"run.json: is not signed, but signatures are required here"):
        trial.receiver("one", verifier=Verifier([signer.verifier()])).pull()


def test_a_version_by_a_stranger_is_refused_and_changes_nothing(trial: Trial, signer: Signer) -> None:
    verifier = Verifier([signer.verifier()])
    with trial.sender(signer=signer) as sender:
        trial.publish(sender)
    trial.receiver("one", verifier=verifier).pull()
    with trial.sender(fence=False) as unsigned:
        trial.publish(unsigned)
    with pytest.raises(BadSignature, match=manifest_key(3)):
        trial.receiver("one", verifier=verifier).pull()
    trial.assert_holds(2)
    trial.store.delete([manifest_key(3)])
    trial.states.pop()
    body = trial.bucket.objects[manifest_key(2)].body
    trial.store.put(manifest_key(3), signed(split_signature(body)[0] + body[-79:], STRANGER))
    with pytest.raises(BadSignature, match=f"signed with key ed25519:{STRANGER.key_id}, which is not trusted here"):
        trial.receiver("one", verifier=verifier).pull()
    trial.assert_holds(2)


def test_a_signed_document_in_another_place_is_refused(trial: Trial, signer: Signer) -> None:
    verifier = everything(trial, signer)
    trial.store.put(manifest_key(6), trial.bucket.objects[manifest_key(5)].body)
    with pytest.raises(CorruptObject, match=f"{manifest_key(6)}: says version 5"):
        trial.receiver("one", verifier=verifier).pull()
    trial.store.delete([manifest_key(6)])
    trial.store.put(snapshot_marker_key(4), trial.bucket.objects[snapshot_marker_key(5)].body)
    trial.store.put(fold_key(1, 5), trial.bucket.objects[FOLD].body)
    trial.receiver("new", base=None, verifier=verifier).pull()
    trial.assert_holds(5, "new")


@pytest.mark.parametrize("key", [RUN_KEY, manifest_key(3), snapshot_marker_key(5), FOLD, RELEASE_KEY])
def test_an_altered_document_is_refused(trial: Trial, key: str) -> None:
    signer = SIGNERS["ed25519"]
    verifier = everything(trial, signer)
    content, (scheme, key_id, signature) = split_signature(trial.bucket.objects[key].body)
    changed = content.replace(b'"writer":"dcr_s3', b'"writer":"dcr-s3')
    assert changed != content
    member = f',"~signature":"{scheme}:{key_id}:{signature.hex()}"'.encode()
    from dcr_s3.format.document import seal

    body = changed + member
    trial.store.put(key, body + seal(body))
    store = open_store(trial.store, verifier=verifier)
    with pytest.raises(BadSignature, match=f"{key}: its signature by ed25519:{key_id} does not hold"):
        store.get(key, limit_bytes=1 << 20)


def test_a_lost_reply_to_a_signed_commit_is_settled(trial: Trial, signer: Signer) -> None:
    from dcr_s3.errors import StoreUnavailable

    put = trial.store.put
    lost: list[str] = []

    def losing(key: str, body: bytes, **condition: Any) -> str:
        etag = put(key, body, **condition)
        if key.startswith(MANIFEST_PREFIX) and key not in lost:
            lost.append(key)
            raise StoreUnavailable("the reply was lost")
        return etag

    with trial.sender(signer=signer) as sender:
        trial.store.put = losing
        trial.publish(sender)
        trial.publish(sender)
    assert len(lost) == 2
    trial.receiver("one", verifier=Verifier([signer.verifier()])).pull()
    trial.assert_holds(3)


def test_keys_can_be_changed_during_a_run(trial: Trial) -> None:
    old, new = SIGNERS["secret"], SIGNERS["ed25519"]
    both = Verifier([old.verifier(), new.verifier()])
    with trial.sender(signer=old) as sender:
        trial.publish(sender)
    with trial.sender(signer=new, verifier=both) as sender:
        trial.publish(sender)
    trial.receiver("one", verifier=both).pull()
    trial.assert_holds(4)
    with pytest.raises(BadSignature):
        trial.receiver("late", verifier=Verifier([old.verifier()])).pull()


def test_acknowledgements_need_no_key(trial: Trial) -> None:
    signer = SIGNERS["ed25519"]
    with trial.sender(signer=signer) as sender:
        report = trial.publish(sender)
        trial.receiver("one", verifier=Verifier([signer.verifier()])).pull()
        assert sender.wait_for(report.version, ["one"], timeout_s=0) == ["one"]


def test_keys_come_from_files_that_the_environment_names(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = Ed25519PrivateKey.generate()
    (tmp_path / "sign.pem").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "trust.pem").write_bytes(
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "other").write_bytes(b"x" * 40)
    url = f"memory://{tmp_path.name}/run"
    monkeypatch.setenv("DCR_TRUST_KEY_FILES", f"{tmp_path / 'other'}:{tmp_path / 'trust.pem'}")
    with pytest.raises(BadInput, match="cannot be read"):
        monkeypatch.setenv("DCR_SIGN_KEY_FILE", str(tmp_path / "absent"))
        Sender.open(url, base=trial.root / "base", state_dir=tmp_path / "state", workers=0)
    monkeypatch.setenv("DCR_SIGN_KEY_FILE", str(tmp_path / "sign.pem"))
    with Sender.open(url, base=trial.root / "base", state_dir=tmp_path / "state", workers=0) as sender:
        sender.publish(save(make_state(5), tmp_path / "new", shards=2))
    monkeypatch.delenv("DCR_SIGN_KEY_FILE")
    Receiver(url, tmp_path / "mirror", base=trial.root / "base", workers=0).pull()
    monkeypatch.setenv("DCR_TRUST_KEY_FILES", str(tmp_path / "other"))
    with pytest.raises(BadSignature):
        Receiver(url, tmp_path / "mirror", workers=0).pull()


@pytest.mark.parametrize(
    "material", [b"short", b"-----BEGIN PRIVATE KEY-----\nsecretsecret\n-----END PRIVATE KEY-----\n"]
)
def test_a_bad_key_is_refused_without_showing_it(material: bytes) -> None:
    for read in (read_signer, read_key):
        with pytest.raises(BadInput) as caught:
            read(material, where="key.pem")
        assert "secretsecret" not in str(caught.value)
        assert "short" not in str(caught.value)


def test_the_secret_does_not_show(signer: Signer) -> None:
    assert "ssss" not in repr(signer) + signer.key_id
    assert b"s".hex() * 8 not in signer.key_id


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 10_000))
def test_any_flipped_bit_of_a_signed_document_is_noticed(extra: bytes, place: int) -> None:
    signer = SIGNERS["secret"]
    verifier = Verifier([signer.verifier()])
    ack = Ack(run_id="0" * 32, receiver="r", version=1, state="1" * 32, proved_at=extra.hex()[:40])
    body = signed(ack.to_bytes(), signer)
    assert signed(body, STRANGER) == body
    verifier.check(body, where="")
    assert Ack.from_bytes(body, where="") == ack
    damaged = bytearray(body)
    damaged[place // 8 % len(body)] ^= 1 << place % 8
    with pytest.raises((BadSignature, CorruptObject)):
        verifier.check(bytes(damaged), where="")
        Ack.from_bytes(bytes(damaged), where="")


def test_owner_lists_are_covered_and_segments_are_not() -> None:
    assert is_signed(owner_key(3, "000001-0123456789ab-0000", 2))
    assert not is_signed("snapshots/000000000001/0123456789ab/config.json")
    assert not is_signed("acks/one.json")


def test_signing_from_several_threads(signer: Signer) -> None:
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(signer.sign(b"m"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(results)) == 1
