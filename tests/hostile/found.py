"""Programs in which the hostile run found something, cut down, with what each route has to say."""

from tests.hostile.check import Route
from tests.hostile.programs import Body, Program, Step

OTHER_CALL = "no chain: the stream would start with"


def body(*steps: tuple[str, int] | tuple[str, int, int], inputs: int = 1, returns: tuple[int, ...] = ()) -> Body:
    """A body that returns its last register unless it says another."""
    done = tuple(Step(op, of) for op, *of in ((step[0], *step[1:]) for step in steps))  # type: ignore[arg-type]
    return Body(inputs, tuple(Step(s.op, tuple(s.of)) for s in done), returns or (inputs + len(steps) - 1,))


def two(x: int) -> tuple[tuple[str, int] | tuple[str, int, int], ...]:
    """Two sublayers on a register, which is the last."""
    return ("branch", x), ("add", x, x + 1), ("branch", x + 2), ("add", x + 2, x + 3)


FOUND: dict[str, tuple[Program, dict[Route, str]]] = {
    # A term of the first add is a later chain's source; live, the stream starts after its module only.
    "used before it starts": (
        Program(
            body(("call 0", 0), ("branch", 2), ("add", 2, 3), ("branch", 4), ("add", 4, 5), ("call 0", 6)),
            (body(("branch", 0), ("add", 0, 1), ("branch", 2), ("add", 2, 3), returns=(4, 1)),),
        ),
        {"graph": "equal", "live": "equal"},
    ),
    # The module whose output the source is was called before.
    "later call": (
        Program(
            body(
                ("linear module", 0),
                ("call 0", 1),
                ("call 0", 2),
                ("branch", 3),
                ("add", 3, 4),
                ("branch", 5),
                ("add", 5, 6),
            ),
            (body(("add vector", 0), ("relu", 1)),),
        ),
        {"graph": "equal", "live": OTHER_CALL},
    ),
    # The root is of the layers' class, but no layer.
    "layer of the root's class": (
        Program(
            body(("linear module", 0), ("call 1", 1, 0), ("call 0", 2), ("call 1", 3, 1), ("call 0", 4)),
            (
                body(("branch", 0), ("add", 0, 1), ("branch", 2), ("sub", 2, 3), ("branch", 4), ("sum", 4, 5)),
                body(("branch", 1), ("sum", 1, 2), inputs=2),
            ),
            2,
        ),
        {"graph": "equal", "live": "no chain: nothing that reads the stream reaches the output"},
    ),
    "learned scale of one element": (
        Program(
            body(("linear module", 0), ("call 0", 1), ("branch", 2), ("learned scale of one", 2), ("add", 4, 3)),
            (body(("branch", 0), ("add", 0, 1), ("branch", 2), ("add", 2, 3)),),
            2,
        ),
        {"graph": "equal", "live": "equal"},
    ),
    "input changed in place": (
        Program(body(("branch of a copy", 0), ("iadd", 0, 1), ("branch of a copy", 2), ("iadd", 2, 3))),
        {"graph": "equal", "live": "equal"},
    ),
    # A layer of two inputs is called again: the later state comes in beside the source.
    "two states enter a shared layer": (
        Program(
            body(*two(0), ("call 0", 4, 0), ("call 0", 5, 0), *two(6)),
            (body(("rms by hand", 0), ("linear", 2), ("add", 1, 3), ("branch", 4), ("add", 4, 5), inputs=2),),
            2,
        ),
        {"graph": "equal", "live": "equal"},
    ),
    # The live stream holds the tensor that the root changes.
    "source changed under another name": (
        Program(
            body(("linear module", 0), ("call 0", 1), ("mul_", 1), ("call 0", 2), ("add", 4, 3)),
            (body(("branch of a copy", 0), ("add", 0, 1), ("branch of a copy", 2), ("add", 2, 3)),),
        ),
        {"live": "RefusedError: a value that the residual stream keeps"},
    ),
    # To the program, the tensor of the first name has changed.
    "a stream added to a tensor in place": (
        Program(
            body(*(("linear module", 0), ("call 0", 1), ("linear", 1)), *(("add_ unbound", 3, 2), ("add", 2, 3))),
            (body(("branch of a copy", 0), ("add", 0, 1), ("branch of a copy", 2), ("add", 2, 3)),),
        ),
        {"live": "RefusedError: the residual stream, or a tensor that it was added to, is changed in place"},
    ),
    # A layer that only reads returns what it was given: live, the stream itself.
    "a reader hands the stream on": (
        Program(
            body(("linear module", 0), ("call 1", 1), ("call 0", 2), ("add pair first", 3, 2, 0), returns=(3,)),  # type: ignore[arg-type]
            (body(("relu", 0), returns=(0,)), body(*two(0), ("branch", 4), ("add", 4, 5))),
            2,
        ),
        {"graph": "equal", "live": "equal"},
    ),
    # The activation changes a read of the stream, where the program changes the stream.
    "changed by an activation in place": (
        Program(body(("linear module", 0), *two(1), ("relu in place", 5), ("branch of a copy", 5), ("add", 6, 7))),
        {"graph": "RefusedError: the residual stream, or", "live": "RefusedError: the residual stream was"},
    ),
    # A row shares the memory of the state, which is used afterwards.
    "a row of a state changed in place": (
        Program(body(("linear module", 0), *two(1), ("add to a row", 5, 4), ("branch of a copy", 5), ("add", 5, 7))),
        {"graph": "RefusedError: the residual stream, or", "live": "RefusedError: the residual stream was"},
    ),
    # In memory that nothing uses afterwards.
    "added in place for nothing": (
        Program(
            body(("linear module", 0), ("call 0", 1), ("call 1", 0), ("rms by hand", 3)),
            (body(("branch of a copy", 0), ("sub", 0, 1), ("branch of a copy", 2), ("add_", 2, 3)), body(*two(0))),
        ),
        {"graph": "equal", "live": "equal"},
    ),
    # To the first stream the layer is a reader, to the second, which starts in it, its adds are pushes.
    "a sum of two streams behind the boundary of one": (
        Program(
            body(*two(0), ("call 0", 4), ("branch", 5), ("add", 5, 6)),
            (body(("branch", 0), ("add", 0, 1), ("add", 1, 1), ("branch", 3), ("add", 3, 4)),),
        ),
        {"graph": "equal", "live": "equal"},
    ),
    # Live, the source is changed before the stream starts: both names mean one tensor.
    "source changed before it starts": (
        Program(body(("linear module", 0), ("mul_", 1), ("call 0", 2, 1)), (body(*two(1), inputs=2),), 3),
        {"live": "equal"},
    ),
    # The other stream has not started where its source is added.
    "added in place before it starts": (
        Program(
            body(*two(0), ("branch of a copy", 4), ("add_", 4, 5), ("call 0", 5, 5), ("branch", 7), ("add", 7, 8)),
            (body(*two(1), inputs=2),),
        ),
        {"live": "equal"},
    ),
    # At the first call both arguments are the source, at the second one of them is a later state.
    "the source comes in beside a later state": (
        Program(
            body(("linear module", 0), ("call 0", 1, 1), ("call 0", 2, 1), ("call 0", 3, 2)),
            (body(*two(1), inputs=2),),
            3,
        ),
        {"graph": "equal", "live": "equal"},
    ),
    # Of no use but its effect on the input.
    "a state taken from a tensor in place": (
        Program(
            body(
                *(("branch of a copy", 0), ("sub_", 0, 1), ("branch of a copy", 1), ("add", 1, 3)),
                *(("branch of a copy", 4), ("add", 4, 5)),
                returns=(6, 0),
            )
        ),
        {"graph": "equal"},
    ),
    # Nothing but zeros.
    "cancelled": (
        Program(body(("linear module", 0), *two(1), ("branch", 5), ("sub", 6, 6))),
        {"graph": "equal", "live": "RefusedError: nothing would learn from the reads of One"},
    ),
    # Exact, and no query would ever learn.
    "read through `detach` only": (
        Program(body(("linear module", 0), *two(1), ("detach", 5))),
        {"graph": "equal", "live": "no chain: what reads the stream reaches the output through `detach` only"},
    ),
    # Autograd forbids it whatever is done to the graph.
    "written into by `out=`": (
        Program(body(*two(0), ("add into", 4, 3))),
        {"graph": "no program", "live": "no program"},
    ),
}
