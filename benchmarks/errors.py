"""The operators' errors against the paper's equations in fp64 on the same numbers.

``python benchmarks/errors.py`` prints the table of ``docs/ops.md``: the largest error relative to the largest
magnitude, over 1 to 257 sources, widths that are and are not powers of two, and non-contiguous rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.ops.test_add_merge_norm import Fused
from tests.ops.test_ops import Case, gradients
from tests.tolerances import TOLERANCE, relative_error

CASES = [(1, 48, "contiguous"), (9, 96, "contiguous"), (9, 257, "padded_rows"), (33, 1024, "contiguous")]
CASES += [(257, 40, "contiguous")]


def errors(dtype: torch.dtype) -> dict[str, float]:
    """The largest error per operator, forward and backward."""
    worst: dict[str, float] = {}

    def note(name: str, pairs: zip[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for actual, expected in pairs:
            worst[name] = max(worst.get(name, 0.0), relative_error(actual, expected))

    for count, width, layout in CASES:
        case = Case(count, (2, 5), width, dtype=dtype, layout=layout, grad=True)
        exact = case.double()
        h, expected = case.depth_attention(), exact.expected_depth_attention()
        note("depth_attention", zip([h], [expected], strict=True))
        note("inter_block", zip(case.inter_block(), exact.expected_inter_block(), strict=True))
        if count > 1:
            note("depth_attention, gradients", zip(gradients(h, case), gradients(expected, exact), strict=True))
            h, expected = case.two_phase(), exact.expected_two_phase()
            note("inter_block and merge", zip([h], [expected], strict=True))
            note("inter_block and merge, gradients", zip(gradients(h, case), gradients(expected, exact), strict=True))
    for norm in ("rms", "layer"):
        plain = Fused(norm, dtype, width=96)
        case, exact = plain.leaves(), plain.leaves(torch.float64)
        found, wanted = case.run(), exact.expected()
        note("add_merge_norm", zip(found, wanted, strict=True))
        weights = [torch.randn_like(w) for w in wanted]
        ours = torch.autograd.grad(found, case.tensors(), [w.to(dtype) for w in weights])
        note("add_merge_norm, gradients", zip(ours, torch.autograd.grad(wanted, exact.tensors(), weights), strict=True))
    return worst


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    columns = {dtype: errors(dtype) for dtype in TOLERANCE}
    print("| operator | " + " | ".join(str(dtype)[6:] for dtype in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name in next(iter(columns.values())):
        print(f"| {name} | " + " | ".join(f"{column[name]:.0e}" for column in columns.values()) + " |")
    print("| allowed in tests | " + " | ".join(f"{TOLERANCE[dtype]:.0e}" for dtype in columns) + " |")


if __name__ == "__main__":
    main()
