"""Two processes, each with half of the batch: what one of them found comes back in a file."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import attnres_compile as ac
from tests.integration.models import example, transformed, without_dropout
from tests.zoo import CASES

PROCESSES = 2
CHECKPOINTED, READS_ALONE = "checkpointed", "reads alone"
Found = dict[str, Any]


def made(name: str, manner: str) -> Any:
    """A transformed model with random queries, in training mode without random numbers."""
    model: Any = without_dropout(transformed(name))
    if manner == READS_ALONE:
        # Their gradients are small beside what they are summed from: fp32 would compare its rounding.
        ac.trainable_parameters(model.double(), "attnres")
    checkpointed = manner == CHECKPOINTED
    if checkpointed and name == "llama":
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    elif checkpointed:
        for block in model.transformer["blocks"]:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    return model


def layers_of(name: str, model: Any) -> Any:
    return model.model.layers if name == "llama" else model.transformer["blocks"]


def step(name: str, model: nn.Module, rank: int | None) -> Found:
    """Two steps of SGD on this process's half of the batch; on all of it without a rank."""
    inputs = example(name, 2 * PROCESSES, 7)
    if rank is not None:
        inputs = {key: value[2 * rank : 2 * rank + 2] for key, value in inputs.items()}
    optimiser = torch.optim.SGD(ac.optimizer_groups(model, weight_decay=0.1, lr=0.1, read_lr=1.0))
    found: Found = {}
    for number in range(2):
        logits = CASES[name].output(model(**inputs))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        found[f"outputs {number}"] = _gathered(logits.detach()) if rank is not None else logits.detach()
        found[f"gradients {number}"] = {
            key.removeprefix("module."): _whole(parameter.grad)
            for key, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        optimiser.step()
    return found


def _gathered(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(PROCESSES)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def ddp(name: str, manner: str, rank: int) -> Found:
    return step(name, DistributedDataParallel(made(name, manner)), rank)


def fsdp(name: str, manner: str, rank: int) -> Found:
    model, mesh = made(name, manner), init_device_mesh("cpu", (PROCESSES,))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for layer in layers_of(name, model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    # the whole state comes together on the first process
    same = state.keys() == before.keys() and all(state[key].equal(before[key]) for key in before)
    return {"sharded": sharded, "state": same or rank > 0, **step(name, model, rank)}


MANNERS = [(name, manner) for name in ("nanogpt", "llama") for manner in ("everything", CHECKPOINTED)]
SCENARIOS: list[tuple[Callable[[str, str, int], Found], str, str]] = [
    (how, name, manner) for how in (ddp, fsdp) for name, manner in (*MANNERS, ("nanogpt", READS_ALONE))
]


def work(rank: int, folder: str) -> None:
    """Run every scenario; one that fails leaves its traceback."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=PROCESSES, timeout=timeout)
    found: dict[str, Found | str] = {}
    for how, name, manner in SCENARIOS:
        label = f"{how.__name__} {name} {manner}"
        try:
            found[label] = how(name, manner, rank)
        except Exception:
            found[label] = traceback.format_exc()
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()
