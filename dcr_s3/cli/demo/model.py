"""A small decoder-only transformer with a Llama checkpoint's structure and tensor names, over bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """Sizes, under the names a Llama `config.json` gives them."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    max_position_embeddings: int = 256

    def config(self) -> dict[str, object]:
        """Contents of the checkpoint's `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "num_key_value_heads": self.num_attention_heads,
            "tie_word_embeddings": False,
            **asdict(self),
        }


def _rotate(x: Tensor, start: int) -> Tensor:
    """Rotary position embedding for ``x`` of shape (batch, heads, length, head size), positions from ``start``."""
    half = x.shape[-1] // 2
    positions = torch.arange(start, start + x.shape[2], dtype=torch.float32)
    angles = positions[:, None] * (10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half))[None, :]
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, width = x.shape
        q, k, v = (
            proj(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        start = 0 if past is None else past[0].shape[2]
        q, k = _rotate(q, start), _rotate(k, start)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width)), (k, v)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=1e-6)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, cache = self.self_attn(self.input_layernorm(x), past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class _Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=1e-6)


class ByteLlama(nn.Module):
    """Next-byte logits, fp32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = _Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.03)

    def forward(self, tokens: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits (batch, length, 256) for int64 ``tokens`` (batch, length) that follow ``past``, and the new cache."""
        x = self.model.embed_tokens(tokens)
        cache: Cache = []
        for number, layer in enumerate(self.model.layers):
            x, kept = layer(x, None if past is None else past[number])
            cache.append(kept)
        return self.lm_head(self.model.norm(x)), cache

    @torch.no_grad()
    def sample(self, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
        """Continues ``prompts`` (batch, prompt length) by ``length`` sampled bytes; returns prompt and continuation."""
        tokens = prompts
        logits, cache = self(prompts)
        for _ in range(length):
            chosen = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], dim=1)
            logits, cache = self(chosen, cache)
        return tokens
