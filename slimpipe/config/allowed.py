"""What a key may hold, in words: the same words in errors and in the reference page."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Allowed:
    """Words for a field whose type says too little."""

    words: str


def allowed(field: FieldInfo) -> str:
    """`a whole number > 0`, `gpipe, 1f1b or slimpipe`, ..."""
    return _words(field.annotation, field.metadata).rstrip(",")


def allowed_element(field: FieldInfo) -> str:
    """The same for one element of a field that holds a list."""
    parts = (field.annotation, *get_args(field.annotation))
    return _words(get_args(next(part for part in parts if get_origin(part) is tuple))[0], [])


def choices(annotation: Any) -> tuple[str, ...]:
    """The names a Literal allows; none for other types."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, `X` or `X | None`, if it holds one."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((inner for inner in map(section_of, get_args(annotation)) if inner is not None), None)


def holds_list(field: FieldInfo) -> bool:
    """Whether a field holds a list, or null."""
    parts = (field.annotation, *get_args(field.annotation))
    return any(get_origin(part) is tuple for part in parts)


def any_of(words: tuple[str, ...]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def divisors_near(number: int, near: int) -> str:
    """The divisor of `number` below `near` and the two above it: what to use instead.

    Of a number that no run has, divisors below a million and their counterparts: the search has an end.
    """
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d < near]
    return ", ".join(map(str, (*below[-1:], *[d for d in divisors if d > near][:2])))


def _words(annotation: Any, metadata: list[Any]) -> str:
    for mark in metadata:
        if isinstance(mark, Allowed):
            return mark.words
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *marks = arguments
        return _words(inner, [*metadata, *marks])
    if origin in (Union, types.UnionType):
        return any_of(tuple("null" if part is type(None) else _words(part, metadata) for part in arguments))
    if origin is Literal:
        return any_of(arguments)
    if origin is tuple:
        return f"a list, each {_words(arguments[0], [])},"
    if annotation is int:
        return "a whole number" + _bounds(metadata)
    if annotation is float:
        return "a number" + _bounds(metadata)
    return {bool: "true or false", str: "text", type(None): "null"}.get(annotation, "a mapping")


def _bounds(metadata: list[Any]) -> str:
    """` > 0`, ` >= 0 and < 1`, or nothing."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(mark, name)}" for mark in metadata for name, sign in signs.items() if hasattr(mark, name)
    ]
    return " " + " and ".join(bounds) if bounds else ""
