"""The sender's parts: tensors to blocks, blocks to segments, segments to the bucket."""
