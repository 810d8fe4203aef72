"""Abstract interpretation of jaxprs, loops and branches included."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from jax.extend import core

Fact = TypeVar("Fact")


class Dataflow(abc.ABC, Generic[Fact]):
    """An abstract interpreter of jaxprs, which knows a `Fact` about each variable.

    A subclass defines the facts of a primitive's results from those of its operands,
    and joins two facts where control flow merges. Loops are interpreted to a fixed
    point, so the result of `join` must know no more than either operand.

    Attributes:
      unknown: Fact about a value of which nothing is known, by default constants and
        literals.
      recording: False while a loop is interpreted to its fixed point, True in the last
        pass, in which subclasses collect results.
    """

    unknown: Fact

    def __init__(self) -> None:
        """Makes an interpreter that records."""
        self.recording = True

    @abc.abstractmethod
    def primitive(self, eqn: Any, given: Sequence[Fact]) -> Sequence[Fact]:
        """Returns the facts about the results of a primitive without a called jaxpr."""

    @abc.abstractmethod
    def join(self, one: Fact, other: Fact) -> Fact:
        """Returns what is known of a value to which one of two facts applies."""

    def special(self, eqn: Any, given: Sequence[Fact]) -> Sequence[Fact] | None:
        """Returns facts for an equation as a whole; None to interpret what it calls."""
        del eqn, given
        return None

    def literal(self, literal: Any) -> Fact:
        """Returns the fact about a literal."""
        del literal
        return self.unknown

    def constant(self, v: Any) -> Fact:
        """Returns the fact about a constant that a jaxpr has closed over."""
        del v
        return self.unknown

    def sliced(self, fact: Fact) -> Fact:
        """Returns the fact about one slice along the first dim."""
        return fact

    def stacked(self, fact: Fact) -> Fact:
        """Returns the fact about slices stacked along a new first dim."""
        return fact

    def in_loop(self, fact: Fact) -> Fact:
        """Returns the fact inside, or after, a body that runs more than once."""
        return fact

    def in_branch(self, fact: Fact, predicate: Fact) -> Fact:
        """Returns the fact inside, or after, a body that `predicate` selects."""
        del predicate
        return fact

    def of_branch(self, fact: Fact, branch: int, num_branches: int) -> Fact:
        """Returns the fact inside one of the branches of a `cond`."""
        del branch, num_branches
        return fact

    def join_branches(self, facts: Sequence[Fact]) -> Fact:
        """Returns what is known of a result that one of several branches makes."""
        return functools.reduce(self.join, facts)

    def under(self, kind: str, predicate: Fact) -> AbstractContextManager[None]:
        """Context for the bodies of a "cond" or "while" that `predicate` controls."""
        del kind, predicate
        return contextlib.nullcontext()

    def results(self, jaxpr: core.Jaxpr, given: Sequence[Fact]) -> list[Fact]:
        """Returns the facts about a jaxpr's results, given those about its inputs."""
        env: dict[Any, Fact] = {v: self.constant(v) for v in jaxpr.constvars}
        env.update(zip(jaxpr.invars, given, strict=True))

        def read(v: Any) -> Fact:
            return self.literal(v) if isinstance(v, core.Literal) else env[v]

        for eqn in jaxpr.eqns:
            facts = self.equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, facts, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, given: Sequence[Fact]) -> Sequence[Fact]:
        """Returns the facts about an equation's results."""
        known = self.special(eqn, given)
        # A subclass decides first, so that it can treat a call as one operation.
        if known is not None:
            return known
        kind = eqn.primitive.name
        if kind == "scan":
            return self._scan(eqn, given)
        if kind == "while":
            return self._while(eqn, given)
        if kind == "cond":
            return self._cond(eqn, given)
        body = called_program(eqn)
        return self.primitive(eqn, given) if body is None else self.results(body, given)

    def _scan(self, eqn: Any, given: Sequence[Fact]) -> list[Fact]:
        # Operands are constants, carry, xs. The xs are found by rank, a slice having a
        # dim less than its array, since jax 0.10 and 0.12 name the params differently.
        body, again = eqn.params["jaxpr"].jaxpr, eqn.params["length"] > 1
        is_slice = _is_larger(eqn.invars, body.invars)
        is_stacked = _is_larger(eqn.outvars, body.outvars)
        num_carry = is_stacked.count(False)
        first = is_slice.count(False) - num_carry
        facts = [
            self.sliced(fact) if is_x else self.in_loop(fact) if again else fact
            for fact, is_x in zip(given, is_slice, strict=True)
        ]

        def run(carry: Sequence[Fact]) -> list[Fact]:
            return self.results(
                body, [*facts[:first], *carry, *facts[first + num_carry :]]
            )

        carry = self._fixed_point(
            lambda carry: run(carry)[:num_carry], facts[first : first + num_carry]
        )
        return [
            self.stacked(fact) if is_y else self.in_loop(fact) if again else fact
            for fact, is_y in zip(run(carry), is_stacked, strict=True)
        ]

    def _while(self, eqn: Any, given: Sequence[Fact]) -> list[Fact]:
        params = eqn.params
        cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        facts = [self.in_loop(fact) for fact in given]
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, rest = facts[:num_cond], facts[num_cond:]
        of_body, start = rest[:num_body], rest[num_body:]

        def run(carry: Sequence[Fact]) -> list[Fact]:
            (goes_on,) = self.results(cond, [*of_cond, *carry])
            with self.under("while", goes_on):
                # The condition too runs once an iteration: ranks that leave the loop at
                # different times run it, and its collectives, unequally often.
                self.results(cond, [*of_cond, *carry])
                new = self.results(body, [*of_body, *carry])
            return [self.in_branch(self.in_loop(fact), goes_on) for fact in new]

        carry = self._fixed_point(run, start)
        run(carry)  # Again, now recording.
        return list(carry)

    def _cond(self, eqn: Any, given: Sequence[Fact]) -> list[Fact]:
        predicate, *operands = given
        operands = [self.in_branch(fact, predicate) for fact in operands]
        branches = eqn.params["branches"]
        made = []
        with self.under("cond", predicate):
            for at, branch in enumerate(branches):
                own = [self.of_branch(fact, at, len(branches)) for fact in operands]
                made.append(self.results(branch.jaxpr, own))
        joined = [self.join_branches(facts) for facts in zip(*made, strict=True)]
        return [self.in_branch(fact, predicate) for fact in joined]

    def _fixed_point(self, run: Any, carry: Sequence[Fact]) -> list[Fact]:
        """Returns what is known of a carry in every iteration."""
        # Each pass joins what holds on entry to an iteration with what holds after it,
        # and so knows less or the same. It ends, as facts are finite, when a pass adds
        # nothing: then the fact holds on entry to any iteration.
        with self._without_recording():
            while True:
                pairs = zip(carry, run(carry), strict=True)
                joined = [self.join(*pair) for pair in pairs]
                if joined == list(carry):
                    return joined
                carry = joined

    @contextlib.contextmanager
    def _without_recording(self) -> Iterator[None]:
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before


def called_program(eqn: Any) -> core.Jaxpr | None:
    """Returns the one jaxpr that an equation calls on its own operands, or None."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if not isinstance(inner, core.Jaxpr):
        return None
    sizes = len(inner.invars), len(inner.outvars)
    return inner if sizes == (len(eqn.invars), len(eqn.outvars)) else None


def _is_larger(outer: Sequence[Any], inner: Sequence[Any]) -> list[bool]:
    pairs = zip(outer, inner, strict=True)
    return [len(o.aval.shape) > len(i.aval.shape) for o, i in pairs]
