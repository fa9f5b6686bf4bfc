"""The options: what is rejected, which chains are selected, and how sublayers are dealt out."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from attnres_compile import AttnResConfig
from attnres_compile.errors import AttnResError, OptionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 2, "block_size": 3}, "num_blocks=2 and block_size=3 were both given"),
        ({"num_blocks": 0}, "num_blocks counts whole numbers from 1, got 0"),
        ({"block_size": -1}, "block_size counts whole numbers from 1, got -1"),
        ({"num_blocks": 2.0}, "num_blocks counts whole numbers from 1, got 2.0"),
        ({"block_size": True}, "block_size counts whole numbers from 1, got True"),
        ({"num_blocks": "8"}, "num_blocks counts whole numbers from 1, got '8'"),
        ({"eps": 0.0}, "eps must be positive, got 0.0"),
        ({"eps": -1e-6}, "eps must be positive"),
        ({"eps": float("nan")}, "eps must be positive, got nan"),
    ],
    ids=str,
)
def test_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        AttnResConfig(**options)
    assert isinstance(caught.value, AttnResError)
    assert isinstance(caught.value, ValueError)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="blocks"):
        AttnResConfig(blocks=3)  # type: ignore[call-arg]


def test_defaults_and_equality() -> None:
    config = AttnResConfig()
    assert (config.num_blocks, config.block_size, config.eps) == (None, None, 1e-6)
    assert config.preserve
    assert config.key_norm
    assert config.strict
    assert config == AttnResConfig()
    assert config != replace(config, preserve=False)
    with pytest.raises(FrozenInstanceError):
        config.eps = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("chains", "selected"),
    [
        (None, [0, 1, 2, 3]),
        ([1], [1]),
        ((0, 3), [0, 3]),
        ({2}, [2]),
        (range(2), [0, 1]),
        ([], []),
        (lambda index: index > 1, [2, 3]),
    ],
)
def test_selection(chains: Any, selected: list[int]) -> None:
    config = AttnResConfig(chains=chains)
    assert [index for index in range(4) if config.selects(index)] == selected


@pytest.mark.parametrize("sublayers", range(1, 40))
def test_balanced_blocks(sublayers: int) -> None:
    for blocks in range(1, sublayers + 1):
        sizes = AttnResConfig(num_blocks=blocks).block_sizes(sublayers)
        assert (len(sizes), sum(sizes)) == (blocks, sublayers)
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)
    assert AttnResConfig().block_sizes(sublayers) == AttnResConfig(num_blocks=min(8, sublayers)).block_sizes(sublayers)


@pytest.mark.parametrize(
    ("size", "sublayers", "expected"),
    [
        (1, 3, (1, 1, 1)),
        (2, 6, (2, 2, 2)),
        (4, 6, (4, 2)),
        (5, 11, (5, 5, 1)),
        (6, 6, (6,)),
        (9, 6, (6,)),
        (3, 1, (1,)),
    ],
)
def test_blocks_of_one_size(size: int, sublayers: int, expected: tuple[int, ...]) -> None:
    assert AttnResConfig(block_size=size).block_sizes(sublayers) == expected


def test_more_blocks_than_sublayers() -> None:
    with pytest.raises(OptionError, match="num_blocks=9 is larger than the 8 sublayers of a chain; give at most 8"):
        AttnResConfig(num_blocks=9).block_sizes(8)
