"""A Hugging Face ``Trainer`` callback (TRL's trainers take the same): publishes after optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dcr_s3.training.publisher import Publisher


class PublishCallback(TrainerCallback):
    """Publishes every ``every_steps``-th policy version in the background, and the last one when training ends.

    ``open_publisher`` is called with the model once training begins, on every rank; it returns ``Publisher.open(url,
    model, ...)``.
    """

    def __init__(self, open_publisher: Callable[[Any], Publisher], *, every_steps: int = 1) -> None:
        self._open = open_publisher
        self._every_steps = every_steps
        self._published_step = -1
        self.publisher: Publisher | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Opens the run; makes optimizer steps wait for weights that are being compared."""
        self.publisher = self._open(kwargs["model"])
        optimizer = kwargs["optimizer"]
        self.publisher.attach(getattr(optimizer, "optimizer", optimizer))  # Accelerate's wrapper has no hooks

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Publishes if it is time."""
        if state.global_step % self._every_steps == 0:
            self._publish(kwargs["model"], state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes what has not been yet, waits for it and closes the run."""
        assert self.publisher is not None
        try:
            if self._published_step != state.global_step:
                self._publish(kwargs["model"], state.global_step)
            self.publisher.wait()
        finally:
            self.publisher.close()

    def _publish(self, model: Any, step: int) -> None:
        assert self.publisher is not None
        self.publisher.step(model, step)
        self._published_step = step
