"""From pydantic's errors to lines that name the dotted key, its value, what is allowed and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Final

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from slimpipe.config.allowed import allowed, allowed_element, any_of, holds_list, section_of
from slimpipe.config.section import LINES, REASON
from slimpipe.config.yaml_text import shown

# Said of a default that follows from a key which has an error, and so a line, of its own.
_ECHO: Final = "default_factory_not_called"


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line a problem, in the order of the keys."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        kind, value, context = item["type"], item["input"], item.get("ctx", {})
        key, field = _place(item["loc"], root)
        if kind == LINES:
            lines.extend(context["lines"].split("\n"))
        elif kind == "extra_forbidden":
            lines.append(unknown_key(key, root))
        elif kind == "missing":
            lines.append(f"{key}: missing; must be {_allowed(field, item['loc'])}")
        elif kind == REASON:
            lines.append(f"{key} = {shown(value)}: {context['reason']}")
        elif kind != _ECHO:
            lines.append(f"{key} = {shown(value)}: must be {_allowed(field, item['loc'])}")
    return lines


def unknown_key(key: str, root: type[BaseModel]) -> str:
    """The line for a key that no section has, with the nearest that one has, or else all of its section's."""
    nearest = _nearest(key, tuple(known_keys(root)))
    if nearest is not None:
        return f"{shown(key)}: unknown key; did you mean {nearest}?"
    section = root.model_fields.get(key.split(".")[0])
    if section is None:
        return f"{shown(key)}: unknown section; the sections are {', '.join(root.model_fields)}"
    inside = section_of(section.annotation) or root
    for part in key.split(".")[1:-1]:
        field = inside.model_fields.get(part.partition("[")[0])
        inside = (section_of(field.annotation) if field is not None else None) or inside
    return f"{shown(key)}: unknown key; use {any_of(tuple(inside.model_fields))}"


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key, the sections' own names included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.")


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """The right name in another section, else the closest spelling among keys of the same depth, else of any name."""
    leaf = key.rsplit(".", 1)[-1]
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known) if "." in name}
    peers = [name for name in known if name.count(".") == key.count(".")]
    if leaf in leaves:
        return difflib.get_close_matches(key, [name for name in known if name.endswith(f".{leaf}")], 1, 0.0)[0]
    if close := difflib.get_close_matches(key, peers, 1, 0.7):
        return close[0]
    return next((leaves[name] for name in difflib.get_close_matches(leaf, leaves, 1, 0.7)), None)


def _place(location: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, FieldInfo | None]:
    """(dotted key, field) of an error's location: `pipeline.layers_per_stage[1]`."""
    key, field, model = "", None, root
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        key += f".{part}" if key else part
        field = model.model_fields.get(part)
        model = (section_of(field.annotation) if field is not None else None) or model
    return key, field


def _allowed(field: FieldInfo | None, location: tuple[int | str, ...]) -> str:
    if field is None:
        return "a mapping of sections"
    inner = section_of(field.annotation)
    if inner is not None and not (holds_list(field) and isinstance(location[-1], str)):
        return f"a mapping with the keys {', '.join(inner.model_fields)}"
    return allowed_element(field) if isinstance(location[-1], int) else allowed(field)
