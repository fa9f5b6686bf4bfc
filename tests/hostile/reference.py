"""Depth attention on a graph by the rules in words: a state is the list of what was added to it, a read mixes blocks.

Independent of the product's stream, plan and operators. It takes from the analysis only where a chain starts and which
module calls read at their entry; what is an add, which states are read and where blocks end it finds by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from attnres_compile.arithmetic import operation_name
from attnres_compile.chains import ResidualChain
from attnres_compile.ops import reference
from attnres_compile.passes import _nodes
from attnres_compile.passes.follow import EXIT
from attnres_compile.passes.starts import sees

SAME = {"clone", "contiguous", "alias", "to", "_to_copy", "float", "double", "dropout"}
ROWS = {"view", "reshape", "flatten", "unsqueeze", "squeeze", "getitem", "slice", "select", "index", "_unsafe_view"}
ROWS |= {"expand", "expand_as"}
METADATA = {"size", "dim", "getattr", "sym_size", "_assert_tensor_metadata", "_guards_fn"}
EPS = 1e-6


class UnsureError(Exception):
    """A program for which the rules in words say nothing: it uses another view of what it changed in place."""


@dataclass(eq=False)
class State:
    """One state of a stream: its terms with the positions at which they came in."""

    chain: int
    position: int
    axis: int
    terms: tuple[tuple[int, Tensor], ...]

    @property
    def tensor(self) -> Tensor:
        """The running sum."""
        return torch.stack([term for _, term in self.terms]).sum(0)

    def mapped(self, function: Any, axis: int) -> "State":
        """The state whose terms went through a function."""
        return State(self.chain, self.position, axis, tuple((p, function(term)) for p, term in self.terms))

    def become(self, after: "State") -> "State":
        """What a change in place makes of this very value."""
        self.position, self.terms = after.position, after.terms
        return self

    def pushed(self, term: Tensor) -> "State":
        """The state after one more term."""
        position = self.position + 1
        shape = torch.broadcast_shapes(self.terms[0][1].shape, term.shape)
        return State(self.chain, position, self.axis, (*self.terms, (position, term.expand(shape))))


class Interpreter(fx.Interpreter):
    """Runs a captured graph with depth attention in the given chains.

    Run once to learn which states are read, then with parameters.
    """

    def __init__(
        self, module: fx.GraphModule, chains: Sequence[ResidualChain], block_size: int, *, live: bool = False
    ) -> None:
        super().__init__(module, graph=module.graph)
        self.live = live
        self.chains, self.block_size = list(chains), block_size
        self.starts = {chain.source: i for i, chain in enumerate(chains)}
        self.read_at: list[set[int]] = [set() for _ in chains]
        self.leaving: list[set[int]] = [set() for _ in chains]
        self.length = [0 for _ in chains]
        self.parameters: list[tuple[Tensor, Tensor]] | None = None
        # Per run: reads at boundaries; names of memory that was changed, and the boundary behind which they follow.
        self.mixes: dict[tuple[State, int, str], Tensor] = {}
        self.stale: dict[fx.Node, str | None] = {}
        self.unsure: set[fx.Node] = set()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One forward."""
        self.mixes.clear()
        self.stale.clear()
        self.unsure.clear()
        return super().run(*args, **kwargs)

    def learn(self, *inputs: Any) -> list[int]:
        """The number of states read, per chain."""
        self.run(*inputs)
        for read, leaving, length in zip(self.read_at, self.leaving, self.length, strict=True):
            read |= leaving & {length}
            read -= {0}
        return [len(read) for read in self.read_at]

    def run_node(self, n: fx.Node) -> Any:
        if any(source in self.unsure or self.is_stale(source, n) for source in n.all_input_nodes):
            self.unsure.add(n)
            if n.op == "output":
                raise UnsureError("another name of a stream that was changed in place")
        seen: Any = partial(self.seen, n)
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), seen)
        states = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, State)]
        value = self.on_states(n, args, kwargs) if states else self.call(n, args, kwargs)
        if (changed := _nodes.changed(n, self.module)) is not None:
            self.note_change(n, changed, value)
        if n in self.starts and not isinstance(value, State):
            i = self.starts[n]
            # A live stream keeps its source itself, which may change until the stream starts.
            value = State(i, 0, self.chains[i].axis, ((0, value if self.live else value.clone()),))
        return value

    def seen(self, n: fx.Node, source: fx.Node) -> Any:
        """What a node gets from another: where a live stream has not started, its source is a tensor still."""
        value = self.env[source]
        start = self.chains[self.starts[source]].start if source in self.starts else None
        unseen = self.live and start is not None and isinstance(value, State) and not sees(start, n)
        return value.terms[0][1] if unseen else value

    def note_change(self, n: fx.Node, changed: fx.Node, value: Any) -> None:
        """Find the names of the memory that a node changed in place that do not follow, a stream being among them."""
        names = {other: held for other, held in self.env.items() if _nodes.memory(other) == _nodes.memory(changed)}
        self.unsure |= names.keys() if n in self.unsure else set()
        if any(isinstance(held, State) for held in (value, *names.values())):
            for other, held in names.items():
                tensor = held.terms[0][1] if isinstance(held, State) and held.position == 0 else held
                if held is not value and not one_memory(tensor, value):
                    self.stale[other] = self.boundary(n, held) if other is changed else None

    def is_stale(self, source: fx.Node, n: fx.Node) -> bool:
        """Whether a node uses an old name, and not behind the boundary where that was changed with the others."""
        return source in self.stale and self.stale[source] != (self.boundary(n, self.env[source]) or n)

    def boundary(self, n: fx.Node, state: Any) -> str | None:
        """Behind which boundary a node gets a state as a tensor."""
        if not isinstance(state, State):
            return None
        return EXIT if n.op == "output" else self.chains[state.chain].boundaries.get(n)

    def on_states(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """What a node does where there are states among its arguments."""
        name = self.name_of(n)
        if name not in SAME or n.op == "output":
            args, kwargs = replaced((args, kwargs), lambda state: self.at_boundary(n, state))
        if name in METADATA:
            return self.call(n, *replaced((args, kwargs), lambda state: state.tensor))
        added = self.added(name, args, kwargs)
        if added is not None:
            self.length[added.chain] = max(self.length[added.chain], added.position)
            return added
        carried = self.carried(n, name, args, kwargs)
        if carried is not None:
            return carried
        return self.call(n, *replaced((args, kwargs), self.read))

    def call(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run the node on tensors."""
        return args[0] if n.op == "output" else getattr(self, n.op)(n.target, args, kwargs)

    def name_of(self, n: fx.Node) -> str:
        """The operation's name; a module that passes its input on has the name of that."""
        if n.op != "call_module":
            return operation_name(n.target) if n.op != "output" else "output"
        module = self.module.get_submodule(str(n.target))
        return "alias" if isinstance(module, nn.Identity | nn.Dropout) else type(module).__name__

    def at_boundary(self, n: fx.Node, state: State) -> Any:
        """The state, or the read that a module (or the exit) makes of it."""
        key = self.boundary(n, state)
        if key is None:
            return state
        at = state, state.position, key
        self.mixes[at] = self.mixes[at] if at in self.mixes else self.read(state, leaving=key == EXIT)
        return self.mixes[at]

    def read(self, state: State, *, leaving: bool = False) -> Tensor:
        """The depth-attention mix of the state's blocks."""
        chain = state.chain
        if self.parameters is None:
            (self.leaving if leaving else self.read_at)[chain].add(state.position)
            return state.tensor
        if leaving and state.position != self.length[chain]:
            return state.tensor
        order = sorted(self.read_at[chain])
        if state.position not in order:
            return state.tensor
        ends = order[self.block_size - 1 :: self.block_size]
        blocks: dict[int, Tensor] = {}
        for position, term in state.terms:
            block = 0 if position == 0 else 1 + sum(end < position for end in ends)
            blocks[block] = blocks[block] + term if block in blocks else term
        sources = [blocks[block].movedim(state.axis, -1) for block in sorted(blocks)]
        if len(sources) == 1:
            return state.tensor
        query, key_norm = (parameter[order.index(state.position)] for parameter in self.parameters[chain])
        mixed = reference.depth_attention(sources, query, key_norm, eps=EPS, scale=float(len(sources)))
        return stored_as(mixed.movedim(-1, state.axis), state.terms[0][1])

    def added(self, name: str, args: Any, kwargs: Any) -> State | None:
        """The state after an add of something that has the features."""
        skip, branch, factor, commutes = None, None, 1.0, False
        if name in ("add", "add_", "radd", "sub", "sub_") and "out" not in kwargs and len(args) > 1:
            skip, branch = args[0], args[1]
            factor = kwargs.get("alpha", args[2] if len(args) > 2 else 1) * (-1 if name.startswith("sub") else 1)
            commutes = factor == 1
        elif name == "addcmul" and "out" not in kwargs:
            skip, factor = args[0], kwargs.get("value", 1)
            branch = self.plain(args[1]) * self.plain(args[2]) if isinstance(skip, State) else None
        elif name == "addmm":
            skip = args[0]
            branch = self.plain(args[1]) @ self.plain(args[2]) if isinstance(skip, State) else None
        later = isinstance(branch, State) and not (isinstance(skip, State) and skip.position >= branch.position)
        original = skip
        if commutes and later:
            skip, branch = branch, skip
        if not isinstance(skip, State) or branch is None:
            return None
        if isinstance(branch, State) and branch.chain != skip.chain:
            return None
        value = self.plain(branch)
        if not isinstance(value, Tensor):
            if value == 0:
                return skip
            value = torch.full_like(skip.terms[0][1], value)
        shape = skip.terms[0][1].shape
        if value.ndim and (value.ndim < -skip.axis or value.shape[skip.axis] != shape[skip.axis]):
            return None
        if torch.broadcast_shapes(shape, value.shape) != shape:
            return None
        after = skip.pushed(factor * value)
        return skip.become(after) if isinstance(original, State) and skip is original and name.endswith("_") else after

    def plain(self, value: Any) -> Any:
        return self.read(value) if isinstance(value, State) else value

    def carried(self, n: fx.Node, name: str, args: Any, kwargs: Any) -> State | None:
        """The state after an operation that acts on every term, and every token, alike."""
        if name == "mul" and len(args) == 2 and not isinstance(args[0], State):
            args = args[::-1]
        state = args[0] if args else None
        if not isinstance(state, State) or any(isinstance(leaf, State) for leaf in leaves((args[1:], kwargs))):
            return None

        before, axis = state.terms[0][1], state.axis

        def apply(term: Tensor) -> Any:
            return self.call(n, (stored_as(term, before), *args[1:]), kwargs)

        if name in SAME:
            return state.mapped(apply, axis)
        if name in ("mul", "div", "mul_", "neg"):
            factor = args[1] if len(args) > 1 else -1.0
            if isinstance(factor, Tensor) and (factor.numel() != 1 or factor.ndim > before.ndim):
                return None
            scaled = state.mapped(lambda term: term / factor if name == "div" else term * factor, axis)
            return state.become(scaled) if name == "mul_" else scaled
        if name in ("transpose", "permute"):
            # Where the features went, a tensor whose sizes are its axes' numbers tells.
            marks = torch.empty(*range(2, 2 + before.ndim))
            dims = args[1:] if name == "transpose" else tuple(leaves(args[1:]))
            moved = marks.transpose(*dims) if name == "transpose" else marks.permute(*dims)
            return state.mapped(apply, list(moved.shape).index(2 + before.ndim + axis) - before.ndim)
        if name in ROWS and axis == -1 and not any(isinstance(arg, torch.dtype) for arg in args):
            shape = apply(before).shape
            features = len(shape) > 0 and shape[-1] == before.shape[-1]
            return state.mapped(apply, axis) if features else None
        return None


def stored_as(value: Tensor, like: Tensor) -> Tensor:
    """The value with the strides of another, on which a view of it may rest."""
    return value if value.stride() == like.stride() else torch.empty_like(like).copy_(value)


def one_memory(a: Any, b: Any) -> bool:
    """Whether two values are tensors, and views of one."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def leaves(value: Any) -> list[Any]:
    """Every leaf of nested tuples, lists, dicts and slices."""
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


def replaced(value: Any, function: Any) -> Any:
    """The same with every state in it replaced."""
    if isinstance(value, list | tuple):
        return type(value)([replaced(item, function) for item in value])
    if isinstance(value, dict):
        return {key: replaced(item, function) for key, item in value.items()}
    return function(value) if isinstance(value, State) else value
