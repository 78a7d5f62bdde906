"""Bounds that hold before anything read from a bucket is believed. Part of the format: writers keep within them."""

RUN_BYTES = 256 << 20
MANIFEST_BYTES = 64 << 20
ACK_BYTES = 64 << 10
RELEASE_BYTES = 16 << 20
LEASE_S = 366 * 86_400
SEGMENT_BYTES = 1 << 30
SEGMENT_HEADER_BYTES = 64 << 10
INDEX_BYTES = 64 << 20
BLOCK_DENSE_BYTES = 16 << 20
BLOCKS_PER_SEGMENT = 1 << 20
REGION_DIMS = 8
TENSORS = 1 << 24
TENSOR_DIMS = 32
TENSOR_CELLS = 1 << 48
NAME_BYTES = 4096
SEGMENTS_PER_VERSION = 1 << 20
VERSION = 10**12 - 1
OWNERS = 10**5
EPOCH = 10**6 - 1
