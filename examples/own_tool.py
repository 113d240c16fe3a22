"""An action of one's own: a calculator.

PYTHONPATH=. calibadv train --config FILE 'tools=[search, examples.own_tool:Calculator]'
"""

from __future__ import annotations

import ast
import operator

from calibadv_jax import Action, Reply

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Calculator(Action):
    """``<calculate> (1879 - 1848) / 2 </calculate>`` brings 15.5."""

    name, purpose, argument = "calculate", "calculate", "numbers with + - * / and brackets"

    def parse(self, body: str) -> float:
        """A ValueError says why the action does not take a body: the policy reads it, and goes on."""
        if len(body) > 200:
            raise ValueError("longer than 200 letters")
        try:
            return self._value(ast.parse(body, mode="eval").body)
        except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
            raise ValueError(f"write {self.argument}") from error

    async def call(self, argument: float) -> Reply:
        """Without documents: such a turn has correctness 0. An error here fails the trajectory."""
        return Reply(text=f"{argument:g}")

    def _value(self, node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return float(node.value)
        raise ValueError(f"write {self.argument}")
