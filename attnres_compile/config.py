"""The options of a transformation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from attnres_compile.errors import OptionError

DEFAULT_NUM_BLOCKS = 8


@dataclass(frozen=True)
class AttnResConfig:
    """Options of Block AttnRes (arXiv 2603.15031).

    Attributes:
        num_blocks: blocks per chain, balanced: their sizes differ by at most one, the larger first. The default
            is 8, or one block per sublayer where a chain has fewer; a number given here must fit every chain.
        block_size: sublayers per block instead, the last block holding the remainder; 1 is Full AttnRes.
        preserve: multiply each read by its number of sources, so that zero queries reproduce the model exactly.
            False is the paper's weighted mean, whose readers see an eps that is n^2 times larger.
        key_norm: give the keys' RMSNorm a learned weight.
        eps: added to the mean square in the keys' RMSNorm.
        chains: which chains to rewrite: their indices in the report, or a predicate on that index. None is all.
        strict: raise when no chain qualifies; otherwise the model comes back unchanged and the report says why.
    """

    num_blocks: int | None = None
    block_size: int | None = None
    preserve: bool = True
    key_norm: bool = True
    eps: float = 1e-6
    chains: Collection[int] | Callable[[int], bool] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        """Reject values that no chain could take."""
        if self.num_blocks is not None and self.block_size is not None:
            raise OptionError(
                f"num_blocks={self.num_blocks} and block_size={self.block_size} were both given; give one of them"
            )
        for name in ("num_blocks", "block_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise OptionError(f"{name} counts whole numbers from 1, got {value!r}")
        if not self.eps > 0:
            raise OptionError(f"eps must be positive, got {self.eps!r}")

    def selects(self, index: int) -> bool:
        """Whether the chain of this index is to be rewritten."""
        if self.chains is None:
            return True
        return self.chains(index) if callable(self.chains) else index in self.chains

    def block_sizes(self, sublayers: int) -> tuple[int, ...]:
        """Sizes of the blocks of a chain, in sublayers; their sum is ``sublayers``.

        Raises:
            OptionError: ``num_blocks`` was given and is larger than ``sublayers``.
        """
        if self.block_size is not None:
            full, rest = divmod(sublayers, self.block_size)
            return (self.block_size,) * full + ((rest,) if rest else ())
        blocks = min(DEFAULT_NUM_BLOCKS, sublayers) if self.num_blocks is None else self.num_blocks
        if blocks > sublayers:
            raise OptionError(
                f"num_blocks={blocks} is larger than the {sublayers} sublayers of a chain; give at most {sublayers}, "
                "or block_size=1 for Full AttnRes, or leave the chain out with chains="
            )
        size, larger = divmod(sublayers, blocks)
        return (size + 1,) * larger + (size,) * (blocks - larger)
