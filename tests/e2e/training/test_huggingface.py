"""A real Trainer with the callback: every step is a version, and the mirror ends with the trained weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dcr_s3 import Receiver
from dcr_s3.store.memory import MemoryStore
from dcr_s3.training import Publisher, shards_of

transformers = pytest.importorskip("transformers", reason="not installed (pip install dcr-s3[training])")
pytest.importorskip("accelerate", reason="not installed (pip install dcr-s3[training])")


class Tokens(torch.utils.data.Dataset):
    """Random token sequences."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("tie", [False, True])
def test_every_optimizer_step_becomes_a_version(memory_store: MemoryStore, tmp_path: Path, tie: bool) -> None:
    from dcr_s3.training.huggingface import PublishCallback

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tie,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    base, mirror = tmp_path / "base", tmp_path / "mirror"
    model.to(torch.bfloat16).save_pretrained(base)
    model.float()
    callback = PublishCallback(
        lambda model: Publisher.open(
            memory_store, model, layout=partial(shards_of, dtype=torch.bfloat16), base=base, workers=1
        )
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=4, learning_rate=1e-3,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[callback])
    trainer.train()
    report = Receiver(memory_store, mirror, base=base).pull()
    assert (report.version, report.step) == (5, 4)
    found = load_file(mirror / "model.safetensors")
    trained = dict(model.named_parameters())
    assert found.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(found[name].view(torch.int16), tensor.detach().bfloat16().view(torch.int16)), name
