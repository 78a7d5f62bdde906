"""Ready-made residual rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from dcr_s3.errors import BadInput
from dcr_s3.mapping.residual import Residual, Tensors

E4M3_MAX = 448.0


def merged_lora(
    output: str,
    weight: str,
    lora_a: str,
    lora_b: str,
    scale: float | str,
    *,
    dtype: torch.dtype | None = None,
) -> Residual:
    """``weight + scale * lora_b @ lora_a`` as ``dtype`` (the weight's by default).

    Shapes: (out, in), (rank, in), (out, rank). ``scale`` is a number or the name of a training tensor of one element.
    Cut weights are merged where they are; only the small matrices may be gathered.
    """
    named = (scale,) if isinstance(scale, str) else ()

    def convert(tensors: Tensors) -> Mapping[str, torch.Tensor]:
        base, factor = tensors[weight], tensors[scale] if isinstance(scale, str) else scale
        if isinstance(factor, DTensor):
            factor = factor.full_tensor()
        if not isinstance(base, DTensor):
            return {output: _merge(base, full(tensors[lora_a]), full(tensors[lora_b]), factor, dtype)}
        rows = _placed(tensors[lora_b], base, 0)
        columns = _placed(tensors[lora_a], base, 1)
        local = _merge(base.to_local(), columns, rows, factor, dtype)
        shape, stride = base.shape, base.stride()
        return {output: DTensor.from_local(local, base.device_mesh, base.placements, shape=shape, stride=stride)}

    return Residual((output,), (weight, lora_a, lora_b, *named), convert)


def _merge(
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scale: torch.Tensor | float,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    return (weight + ((lora_b @ lora_a) * scale).to(weight.dtype)).to(dtype or weight.dtype)


def _placed(factor: torch.Tensor, weight: DTensor, dim: int) -> torch.Tensor:
    """A low-rank factor's rows (or columns) that belong to the local part of ``weight``."""
    if not isinstance(factor, DTensor):
        factor = DTensor.from_local(factor, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim)
    cut = [p if isinstance(p, Shard) and p.dim == dim else Replicate() for p in weight.placements]
    if any(not isinstance(p, (Shard, Replicate)) for p in weight.placements):
        if [*factor.placements] == [*weight.placements] and dim == 0:
            return factor.to_local()
        raise BadInput(f"a factor placed {factor.placements} does not fit a weight placed {weight.placements}")
    return factor.redistribute(placements=cut).to_local()


def stacked_experts(output: str, experts: Sequence[str]) -> Residual:
    """One tensor with a new first dim, of tensors that every rank can see whole. Experts that are cut or spread over
    ranks need no conversion: describe them with ``megatron.stacked_expert``.
    """
    return Residual(
        (output,), tuple(experts), lambda tensors: {output: torch.stack([full(tensors[name]) for name in experts])}
    )


def block_fp8(weight: str, scale: str, source: str, *, block: tuple[int, int] = (128, 128)) -> Residual:
    """An e4m3 matrix and one fp32 scale per ``block`` of rows and columns: source = weight * scale.

    Both change together, and a scale that moves can alter every value of its block. The source matrix is gathered on
    every rank, one at a time.
    """

    def convert(tensors: Tensors) -> Mapping[str, torch.Tensor]:
        values, scales = quantise(full(tensors[source]), block)
        return {weight: values, scale: scales}

    return Residual((weight, scale), (source,), convert)


def quantise(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values (rows, columns) and fp32 scales (blocks of rows, blocks of columns); the last blocks may be
    smaller.
    """
    rows, cols = matrix.shape
    high, wide = block
    padded = functional.pad(matrix.float(), (0, -cols % wide, 0, -rows % high))
    tiles = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = (tiles.abs().amax(dim=(1, 3)) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (tiles / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    values = scaled.to(torch.float8_e4m3fn).reshape(padded.shape)[:rows, :cols].contiguous()
    return values, scales


def tied(output: str, source: str) -> Residual:
    """A canonical tensor that is a copy of another one's training tensor, where a checkpoint stores tied weights
    twice.
    """
    return Residual((output,), (source,), lambda tensors: {output: tensors[source]})


def export_hook(
    outputs: Sequence[str], export: Callable[[Tensors], Mapping[str, torch.Tensor]], inputs: Sequence[str] | None = None
) -> Residual:
    """Whatever a framework's own export function computes; without ``inputs`` it runs for every version."""
    return Residual(tuple(outputs), tuple(inputs) if inputs is not None else None, export)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; a DTensor is gathered."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
