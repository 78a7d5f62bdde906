"""Pure numbers: find the bits that changed, encode them, decode them, apply them, digest the state."""

from dcr_s3.delta.changes import Changes, Pieces
from dcr_s3.delta.codec import EncodedBlock, apply_changes, decode_block, encode_block
from dcr_s3.delta.digest import TensorKey, digest_at, digest_range, tensor_key
from dcr_s3.delta.kernels import kernel_name
from dcr_s3.delta.places import Places

__all__ = [
    "Changes",
    "EncodedBlock",
    "Pieces",
    "Places",
    "TensorKey",
    "apply_changes",
    "decode_block",
    "digest_at",
    "digest_range",
    "encode_block",
    "kernel_name",
    "tensor_key",
]
