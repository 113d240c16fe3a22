"""Operations of products and bytes of memory traffic of a program that XLA compiled for a GPU, from its text.

XLA's own count knows nothing of cuBLAS's calls and counts the body of a loop once. Here a loop counts as
often as it runs. A kernel reads its operands and writes its results; of a sliced array, only the slice.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d\w*)?)\[([\d,]*)\]")
COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<type>.*?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$"
)
CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\["(\d+)"\]')
CUBLAS = "__cublas"
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "fusion-done", "iota"}


@dataclass(frozen=True)
class Costs:
    """Operations of matrix products, without those of attention kernels, and bytes read and written."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: int) -> Costs:
        """Return the costs of so many runs."""
        return Costs(self.flops * count, self.bytes * count)


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool


@dataclass
class _Computation:
    instructions: dict[str, _Instruction] = field(default_factory=dict)

    @property
    def root(self) -> _Instruction:
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    def users(self, name: str) -> list[_Instruction]:
        """Return the instructions that take a value; those of a bitcast count in its place."""
        users = []
        for instruction in self.instructions.values():
            if name not in instruction.operands:
                continue
            if instruction.opcode == "bitcast":
                users += self.users(instruction.name)
            else:
                users.append(instruction)
        return users


def program_costs(text: str, other_trips: int) -> Costs:
    """Return the costs of a compiled program.

    Args:
        text: of the compiled program (`jax.stages.Compiled.as_text`).
        other_trips: iterations of each loop whose number XLA does not know.
    """
    computations: dict[str, _Computation] = {}
    entry = ""
    current = _Computation()
    for line in text.splitlines():
        head = COMPUTATION.match(line)
        if head:
            current = computations.setdefault(head[1], _Computation())
            entry = head[1] if line.startswith("ENTRY") else entry
        match = INSTRUCTION.match(line)
        if match:
            operands, _, attributes = match["rest"].partition(")")
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            current.instructions[match["name"]] = _Instruction(
                match["name"], match["type"], match["opcode"], names, attributes, bool(match["root"])
            )
    return _computation_costs(computations, computations[entry], other_trips)


def _computation_costs(
    computations: dict[str, _Computation], computation: _Computation, other_trips: int
) -> Costs:
    total = Costs()
    for instruction in computation.instructions.values():
        called = CALLED.search(instruction.attributes)
        if instruction.opcode == "while" and called:
            known = TRIPS.search(instruction.attributes)
            body = _computation_costs(computations, computations[called[1]], other_trips)
            total += body.times(int(known[1]) if known else other_trips)
        elif instruction.opcode in ("call", "async-start") and called:
            total += _computation_costs(computations, computations[called[1]], other_trips)
        elif instruction.opcode.startswith("fusion") and called:
            total += _fusion_costs(computation, instruction, computations[called[1]])
        elif instruction.opcode not in FREE:
            total += _instruction_costs(computation, instruction)
    return total


def _instruction_costs(computation: _Computation, instruction: _Instruction) -> Costs:
    """Return the costs of an instruction that is a kernel of its own."""
    if instruction.opcode == "dynamic-slice":
        return Costs(0.0, 2 * _size(instruction.type))
    if instruction.opcode == "dynamic-update-slice":
        update = computation.instructions[instruction.operands[1]]
        return Costs(0.0, 2 * _size(update.type))
    is_product = CUBLAS in instruction.attributes
    written = _size(instruction.type, only_first=is_product)  # A second result of cuBLAS is its workspace.
    read = sum(_size(computation.instructions[name].type) for name in instruction.operands)
    return Costs(_product_flops(computation, instruction) if is_product else 0.0, written + read)


def _fusion_costs(computation: _Computation, fusion: _Instruction, fused: _Computation) -> Costs:
    """Return the costs of a fusion, whose instructions inside keep their results in registers."""
    costs = Costs()
    for instruction in fused.instructions.values():
        if CUBLAS in instruction.attributes:
            costs += Costs(_product_flops(fused, instruction), 0.0)
        if instruction.opcode == "parameter":
            costs += Costs(0.0, _bytes_read(fused, instruction))
    root = fused.root
    results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for result in results:
        costs += Costs(0.0, _bytes_written(fused, result))
    return costs


def _bytes_read(fused: _Computation, parameter: _Instruction) -> float:
    """Return the bytes of a parameter that a fusion reads."""
    read = 0.0
    for user in fused.users(parameter.name):
        is_first = parameter.name in _through_bitcasts(fused, user.operands[0])
        if is_first and user.opcode in ("dynamic-slice", "gather"):
            read += _size(user.type)
        elif not (is_first and user.opcode == "dynamic-update-slice"):  # That one writes in place.
            return _size(parameter.type)
    return read


def _bytes_written(fused: _Computation, result: _Instruction) -> float:
    """Return the bytes that a fusion writes for one of its results."""
    for name in _through_bitcasts(fused, result.name):
        instruction = fused.instructions[name]
        if instruction.opcode == "dynamic-update-slice":
            return _size(fused.instructions[instruction.operands[1]].type)
    return _size(result.type)


def _through_bitcasts(computation: _Computation, name: str) -> list[str]:
    """Return a value's name, and those of the values that it is a bitcast of."""
    names = [name]
    while computation.instructions[names[-1]].opcode == "bitcast":
        names.append(computation.instructions[names[-1]].operands[0])
    return names


def _product_flops(computation: _Computation, product: _Instruction) -> float:
    """Return the operations of a call of cuBLAS: two for each result and contracted element."""
    axis = CONTRACTED.search(product.attributes)
    assert axis is not None, product.name
    left = computation.instructions[product.operands[0]].type
    match = ARRAY.search(left)
    result = ARRAY.search(product.type)
    assert match and result, product.name
    return 2.0 * math.prod(_dimensions(result[2])) * _dimensions(match[2])[int(axis[1])]


def _size(text: str, only_first: bool = False) -> float:
    """Return the bytes of a type, which may be a tuple."""
    sizes = []
    for kind, dimensions in ARRAY.findall(text):
        bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])  # type: ignore[index]
        sizes.append(math.prod(_dimensions(dimensions)) * bits / 8)
    return sum(sizes[:1] if only_first else sizes)


def _dimensions(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]
