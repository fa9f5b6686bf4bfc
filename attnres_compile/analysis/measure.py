"""Measure one forward and backward of a transformed model: what its reads attend to, and how large things are.

No hooks are registered: the streams tell an observer what is pushed and read. Nothing of the model changes, neither
its mode, nor its gradients, nor the random numbers that come next.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres_compile.arithmetic import NUMBERS
from attnres_compile.attach import ATTRIBUTE
from attnres_compile.capture.inputs import normalise
from attnres_compile.chains import BlockPlan
from attnres_compile.errors import InputError
from attnres_compile.observer import Observer
from attnres_compile.ops.factored import compute_dtype, inverse_rms
from attnres_compile.report import AttnResReport
from attnres_compile.stream import Stream

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class ReadMeasure:
    """One read, as means over all tokens.

    Attributes:
        weights: depth attention per source: embedding, finished blocks, and the open block's partial sum if there is
            one. They sum to one.
        partial: whether the last source is a partial sum.
        entropy: of the weights, in nats; ``log(len(weights))`` is uniform.
        magnitude: root mean square of what is read.
    """

    weights: tuple[float, ...]
    partial: bool
    entropy: float
    magnitude: float


@dataclass(frozen=True)
class SublayerMeasure:
    """One sublayer.

    Attributes:
        name: path of its module.
        output: root mean square of what it adds.
        state: root mean square of the open block's sum after it. With one block, that is the standard stream without
            its embedding.
        gradient: root mean square of the loss' gradient by its output; NaN where no parameter before it trains.
        read: the read of the state after it, None where its row was not read.
    """

    name: str
    output: float
    state: float
    gradient: float
    read: ReadMeasure | None


@dataclass(frozen=True)
class ChainMeasure:
    """One residual chain.

    Attributes:
        container: path of the module that holds it.
        block_sizes: in sublayers.
        preserve: whether a read is multiplied by its number of sources.
        embedding: root mean square of ``b_0``.
        sublayers: in order.
    """

    container: str
    block_sizes: tuple[int, ...]
    preserve: bool
    embedding: float
    sublayers: tuple[SublayerMeasure, ...]

    def mixing(self) -> Tensor:
        """The depth-mixing matrix ``[L + 1, L + 1]`` in fp64; rows that were not read are NaN."""
        size = len(self.sublayers) + 1
        mixing = torch.zeros(size, size, dtype=torch.float64)
        mixing[0, 0] = 1
        ends = list(itertools.accumulate(self.block_sizes))
        block_of = [0, *(1 + next(n for n, end in enumerate(ends) if i < end) for i in range(size - 1))]
        for l, sublayer in enumerate(self.sublayers, 1):
            if sublayer.read is None:
                mixing[l] = math.nan
                continue
            weights = sublayer.read.weights
            scale = len(weights) if self.preserve else 1
            for i in range(l + 1):
                # The open block's number is that of the last source.
                mixing[l, i] = scale * weights[block_of[i]]
        return mixing


@dataclass(frozen=True)
class Measurement:
    """All chains of a model in one forward and backward.

    Attributes:
        model: its class.
        loss: the loss, None where the gradients are those of a fixed random projection of the outputs.
        chains: in the order of the report.
    """

    model: str
    loss: float | None
    chains: tuple[ChainMeasure, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)


def measure(model: nn.Module, example_inputs: Any = None, *, loss: Loss | None = None) -> Measurement:
    """Run a transformed model once, in eval mode, and look at its streams.

    Args:
        model: what ``transform`` returned, trained or not.
        example_inputs: as for ``transform``. With ``labels`` among them a Hugging Face model's own loss is taken.
        loss: from the model's output to a scalar. None takes ``output.loss`` where there is one, else a fixed random
            projection of the outputs.

    Raises:
        InputError: the model was not transformed.
    """
    root = getattr(model, "_orig_mod", model)
    report = getattr(root, "attnres_report", None)
    if not isinstance(report, AttnResReport) or ATTRIBUTE not in dict(root.named_children()):
        raise InputError(f"{type(root).__name__} was not transformed: pass what attnres_compile.transform returned")
    inputs = normalise(root, example_inputs)
    probe = _Probe()
    with _undisturbed(root), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        with probe:
            output = root(*inputs.args, **inputs.kwargs)
        found = loss(output) if loss is not None else getattr(output, "loss", None)
        gradients = probe.gradients(_projection(output) if found is None else found)
    chains = []
    for chain, described in enumerate(chain for chain in report.chains if chain.rewritten):
        names = described.names or tuple(f"sublayer {i}" for i in range(1, described.sublayers + 1))
        chains.append(probe.measured(chain, described.container, names, gradients))
    return Measurement(type(root).__name__, None if found is None else float(found.detach()), tuple(chains))


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode and seeded random numbers inside; modes and random numbers as before after it."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


class _Probe(Observer):
    """Keeps what is pushed, and measures what is read while it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[int, BlockPlan] = {}
        self.embeddings: dict[int, float] = {}
        self.branches: dict[tuple[int, int], list[Tensor]] = {}
        self.states: dict[tuple[int, int], float] = {}
        self.read: dict[tuple[int, int], ReadMeasure] = {}

    def pushed(self, plan: BlockPlan, position: int, branch: Any, dtype: torch.dtype, partial: Any) -> None:
        super().pushed(plan, position, branch, dtype, partial)
        self.plans[plan.chain] = plan
        if position <= plan.last and not isinstance(branch, NUMBERS):
            # What is pushed between two reads is one sublayer.
            sublayer = sum(row >= 0 for row in plan.rows[1:position])
            self.branches.setdefault((plan.chain, sublayer), []).append(branch)
            self.states[plan.chain, sublayer] = _magnitude(partial)

    def reads(self, stream: Stream, row: int) -> None:
        super().reads(stream, row)
        chain = stream.plan.chain
        with torch.no_grad():
            sources = [source.movedim(stream.axis, -1) for source in stream.sources]
            sources = [source.to(compute_dtype(source.dtype)) for source in sources]
            key = stream.reads.query[row]
            if stream.reads.key_norm is not None:
                key = key * stream.reads.key_norm[row]
            key = key.to(sources[0].dtype)
            logits = torch.stack([(source @ key) * inverse_rms(source, stream.plan.eps) for source in sources])
            weights = logits.softmax(0)
            entropy = torch.special.entr(weights).sum(0).mean()
            mix = sum(weight.unsqueeze(-1) * source for weight, source in zip(weights, sources, strict=True))
            scale = len(sources) if stream.plan.preserve else 1
            self.embeddings[chain] = _magnitude(sources[0])
            self.read[chain, row] = ReadMeasure(
                weights=tuple(weights.flatten(1).double().mean(1).tolist()),
                partial=stream.partial is not None,
                entropy=float(entropy),
                magnitude=scale * _magnitude(mix),
            )

    def gradients(self, loss: Tensor) -> dict[tuple[int, int], float]:
        wanted = {key: branches[0] for key, branches in self.branches.items() if branches[0].requires_grad}
        if not wanted or not loss.requires_grad:
            return {}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return {key: _magnitude(grad) for key, grad in zip(wanted, found, strict=True) if grad is not None}

    def measured(
        self, chain: int, container: str, names: tuple[str, ...], gradients: dict[tuple[int, int], float]
    ) -> ChainMeasure:
        plan = self.plans[chain]
        sublayers = tuple(
            SublayerMeasure(
                name=name,
                output=_magnitude(sum(self.branches[chain, i])) if (chain, i) in self.branches else math.nan,
                state=self.states.get((chain, i), math.nan),
                gradient=gradients.get((chain, i), math.nan),
                read=self.read.get((chain, i)),
            )
            for i, name in enumerate(names)
        )
        embedding = self.embeddings.get(chain, math.nan)
        return ChainMeasure(container, plan.block_sizes, plan.preserve, embedding, sublayers)


def _magnitude(tensor: Any) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def _projection(output: Any) -> Tensor:
    """A loss that every number of the outputs takes part in, each with another weight."""
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
    total = torch.zeros((), dtype=torch.float64)
    for i, tensor in enumerate(t for t in leaves if isinstance(t, Tensor) and t.requires_grad):
        generator = torch.Generator().manual_seed(i)
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        total = total + ((tensor * weights).sum() / max(tensor.numel(), 1)).cpu()
    return total
