"""Trains the demonstration's model: a short pretraining, then policy-gradient steps at an RL learning rate."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dcr_s3.cli.demo.model import ByteLlama, Shape
from dcr_s3.cli.demo.text import corpus, reward, vocabulary

PROMPT_BYTES = 32
COMPLETION_BYTES = 48
PROMPTS = 8
GROUP = 4


@dataclass(frozen=True)
class StepResult:
    """One policy update. ``mean_reward`` is the mean over the sampled completions, before the update."""

    mean_reward: float
    grad_norm: float


class Trainer:
    """fp32 AdamW master weights; the published policy is their bf16 cast, rounded to nearest even."""

    def __init__(self, *, seed: int = 0, learning_rate: float = 2e-6, shape: Shape | None = None) -> None:
        torch.manual_seed(seed)
        # One core is left to the server and the receivers: torch's threads wait for each other by spinning.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        self.shape = shape or Shape()
        self.generator = torch.Generator().manual_seed(seed)
        self.text = corpus()
        self.words = vocabulary(self.text)
        self.tokens = torch.frombuffer(bytearray(self.text), dtype=torch.uint8)
        self.model = ByteLlama(self.shape)
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def policy(self) -> dict[str, Tensor]:
        """Canonical name to bf16 tensor, fresh memory."""
        return {name: tensor.detach().to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}

    def _windows(self, count: int, length: int) -> Tensor:
        starts = torch.randint(len(self.tokens) - length, (count,), generator=self.generator)
        return torch.stack([self.tokens[s : s + length] for s in starts.tolist()]).long()

    def pretrain(self, steps: int, on_step: Callable[[int, float], None], *, batch: int = 8, length: int = 96) -> None:
        """Next-byte prediction with a warm-up and cosine decay; calls ``on_step(step, loss)`` after each step."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        warmup = max(steps // 10, 1)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps - warmup, 1)),
            ],
            [warmup],
        )
        for step in range(steps):
            window = self._windows(batch, length + 1)
            logits, _ = self.model(window[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            on_step(step + 1, loss.item())

    def reinforce(self) -> StepResult:
        """One on-policy step: completions in groups, their log-likelihood weighted by group-normalised reward."""
        prompts = self._windows(PROMPTS, PROMPT_BYTES).repeat_interleave(GROUP, dim=0)
        sampled = self.model.sample(prompts, COMPLETION_BYTES, self.generator)
        completions = [bytes(row) for row in sampled[:, PROMPT_BYTES:].tolist()]
        rewards = torch.tensor([reward(c, self.words) for c in completions]).view(PROMPTS, GROUP)
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        logits, _ = self.model(sampled[:, :-1])
        chosen = logits[:, PROMPT_BYTES - 1 :].log_softmax(-1).gather(2, sampled[:, PROMPT_BYTES:, None]).squeeze(2)
        loss = -(advantage[:, None] * chosen).mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return StepResult(rewards.mean().item(), norm.item())
