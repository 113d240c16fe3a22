"""What a compiled program sends between devices, and what it sorts and compares."""

import re
from functools import partial

import jax
from jax.sharding import SingleDeviceSharding

from calibadv_jax.sampler.sampling import sample_tokens


def computations(text):
    """Name -> lines of every computation of a compiled program."""
    bodies, name = {}, ""
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[1]
        bodies.setdefault(name, []).append(line)
    return bodies


def collectives(text, kind):
    """(whether in a loop, shape) of every collective of a kind."""
    parts = computations(text)
    lines = [line for lines in parts.values() for line in lines]
    loops = {body for line in lines for body in re.findall(r"body=%?([\w.\-]+)", line)}
    while True:
        inner = {
            called
            for name in loops
            for line in parts.get(name, [])
            for called in re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", line)
        }
        if inner <= loops:
            break
        loops |= inner
    sent = re.compile(rf"= (.*?) {kind}(?:-start)?\(")
    return [
        (name in loops, shape)
        for name, lines in parts.items()
        for match in filter(None, map(sent.search, lines))
        for shape in re.findall(r"\w+\[[\d,]*\]", match[1])
    ]


MOVES = ("bitcast", "copy", "copy-done", "copy-start", "get-tuple-element", "reshape", "transpose")


def check_filter(device):
    """Check that a device's program for top-p and top-k sorts and compares logits, nothing computed."""
    place = SingleDeviceSharding(device)
    dtypes = {"seeds": "uint32", "positions": "int32", "temperatures": "float32"}
    dtypes |= {"top_p": "float32", "top_k": "int32"}
    arguments = {n: jax.ShapeDtypeStruct((8,), dtype, sharding=place) for n, dtype in dtypes.items()}
    logits = jax.ShapeDtypeStruct((8, 1000), "float32", sharding=place)
    program = jax.jit(partial(sample_tokens, filtered=True)).lower(logits=logits, **arguments).compile()
    origins = compared_and_sorted(program.as_text(), "[8,1000]")
    names = {kind: {re.sub(r"\W|\d", "", name) for name in names} for kind, names in origins.items()}
    assert names == {"compare": {"logits"}, "sort": {"logits"}}, origins


def compared_and_sorted(text, shape):
    """Origins of the arrays of a shape that are compared by >= or sorted: {"compare": {…}, "sort": {…}}.

    An origin is a parameter of the program if the array is only moved on its way, else an operation.
    """
    parts = computations(text)
    entry = re.search(r"(?m)^ENTRY %?([\w.\-]+) ", text)[1]
    operations, callers = {}, {}
    for computation, lines in parts.items():
        for line in lines[1:]:
            match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*?)\)(?=,|$| )(.*)", line)
            if match:
                name, result, operation, inside, rest = match.groups()
                operands = re.findall(r"%([\w.\-]+)", inside) or [inside]
                operations[computation, name] = result, operation, operands, rest
                callers |= {
                    called: (computation, operands) for called in re.findall(r"calls=%?([\w.\-]+)", rest)
                }

    def origin(computation, name):
        _, operation, operands, _ = operations[computation, name]
        if operation in MOVES:
            return origin(computation, operands[0])
        if operation != "parameter":
            return operation
        if computation == entry:
            return name
        caller, arguments = callers[computation]
        return origin(caller, arguments[int(operands[0])])

    origins = {"compare": set(), "sort": set()}
    for (computation, _), (result, operation, operands, rest) in operations.items():
        if shape in result and (operation == "sort" or (operation == "compare" and "direction=GE" in rest)):
            origins[operation].add(origin(computation, operands[0]))
    return origins
