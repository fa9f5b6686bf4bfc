"""Transformers' own Trainer: mixed precision, checkpointing, saving, and resuming to the bit."""

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import PreTrainedModel

import attnres_compile as ac
from tests.integration.models import KEY_NORM, QUERY, pair, run
from tests.tolerances import assert_close, relative_error
from tests.zoo import ids

STEPS, HALF = 4, 2


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = ids(8, 9)[index]
        return {"input_ids": tokens, "labels": tokens}


def trainer(model: Any, folder: Path, **settings: Any) -> Trainer:
    """A trainer on the CPU, with decay on matrices alone."""
    optimizer = torch.optim.AdamW(ac.optimizer_groups(model, weight_decay=0.1, lr=1e-2, read_lr=3e-2))
    defaults: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 7,
    }
    arguments = TrainingArguments(output_dir=str(folder), **(defaults | settings))
    return Trainer(model, arguments, train_dataset=Tokens(), optimizers=(optimizer, None))


def train(trained: Trainer, **settings: Any) -> list[float]:
    """The losses of every step."""
    with warnings.catch_warnings():
        # transformers' and torch's own remarks on each other
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        trained.train(**settings)
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert not [name for name in actual if not torch.equal(actual[name], expected[name])]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16 autocast"])
def test_first_loss_is_the_originals_and_the_reads_learn(bf16: bool, tmp_path: Path) -> None:
    original, model = pair("llama")
    ours = trainer(model, tmp_path, bf16=bf16)
    before = parameters(original)
    optimizer = torch.optim.SGD(original.parameters(), lr=1e-2)
    expected = train(Trainer(original, ours.args, train_dataset=Tokens(), optimizers=(optimizer, None)))
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            # the two share their parameters
            parameter.copy_(before[name])
    losses = train(ours)
    assert losses[0] == pytest.approx(expected[0], rel=2e-2 if bf16 else 1e-4)
    assert len(losses) == STEPS
    assert model.get_parameter(QUERY).any(dim=-1).all()
    assert not model.get_parameter(KEY_NORM).eq(1).all()
    assert model.get_parameter(QUERY).dtype == torch.float32


def test_gradient_checkpointing_trains_the_same(tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        model = pair("llama")[1]
        kwargs = {"use_reentrant": False}
        settings = {"activation_checkpointing": checkpointing, "activation_checkpointing_kwargs": kwargs}
        train(trainer(model, tmp_path, **settings))
        assert model.is_activation_checkpointing is checkpointing
        found.append(parameters(model))
    for name, expected in found[0].items():
        assert_close(found[1][name], expected, name)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["fp32", "bf16 autocast"])
def test_resume_is_equal_to_the_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    model = pair("gpt2")[1]
    through = trainer(model, tmp_path, save_strategy="steps", save_steps=HALF, **settings)
    losses = train(through)
    folder = tmp_path / f"checkpoint-{HALF}"
    resumed = pair("gpt2")[1]
    again = trainer(resumed, tmp_path / "again", **settings)
    assert train(again, resume_from_checkpoint=str(folder)) == losses
    assert_equal(parameters(resumed), parameters(model))


def test_a_checkpoint_is_a_pretrained_model(tmp_path: Path) -> None:
    model = pair("llama")[1]
    train(trainer(model, tmp_path, save_strategy="steps", save_steps=HALF))
    model.eval()
    restored: Any = ac.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert isinstance(restored, PreTrainedModel)
    assert torch.equal(run("llama", restored), run("llama", model))
    # and one from which training goes on, with the Trainer's own files
    resumed: Any = ac.from_pretrained(tmp_path / f"checkpoint-{HALF}")
    train(trainer(resumed, tmp_path / "again"), resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    assert_equal(parameters(resumed), parameters(model))


def test_reads_alone(tmp_path: Path) -> None:
    model = pair("llama")[1]
    ac.trainable_parameters(model, "attnres")
    before = parameters(model)
    train(trainer(model, tmp_path))
    moved = {name for name, value in parameters(model).items() if not torch.equal(value, before[name])}
    assert moved == {QUERY, KEY_NORM}


def test_lora_and_the_reads(tmp_path: Path) -> None:
    model = pair("llama")[1]
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=ac.read_modules(model))
    torch.manual_seed(0)
    adapted: Any = peft.get_peft_model(model, settings)
    before = parameters(adapted)
    train(trainer(adapted, tmp_path, save_strategy="steps", save_steps=STEPS))
    moved = {name for name, value in parameters(adapted).items() if not torch.equal(value, before[name])}
    assert {name for name in moved if "attnres" in name} == {
        f"base_model.model.attnres.0.modules_to_save.default.{name}" for name in ("query", "key_norm")
    }
    assert all("lora_" in name for name in moved if "attnres" not in name) and len(moved) > 2
    adapted.eval()
    restored = peft.PeftModel.from_pretrained(pair("llama")[1], tmp_path / f"checkpoint-{STEPS}")
    assert_close(run("llama", restored), run("llama", adapted))
    assert relative_error(run("llama", restored), run("llama", pair("llama")[1])) > 1e-3


def test_a_plain_loop_resumes_to_the_bit(tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            tokens = ids(2, 7 + step)
            optimizer.zero_grad()
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=tokens)
            nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = pair("nanogpt")[1].train()
        return model, torch.optim.AdamW(ac.optimizer_groups(model, weight_decay=0.1), lr=1e-2)

    model, optimizer = made()
    steps(model, optimizer, 0, HALF)
    ac.save_pretrained(model, tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    steps(model, optimizer, HALF, STEPS)

    resumed = ac.from_pretrained(tmp_path, model=pair("nanogpt")[0], example_inputs=ids(2, 7)).train()
    other = torch.optim.AdamW(ac.optimizer_groups(resumed, weight_decay=0.1), lr=1e-2)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    steps(resumed, other, HALF, STEPS)
    assert_equal(parameters(resumed), parameters(model))
