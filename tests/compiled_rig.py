"""What a compiled program sends between devices."""

import re


def computations(text):
    """Name -> lines of every computation of a compiled program."""
    found, name = {}, ""
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[1]
        found.setdefault(name, []).append(line)
    return found


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
    found = []
    for name, lines in parts.items():
        for line in lines:
            match = re.search(rf"= (.*?) {kind}(?:-start)?\(", line)
            if match:
                found += [(name in loops, shape) for shape in re.findall(r"\w+\[[\d,]*\]", match[1])]
    return found
