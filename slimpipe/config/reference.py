"""docs/configuration.md, made from the types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slimpipe.config.allowed import allowed, holds_list, section_of
from slimpipe.config.root import Config
from slimpipe.config.section import Planned, Refused, Section, follows_others
from slimpipe.config.yaml_text import shown

_HEAD: Final = """\
# Configuration

One YAML file a run, with the sections below; `configs/quickstart.yaml` is a commented example. On the command line,
dotted overrides change single keys, their values in YAML:
`slimpipe train configs/quickstart.yaml pipeline.slices=8 optim.lr=1e-4`.
An unknown key, a value of the wrong type and anything that is not built yet are refused, with a line that says what to
change.

This page is made from the types; to make it anew:
`python -c "from slimpipe.config import reference_markdown as page; print(page(), end='')" > docs/configuration.md`.
"""


def reference_markdown() -> str:
    """The reference page: for each section a table of key, allowed values, default and meaning."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and issubclass(section, Section):
            yield f"## {name}\n\n{section.__doc__}\n"
            yield "| key | allowed | default | meaning |\n|---|---|---|---|"
            yield from _rows(section)
            yield ""


def _rows(section: type[Section]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        words = allowed(field) if inner is None or holds_list(field) else "a mapping or null"
        yield f"| `{section.path}.{name}` | {words} | {_default(field)} | {' '.join(_meaning(field))} |"
        # A section that stands under two keys is described under its own.
        if inner is not None and issubclass(inner, Section) and inner.path.startswith(f"{section.path}.{name}"):
            yield from _rows(inner)


def _default(field: FieldInfo) -> str:
    if follows_others(field):
        return "see right"
    default = field.get_default(call_default_factory=True, validated_data={})
    return "**required**" if default is PydanticUndefined else f"`{shown(default)}`"


def _meaning(field: FieldInfo) -> Iterator[str]:
    yield field.description or ""
    for mark in field.metadata:
        if isinstance(mark, Planned):
            names = ", ".join(f"`{shown(value)}`" for value in mark.values)
            yield f"Not built yet: {names or mark.what}."
        if isinstance(mark, Refused):
            yield f"Only null: {mark.why}."
