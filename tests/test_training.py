"""What trains, and how an optimiser groups it."""

import pytest
import torch
from torch import nn

import attnres_compile as ac
from tests.integration.models import KEY_NORM, QUERY, pair, run


def names(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for parameter in parameters]


def test_reads_alone_train_then_everything() -> None:
    model = pair("nanogpt")[1]
    assert names(model, ac.trainable_parameters(model, "attnres")) == [QUERY, KEY_NORM]
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {QUERY, KEY_NORM}
    assert len(ac.trainable_parameters(model, "all")) == len(list(model.parameters()))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_every_chain_is_found_through_a_wrapper() -> None:
    model = pair("t5")[1]
    assert ac.read_modules(model) == ["attnres.0", "attnres.1"]
    assert len(ac.trainable_parameters(nn.ModuleDict({"inner": model}))) == 4


def test_parameters_without_gradient_of_their_own_stay_so() -> None:
    model = pair("nanogpt")[1]
    model.register_parameter("counts", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    assert "counts" not in names(model, ac.trainable_parameters(model, "all"))


def test_reads_and_vectors_do_not_decay() -> None:
    model = pair("nanogpt")[1]
    groups = {group["name"]: group for group in ac.optimizer_groups(model, weight_decay=0.1, lr=1e-3, read_lr=1e-2)}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "matrices": 0.1,
        "vectors": 0.0,
        "attnres": 0.0,
    }
    assert {name: group["lr"] for name, group in groups.items()} == {"matrices": 1e-3, "vectors": 1e-3, "attnres": 1e-2}
    assert names(model, groups["attnres"]["params"]) == [QUERY, KEY_NORM]
    assert all(parameter.ndim == 1 for parameter in groups["vectors"]["params"])
    grouped = [id(parameter) for group in groups.values() for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_a_step_with_groups_decays_matrices_alone() -> None:
    model = pair("nanogpt")[1]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(ac.optimizer_groups(model, weight_decay=0.5), lr=0.1)
    (0.0 * run("nanogpt", model).sum()).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim > 1 and "attnres." not in name
        assert torch.equal(parameter, before[name] * 0.95 if matrix else before[name]), name


def test_frozen_parameters_are_in_no_group() -> None:
    model = pair("nanogpt")[1]
    ac.trainable_parameters(model)
    (group,) = ac.optimizer_groups(model, weight_decay=0.1)
    assert group["name"] == "attnres" and "lr" not in group and len(group["params"]) == 2


def test_refusals() -> None:
    original, model = pair("nanogpt")
    with pytest.raises(ac.OptionError, match="'attnres' or 'all', got 'queries'"):
        ac.trainable_parameters(model, "queries")  # type: ignore[arg-type]
    for ask in (ac.trainable_parameters, ac.read_modules, lambda m: ac.optimizer_groups(m, weight_decay=0.1)):
        with pytest.raises(ac.InputError, match="NanoGPT has no reads"):
            ask(original)
